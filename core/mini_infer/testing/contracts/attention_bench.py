"""What the suite of ``AttentionBackend`` runs its steps on: rows that live for some steps, beside dense attention.

Contract: a row's queries, keys and values are known from the start; blocks are random, with NaN where nobody may look.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch

from mini_infer.interfaces import BatchLimits
from mini_infer.layers import Attention, RotaryEmbedding
from mini_infer.testing.batches import pack_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces import AttentionBackend, KVCacheSpec

MAX_LEN = 48
NUM_ROWS = 6
TOLERANCE = {"float32": 3e-5, "float16": 8e-3, "bfloat16": 4e-2}
"""Largest difference allowed, for keys, values and queries of standard deviation 1."""


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
