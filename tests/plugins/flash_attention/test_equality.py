"""Over stand-ins of their libraries ``flash-attn`` and ``flashinfer`` change no token of random traffic, in float32."""

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.plugins.flash_attention.fake_libraries import only
from tests.plugins.flash_attention.test_contract import on_cpu

from mini_infer.build.attention_choice import choose_backend
from mini_infer.errors import ConfigError, PluginLoadError
from mini_infer.interfaces import AttentionBackend, KVCacheSpec, SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.plugin_system.manager import PluginManager
from mini_infer.plugins import hookimpl
from mini_infer.settings import load_settings
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.models import tiny_checkpoint
from mini_infer_plugins.flash_attn.paged_attention import FlashAttnBackend, FlashAttnInLargeBlocks, backend_for
from mini_infer_plugins.flashinfer.paged_attention import FlashInferAttention, FlashInferAttention3

CASES: dict[str, tuple[type[AttentionBackend], tuple[int, int]]] = {
    "vfa3": (FlashAttnBackend, (9, 0)),
    "flash_attn_interface": (FlashAttnBackend, (9, 0)),
    "flash_attn": (FlashAttnInLargeBlocks, (8, 0)),
    "flashinfer": (FlashInferAttention, (8, 0)),
}
SPEC = KVCacheSpec("full", 2, 64, 64, "bfloat16")


def install(monkeypatch: pytest.MonkeyPatch, *names: str, capability: tuple[int, int] = (9, 0)) -> None:
    for module, content in only(*names).items():
        monkeypatch.setitem(sys.modules, module, content)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def traffic() -> list[EngineRequest]:
    rng = Random(3)
    return [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=[rng.randrange(200) for _ in range(rng.randint(1, 40))],
            params=SamplingParams(temperature=float(index % 2), max_tokens=rng.randint(1, 12)),
            seed=index,
        )
        for index in range(14)
    ]


def tokens(model: Path, plugins: Sequence[Any], **engine: Any) -> dict[str, list[int]]:
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 6, **engine}
    built = make_engine(model, plugins=plugins, **settings)
    return {name: output.token_ids for name, output in run_engine(built.engine, traffic()).items()}


@pytest.mark.parametrize("library", CASES)
def test_no_token_changes(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_type, capability = CASES[library]
    install(monkeypatch, library, capability=capability)
    offered = on_cpu(backend_type, library, capability)

    @hookimpl
    def attention_backends(context: Any) -> Sequence[type[AttentionBackend]]:
        return [offered]

    plugin = ModuleType("flash_on_cpu")
    vars(plugin).update(name="flash-on-cpu", api_version=0, attention_backends=attention_backends)
    tiny_checkpoint(tmp_path, "qwen2", seed=0)
    expected = tokens(tmp_path, ())
    here: dict[str, Any] = {"attention": offered.name, "block_size": min(offered.capabilities.block_sizes or (16,))}
    assert tokens(tmp_path, [plugin], **here) == expected
    few = {"num_kv_blocks": 4 if library == "flash_attn" else 9, "max_num_batched_tokens": 16}
    assert tokens(tmp_path, [plugin, "chunked-prefill"], **here, **few) == expected


# -- which backend, and why not ----------------------------------------------------------------------------------------


def offered_by(plugin: str, device: str = "cuda:0", **table: Any) -> tuple[list[type[AttentionBackend]], list[str]]:
    """What a plugin's hook answers, and what it logs."""
    said: list[str] = []
    settings = load_settings(arguments={"plugins": [plugin], "plugin": {plugin: table} if table else {}}, environ={})
    manager = PluginManager(settings, device=device)
    return manager.many("attention_backends", manager.context(dtype="bfloat16", log=said.append)), said


def test_a_plugin_without_its_library_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for device in ("cpu", "cuda:0"):
        with pytest.raises(PluginLoadError) as caught:
            offered_by("flash-attn", device)
        message = str(caught.value)
        assert message.startswith("plugin 'flash-attn' (mini-infer ") and "\n" not in message
        assert message.endswith("pip install 'mini-infer[flash]'") and "vfa3" in message


@pytest.mark.parametrize("backend", [FlashAttnBackend, FlashInferAttention])
def test_a_backend_named_without_its_library_is_an_error_with_the_extra(
    backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install 'mini-infer\[flash(infer)?\]'$"):
        choose_backend(backend.name, [backend], SPEC, "cuda:0")
    chosen, choice = choose_backend("auto", [backend], SPEC, "cuda:0")
    assert chosen.name == "reference" and "pip install 'mini-infer[flash" in str(choice)


def test_a_backend_whose_plugin_is_not_enabled() -> None:
    with pytest.raises(ConfigError, match="no enabled plugin brings a backend 'flash-attn'; known: reference"):
        choose_backend("flash-attn", [], SPEC, "cuda:0")


@pytest.mark.parametrize(
    ("installed", "capability", "block_sizes"),
    [("vfa3", (9, 0), (16, 32)), ("flash_attn_interface", (9, 0), (16, 32)), ("flash_attn", (8, 0), (256, 512))],
)
def test_flash_attn_takes_the_blocks_of_its_build_and_logs_which_that_is(
    installed: str, capability: tuple[int, int], block_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, installed, capability=capability)
    (backend,), said = offered_by("flash-attn")
    assert backend.capabilities.block_sizes == block_sizes
    assert len(said) == 1 and f"(module {installed})" in said[0]
    assert choose_backend("auto", [backend], SPEC, "cuda:0")[0] is backend


def test_flash_attn_says_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vfa3", capability=(8, 0))
    (backend,), said = offered_by("flash-attn")
    assert not said
    assert "does not run on compute capability 8.0" in str(choose_backend("auto", [backend], SPEC, "cuda:0")[1])
    install(monkeypatch, "vfa3")
    odd = KVCacheSpec("full", 2, 20, 20, "bfloat16")
    with pytest.raises(ConfigError, match="multiples of 8 up to 256, not 20"):
        choose_backend("flash-attn", [backend], odd, "cuda:0")
    assert backend_for("cpu", print) is FlashAttnBackend


def test_flashinfer_says_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flashinfer", capability=(8, 0))
    assert FlashInferAttention.unavailable(SPEC, "cuda:0") is None
    assert FlashInferAttention3.unavailable(SPEC, "cuda:0") == "its kernels 'fa3' need compute capability 9.0"
