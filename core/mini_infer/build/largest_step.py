"""What the largest step takes beside weights and KV cache: it is run once, on a GPU, before the KV cache is sized.

Contract: the step's rows have no blocks but the null block, so a cache of that block alone serves it, and nothing of it
stays. Where it does not fit, one plain line says which settings to lower.
"""

from typing import TYPE_CHECKING

import torch

from mini_infer.errors import ConfigError
from mini_infer.plan import Grant, LateInputs, NewRow, StepPlan
from mini_infer.sampling_params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from mini_infer.interfaces import BatchLimits, StepWorker

WORST = SamplingParams(top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, logprobs=MAX_LOGPROBS)
"""All that sampling can be asked for at a cost in memory."""


def is_measured(device: str) -> bool:
    """Whether the step is run: a CPU has room for it beside the modest cache that it gets there."""
    return device.startswith("cuda")


def largest_plan(limits: "BatchLimits", max_drafts: int) -> StepPlan:
    """A whole budget of tokens in as many rows as there may be, each of which draws, and verifies drafts if any may.

    Args:
        limits: of rows and tokens of a step, and of a sequence.
        max_drafts: most drafts a row.
    """
    drafts = [0] * min(max_drafts, limits.max_num_tokens - 1)
    longest = limits.max_blocks_per_row * limits.block_size - limits.block_size + 1  # that any ``max_model_len`` allows
    num_rows = min(limits.max_num_rows, limits.max_num_tokens // (1 + len(drafts)))
    each, more = divmod(limits.max_num_tokens, num_rows)
    lens = [min(each + (slot < more), max(longest, 1 + len(drafts))) - len(drafts) for slot in range(num_rows)]
    new = [NewRow(slot, [0] * n, n, 0, [], WORST, seed=0, choice=0) for slot, n in enumerate(lens)]
    return StepPlan(0, [Grant(slot, n, True, draft_token_ids=drafts) for slot, n in enumerate(lens)], new)


def run_step(worker: "StepWorker", plan: StepPlan) -> None:
    """Forward, sample, result."""
    worker.forward(plan)
    worker.sample(LateInputs()).result()


def peak_bytes(run: "Callable[[], None]", device: str) -> int:
    """Bytes that ``run`` took from the GPU at its peak, and gave back.

    Raises:
        ConfigError: there were not as many.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    try:
        run()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the largest step does not fit beside the weights on {device}: lower engine.max_num_batched_tokens or "
            "engine.max_num_seqs, or free memory"
        ) from error
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return max(0, peak - before)
