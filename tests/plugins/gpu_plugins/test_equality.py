"""The GPU plugins change no token: float32 traffic with each on its own and with all together, in both loops.

The traffic runs on a GPU only; ``pytest -m gpu``.
"""

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mini_infer.forward_batch import StepShape
from mini_infer.interfaces import BatchLimits, KVCacheSpec, SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.models import tiny_checkpoint
from mini_infer_plugins.cuda_graphs.graphs import CudaGraphRunner, fastest_from

TOGETHER = [
    (),
    ("triton-attention",),
    ("fused-kernels",),
    ("triton-attention", "cuda-graphs"),
    ("cuda-graphs", "chunked-prefill"),
    ("device-sampler",),
    ("triton-attention", "fused-kernels", "device-sampler", "cuda-graphs"),
    ("triton-attention", "fused-kernels", "device-sampler", "cuda-graphs", "chunked-prefill"),
]


def requests() -> list[EngineRequest]:
    rng = Random(0)
    return [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=[rng.randrange(200) for _ in range(rng.randint(1, 30))],
            params=SamplingParams(
                temperature=float(index % 2),
                max_tokens=rng.randint(1, 25),
                repetition_penalty=1.2 if index % 3 == 0 else 1.0,
                top_k=20 if index % 4 == 1 else 0,
                top_p=0.9 if index % 8 > 4 else 1.0,
                min_p=0.05 if index % 5 == 1 else 0.0,
                logit_bias={7: 2.0} if index % 6 == 1 else {},
            ),
            seed=index,
        )
        for index in range(24)
    ]


def tokens(model: Path, plugins: tuple[str, ...], **engine: Any) -> dict[str, list[int]]:
    settings = {"device": "cuda", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 16, **engine}
    built = make_engine(model, plugins=list(plugins), **settings)
    return {name: output.token_ids for name, output in run_engine(built.engine, requests()).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("plugins", TOGETHER, ids=lambda names: "+".join(names) or "none")
def test_no_token_changes(plugins: tuple[str, ...], tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen2", seed=0)
    expected = tokens(tmp_path, (), device="cpu")
    for overlap, pool in product((False, True), ({}, {"num_kv_blocks": 8, "max_num_batched_tokens": 32})):
        assert tokens(tmp_path, plugins, overlap=overlap, **pool) == expected


LIMITS = BatchLimits(max_num_rows=3, max_num_tokens=20, max_blocks_per_row=4, block_size=4)


def test_attention_that_cannot_be_captured_leaves_graphs_between() -> None:
    said: list[str] = []
    runner = CudaGraphRunner([1, 2], [8], said.append)
    runner.bind([ReferenceAttention(KVCacheSpec("full", 1, 8, 8, "float32"), "cpu", 16)])
    runner.limits(LIMITS)
    assert said == ["cuda-graphs: attention 'reference' cannot be captured, so only steps with prompts have graphs"]
    one = StepShape.of([1], 1)
    assert runner.shape(one) == one
    assert [shape.num_tokens for shape in runner.rehearsals()] == [8]


def test_the_buckets_that_the_engine_can_fill_are_rehearsed() -> None:
    runner = CudaGraphRunner([1, 2, 4, 8], [8, 16, 32, 64])
    limits = runner.limits(LIMITS)
    assert (limits.max_num_rows, limits.max_num_tokens) == (3 + 3, 32)  # 32 tokens of padding are three rows of 13
    assert [(shape.num_rows, shape.num_tokens) for shape in runner.rehearsals()] == [
        *((1, 32), (1, 16), (1, 8)),
        *((4, 4), (2, 2), (1, 1)),
    ]


def test_a_larger_bucket_that_is_faster_is_taken() -> None:
    seconds = {8: 1.0, 16: 1.1, 24: 2.0, 32: 1.5, 40: 1.495, 48: 1.2, 56: 1.6}
    assert {rows: fastest_from(rows, seconds) for rows in seconds} == {
        8: 8,
        16: 16,
        24: 48,
        32: 48,
        40: 48,
        48: 48,
        56: 56,
    }


def test_a_step_is_padded_to_its_bucket() -> None:
    runner = CudaGraphRunner([1, 4], [8, 32])
    runner.limits(LIMITS)
    for rows, query_len, padded in ((1, 1, 1), (2, 1, 4), (3, 4, 4), (5, 1, 5)):
        shape = runner.shape(StepShape.of([query_len] * rows, query_len))
        assert (shape.num_rows, shape.num_tokens) == (padded, padded * query_len)
    for lens, rows, tokens in (([1, 3], 3, 8), ([1, 7], 2, 8), ([1, 8], 4, 32), ([1, 32], 2, 33)):
        shape = runner.shape(StepShape.of(lens, 1, True))
        assert (shape.num_rows, shape.num_tokens, shape.last_only) == (rows, tokens, tokens == 33)
