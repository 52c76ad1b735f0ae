"""``python -m benchmarks gpu``: what is measured on one GPU, each command a JSON file with where it came from.

python -m benchmarks gpu rows qwen2.5-7b --engine mini-infer --json ours.json
python -m benchmarks gpu rows qwen2.5-7b --engine vllm --json vllm.json
python -m benchmarks gpu arrivals qwen2.5-7b --engine mini-infer --json arrivals.json
python -m benchmarks gpu breakdown qwen2.5-7b --json breakdown.json
python -m benchmarks gpu attention --json attention.json
python -m benchmarks gpu tilings --json tilings.json
python -m benchmarks gpu quality --json quality.json
python -m benchmarks gpu sampler --json sampler.json
python -m benchmarks gpu compare ours.json vllm.json arrivals.json breakdown.json attention.json quality.json
python -m benchmarks gpu plot ours.json vllm.json --png gpu.png

Every command but attention, tilings and sampler can be tried on a CPU: ``--device cpu``, and ``tiny`` for the model.
"""

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_models import SHAPES
from benchmarks.gpu_rows import ROWS
from benchmarks.record import provenance

MODEL = click.argument("model", type=click.Choice(list(SHAPES)))
ENGINE = click.option("--engine", required=True, help="mini-infer, mini-infer:ATTENTION or vllm")
REPEATS = click.option("--repeats", default=3, show_default=True, help="the best is reported")
DEVICE = click.option("--device", default="cuda", show_default=True, help="cpu: to try the command out")
JSON = click.option("--json", "target", type=click.Path(path_type=Path), required=True)
FILES = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.group(help=__doc__)
def gpu() -> None:
    """See the module."""


def _read(files: tuple[Path, ...]) -> list[dict[str, Any]]:
    for path in files:
        if not path.is_file():
            raise click.ClickException(f"there is no {path}: the other commands make such files")
    return [json.loads(path.read_text()) for path in files]


def _write(target: Path, what: str, model: str | None, figures: dict[str, Any], **more: Any) -> None:
    record = {"what": what, "model": model, **more, "figures": figures, **provenance()}
    target.write_text(json.dumps(record, indent=1) + "\n")


@gpu.command("rows")
@MODEL
@ENGINE
@click.option("--row", "names", multiple=True, type=click.Choice(list(ROWS)), help="all if none is named")
@REPEATS
@DEVICE
@JSON
def rows(model: str, engine: str, names: tuple[str, ...], repeats: int, device: str, target: Path) -> None:
    """Measure the rows on one engine; each figure is written as soon as it is known."""
    from benchmarks.engines.gpu_offline import find

    seconds = find(engine, model, device)
    seconds([128] * 4, [16] * 4)
    figures: dict[str, float] = {}
    units: dict[str, str] = {}
    for name in names or ROWS:
        figures[name], units[name] = ROWS[name].measure(seconds, repeats), ROWS[name].unit
        click.echo(f"{model} {engine} {name}: {figures[name]:.1f} {units[name]}")
        _write(target, "rows", model, figures, units=units, engine=engine, repeats=repeats)


@gpu.command("arrivals")
@MODEL
@ENGINE
@click.option(
    "--budget",
    type=int,
    help="tokens of a step: ours while requests decode (max_tokens_beside_decodes; 512), vLLM's always (8192)",
)
@REPEATS
@DEVICE
@click.option("--scale", default=1, show_default=True, help="divide prompts and clients by it, to try the command out")
@JSON
def arrivals(model: str, engine: str, budget: int | None, repeats: int, device: str, scale: int, target: Path) -> None:
    """A long prompt among seven decoders, and clients that send their next request when the last is answered."""
    from benchmarks.engines.gpu_offline import find_stepped
    from benchmarks.gpu_arrivals import measure

    budget = budget or (8192 if engine == "vllm" else 512)
    stepped = find_stepped(engine, model, budget=budget, device=device)
    figures: dict[str, float] = {}
    units: dict[str, str] = {}
    for name, unit, figure in measure(stepped, model, repeats, scale=scale):
        figures[name], units[name] = figure, unit
        click.echo(f"{model} {engine} {name}: {figure:.1f} {unit}")
        _write(target, "arrivals", model, figures, units=units, engine=engine, repeats=repeats, budget=budget)


@gpu.command("breakdown")
@MODEL
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 64, 256), show_default=True)
@DEVICE
@JSON
def breakdown(model: str, batches: tuple[int, ...], device: str, target: Path) -> None:
    """Where a decode step's microseconds go.

    The host's parts are schedule, prepare (the batch), launch (the model), sample, wait (for the last step's tokens)
    and update. The device's are kernels, and gaps between steps, in a step outside its graph, and inside the graph.
    """
    from benchmarks.gpu_breakdown import measure

    figures: dict[str, Any] = {}
    for batch, parts in measure(model, batches, device):
        for side in ("host", "device"):
            if side in parts:
                click.echo(
                    f"{model}, batch {batch}, {side}: " + ", ".join(f"{k} {v:.1f}" for k, v in parts[side].items())
                )
        for name, (microseconds, count) in list(parts.get("kernels", {}).items())[:12]:
            click.echo(f"    {microseconds:8.1f} us x{count:<5.1f} {name[:90]}")
        figures[str(batch)] = parts
        _write(target, "breakdown", model, figures)


@gpu.command("attention")
@click.option("--prefill/--no-prefill", default=True, show_default=True)
@JSON
def attention(prefill: bool, target: Path) -> None:
    """Our attention beside FlashAttention-3 where a build of it is installed: Qwen2.5-7B's heads, blocks of 16."""
    from benchmarks.gpu_attention import cells

    figures: dict[str, dict[str, float]] = {}
    for name, cell in cells(prefill=prefill):
        figures[name] = cell
        click.echo(f"{name:16} " + "  ".join(f"{engine} {value:.1f}" for engine, value in cell.items()))
        _write(target, "attention", "qwen2.5-7b", figures)


@gpu.command("tilings")
@JSON
def tilings(target: Path) -> None:
    """Our decode attention in every tiling, beside the one that is chosen."""
    from benchmarks.gpu_attention import tiling_cells

    figures: dict[str, dict[str, float]] = {}
    for name, cell in tiling_cells():
        figures[name] = cell
        click.echo(f"{name:16} " + "  ".join(f"{tiling} {value:.1f}" for tiling, value in cell.items()))
        _write(target, "tilings", "qwen2.5-7b", figures)


@gpu.command("quality")
@click.option("--prompts", default=32, show_default=True, help="at most 32")
@click.option("--tokens", default=64, show_default=True, help="of each text")
@click.option("--dtype", default="bfloat16", show_default=True)
@DEVICE
@JSON
def quality(prompts: int, tokens: int, dtype: str, device: str, target: Path) -> None:
    """How far bfloat16 is from float32: ours beside transformers' own, on the demo model (SmolLM2-135M-Instruct)."""
    from benchmarks.gpu_quality import measure

    figures = measure(prompts, tokens, dtype, device)
    for name, cell in figures.items():
        click.echo(f"{name}: " + ", ".join(f"{key} {value}" for key, value in cell.items()))
    _write(target, "quality", "demo", figures, dtype=dtype, prompts=prompts, tokens=tokens, device=device)


@gpu.command("compare")
@FILES
def compare(files: tuple[Path, ...]) -> None:
    """Tables of any results, in Markdown: ours beside each peer of the same model, with targets and limits."""
    from benchmarks.gpu_report import tables

    for table in tables(_read(files)):
        click.echo(table + "\n")


@gpu.command("plot")
@FILES
@click.option("--png", type=click.Path(path_type=Path), required=True)
def plot(files: tuple[Path, ...], png: Path) -> None:
    """Draw rows and arrivals, ours as multiples of each peer's."""
    from benchmarks.gpu_report import save_plot

    save_plot(_read(files), png)


@gpu.command("sampler")
@JSON
def sampler(target: Path) -> None:
    """Drawing tokens of 152,064 by device-sampler, by the reference's operators, and a sort of the logits."""
    from benchmarks.gpu_sampler import cells

    figures = cells()
    for name, cell in figures.items():
        click.echo(f"{name:26} " + "  ".join(f"{way} {value:.1f}" for way, value in cell.items()))
    _write(target, "sampler", None, figures)
