"""The contract suites on a GPU: the core's own parts, the model families, and the GPU plugins where triton is.

On a CPU the same suites run elsewhere (``tests/core``, ``tests/models``). With ``TRITON_INTERPRET=1`` and triton on the
path those of the kernels run without a GPU, for minutes.
"""

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from mini_infer.interfaces import KVCacheSpec
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.reference.cache_policy import FreeAtOnce
from mini_infer.reference.scheduler import ArrivalOrder, ComposedScheduler, LastArrived, first_come_first_served
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.testing import tiny_model
from mini_infer.testing.contracts import (
    attention_backend_suite,
    cache_policy_suite,
    model_adapter_suite,
    sampler_suite,
    scheduler_suite,
)
from mini_infer.testing.dense import DenseModel
from mini_infer.testing.toy_model import ToyAdapter
from mini_infer_models.llama.model import LlamaAdapter
from mini_infer_models.qwen2.model import Qwen2Adapter
from mini_infer_models.qwen3.model import Qwen3Adapter
from mini_infer_plugins.chunked_prefill.chunks import ChunksBesideDecodes

FULL = os.environ.get("MINI_INFER_TEST_FULL") == "1"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = find_spec("triton") is not None
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


def on_gpu(suite: type) -> Any:
    return pytest.mark.gpu(suite)


def chunks() -> ComposedScheduler:
    return ComposedScheduler(ArrivalOrder(), LastArrived(), ChunksBesideDecodes(5))


def model_suite(adapter: Any, *family: str, **config: Any) -> Any:
    def reference(folder: Any) -> Any:
        return DenseModel(folder).logits

    return on_gpu(
        model_adapter_suite(adapter, lambda: tiny_model(*family, **config), reference=reference, device="cuda")
    )


TestReferenceAttention = on_gpu(attention_backend_suite(ReferenceAttention, device="cuda"))
TestReferenceSampler = on_gpu(sampler_suite(ReferenceSampler, device="cuda"))
TestFirstComeFirstServed = on_gpu(scheduler_suite(first_come_first_served, device="cuda"))
TestChunkedPrefill = on_gpu(scheduler_suite(chunks, device="cuda"))
TestFreeAtOnce = on_gpu(cache_policy_suite(FreeAtOnce, device="cuda", num_traffics=2))
TestToy = model_suite(ToyAdapter, "toy", layer_kinds=["full", "latent", "sliding"])
TestLlama = model_suite(LlamaAdapter, "llama", attention_bias=True)
TestQwen2 = model_suite(Qwen2Adapter, "qwen2", tie_word_embeddings=True, **WINDOWS)
TestQwen3 = model_suite(Qwen3Adapter, "qwen3")


if HAS_TRITON:
    from mini_infer_plugins.device_sampler.sampler import DeviceSampler
    from mini_infer_plugins.triton_attention.paged_attention import TritonAttention

    DEVICE = "cpu" if INTERPRETED else "cuda"
    SOME = {("float32", 16)} if INTERPRETED else {("float32", 80), ("bfloat16", 128)}

    class Fewer(TritonAttention):
        """The backend, declaring one block size: each is compiled anew, which takes seconds."""

        capabilities = replace(TritonAttention.capabilities, devices=(DEVICE,), block_sizes=(16,))

    class FewerSpecs(attention_backend_suite(Fewer, device=DEVICE, groups=(7,))):  # type: ignore[misc]
        def specs(self) -> list[KVCacheSpec]:
            return [spec for spec in super().specs() if (spec.dtype, spec.head_dim) in SOME]

    def where_it_runs(suite: type) -> Any:
        return suite if INTERPRETED else on_gpu(suite)

    every = attention_backend_suite(TritonAttention, device=DEVICE, groups=(1, 3, 7, 16))
    TestTritonAttention = where_it_runs(every if FULL and not INTERPRETED else FewerSpecs)
    TestDeviceSampler = where_it_runs(sampler_suite(DeviceSampler, device=DEVICE))
