"""``python -m benchmarks``: run workloads on engines, compare their results, draw them.

python -m benchmarks list
python -m benchmarks run cpu-decode-float32 --engine mini-infer --threads 1 --json out.json
python -m benchmarks suite cpu-decode-float32 cpu-mixed-8 --threads 1 --out benchmarks/results
python -m benchmarks compare benchmarks/results/*.json
python -m benchmarks plot benchmarks/results/*.json --png benchmarks/results/cpu.png
python -m benchmarks prefix --json prefix.json
python -m benchmarks gpu --help
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu import gpu
from benchmarks.prefix import prefix
from benchmarks.report import print_table, save_plot
from benchmarks.workloads import WORKLOADS


@click.group(help=__doc__)
def main() -> None:
    """See the module."""


main.add_command(gpu)
main.add_command(prefix)


@main.command("list")
def list_workloads() -> None:
    """Print the workloads."""
    for workload in WORKLOADS.values():
        against = ", ".join(workload.peers)
        click.echo(f"{workload.name:24} {workload.kind:8} {workload.dtype:9} >= {workload.target} x {against}")


@main.command()
@click.argument("name", type=click.Choice(list(WORKLOADS)))
@click.option("--engine", required=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "target", type=click.Path(path_type=Path), required=True)
def run(name: str, engine: str, threads: int, repeats: int, target: Path) -> None:
    """Run one workload on one engine, in this process, and write its JSON."""
    import torch

    from benchmarks import streams
    from benchmarks.engines import find
    from benchmarks.record import provenance

    torch.set_num_threads(threads)
    workload = WORKLOADS[name]
    if engine in streams.SERVERS:
        seconds = streams.run(engine, workload, repeats, threads)
    else:
        seconds = find(engine)(workload, repeats)
    tokens = 1 if workload.kind == "decode" else workload.num_output_tokens
    result = {
        "workload": name,
        "engine": engine,
        "threads": threads,
        "seed": workload.seed,
        "seconds": seconds,
        "tokens_per_second": [tokens / s for s in seconds],
        "best": tokens / min(seconds),
        **provenance(),
    }
    target.write_text(json.dumps(result, indent=1) + "\n")


@main.command()
@click.argument("names", nargs=-1, type=click.Choice(list(WORKLOADS)))
@click.option("--threads", multiple=True, type=int, default=(1,), show_default=True)
@click.option("--rounds", default=3, show_default=True, help="engines take turns, so that drift hits all alike")
@click.option("--out", type=click.Path(path_type=Path), default=Path("benchmarks/results"), show_default=True)
def suite(names: tuple[str, ...], threads: tuple[int, ...], rounds: int, out: Path) -> None:
    """Run workloads on ours and on their peers in turn; write one JSON file each and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in names or list(WORKLOADS):
        for count in threads:
            results += _interleaved(name, count, rounds, out)
    print_table(results)


def _interleaved(name: str, threads: int, rounds: int, out: Path) -> list[dict[str, Any]]:
    workload = WORKLOADS[name]
    ours = "mini-infer-serve" if workload.kind == "streams" else "mini-infer"
    merged: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for engine in (ours, *workload.peers):
            result = _in_a_process(name, engine, threads)
            if engine in merged:
                merged[engine]["tokens_per_second"] += result["tokens_per_second"]
                merged[engine]["seconds"] += result["seconds"]
            else:
                merged[engine] = result
            merged[engine]["best"] = max(merged[engine]["tokens_per_second"])
    for engine, result in merged.items():
        path = out / f"{name}-{engine}-{threads}t.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    return list(merged.values())


def _in_a_process(name: str, engine: str, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks", "run", name, "--engine", engine, "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        subprocess.run([*command, "--repeats", "1", "--json", str(target)], env=environment, check=True)
        loaded: dict[str, Any] = json.loads(target.read_text())
        return loaded


@main.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
def compare(files: tuple[Path, ...]) -> None:
    """Join results into the table of ratios."""
    print_table([json.loads(path.read_text()) for path in files])


@main.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--png", type=click.Path(path_type=Path), required=True)
def plot(files: tuple[Path, ...], png: Path) -> None:
    """Draw results as bars."""
    save_plot([json.loads(path.read_text()) for path in files], png)


if __name__ == "__main__":
    main()
