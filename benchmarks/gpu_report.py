"""Tables and bars out of the records that ``python -m benchmarks gpu`` writes; nothing is measured here."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_targets import ATTENTION_RATIO, MOST_GAP, target_of, times_better

Record = dict[str, Any]


def tables(records: Sequence[Record]) -> Iterator[str]:
    """Markdown, one table a measurement; ours beside each peer that was measured."""
    for kind in ("rows", "arrivals"):
        for ours in records:
            if ours["what"] == kind and is_ours(ours):
                beside: list[Record | None] = [*peers_of(ours, records)]
                yield from (comparison(ours, peer) for peer in beside or [None])
    for record in records:
        if record["what"] == "breakdown":
            yield breakdown(record)
        elif record["what"] == "attention":
            yield attention(record)
        elif record["what"] == "quality":
            yield quality(record)
        elif record["what"] not in ("rows", "arrivals"):
            yield cells(record)


def peers_of(ours: Record, records: Sequence[Record]) -> list[Record]:
    """The same measurement of the same model on engines that are not ours."""
    return [r for r in records if all(r[k] == ours[k] for k in ("what", "model")) and not is_ours(r)]


def is_ours(record: Record) -> bool:
    """``mini-infer``, or ``mini-infer:ATTENTION``."""
    return str(record["engine"]).partition(":")[0] == "mini-infer"


def comparison(ours: Record, peer: Record | None) -> str:
    """Ratios above 1: ours is better. The share is of what the card allows."""
    rows = []
    for name, figure in ours["figures"].items():
        unit, target = ours["units"][name], target_of(ours, name)
        other = None if peer is None else peer["figures"].get(name)
        ratio = None if other is None else times_better(unit, figure, other)
        share = None if target.limit is None else times_better(unit, figure, target.limit)
        met = target.met(unit, figure, other)
        rows.append(
            (
                f"{name}, {unit}",
                f"{figure:.1f}",
                "–" if other is None else f"{other:.1f}",
                "–" if ratio is None else f"{ratio:.2f}",
                str(target) or "–",
                "–" if share is None else f"{share:.0%}",
                {True: "yes", False: "no", None: "–"}[met],
            )
        )
    head = (ours["model"], _engine(ours), "no peer" if peer is None else _engine(peer), "ratio", "target", "of limit")
    return _table((*head, "met"), rows) + "\n\n" + "\n".join(_origin(r) for r in (ours, peer) if r is not None)


def breakdown(record: Record) -> str:
    """Microseconds a step."""
    columns = list(record["figures"].values())
    rows = [(name, *(f"{c['host'][name]:.0f}" for c in columns)) for name in columns[0]["host"]]
    devices = [c["device"] for c in columns if "device" in c]
    if devices:
        rows += [(f"device: {name}", *(f"{d[name]:.1f}" for d in devices)) for name in devices[0]]
        rows.append((f"gap, at most {MOST_GAP:.0%}", *(f"{d['between steps'] / d['step']:.2%}" for d in devices)))
    head = (f"{record['model']}, us a decode step", *(f"batch {batch}" for batch in record["figures"]))
    return _table(head, rows) + "\n\n" + _origin(record)


def attention(record: Record) -> str:
    """Microseconds, and ours against FlashAttention-3."""
    rows = []
    for name, cell in record["figures"].items():
        flash = cell.get("flash-attention-3")
        least = ATTENTION_RATIO["prefill" if name.startswith("prompt") else "decode"]
        ratio = None if flash is None else flash / cell["ours"]
        rows.append(
            (
                name,
                f"{cell['ours']:.1f}",
                "–" if flash is None else f"{flash:.1f}",
                "–" if ratio is None else f"{ratio:.2f}",
                f"{least}",
                "–" if "limit" not in cell else f"{cell['limit'] / cell['ours']:.0%}",
                "–" if ratio is None else ("yes" if ratio >= least else "no"),
            )
        )
    head = ("attention, us", "ours", "FlashAttention-3", "ratio", "target", "of limit", "met")
    return _table(head, rows) + "\n\n" + _origin(record)


def quality(record: Record) -> str:
    """Distance from float32, ours beside transformers' in the same dtype."""
    rows = [
        (
            name,
            f"{c['ours']:.4f}",
            f"{c['transformers']:.4f}",
            f"{c['difference']:+.4f} ± {c['interval']:.4f}",
            c["met"],
        )
        for name, c in record["figures"].items()
    ]
    head = (f"{record['model']}, {record['dtype']}", "ours", "transformers", "ours - transformers, 95%", "no worse")
    return _table(head, rows) + "\n\n" + _origin(record)


def cells(record: Record) -> str:
    """Microseconds of any other measurement, a column for each way of doing it."""
    ways = list(dict.fromkeys(way for cell in record["figures"].values() for way in cell))
    rows = [
        (name, *(f"{cell[way]:.1f}" if way in cell else "–" for way in ways))
        for name, cell in record["figures"].items()
    ]
    return _table((f"{record['what']}, us", *ways), rows) + "\n\n" + _origin(record)


def save_plot(records: Sequence[Record], png: Path) -> None:
    """Bars: every figure of ours as a multiple of the peer's, target and limit as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = [
        (ours, peer)
        for ours in records
        if ours["what"] in ("rows", "arrivals") and is_ours(ours)
        for peer in peers_of(ours, records)
    ]
    figure, panels = pyplot.subplots(max(1, len(pairs)), 1, figsize=(10, 3.4 * max(1, len(pairs))), squeeze=False)
    for panel, (ours, peer) in zip(panels.flat, pairs, strict=False):
        names = [name for name in ours["figures"] if name in peer["figures"]]
        units = [ours["units"][name] for name in names]
        other = [peer["figures"][name] for name in names]
        ratios = [times_better(u, ours["figures"][n], o) for n, u, o in zip(names, units, other, strict=True)]
        panel.bar(names, ratios, color="#4472c4")
        panel.axhline(1.0, color="grey", linewidth=1)
        for at, (name, unit, figure_of_peer) in enumerate(zip(names, units, other, strict=True)):
            target = target_of(ours, name)
            for value, colour in ((target.reach, "orange"), (target.limit, "red")):
                if value is not None:
                    panel.hlines(times_better(unit, value, figure_of_peer), at - 0.4, at + 0.4, color=colour)
            if target.ratio is not None:
                panel.hlines(target.ratio, at - 0.4, at + 0.4, color="orange")
            panel.annotate(f"{ratios[at]:.2f}", (at, ratios[at]), ha="center", va="bottom", fontsize=7)
        panel.set_title(f"{ours['model']}: times {_engine(peer)} (orange: target, red: limit)", fontsize=9)
        panel.tick_params(axis="x", labelrotation=30, labelsize=7)
    figure.tight_layout()
    figure.savefig(png, dpi=120)


def _engine(record: Record) -> str:
    version = record["versions"].get(record["engine"], "")
    budget = f", budget {record['budget']}" if record.get("budget") else ""
    return f"{record['engine']} {version}".strip() + budget


def _origin(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    hardware = record["hardware"].get("gpu") or record["hardware"].get("cpu")
    return f"{record.get('engine', 'mini-infer')}: commit {record['commit']}; {hardware}; {versions}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)
