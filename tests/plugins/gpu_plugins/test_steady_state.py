"""A decode step waits for the device at one place only, and 10,000 steps take no more memory than the first thousand.

On a GPU a profiler's trace shows every call that blocks the host. On a CPU the same traffic runs, so the counting of
waits and of Python's own memory is shown to work.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugins.gpu_plugins.test_random_traffic import CHUNKS, DRAWS, FUSED, GRAPHS, TRITON, cases

from mini_infer.build import build_engine
from mini_infer.engine import Engine
from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.settings import load_settings
from mini_infer.testing import tiny_model
from mini_infer.worker.host_copy import HostCopy

FULL = os.environ.get("MINI_INFER_TEST_FULL") == "1"
DEFAULT = (TRITON, FUSED, DRAWS, GRAPHS, CHUNKS)
STEPS = 20
NUM_STEPS = {"cpu": 10_000 if FULL else 450, "cuda": 10_000}
MOST_BLOCKS_OF_PYTHON = 400
"""Allocations that may be left over: caches of Python's own, not something for every step."""
LAST_STEP = 16 * 2**10
"""Bytes on the device by which two last steps may differ, having other rows."""
SEGMENT = 2 * 2**20
"""The allocator's smallest: a step larger than all before may take one, ten thousand steps must not take more."""

GREEDY: dict[str, Any] = {"temperature": 0.0}
OF_ALL_KINDS: list[dict[str, Any]] = [
    GREEDY,
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"temperature": 1.0, "top_p": 0.8, "logit_bias": {5: 2.0, 9: -100.0}, "logprobs": 2},
]


def make(device: str, plugins: Sequence[str]) -> Engine:
    """As a user would start it: nothing of the testing kit around it."""
    engine = {
        "device": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "num_kv_blocks": 8 * 32,
        "overlap": True,
    }
    arguments = {"model": str(tiny_model("qwen2")), "plugins": list(plugins), "engine": engine}
    return build_engine(load_settings(arguments=arguments, environ={})).engine


def request(number: int, max_tokens: int, params: dict[str, Any]) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=[(number * 7 + i) % 300 for i in range(1 + number * 13 % 40)],
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
        seed=number,
    )


def settle(engine: Engine, params: Sequence[dict[str, Any]]) -> None:
    """Requests that decode for long, and the first of their steps."""
    for number, each in enumerate(params):
        engine.add_request(request(number, 400, each))
    for _ in range(30):
        engine.step()


# -- waiting -----------------------------------------------------------------------------------------------------------

BLOCKING = ("Synchronize", "cudaFree", "cuMemFree")
"""In names of CUDA's calls that wait for the device. ``cudaMemcpy`` does too; ``...Async`` does not."""
WINDOW, WAIT = "steady steps", "wait for tokens"
CLOCKS = 5.0
"""Microseconds by which the two sources of a trace may differ."""


def blocking_calls(trace: dict[str, Any]) -> list[tuple[str, bool]]:
    """Calls that block the host within ``WINDOW``, and whether each is within a ``WAIT``."""
    spans: dict[str, list[tuple[float, float]]] = {WINDOW: [], WAIT: []}
    calls: list[tuple[float, str]] = []
    for event in trace["traceEvents"]:
        name = event.get("name")
        if event.get("ph") != "X":
            continue
        if name in spans and event.get("cat") == "user_annotation":
            spans[name].append((event["ts"], event["ts"] + event["dur"]))
        elif event.get("cat") in ("cuda_runtime", "cuda_driver") and _blocks(name):
            calls.append((event["ts"], name))

    def inside(at: float, span: str, slack: float = 0.0) -> bool:
        return any(start - slack <= at <= end + slack for start, end in spans[span])

    assert len(spans[WINDOW]) == 1, f"the trace has {len(spans[WINDOW])} windows"
    return [(name, inside(at, WAIT, CLOCKS)) for at, name in sorted(calls) if inside(at, WINDOW)]


def _blocks(name: str) -> bool:
    copies = ("Memcpy" in name or "Memset" in name) and "Async" not in name
    return copies or any(part in name for part in BLOCKING)


def test_which_calls_block() -> None:
    def event(cat: str, name: str, ts: float, dur: float = 1.0) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    calls = ["cudaEventSynchronize", "cudaMemcpyAsync", "cudaMemcpy", "cudaGraphLaunch", "cuLaunchKernelEx"]
    calls += ["cudaStreamWaitEvent", "cudaEventQuery", "cudaFree", "cudaStreamIsCapturing", "cuMemcpyDtoH_v2"]
    trace = [event("cuda_runtime", name, 10.0 * index) for index, name in enumerate(calls)]
    trace += [event("user_annotation", WINDOW, 0, 95), event("user_annotation", WAIT, 0, 5)]
    trace += [event("cuda_runtime", "cudaDeviceSynchronize", 99), {"ph": "M", "name": "process_name"}]
    expected = [("cudaEventSynchronize", True), ("cudaMemcpy", False), ("cudaFree", False), ("cuMemcpyDtoH_v2", False)]
    assert blocking_calls({"traceEvents": trace}) == expected


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostCopy]]:
    """Each wait for a step's tokens, marked in traces."""
    waited: list[HostCopy] = []
    wait = HostCopy.wait

    def marked(copy: HostCopy) -> list[torch.Tensor]:
        waited.append(copy)
        with torch.profiler.record_function(WAIT):
            return wait(copy)

    monkeypatch.setattr(HostCopy, "wait", marked)
    return iter([waited])


@pytest.mark.parametrize("params", [[GREEDY] * 4, OF_ALL_KINDS], ids=["greedy", "of all kinds"])
@cases([(), (GRAPHS,), DEFAULT], [()])
def test_a_decode_step_waits_for_its_tokens_alone(
    device: str, plugins: tuple[str, ...], params: list[dict[str, Any]], waits: Iterator[list[HostCopy]], tmp_path: Path
) -> None:
    engine, waited = make(device, plugins), next(waits)
    settle(engine, params)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    waited.clear()
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function(WINDOW):
            for _ in range(STEPS):
                assert len(engine.step()) == len(params)
        num_waits = len(waited)
        if device == "cuda":
            time.sleep(1e-3)  # what blocks from here on is not ours
            torch.cuda.synchronize()
    assert num_waits == STEPS
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = blocking_calls(json.loads((tmp_path / "trace.json").read_text()))
    expected = [("cudaEventSynchronize", True)] * STEPS if device == "cuda" else []
    assert found == expected, sorted(set(found))


@pytest.mark.gpu
@pytest.mark.parametrize("params", [[GREEDY] * 4, OF_ALL_KINDS], ids=["greedy", "of all kinds"])
@pytest.mark.parametrize("plugins", [(), DEFAULT], ids=["plain", "default"])
def test_torch_sees_no_synchronisation(plugins: tuple[str, ...], params: list[dict[str, Any]]) -> None:
    """While rows decode, and while requests come and go; waiting for an event is not counted.

    Torch raises where the host would wait, and no step may raise here (``conftest.py``).
    """
    if plugins:
        pytest.importorskip("triton")
    engine = make("cuda", plugins)
    settle(engine, params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS):
            engine.step()
        for number, each in enumerate(params, 100):
            engine.add_request(request(number, 5, each))
            engine.step()
        engine.abort("0")
        for _ in range(STEPS):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- memory ------------------------------------------------------------------------------------------------------------


class Traffic:
    """Requests of all kinds that come and go, up to eight at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.numbers, self.kinds = engine, count(), cycle(OF_ALL_KINDS)
        self.num_running = 0

    def run(self, num_steps: int) -> None:
        """So many steps, and until all have ended."""
        for step in range(num_steps):
            if self.num_running < 8 and step % 5 == 0:
                number = next(self.numbers)
                self.engine.add_request(request(number, 20 + number * 31 % 60, next(self.kinds)))
                self.num_running += 1
            self._step()
        while self.engine.has_work():
            self._step()
        assert self.num_running == 0

    def _step(self) -> None:
        for delta in self.engine.step():
            assert delta.error is None
            self.num_running -= delta.finish_reason is not None


def memory(device: str) -> dict[str, int]:
    """What is allocated now."""
    gc.collect()
    found = {"of python": sys.getallocatedblocks(), "resident": resident_bytes()}
    if device == "cuda":
        torch.cuda.synchronize()
        found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return found


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0


@cases([DEFAULT], [("cpu-attention", "cpu-kernels", CHUNKS)])
def test_memory_does_not_grow(device: str, plugins: tuple[str, ...]) -> None:
    engine = make(device, plugins)
    traffic, share = Traffic(engine), NUM_STEPS[device] // 3
    traffic.run(max(share, 150))
    warm = memory(device)
    traffic.run(share)
    middle = memory(device)
    traffic.run(share)
    end = memory(device)
    assert engine.stats().step_id >= 3 * share
    assert end["of python"] - middle["of python"] < MOST_BLOCKS_OF_PYTHON, (warm, middle, end)
    assert end["resident"] - warm["resident"] < 64 * 2**20, (warm, middle, end)
    if device == "cuda":
        assert abs(end["allocated"] - warm["allocated"]) <= LAST_STEP, (warm, middle, end)
        assert end["reserved"] - middle["reserved"] <= SEGMENT, (warm, middle, end)
