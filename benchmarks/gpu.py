"""``python -m benchmarks gpu``: the rows of one GPU, where a step's time goes, attention and drawing alone.

python -m benchmarks gpu rows qwen2.5-7b --engine mini-infer --json ours.json
python -m benchmarks gpu rows qwen2.5-7b --engine vllm --json vllm.json
python -m benchmarks gpu compare ours.json vllm.json
python -m benchmarks gpu arrivals qwen2.5-7b --json arrivals.json
python -m benchmarks gpu breakdown qwen2.5-7b --batch 1 --batch 64 --json breakdown.json
python -m benchmarks gpu attention --json attention.json
python -m benchmarks gpu sampler --json sampler.json
"""

import json
import random
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_models import SHAPES
from benchmarks.gpu_rows import ROWS
from benchmarks.record import provenance

MODEL = click.argument("model", type=click.Choice(list(SHAPES)))
JSON = click.option("--json", "target", type=click.Path(path_type=Path), required=True)


@click.group(help=__doc__)
def gpu() -> None:
    """See the module."""


def _write(target: Path, what: str, model: str | None, figures: dict[str, Any], **more: Any) -> None:
    record = {"what": what, "model": model, **more, "figures": figures, **provenance()}
    target.write_text(json.dumps(record, indent=1) + "\n")


@gpu.command("rows")
@MODEL
@click.option("--engine", required=True, help="mini-infer or vllm")
@click.option("--row", "names", multiple=True, type=click.Choice(list(ROWS)), help="all if none is named")
@click.option("--repeats", default=3, show_default=True)
@JSON
def rows(model: str, engine: str, names: tuple[str, ...], repeats: int, target: Path) -> None:
    """Measure the rows on one engine; each figure is written as soon as it is known."""
    from benchmarks.engines.gpu_offline import find

    seconds = find(engine, model)
    seconds([128] * 4, [16] * 4)
    figures: dict[str, float] = {}
    for name in names or ROWS:
        figures[name] = round(ROWS[name].measure(seconds, repeats), 1)
        click.echo(f"{model} {engine} {name}: {figures[name]} {ROWS[name].unit}")
        _write(target, "rows", model, figures, engine=engine, repeats=repeats)


@gpu.command("compare")
@click.argument("ours", type=click.Path(path_type=Path))
@click.argument("peer", type=click.Path(path_type=Path))
def compare(ours: Path, peer: Path) -> None:
    """The table of two results of one model, with ratios (above 1, ours is better) and what was to be reached."""
    for path in (ours, peer):
        if not path.is_file():
            raise click.ClickException(f"there is no {path}: make it with `python -m benchmarks gpu rows`")
    mine, theirs = (json.loads(path.read_text()) for path in (ours, peer))
    click.echo(
        f"| {mine['model']} | {mine['engine']} | {theirs['engine']} | ratio | target | met |\n|---|---|---|---|---|---|"
    )
    for name, figure in mine["figures"].items():
        row, other = ROWS[name], theirs["figures"].get(name)
        least, floor = row.targets[mine["model"]]
        ratio = None if other is None else row.ratio(figure, other)
        enough = floor is None or (figure >= floor if row.unit == "tok/s" else figure <= floor)
        met = enough and (ratio is None or ratio >= least)
        wanted = f"{least} x" if floor is None else f"{floor} {row.unit}"
        cells = (
            f"{name}, {row.unit}",
            figure,
            other,
            "" if ratio is None else f"{ratio:.2f}",
            wanted,
            "yes" if met else "no",
        )
        click.echo("| " + " | ".join(map(str, cells)) + " |")
    click.echo(f"\n{mine['hardware'].get('gpu')}; ours at {mine['commit']}; {mine['versions']}; {theirs['versions']}")


@gpu.command("arrivals")
@MODEL
@click.option("--cap", default=512, show_default=True, help="chunked-prefill's max_tokens_beside_decodes")
@JSON
def arrivals(model: str, cap: int, target: Path) -> None:
    """A long prompt among seven decoders, and clients that send their next request when the last is answered."""
    from benchmarks.gpu_arrivals import clients, long_prompt, start

    engine = start(model, cap)
    rng = random.Random(0)
    figures: dict[str, float] = {}
    for length in (1024, 8192):
        best = min(long_prompt(engine, model, length, rng) for _ in range(4))
        figures[f"longest gap, prompt of {length}, ms"], figures[f"its first token, {length}, ms"] = best
    for count in (1, 8, 64, 256):
        figures[f"{count} clients, tok/s"] = clients(engine, model, count, rng)
    for name, figure in figures.items():
        click.echo(f"{model} {name}: {figure:.1f}")
    _write(target, "arrivals", model, figures, cap=cap)


@gpu.command("breakdown")
@MODEL
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 64, 256), show_default=True)
@JSON
def breakdown(model: str, batches: tuple[int, ...], target: Path) -> None:
    """Where a decode step's microseconds go: the host's parts, the device's kernels, the gaps between them."""
    from benchmarks.gpu_breakdown import measure

    figures = measure(model, batches)
    for batch, parts in figures.items():
        click.echo(f"{model}, batch {batch}: " + ", ".join(f"{k} {v:.0f}" for k, v in parts.items() if k != "kernels"))
        for name, (microseconds, count) in list(parts["kernels"].items())[:12]:
            click.echo(f"    {microseconds:8.1f} us x{count:<5.1f} {name[:90]}")
    _write(target, "breakdown", model, figures)


@gpu.command("attention")
@click.option("--prefill/--no-prefill", default=True, show_default=True)
@JSON
def attention(prefill: bool, target: Path) -> None:
    """Our attention beside FlashAttention-3 where a build of it is installed: Qwen2.5-7B's heads, blocks of 16."""
    from benchmarks.gpu_attention import decode_cells, prefill_cells

    figures = decode_cells() | (prefill_cells() if prefill else {})
    for name, cell in figures.items():
        click.echo(f"{name:16} " + "  ".join(f"{engine} {value:.1f}" for engine, value in cell.items()))
    _write(target, "attention", None, figures)


@gpu.command("sampler")
@JSON
def sampler(target: Path) -> None:
    """Drawing tokens of 152,064 by device-sampler, by the reference's operators, and a sort of the logits."""
    from benchmarks.gpu_sampler import cells

    figures = cells()
    for name, cell in figures.items():
        click.echo(f"{name:26} " + "  ".join(f"{way} {value:.1f}" for way, value in cell.items()))
    _write(target, "sampler", None, figures)
