"""Where the microseconds of a decode step go."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_arrivals import make_request, start

STEPS, CONTEXT = 20, 128
GAP = 5.0  # microseconds between two kernels that count as the device waiting for the host


def measure(model: str, batches: Sequence[int]) -> dict[str, dict[str, Any]]:
    """By batch size, microseconds a step: ``busy``, ``idle`` in gaps over ``GAP``, ``small gaps``, kernels by name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    engine = start(model, 512)
    rng = random.Random(0)
    figures: dict[str, dict[str, Any]] = {}
    for batch in batches:
        for i in range(batch):
            engine.add_request(make_request(str(i), model, CONTEXT, STEPS + 40, rng))
        for _ in range(20):
            engine.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(STEPS):
                engine.step()
            torch.cuda.synchronize()
        while engine.has_work():
            engine.step()
        figures[str(batch)] = _summary(trace)
    return figures


def _summary(trace: Any) -> dict[str, Any]:
    events = sorted(
        (e for e in trace.events() if e.device_type.name == "CUDA"), key=lambda event: float(event.time_range.start)
    )
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    busy = idle = small = 0.0
    reached = events[0].time_range.start
    for event in events:
        start_at, end = event.time_range.start, event.time_range.end
        kernels[event.name][0] += (end - start_at) / STEPS
        kernels[event.name][1] += 1 / STEPS
        gap = start_at - reached
        if gap > GAP:
            idle += gap
        elif gap > 0:
            small += gap
        busy += max(0.0, end - max(reached, start_at))
        reached = max(reached, end)
    ordered = dict(sorted(kernels.items(), key=lambda item: -item[1][0]))
    return {"busy": busy / STEPS, "idle": idle / STEPS, "small gaps": small / STEPS, "kernels": ordered}
