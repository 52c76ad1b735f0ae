"""Drawing tokens alone: device-sampler, the reference's PyTorch operators, and the sort that neither of ours makes.

The same logits again and again: as in a step, where they were just written, what fits is in the L2. Ours and the sort
run in CUDA graphs; the reference brings host values along, so it is launched operator by operator.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.gpu_attention import event_time, graph_time

ROWS = (1, 64, 256)
VOCAB_SIZE = 152_064
SPREAD = 3.0  # standard deviation of the logits; a model's best token leads by more, random weights' by less

KINDS: dict[str, tuple[dict[str, float], float]] = {
    "greedy": ({"temperature": 0.0}, SPREAD),
    "temperature": ({}, SPREAD),
    "top-k 50": ({"top_k": 50}, SPREAD),
    "top-p 0.9": ({"top_p": 0.9}, SPREAD),
    "top-p 0.9, flat": ({"top_p": 0.9}, 1.0),
    "top-k 50, top-p 0.9": ({"top_k": 50, "top_p": 0.9}, SPREAD),
    "penalties, top-p 0.9": ({"top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2}, SPREAD),
}


def cells() -> dict[str, dict[str, float]]:
    """Microseconds by kind, rows and way; ``limit`` is the time to read the logits once at 4.3 TB/s."""
    import torch

    found = {}
    for rows in ROWS:
        for kind, (params, spread) in KINDS.items():
            torch.manual_seed(0)
            logits = (torch.randn(rows, VOCAB_SIZE, device="cuda") * spread).bfloat16().float()
            ours, reference = _draws(logits, params)
            cell = {"ours": graph_time(ours), "reference": event_time(reference)}
            cell["sort"] = graph_time(lambda x=logits: x.sort(dim=1, descending=True))
            cell["limit"] = rows * VOCAB_SIZE * 4 / 4.3e6
            found[f"{kind}, {rows}"] = cell
    return found


def _draws(logits: Any, params: dict[str, float]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours and the reference's, on states of their own."""
    import torch

    from mini_infer.interfaces import NewRow, SamplingParams, SamplingRows
    from mini_infer.sampling.sampler import ReferenceSampler
    from mini_infer.sampling.state import SamplingState
    from mini_infer_plugins.device_sampler.sampler import DeviceSampler

    rows = len(logits)
    asked = SamplingParams(**params)  # type: ignore[arg-type]
    state = SamplingState(rows, VOCAB_SIZE, "cuda")
    state.add(*(NewRow(slot, list(range(1024)), 512, 0, [], asked, seed=slot, choice=0) for slot in range(rows)))
    where = SamplingRows(
        slots=torch.arange(rows, device="cuda"),
        positions=torch.full((rows,), 1024, device="cuda"),
        drafts_before=None,
        slots_host=list(range(rows)),
        draft_index_host=[0] * rows,
    )

    def of(sampler: DeviceSampler | ReferenceSampler) -> Callable[[], Any]:
        if asked.greedy:
            return lambda: sampler.greedy(logits, None)
        return lambda: sampler.sample(logits, where, state)

    return of(DeviceSampler()), of(ReferenceSampler())
