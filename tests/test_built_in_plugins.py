"""The plugins of this distribution keep the contract: they load, cost nothing heavy, and the sets name real ones."""

import re
import subprocess
import sys

import pytest

from mini_infer.errors import PluginLoadError
from mini_infer.plugin_system.contract import load_plugin
from mini_infer.plugin_system.index import discover
from mini_infer.plugin_system.sets import PLUGIN_SETS

INDEX = discover(())
OURS = [name for name in INDEX.names() if INDEX.sources[name][0].distribution == "mini-infer"]
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "triton", "numpy", "llguidance"} | {
    "flash_attn",
    "flash_attn_interface",
    "flashinfer",
    "vfa3",
}


@pytest.mark.parametrize("name", OURS)
def test_each_loads(name: str) -> None:
    try:
        plugin = load_plugin(INDEX.get(name))
    except PluginLoadError as e:
        assert re.search(r"pip install (triton|'mini-infer\[)|Triton needs", str(e)), e
        pytest.skip(str(e))
    assert plugin.name == name


def test_none_imports_anything_heavy() -> None:
    modules = [INDEX.get(name).origin for name in OURS]
    script = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in done.stdout.split())


def test_the_sets_name_plugins_that_are_there() -> None:
    named = {name for plugins in PLUGIN_SETS.values() for names in plugins.members.values() for name in names}
    assert named <= set(OURS)
