"""The contract of ``AttentionBackend``: any batch, over blocks anywhere, with NaN wherever nobody may look.

Rows live for a few steps, as in an engine: prompts whole or in chunks, then decoding, beside each other in random
blocks. What a step gives is compared with dense attention in float64 over the row's own keys and values. All that the
backend declares is tried: kinds of cache, dtypes, head dims, block sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch

from mini_infer.interfaces import BatchLimits, KVCacheSpec
from mini_infer.layers import Attention, RotaryEmbedding
from mini_infer.testing.batches import at_the_addresses_of, pack_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces import AttentionBackend
    from mini_infer.interfaces.model import KVKind

MAX_LEN = 48
NUM_ROWS = 6
TOLERANCE = {"float32": 3e-5, "float16": 8e-3, "bfloat16": 4e-2}
"""Largest difference allowed, for keys, values and queries of standard deviation 1."""


def attention_backend_suite(
    backend: type[AttentionBackend], *, device: str = "cpu", groups: Sequence[int] = (1, 3)
) -> type[AttentionBackendSuite]:
    """Tests of a backend: ``TestMine = attention_backend_suite(MyBackend)``.

    Args:
        backend: the class, as a plugin's hook ``attention_backends`` returns it.
        device: where to run.
        groups: query heads that share a key head.
    """
    return type(
        "AttentionBackendSuite", (AttentionBackendSuite,), {"backend": backend, "device": device, "groups": groups}
    )


@dataclass
class Row:
    """One sequence: all that will ever be written and asked of it."""

    query: torch.Tensor  # [MAX_LEN, num_heads, head_dim]
    key: torch.Tensor  # [MAX_LEN, num_kv_heads, head_dim]
    value: torch.Tensor  # [MAX_LEN, num_kv_heads, v_head_dim]
    blocks: list[int]
    length: int = 0  # tokens written so far


class Bench:
    """A backend bound to one layer (two, so that they could be mixed up), and rows in random blocks."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        spec: KVCacheSpec,
        block_size: int,
        group: int,
        device: str,
        seed: int = 0,
    ) -> None:
        self.spec, self.block_size, self.device = spec, block_size, device
        self.rng = Random(f"{spec} {block_size} {group} {seed}")
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = getattr(torch, spec.dtype)
        self.num_heads = group * spec.num_kv_heads
        self.backend = backend(spec, device, block_size)
        rotary = None
        if spec.kind != "latent" and spec.head_dim % 2 == 0:
            frequencies = 10000.0 ** (-torch.arange(0, spec.head_dim, 2) / spec.head_dim)
            rotary = RotaryEmbedding(frequencies, MAX_LEN, dtype=self.dtype).to(device)
        self.layer, self.other = (Attention(self.num_heads, spec, spec.head_dim**-0.5, rotary) for _ in range(2))
        num_blocks = 2 * NUM_ROWS * -(-MAX_LEN // block_size)
        for layer in (self.layer, self.other):
            shape = self.backend.kv_cache_shape(num_blocks)
            layer.bind(self.backend, torch.full(shape, torch.nan, dtype=self.dtype, device=device))
        self.backend.buffers(BatchLimits(16, 512, -(-MAX_LEN // block_size), block_size))
        free = list(range(1, num_blocks))
        self.rng.shuffle(free)
        self.rows = [self._row(free) for _ in range(NUM_ROWS)]

    def _row(self, free: list[int]) -> Row:
        spec = self.spec
        key = self.noise(MAX_LEN, spec.num_kv_heads, spec.head_dim)
        latent = spec.kind == "latent"
        value = key[..., : spec.v_head_dim] if latent else self.noise(MAX_LEN, spec.num_kv_heads, spec.v_head_dim)
        blocks = [free.pop() for _ in range(-(-MAX_LEN // self.block_size))]
        return Row(self.noise(MAX_LEN, self.num_heads, spec.head_dim), key, value, blocks)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def batch(self, counts: Sequence[int], num_padding_rows: int = 0) -> ForwardBatch:
        """The step that runs ``counts[i]`` more tokens of row i; rows with none are left out."""
        step = [(count, row) for count, row in zip(counts, self.rows, strict=False) if count]
        width = -(-MAX_LEN // self.block_size)
        tables = [[*row.blocks[: -(-(row.length + count) // self.block_size)]] for count, row in step]
        tables[0] += [0] * (width - len(tables[0]))  # the engine's tables have one width, unused entries are 0
        rows = [(count, row.length + count) for count, row in step]
        return pack_batch(rows, tables, self.block_size, num_padding_rows=num_padding_rows, device=self.device)

    def run(self, counts: Sequence[int], batch: ForwardBatch, prepared: ForwardBatch | None = None) -> torch.Tensor:
        """Run both layers on a step: what the first gives for the rows' tokens and for padding.

        Args:
            counts: tokens of each row, as for ``batch``.
            batch: handed to the layers.
            prepared: handed to ``prepare``, if that is another.
        """
        self.backend.prepare(prepared or batch)
        tokens = []
        for count, row in zip(counts, self.rows, strict=False):
            stretch = slice(row.length, row.length + count)
            tokens.append(torch.cat([x[stretch].flatten(1) for x in (row.query, row.key, row.value)], dim=1))
        tokens.append(self.noise(batch.shape.num_tokens - sum(counts), tokens[0].shape[1]))
        # Views with gaps between tokens, as a merged projection gives them.
        first = self.rows[0]
        sizes = [x[0].numel() for x in (first.query, first.key, first.value)]
        query, key, value = torch.split(torch.cat(tokens), sizes, dim=1)
        query = torch.unflatten(query, 1, (self.num_heads, -1))
        key, value = (torch.unflatten(x, 1, (self.spec.num_kv_heads, -1)) for x in (key, value))
        out: torch.Tensor = self.layer(query, key, value, batch)
        self.other(-query, -key, -value, batch)
        return out

    def spoil(self, poison: float) -> None:
        """Write ``poison`` wherever a row has room past its end, as rejected drafts would, and to the null block."""
        room = [len(row.blocks) * self.block_size - row.length for row in self.rows]
        batch = self.batch(room, num_padding_rows=1)
        spec, num_tokens = self.spec, batch.shape.num_tokens
        key = torch.full((num_tokens, spec.num_kv_heads, spec.head_dim), poison, dtype=self.dtype, device=self.device)
        query = key.new_zeros(num_tokens, self.num_heads, spec.head_dim)
        self.backend.prepare(batch)
        query = self.backend.write_kv(self.layer, query, key, key[..., : spec.v_head_dim], batch)
        self.backend.attend(self.layer, query, batch)  # which may have been left the writing

    def step(self, counts: Sequence[int], num_padding_rows: int = 0) -> None:
        """Run a step and compare every row with dense attention."""
        batch = self.batch(counts, num_padding_rows)
        out = self.run(counts, batch)
        self.compare(counts, out)
        self.advance(counts)

    def advance(self, counts: Sequence[int]) -> None:
        for count, row in zip(counts, self.rows, strict=False):
            row.length += count

    def compare(self, counts: Sequence[int], out: torch.Tensor) -> None:
        assert out.dtype == self.dtype, f"the output is {out.dtype}, the query {self.dtype}"
        width = (self.num_heads, self.spec.v_head_dim)
        assert out.shape[1:] == width, f"the output is {tuple(out.shape)}, not [num_tokens, {width[0]}, {width[1]}]"
        assert out.isfinite().all(), (
            f"tokens {(~out.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()} are NaN"
        )
        start = 0
        for index, (count, row) in enumerate(zip(counts, self.rows, strict=False)):
            worst = (out[start : start + count].double() - self.dense(row, count)).abs().max().item() if count else 0.0
            assert worst <= TOLERANCE[self.spec.dtype], (
                f"row {index}, tokens {row.length} to {row.length + count}, is off by {worst:.3g}: {self.spec}, "
                f"blocks of {self.block_size}, {self.num_heads} heads"
            )
            start += count

    def dense(self, row: Row, count: int) -> torch.Tensor:
        """[count, num_heads, v_head_dim] float64 for the row's next tokens."""
        length = row.length + count
        query, key, value = row.query[row.length : length], row.key[:length], row.value[:length]
        at = torch.arange(length, device=self.device)
        if self.layer.rotary is not None:
            query, _ = self.layer.rotary(query, query, at[row.length :])
            _, key = self.layer.rotary(key, key, at)
        group = self.num_heads // self.spec.num_kv_heads
        key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * self.layer.scale
        here = at[row.length :, None]
        hidden = (at > here) | (at <= here - (self.spec.sliding_window or MAX_LEN))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


class AttentionBackendSuite:
    """The tests; ``attention_backend_suite`` fills in what they are about."""

    backend: ClassVar[type[AttentionBackend]]
    device: ClassVar[str]
    groups: ClassVar[Sequence[int]]

    def specs(self) -> list[KVCacheSpec]:
        """What the backend says that it serves."""
        can = self.backend.capabilities
        head_dims = can.head_dims or (16, 20, 64)
        specs = []
        for kind in can.kinds:
            for head_dim in head_dims:
                for dtype in can.dtypes:
                    heads, v_head_dim = (1, max(1, head_dim * 3 // 4)) if kind == "latent" else (2, head_dim)
                    window = 5 if kind == "sliding" else None
                    specs.append(KVCacheSpec(cast("KVKind", kind), heads, head_dim, v_head_dim, dtype, window))
        here = [spec for spec in specs if self.backend.unavailable(spec, self.device) is None]
        if not here:
            pytest.skip(str(self.backend.unavailable(specs[0], self.device)))
        return here

    def benches(self, seed: int = 0) -> list[Bench]:
        """One for each spec, group and block size, or for a part of them where there are many."""
        sizes = self.backend.capabilities.block_sizes or (1, 4, 16)
        every = [(spec, size, group) for spec in self.specs() for size in sizes for group in self.groups]
        chosen = Random(seed).sample(every, min(len(every), 12))
        return [Bench(self.backend, spec, size, group, self.device, seed) for spec, size, group in chosen]

    def test_it_declares_this_device(self) -> None:
        assert self.device.partition(":")[0] in self.backend.capabilities.devices
        assert isinstance(self.backend.name, str) and self.backend.name

    def test_caches_have_the_layout_that_copies_rely_on(self) -> None:
        for bench in self.benches():
            shape = bench.backend.kv_cache_shape(7)
            numbers = 7 * bench.block_size * bench.spec.numbers_per_token
            assert torch.Size(shape).numel() == numbers, f"7 blocks are {shape}, not {numbers} numbers"
            in_pairs = len(shape) > 1 and shape[0] == 2 and shape[1] == 7
            assert shape[0] == 7 or in_pairs, f"{shape} has the block neither first nor behind (keys, values)"

    @pytest.mark.parametrize("seed", range(4))
    def test_rows_of_every_kind_beside_each_other(self, seed: int) -> None:
        """Prompts, chunks and decoding rows in one step, over several steps, padding behind them."""
        for bench in self.benches(seed):
            lengths = [bench.rng.randint(1, 20) for _ in bench.rows]
            bench.step(lengths, bench.rng.randint(0, 2))
            bench.step([1] * len(lengths), bench.rng.randint(0, 2))
            bench.step([bench.rng.choice([0, 1, 1, 4, 7]) for _ in lengths[1:]] + [1], 1)
            bench.step([1] * len(lengths))

    def test_uniform_rows_of_several_tokens(self) -> None:
        """What verifies drafts: each row a few tokens at the end of its sequence."""
        for bench in self.benches():
            bench.step([bench.rng.randint(1, 9) for _ in bench.rows])
            bench.step([4] * len(bench.rows), 2)

    def test_slots_past_the_end_do_not_matter(self) -> None:
        """Rejected drafts, or who had the block before, left anything there."""
        for bench in self.benches():
            bench.step([bench.rng.randint(1, 20) for _ in bench.rows], 1)
            counts = [1] * len(bench.rows)
            for poison in (torch.nan, torch.inf, 1e4):
                bench.spoil(poison)
                bench.step(counts, 1)

    def test_what_is_not_finite_stays_in_its_row(self) -> None:
        for bench in self.benches():
            sick = bench.rows[1]
            lengths = [bench.rng.randint(2, 9) for _ in bench.rows]
            for counts in (lengths, [1] * len(bench.rows)):
                sick.key[:], sick.value[:] = torch.nan, torch.nan
                out = bench.run(counts, bench.batch(counts))
                out[counts[0] : counts[0] + counts[1]] = 0
                sick.key[:], sick.value[:] = 0, 0
                bench.compare(counts, out)
                bench.advance(counts)

    def test_attending_apart_from_writing(self) -> None:
        """As a step runner does that captures only what lies between two attentions and says where answers go."""
        for bench in self.benches():
            for counts in ([bench.rng.randint(1, 9) for _ in bench.rows], [1] * len(bench.rows)):
                batch = bench.batch(counts, 1)
                out = torch.empty(
                    batch.shape.num_tokens,
                    bench.num_heads,
                    bench.spec.v_head_dim,
                    dtype=bench.dtype,
                    device=self.device,
                )
                found = bench.run(
                    counts, replace(batch, around_attention=partial(attend_into, {bench.layer: out}, batch))
                )
                assert found.data_ptr() == out.data_ptr(), "the answer went elsewhere"
                bench.compare(counts, out)
                bench.advance(counts)

    def test_lengths_on_the_host_are_bounds_only(self) -> None:
        """After drafts were rejected on the device, the host knows no better than an upper bound."""
        if self.backend.capabilities.needs_host_lengths:
            pytest.skip("it declares needs_host_lengths")
        for bench in self.benches():
            bench.step([bench.rng.randint(1, 9) for _ in bench.rows])
            counts = [1] * len(bench.rows)
            batch = bench.batch(counts)
            room = batch.block_table.shape[1] * bench.block_size
            bounds = [min(length + 3, room) for length in batch.seq_lens_host]
            bench.compare(counts, bench.run(counts, replace(batch, seq_lens_host=bounds)))

    def test_a_captured_step_can_be_replayed(self) -> None:
        """A replay runs what was captured: the first step's batch, its tensors filled anew, no host list read."""
        if self.backend.capabilities.graphs == "none":
            pytest.skip("it declares no graphs")
        for bench in self.benches():
            bench.step([bench.rng.randint(1, 9) for _ in bench.rows])
            counts = [1] * len(bench.rows)
            captured = bench.batch(counts)
            bench.compare(counts, bench.run(counts, captured))
            bench.advance(counts)
            for _ in range(4):
                now = bench.batch(counts)
                bench.compare(counts, bench.run(counts, captured, prepared=at_the_addresses_of(captured, now)))
                bench.advance(counts)


def attend_into(outs: dict[Attention, torch.Tensor], batch: ForwardBatch, layer: Attention, query: Any) -> torch.Tensor:
    """In the place of ``around_attention``."""
    return layer.backend.attend(layer, query, batch, outs.get(layer))
