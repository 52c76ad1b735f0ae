"""``flash-attn`` and ``flashinfer`` keep the contract, each over a stand-in of each library; no GPU is needed."""

import sys
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from tests.plugins.flash_attention.fake_libraries import only

from mini_infer.interfaces import AttentionBackend, KVCacheSpec
from mini_infer.testing.contracts import attention_backend_suite
from mini_infer_plugins.flash_attn.paged_attention import FlashAttnBackend, FlashAttnInLargeBlocks
from mini_infer_plugins.flashinfer.paged_attention import FlashInferAttention


def on_cpu(backend: type[AttentionBackend], installed: str, capability: tuple[int, int]) -> type[AttentionBackend]:
    """A backend as it is, but on a CPU, in float32 too, over the stand-in of one library."""
    can = backend.capabilities
    here = replace(can, devices=("cpu",), dtypes=("float32", *can.dtypes), head_dims=can.head_dims and (16, 64))

    def unavailable(cls: type, spec: KVCacheSpec, device: str) -> str | None:
        return None if spec.head_dim % 8 == 0 else "head dims are multiples of 8"

    members = {"capabilities": here, "unavailable": classmethod(unavailable), "library": (installed, capability)}
    return type(f"{backend.__name__}OnCpu", (backend,), members)


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one library that a suite's backend is to find."""
    backend: ClassVar = request.cls.backend
    name, capability = backend.library
    for module, content in only(name).items():
        monkeypatch.setitem(sys.modules, module, content)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


TestKernelsOfFlashAttention3 = attention_backend_suite(on_cpu(FlashAttnBackend, "vfa3", (9, 0)))
TestFlashAttention3 = attention_backend_suite(on_cpu(FlashAttnBackend, "flash_attn_interface", (9, 0)))
TestFlashAttn2 = attention_backend_suite(on_cpu(FlashAttnInLargeBlocks, "flash_attn", (8, 6)))
TestFlashInfer = attention_backend_suite(on_cpu(FlashInferAttention, "flashinfer", (8, 0)))
