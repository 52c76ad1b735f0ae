"""What changes logits before temperature: penalties over the history, logit bias, ids that no tokenizer knows.

Contract: a row's history is its prompt, its output so far, and the drafts before its position in this step. Repetition
(Keskar et al., "CTRL", arXiv 1909.05858) sees prompt and output, presence and frequency (OpenAI API) the output only,
in that order. Each change is float32, element by element, so a row's result never depends on the batch.
"""

from typing import TYPE_CHECKING

import torch

from mini_infer.sampling.state import to_device

if TYPE_CHECKING:
    from mini_infer.interfaces.sampler import SamplingRows
    from mini_infer.sampling.state import SamplingState


def adjust_logits(logits: torch.Tensor, rows: "SamplingRows", state: "SamplingState") -> torch.Tensor:
    """Penalties, bias and invalid ids for the rows that have any.

    Args:
        logits: [num_rows, vocab_size] float32, overwritten.
        rows: what each row is.
        state: parameters and counts by slot.

    Returns:
        The same tensor.
    """
    for slots, penalise in ((state.repetition_slots, _repetition), (state.output_penalty_slots, _output_penalties)):
        if slots and (mine := [i for i, slot in enumerate(rows.slots_host) if slot in slots]):
            penalise(logits, rows, state, to_device(mine, torch.int64, logits.device))
    if state.bias_slots and (mine := [i for i, slot in enumerate(rows.slots_host) if slot in state.bias_slots]):
        width = max(state.bias_slots[rows.slots_host[i]] for i in mine)
        _bias(logits, rows, state, to_device(mine, torch.int64, logits.device), width)
    if state.invalid_token_ids is not None:
        logits.index_fill_(1, state.invalid_token_ids, float("-inf"))
    return logits


def _repetition(logits: torch.Tensor, rows: "SamplingRows", state: "SamplingState", mine: torch.Tensor) -> None:
    assert state.prompt_mask is not None  # made with the first penalty slot
    slots = rows.slots[mine]
    seen = (_output_counts(rows, state, mine) > 0).logical_or_(state.prompt_mask.index_select(0, slots))
    penalty = state.repetition_penalty[slots, None]
    values = logits.index_select(0, mine)
    # Each term is 0 where the other is not: exact, and quicker than to branch on signs.
    penalised = values.clamp(min=0).div_(penalty).add_(values.clamp(max=0).mul_(penalty))
    logits.index_copy_(0, mine, torch.where(seen, penalised, values))


def _output_penalties(logits: torch.Tensor, rows: "SamplingRows", state: "SamplingState", mine: torch.Tensor) -> None:
    slots = rows.slots[mine]
    counts = _output_counts(rows, state, mine).to(torch.float32)
    values = logits.index_select(0, mine)
    values -= counts * state.frequency_penalty[slots, None]
    values -= counts.clamp_(max=1) * state.presence_penalty[slots, None]
    logits.index_copy_(0, mine, values)


def _output_counts(rows: "SamplingRows", state: "SamplingState", mine: torch.Tensor) -> torch.Tensor:
    """[len(mine), vocab_size] int32, a copy: how often each token is in the output or the drafts before."""
    assert state.output_counts is not None  # made with the first penalty slot
    counts = state.output_counts.index_select(0, rows.slots[mine])
    if rows.drafts_before is not None:
        drafts = rows.drafts_before[mine]
        counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).to(torch.int32))
    return counts


def _bias(logits: torch.Tensor, rows: "SamplingRows", state: "SamplingState", mine: torch.Tensor, width: int) -> None:
    assert state.bias_token_ids is not None and state.bias_values is not None  # made with the first bias slot
    slots = rows.slots[mine]
    values = logits.index_select(0, mine)
    values.scatter_add_(1, state.bias_token_ids[slots, :width], state.bias_values[slots, :width])
    logits.index_copy_(0, mine, values)
