"""The profile run: what the largest step takes of a GPU beside the weights and the KV cache.

Contract: run once, before the KV cache is sized. Attention is left out, so no cache is needed: its answer is allocated,
nothing is read. Sampling state and layers are afterwards as they were.
"""

from typing import TYPE_CHECKING, ClassVar

import torch

from mini_infer.forward_batch import ForwardBatch, StepShape
from mini_infer.interfaces import AttentionBackend, AttentionCapabilities, SamplingParams, SamplingRows
from mini_infer.plan import NewRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.interfaces import CausalLM, Sampler
    from mini_infer.layers import Attention
    from mini_infer.sampling.state import SamplingState


class _NoAttention(AttentionBackend):
    """Allocates what attention would, and neither writes nor reads."""

    name: ClassVar[str] = "none"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(("cuda",), (), (), fuses_rope=True)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (0,)

    def write_kv(
        self,
        layer: "Attention",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        return query.clone()

    def attend(
        self, layer: "Attention", query: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return query.new_zeros(query.shape[0], layer.num_heads, self.spec.v_head_dim)


@torch.inference_mode()
def measure_step(
    model: "CausalLM",
    layers: "Sequence[Attention]",
    sampler: "Sampler",
    state: "SamplingState",
    *,
    num_tokens: int,
    num_rows: int,
    device: str,
) -> int:
    """Bytes that a step of ``num_tokens`` prompt tokens, or drawing for ``num_rows`` requests, takes at its peak."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for layer in layers:
        layer.backend = _NoAttention(layer.spec, device, 1)
    try:
        batch = _largest(num_tokens, model.leaves_out, device)
        hidden = model.forward(batch.input_ids, batch.positions, batch)
        width, dtype = hidden.shape[1], hidden.dtype
        del hidden, batch
        logits = model.logits(torch.zeros(num_rows, width, dtype=dtype, device=device))
        sampler.greedy(logits, state.invalid_token_ids)
        _draw(logits.float(), sampler, state, device)
        torch.cuda.synchronize(device)
    finally:
        for layer in layers:
            del layer.backend
    taken = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return taken


def _largest(num_tokens: int, last_only: bool, device: str) -> ForwardBatch:
    """One prompt of so many tokens, in the null block."""
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    return ForwardBatch(
        shape=StepShape.of([num_tokens], 0, last_only),
        input_ids=zeros,
        positions=zeros,
        slot_mapping=zeros,
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        query_lens_host=[num_tokens],
        seq_lens_host=[num_tokens],
    )


def _draw(logits: torch.Tensor, sampler: "Sampler", state: "SamplingState", device: str) -> None:
    """Draw as if every request wanted all that narrows a choice; kernels are compiled on the way."""
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)
    slots = list(range(logits.shape[0]))
    state.add(*(NewRow(slot, [0], 1, 0, [], params, seed=slot, choice=0) for slot in slots))
    at = torch.arange(len(slots), device=device)
    sampler.sample(logits, SamplingRows(at, torch.ones_like(at), None, slots, [0] * len(slots)), state)
    state.remove(*slots)
