"""Forward passes by hand: a packed batch over scattered blocks, for tests of backends and models without the engine.

Contract: what an engine would hand to a model, made from plain lists. Blocks of a row are in random order, never 0.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces import AttentionBackend, KVCacheSpec


def block_tables(num_tokens: Sequence[int], block_size: int, num_blocks: int, seed: int = 0) -> list[list[int]]:
    """Distinct random blocks for rows of so many tokens, out of 1 to ``num_blocks`` - 1."""
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-tokens // block_size))] for tokens in num_tokens]


def pack_batch(
    rows: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    token_ids: Sequence[Sequence[int]] | None = None,
    num_padding_rows: int = 0,
    device: str = "cpu",
) -> ForwardBatch:
    """A packed batch.

    Args:
        rows: (tokens of this step, sequence length with them) of each row, uniform rows first.
        tables: each row's blocks.
        block_size: tokens a block.
        token_ids: this step's tokens of each row; zeros if not given.
        num_padding_rows: rows of one token in the null block, behind the others.
        device: where the tensors lie.
    """
    import torch

    from mini_infer.forward_batch import ForwardBatch, StepShape

    padded = [*rows, *[(1, 1)] * num_padding_rows]
    tables = [*tables, *[[0]] * num_padding_rows]
    positions = [list(range(length - count, length)) for count, length in padded]
    slots = [
        [table[p // block_size] * block_size + p % block_size for p in row]
        for row, table in zip(positions, tables, strict=True)
    ]
    width = max(map(len, tables))
    ids = [*(token_ids or [[0] * count for count, _ in rows]), *[[0]] * num_padding_rows]
    first = padded[0][0] if padded[0][0] <= 8 else 0
    uniform = next((i for i, (count, _) in enumerate(padded) if count != first), len(padded)) if first else 0

    def integers(values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([value for row in values for value in row], dtype=torch.int64, device=device)

    starts = [0]
    for count, _ in padded:
        starts.append(starts[-1] + count)
    return ForwardBatch(
        shape=StepShape(len(padded), starts[-1], uniform, first, max(count for count, _ in padded)),
        input_ids=integers(ids),
        positions=integers(positions),
        slot_mapping=integers(slots),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([length for _, length in padded], dtype=torch.int32, device=device),
        block_table=torch.tensor(
            [[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32, device=device
        ),
        query_lens_host=[count for count, _ in padded],
        seq_lens_host=[length for _, length in padded],
    )


def bind_caches(
    module: nn.Module,
    backend: type[AttentionBackend],
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    device: str = "cpu",
    fill: float = float("nan"),
) -> list[AttentionBackend]:
    """Give each attention layer of ``module`` a cache full of ``fill`` and the backend of its group.

    Returns:
        One backend a group; call ``prepare`` of each before a forward pass.
    """
    import torch

    from mini_infer.layers import Attention

    groups: dict[KVCacheSpec, AttentionBackend] = {}
    for layer in module.modules():
        if isinstance(layer, Attention):
            made = groups.setdefault(layer.spec, backend(layer.spec, device, block_size))
            dtype = getattr(torch, layer.spec.dtype)
            layer.bind(made, torch.full(made.kv_cache_shape(num_blocks), fill, dtype=dtype, device=device))
    return list(groups.values())


def run(module: nn.Module, backends: Sequence[AttentionBackend], batch: ForwardBatch) -> torch.Tensor:
    """Logits of every token of ``batch``: [num_tokens, vocab_size]."""
    import torch

    from mini_infer.interfaces import CausalLM

    assert isinstance(module, CausalLM)
    with torch.inference_mode():
        for backend in backends:
            backend.prepare(batch)
        return module.logits(module.forward(batch.input_ids, batch.positions, batch))


def at_the_addresses_of(first: ForwardBatch, now: ForwardBatch) -> ForwardBatch:
    """``now``, its tensors copied over those of ``first``: what two steps of one bucket are."""
    return replace(
        now,
        input_ids=first.input_ids.copy_(now.input_ids),
        positions=first.positions.copy_(now.positions),
        slot_mapping=first.slot_mapping.copy_(now.slot_mapping),
        cu_seqlens_q=first.cu_seqlens_q.copy_(now.cu_seqlens_q),
        seq_lens=first.seq_lens.copy_(now.seq_lens),
        block_table=first.block_table.copy_(now.block_table),
    )
