"""``flash-attn`` and ``flashinfer`` with the real libraries, on a GPU: ``pytest -m gpu`` where they are installed.

The contract suite, then bfloat16 against the core's reference in float32 over longer rows, then a captured device graph
replayed at other lengths, then an engine.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from mini_infer.flash_attention import missing_flash_attention
from mini_infer.forward_batch import ForwardBatch
from mini_infer.interfaces import AttentionBackend, BatchLimits, KVCacheSpec, SamplingParams
from mini_infer.layers import Attention
from mini_infer.messages import EngineRequest
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.batches import block_tables, pack_batch
from mini_infer.testing.contracts import attention_backend_suite
from mini_infer.testing.models import tiny_checkpoint
from mini_infer_plugins.flash_attn.paged_attention import backend_for
from mini_infer_plugins.flashinfer.paged_attention import FlashInferAttention

pytestmark = pytest.mark.gpu

FLASH_ATTN = backend_for("cuda:0" if torch.cuda.is_available() else "cpu", print)
LIBRARIES: dict[type[AttentionBackend], str | None] = {
    FLASH_ATTN: missing_flash_attention(),
    FlashInferAttention: None if find_spec("flashinfer") else "flashinfer-python is not installed",
}
TOLERANCE = 4e-2  # as the contract suite's for bfloat16, numbers of standard deviation 1


class OneHeadDim(FlashInferAttention):
    """What is compiled for each head dim and dtype takes minutes: one of them is tried."""

    capabilities = replace(FlashInferAttention.capabilities, head_dims=(128,), dtypes=("bfloat16",))


@pytest.mark.skipif(LIBRARIES[FLASH_ATTN] is not None, reason=str(LIBRARIES[FLASH_ATTN]))
class TestFlashAttn(attention_backend_suite(FLASH_ATTN, device="cuda:0", groups=(1, 3, 7))):
    """The contract."""


@pytest.mark.skipif(LIBRARIES[FlashInferAttention] is not None, reason=str(LIBRARIES[FlashInferAttention]))
class TestFlashInfer(attention_backend_suite(OneHeadDim, device="cuda:0", groups=(1, 3, 7))):
    """The contract."""


@pytest.fixture(params=list(LIBRARIES), ids=["flash-attn", "flashinfer"])
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    lack = LIBRARIES[request.param]
    if lack is not None:
        pytest.skip(lack)
    found: type[AttentionBackend] = request.param
    return found


class Rows:
    """Rows whose keys are in blocks, what stands past their ends being NaN, and both backends over them."""

    def __init__(
        self, backend: type[AttentionBackend], heads: tuple[int, int, int], window: int | None, lens: list[int]
    ) -> None:
        torch.manual_seed(0)
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.kind: Any = "full" if window is None else "sliding"
        self.window, self.lens = window, lens
        self.block_size = min(backend.capabilities.block_sizes or (16,))
        blocks = [-(-length // self.block_size) for length in lens]
        self.num_blocks = 1 + sum(blocks)
        self.tables = block_tables(lens, self.block_size, self.num_blocks)
        self.width = max(blocks)
        cache = torch.randn(2, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim, device="cuda")
        for length, table in zip(lens, self.tables, strict=True):
            cache[:, table[-1], (length - 1) % self.block_size + 1 :] = torch.nan
        cache[:, 0] = torch.nan
        self.cache = cache.bfloat16()
        self.fast = self.bound(backend, "bfloat16")
        self.plain = self.bound(ReferenceAttention, "float32")

    def bound(self, backend: type[AttentionBackend], dtype: str) -> Attention:
        spec = KVCacheSpec(self.kind, self.num_kv_heads, self.head_dim, self.head_dim, dtype, self.window)
        layer = Attention(self.num_heads, spec, self.head_dim**-0.5)
        made = backend(spec, "cuda:0", self.block_size)
        layer.bind(made, self.cache.to(getattr(torch, dtype)).clone())
        made.buffers(BatchLimits(len(self.lens) + 8, 1 << 15, self.width, self.block_size))
        return layer

    def batch(self, query_lens: list[int], lens: list[int] | None = None) -> ForwardBatch:
        lens = self.lens if lens is None else lens
        tables = [table + [0] * (self.width - len(table)) for table in self.tables]
        rows = list(zip(query_lens, lens, strict=True))
        padding = int(query_lens[0] == 1)  # such a row has one token, and uniform rows are alike
        return pack_batch(rows, tables, self.block_size, num_padding_rows=padding, device="cuda")

    def numbers(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        merged = torch.randn(batch.shape.num_tokens, sum(sizes) * self.head_dim, device="cuda").bfloat16()
        query, key, value = (
            part.unflatten(1, (-1, self.head_dim)) for part in merged.split([n * self.head_dim for n in sizes], dim=1)
        )
        return query, key, value

    def compare(self, found: torch.Tensor, batch: ForwardBatch, numbers: tuple[torch.Tensor, ...]) -> None:
        self.plain.backend.prepare(batch)
        expected = self.plain(*(each.float() for each in numbers), batch)
        real = int(batch.cu_seqlens_q[len(self.lens)])  # what comes behind is padding
        assert found.dtype == torch.bfloat16 and found.isfinite().all()
        worst = (found[:real].float() - expected[:real]).abs().max().item()
        assert worst <= TOLERANCE, f"off by {worst:.3g}"


STEPS = {
    "decode": ([1] * 6, [1, 40, 257, 1000, 3000, 2]),
    "verify": ([4] * 5, [4, 40, 257, 1000, 3000]),
    "prompts": ([300, 1, 77, 1500], [300, 1, 77, 1500]),
    "chunks": ([300, 16, 77, 512], [900, 2000, 300, 512]),
    "mixed": ([1, 1, 1, 300, 16, 77], [5, 3000, 257, 300, 2000, 300]),
}


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(28, 4, 128), (8, 8, 64)], ids=["7-to-1", "1-to-1"])
@pytest.mark.parametrize("step", STEPS)
def test_bfloat16_beside_the_reference_in_float32(
    backend: type[AttentionBackend], step: str, heads: tuple[int, int, int], window: int | None
) -> None:
    query_lens, lens = STEPS[step]
    rows = Rows(backend, heads, window, lens)
    batch = rows.batch(query_lens)
    numbers = rows.numbers(batch)
    rows.fast.backend.prepare(batch)
    rows.compare(rows.fast(*numbers, batch), batch, numbers)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("window", [None, 100])
def test_a_graph_is_replayed_at_other_lengths(
    backend: type[AttentionBackend], query_len: int, window: int | None
) -> None:
    """Captured where all rows are short, replayed where some are long, and the other way round."""
    if backend.capabilities.graphs == "none":
        pytest.skip("it declares no graphs")
    longest = [3000, 700, 90, 4, 2500]
    for first in ([4, 5, 6, 4, 7], longest):
        rows = Rows(backend, (28, 4, 128), window, longest)
        batch = rows.batch([query_len] * 5, first)
        numbers = rows.numbers(batch)
        rows.fast.backend.prepare(batch)
        rows.compare(rows.fast(*numbers, batch), batch, numbers)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = rows.fast(*numbers, batch)
        for lens in (longest, [4, 5, 6, 4, 7], [1000, 699, 20, 4, 2499], longest):
            now = rows.batch([query_len] * 5, lens)
            for name in ("positions", "slot_mapping", "cu_seqlens_q", "seq_lens", "block_table"):
                getattr(batch, name).copy_(getattr(now, name))
            for each in numbers:
                each.copy_(torch.randn_like(each))
            graph.replay()
            rows.compare(out, now, numbers)


@pytest.mark.parametrize("others", [(), ("cuda-graphs",), ("cuda-graphs", "chunked-prefill")], ids="+".join)
def test_an_engine_in_bfloat16(backend: type[AttentionBackend], others: tuple[str, ...], tmp_path: Path) -> None:
    """Rounding may turn a token that was close, so the first ones are compared, and nearly all must agree."""
    dim = 64 if 64 in backend.capabilities.head_dims else 16
    tiny_checkpoint(tmp_path, "qwen2", seed=0, head_dim=dim, hidden_size=4 * dim)
    rng = Random(0)
    requests = [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=[rng.randrange(200) for _ in range(rng.randint(1, 60))],
            params=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
            seed=index,
        )
        for index in range(24)
    ]

    def tokens(plugins: tuple[str, ...], attention: str) -> dict[str, list[int]]:
        block_size = min(backend.capabilities.block_sizes or (16,))
        settings = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 8}
        built = make_engine(tmp_path, plugins=list(plugins), attention=attention, block_size=block_size, **settings)
        return {name: output.token_ids for name, output in run_engine(built.engine, requests).items()}

    expected = tokens((), "reference")
    found = tokens((backend.name, *others), backend.name)
    assert {name: len(ids) for name, ids in found.items()} == {name: len(ids) for name, ids in expected.items()}
    pairs = [pair for name, ids in found.items() for pair in zip(ids[:3], expected[name][:3], strict=True)]
    agreeing = sum(a == b for a, b in pairs) / len(pairs)
    assert agreeing >= 0.85, f"{agreeing:.0%} of the first tokens agree"
