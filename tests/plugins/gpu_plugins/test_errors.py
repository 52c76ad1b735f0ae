"""What the GPU plugins lack is told at the start, in one line. Only what is marked so needs a GPU."""

import json
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tests.core.fake_gpus import fake_gpus

from mini_infer import LLM
from mini_infer.cli import main
from mini_infer.errors import ConfigError, PluginError
from mini_infer.plugin_system.manager import PluginManager
from mini_infer.settings import Settings
from mini_infer.testing import tiny_model

HOOKS = {
    "triton-attention": "attention_backends",
    "fused-kernels": "model_transforms",
    "device-sampler": "sampler",
    "cuda-graphs": "step_runner",
}
WANT_TRITON = ["triton-attention", "fused-kernels", "device-sampler"]


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(attributes)
    return made


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name, a compiler and headers."""
    fake = module("triton")
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setattr("shutil.which", lambda program, *_, **__: f"/usr/bin/{program}" if program == "gcc" else None)
    monkeypatch.setattr("mini_infer.triton_needs.Path.is_file", lambda path: path.name == "Python.h")
    monkeypatch.delenv("CC", raising=False)
    return fake


def works(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """Let Triton's driver start, or not."""

    def start() -> None:
        if error is not None:
            raise error

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=start))
    monkeypatch.setitem(sys.modules, "triton.runtime", module("triton.runtime", driver=driver))


def asked(plugin: str, device: str = "cuda:0") -> Any:
    """Enable a plugin and call its hook."""
    manager = PluginManager(Settings(plugins=(plugin,)), device=device)
    context = manager.context(dtype="bfloat16", log=lambda line: None)
    hook = HOOKS[plugin]
    return manager.many(hook, context) if hook.endswith("s") else manager.one(hook, context, lambda: None)


def refused(plugin: str, device: str = "cuda:0") -> str:
    with pytest.raises((ConfigError, PluginError)) as error:
        asked(plugin, device)
    line = str(error.value)
    assert "\n" not in line and plugin in line
    return line


# -- what is not installed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", WANT_TRITON)
def test_without_triton(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert refused(plugin).endswith(
        " cannot be used: it needs the package triton, which a PyTorch for CUDA brings along on Linux: "
        "pip install triton"
    )


@pytest.mark.parametrize("plugin", WANT_TRITON)
def test_with_all_that_it_needs_it_loads(plugin: str, triton: ModuleType) -> None:
    assert PluginManager(Settings(plugins=(plugin,)), device="cuda:0").plugins[0].name == plugin


@pytest.mark.parametrize("plugin", WANT_TRITON)
def test_without_a_compiler(plugin: str, triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    told = "Triton needs a C compiler: install gcc or clang, or name one in the environment variable CC"
    assert refused(plugin).endswith(f" cannot be used: {told}")
    monkeypatch.setenv("CC", "/no/such/cc")
    assert refused(plugin).endswith("CC names '/no/such/cc', which is none: correct or unset CC")


def test_without_pythons_headers(triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.triton_needs.Path.is_file", lambda path: False)
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    line = refused("fused-kernels")
    assert re.search(r"Triton needs Python's C headers, and there is no \S+/Python\.h: install python3-dev$", line)


# -- the card ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", WANT_TRITON)
def test_a_card_that_is_too_old(plugin: str, triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, capability=(7, 5), name="Tesla T4")
    works(monkeypatch)
    assert refused(plugin) == (
        f"plugin {plugin} needs compute capability 8.0, this is cuda:0 (Tesla T4, compute capability 7.5): "
        f"leave it out with without = ['{plugin}'], or set plugins = [] to leave out all"
    )


@pytest.mark.parametrize("plugin", ["fused-kernels", "device-sampler", "cuda-graphs"])
def test_a_cpu(plugin: str, triton: ModuleType) -> None:
    assert refused(plugin, "cpu") == f"plugin {plugin} runs on a GPU, not on cpu: leave it out"


@pytest.mark.parametrize("plugin", WANT_TRITON)
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            AssertionError("libcuda.so cannot found!\nPlease make sure"),
            "AssertionError: libcuda.so cannot found! Please",
        ),
        (
            subprocess.CalledProcessError(1, ["gcc", "main.c"]),
            "CalledProcessError: Command '['gcc', 'main.c']' returned",
        ),
        (PermissionError(13, "Permission denied", "/root/.triton"), "PermissionError: [Errno 13] Permission denied:"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_triton_that_does_not_find_its_way(
    error: Exception, told: str, plugin: str, triton: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch)
    works(monkeypatch, error)
    line = refused(plugin)
    assert line.startswith(f"plugin {plugin} cannot be used: Triton does not work on cuda:0: {told}")
    assert line.endswith(f"leave the plugin out with without = ['{plugin}']")


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", WANT_TRITON)
def test_generate_without_triton(plugin: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", None)
    done = CliRunner().invoke(main, ["generate", "x", "--model", str(tiny_model("llama")), "--plugins", plugin])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "it needs the package triton" in line


def command(*arguments: str, cwd: Path, **environment: str) -> str:
    """The one line that a process ends with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINI_INFER_") and name != "CC"}
    done = subprocess.run(
        [sys.executable, "-m", "mini_infer", *arguments],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    return line


def test_serve_without_a_compiler(tmp_path: Path) -> None:
    """Two processes, one line."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("")
    arguments = ("serve", "--port", "0", "--model", str(tiny_model("llama")), "--plugins", "fused-kernels")
    line = command(*arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path), PATH="/nowhere")
    assert line.startswith("plugin 'fused-kernels' (mini-infer ")
    assert " cannot be used: Triton needs a C compiler: install gcc or clang" in line


# -- a real card -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("start", ["generate", "serve"])
def test_a_model_that_no_card_holds(start: str, tmp_path: Path) -> None:
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    sizes = {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 400,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    arguments = [start, *(["x"] if start == "generate" else ["--port", "0"]), "--model", str(tmp_path)]
    settings = {"device": "cuda", "dtype": "bfloat16", "load_format": "random", "skip_tokenizer": "true"}
    options = [word for key, value in settings.items() for word in ("--set", f"engine.{key}={value}")]
    line = command(*arguments, *options, cwd=tmp_path)
    assert line.startswith("the model does not fit: its weights need ") and " GiB are free on cuda:0: " in line


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"num_kv_blocks": 10**9}, r"1000000000 blocks need .*: lower engine\.num_kv_blocks\b"),
        ({"kv_cache_memory": "99TiB"}, r".* blocks need .* are free on cuda:0 .*: lower engine\.kv_cache_memory\b"),
        ({"kv_cache_memory": "64KiB", "max_model_len": 2048}, r"one sequence of engine\.max_model_len 2048 needs "),
    ],
)
def test_a_cache_that_the_card_does_not_hold(engine: dict[str, Any], told: str) -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    with pytest.raises(ConfigError, match=f"^the KV cache does not fit: {told}"):
        LLM(str(model), engine={"device": "cuda", **engine})


@pytest.mark.gpu
def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.device is 'cuda:99', but torch sees \d+ GPUs?: take cuda:0"):
        LLM(str(tiny_model("llama")), engine={"device": "cuda:99"})
    line = command("serve", "--port", "0", "--set", "engine.device=cuda", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert line.startswith("engine.device is 'cuda', but torch sees no GPU while CUDA_VISIBLE_DEVICES is ''")


@pytest.mark.gpu
def test_a_compiler_that_is_not_there_on_a_real_card(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    line = command("generate", "x", "--model", str(tiny_model("llama")), cwd=tmp_path, PATH="/nowhere")
    assert "cannot be used: Triton needs a C compiler" in line


FAULT = """
import sys
import torch
from mini_infer import LLM, EngineError, SamplingParams
from mini_infer.interfaces import ModelTransform

class Fault(ModelTransform):
    name = "fault"

    def apply(self, module, config):
        forward, calls = module.forward, iter(range(10**6))

        def faulty(*arguments):
            if next(calls) == 3:  # an assertion on the device, which is of no use from then on
                torch.zeros(1, device=config.device)[torch.full((1,), 9, device=config.device)]
            return forward(*arguments)

        module.forward = faulty
        return module

from mini_infer.plugins import hookimpl
from types import ModuleType
plugin = ModuleType("fault")
plugin.name, plugin.api_version = "fault", 0
plugin.model_transforms = hookimpl(specname="model_transforms")(lambda context: [Fault()])

from mini_infer.testing import make_llm
llm = make_llm(sys.argv[1], plugins=[plugin], device="cuda")
try:
    llm.generate([[1, 2], [3]], SamplingParams(max_tokens=50, ignore_eos=True))
except EngineError as error:
    print(error, flush=True)
    import os
    os._exit(7)
"""


@pytest.mark.gpu
def test_a_device_that_is_lost_while_it_serves() -> None:
    """In a process of its own, for nothing on this device runs there afterwards."""
    script = [sys.executable, "-c", FAULT, str(tiny_model("llama"))]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240)
    assert done.returncode == 7, done
    (line,) = done.stdout.splitlines()
    assert line.startswith("the device failed: CUDA error: device-side assert triggered")
