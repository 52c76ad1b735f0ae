"""Where the microseconds of a decode step go: the host's parts of it, the device's kernels, the gaps between them.

The host is measured without a profiler, the device under one. A step is what the device does up to the copy of its
tokens to the host::

    device  | small kernels | graph: a kernel, a kernel, ... | draw, copy tokens |      | small kernels | graph ...
                           ^ outside the graph  ^ inside the graph                 ^ between two steps
"""

import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engines.gpu_offline import build, make_request
from benchmarks.gpu_models import random_prompts
from mini_infer.interfaces import Observer, StepEvents, StepRunner
from mini_infer.plugins import hookimpl

CONTEXT, WARM_UP, HOST_STEPS, DEVICE_STEPS = 128, 20, 100, 20
END_OF_STEP = "DtoH"
_FIRST_STEPS = 2  # under the profiler: the loop fills up again
HOST_PARTS = ("schedule", "prepare", "launch", "sample", "wait", "update", "other")


# -- the host ----------------------------------------------------------------------------------------------------------


class HostTimer(Observer):
    """A plugin that adds up a step's parts: those that the engine times, and the runner's share of ``forward``."""

    name = "host-timer"
    api_version = 0

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def step(self, events: StepEvents) -> None:
        for part, seconds in events.seconds.items():
            self.seconds[part] += seconds

    @hookimpl
    def extensions(self, context: object) -> list[Observer]:
        return [self]

    @hookimpl(wrapper=True)
    def step_runner(self, context: object) -> Any:
        return TimedRunner((yield), self)

    def microseconds(self, steps: int, elapsed: float) -> dict[str, float]:
        """A step: its wall time and ``HOST_PARTS``, which add up to it."""
        parts = {name: self.seconds[name] for name in HOST_PARTS}
        parts["prepare"] = self.seconds["forward"] - parts["launch"]
        parts["other"] = elapsed - sum(seconds for name, seconds in parts.items() if name != "other")
        return {name: 1e6 * seconds / steps for name, seconds in {"step": elapsed, **parts}.items()}


class TimedRunner(StepRunner):
    """The step runner in use, its ``run`` timed."""

    def __init__(self, inner: StepRunner, timer: HostTimer) -> None:
        self._timer, self._run = timer, inner.run
        self.bind, self.limits = inner.bind, inner.limits  # type: ignore[method-assign]
        self.rehearsals, self._shape = inner.rehearsals, inner.shape  # type: ignore[method-assign]

    def shape(self, shape: Any) -> Any:
        return self._shape(shape)

    def run(self, forward: Callable[[Any], Any], batch: Any) -> Any:
        started = time.perf_counter()
        out = self._run(forward, batch)
        self._timer.seconds["launch"] += time.perf_counter() - started
        return out


# -- the device --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that the device did.

    Attributes:
        name: of the kernel, copy or fill.
        start, end: microseconds.
        launch: what launched it; the operations of a graph have one in common.
        kernel: no copy and no fill.
    """

    name: str
    start: float
    end: float
    launch: int | None = None
    kernel: bool = True


def operations(trace: dict[str, Any]) -> list[Operation]:
    """What a Chrome trace of ``torch.profiler`` says that the device did, in order."""
    kinds = {"kernel": True, "gpu_memcpy": False, "gpu_memset": False}
    found = [
        Operation(e["name"], e["ts"], e["ts"] + e["dur"], e.get("args", {}).get("correlation"), kinds[e["cat"]])
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in kinds
    ]
    return sorted(found, key=lambda operation: operation.start)


def split_steps(found: Iterable[Operation]) -> list[list[Operation]]:
    """One list a step, each ending with the copy of its tokens; what follows the last copy is left out."""
    steps: list[list[Operation]] = []
    step: list[Operation] = []
    for operation in found:
        step.append(operation)
        if END_OF_STEP in operation.name:
            steps.append(step)
            step = []
    return steps


def device_parts(steps: Sequence[Sequence[Operation]]) -> dict[str, float]:
    """Microseconds a step, the steps having followed each other.

    ``step`` runs from its first operation to the next step's; it is ``kernels`` (somebody computes), ``between steps``
    (from the last kernel's end to the next step's first kernel, the copy of the tokens among it), ``outside the graph``
    and ``inside the graph``, where nothing ran although the step was under way.

    Args:
        steps: at least two; the last only ends the one before it.
    """
    sums: dict[str, float] = defaultdict(float)
    kernels = [[operation for operation in step if operation.kernel] for step in steps]
    for here, following in pairwise(kernels):
        in_graph = _shared_launches(here)
        reached, before = here[0].start, here[0]
        for kernel in here:
            gap = max(0.0, kernel.start - reached)
            inside = kernel.launch == before.launch and kernel.launch in in_graph
            sums["inside the graph" if inside else "outside the graph"] += gap
            sums["kernels"] += max(0.0, kernel.end - max(reached, kernel.start))
            reached, before = max(reached, kernel.end), kernel
        sums["between steps"] += max(0.0, following[0].start - reached)
        sums["step"] += following[0].start - here[0].start
    order = ("step", "kernels", "between steps", "outside the graph", "inside the graph")
    return {name: sums[name] / (len(steps) - 1) for name in order}


def _shared_launches(found: Sequence[Operation]) -> set[int]:
    """Launches of more than one operation: graphs."""
    counts: dict[int, int] = defaultdict(int)
    for operation in found:
        if operation.launch is not None:
            counts[operation.launch] += 1
    return {launch for launch, count in counts.items() if count > 1}


def by_name(steps: Sequence[Sequence[Operation]]) -> dict[str, list[float]]:
    """Microseconds and number a step of each operation, the longest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for operation in (operation for step in steps for operation in step):
        sums[operation.name][0] += operation.end - operation.start
        sums[operation.name][1] += 1
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return {name: [value / len(steps) for value in values] for name, values in ordered}


# -- both --------------------------------------------------------------------------------------------------------------


def measure(model: str, batches: Sequence[int], device: str = "cuda") -> Iterable[tuple[int, dict[str, Any]]]:
    """Batch size, and microseconds a step: ``host``, ``device`` and ``kernels`` by name (on a GPU)."""
    from mini_infer.garbage import frozen

    timer = HostTimer()
    engine = build(model, device, modules=[timer]).engine
    for batch in batches:
        num_tokens = WARM_UP + HOST_STEPS + DEVICE_STEPS + _FIRST_STEPS + 10
        for index, prompt in enumerate(random_prompts(model, [CONTEXT] * batch, random.Random(batch))):
            engine.add_request(make_request(str(index), prompt, num_tokens))
        with frozen():
            decoding: set[str] = set()
            while len(decoding) < batch:
                decoding |= {delta.request_id for delta in engine.step() if delta.token_ids}
            _steps(engine, WARM_UP)
            timer.seconds.clear()
            elapsed = _steps(engine, HOST_STEPS)
            figures: dict[str, Any] = {"host": timer.microseconds(HOST_STEPS, elapsed)}
            if device != "cpu":
                figures |= _device_figures(engine)
        for index in range(batch):
            engine.abort(str(index))
        while engine.has_work():
            engine.step()
        yield batch, figures


def _steps(engine: Any, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        assert engine.step() is not None
    return time.perf_counter() - started


def _device_figures(engine: Any) -> dict[str, Any]:
    steps = split_steps(operations(_trace(lambda: _steps(engine, DEVICE_STEPS + _FIRST_STEPS))))
    steps = steps[_FIRST_STEPS:]
    assert len(steps) >= DEVICE_STEPS - 1, f"{len(steps)} copies to the host in {DEVICE_STEPS} steps"
    return {"device": device_parts(steps), "kernels": by_name(steps)}


def _trace(work: Callable[[], Any]) -> dict[str, Any]:
    """The Chrome trace of what ``work`` had the device do."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
        return trace
