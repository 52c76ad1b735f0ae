"""The contract of ``AttentionBackend``: any batch, over blocks anywhere, with NaN wherever nobody may look.

Rows live for a few steps, as in an engine: prompts whole or in chunks, then decoding, beside each other in random
blocks. What a step gives is compared with dense attention in float64 over the row's own keys and values. All that the
backend declares is tried: kinds of cache, dtypes, head dims, block sizes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch

from mini_infer.interfaces import KVCacheSpec
from mini_infer.testing.batches import at_the_addresses_of
from mini_infer.testing.contracts.attention_bench import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces import AttentionBackend
    from mini_infer.interfaces.model import KVKind
    from mini_infer.layers import Attention


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
