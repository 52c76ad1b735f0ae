"""Results side by side: a table with ratios, and bars."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.workloads import WORKLOADS

Result = dict[str, Any]

_PANELS_A_LINE = 4


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row a workload and thread count: ours, the best peer, their ratio, and whether the target is met."""
    groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        groups[result["workload"], result["threads"]].append(result)
    table = []
    for (name, threads), group in groups.items():
        ours = next((r for r in group if r["engine"].startswith("mini-infer")), None)
        peers = [r for r in group if r is not ours]
        peer = max(peers, key=lambda r: r["best"], default=None)
        ratio = ours["best"] / peer["best"] if ours and peer else None
        table.append(
            {
                "workload": name,
                "threads": threads,
                "ours": ours and ours["best"],
                "ours_median": ours and median(ours["tokens_per_second"]),
                "peer": peer and peer["best"],
                "peer_name": peer and peer["engine"],
                "ratio": ratio,
                "target": WORKLOADS[name].target,
                "met": ratio is not None and ratio >= WORKLOADS[name].target,
            }
        )
    return table


def print_table(results: Sequence[Result]) -> None:
    """Write the table as Markdown, best of all repeats on each side, tokens a second."""
    print("| workload | threads | ours | median | best peer | ratio | target | met |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows(results):
        ours, middle, peer, ratio = (row[key] for key in ("ours", "ours_median", "peer", "ratio"))
        cells = [
            row["workload"],
            row["threads"],
            f"{ours:.1f}" if ours else "–",
            f"{middle:.1f}" if middle else "–",
            f"{peer:.1f} ({row['peer_name']})" if peer else "–",
            f"{ratio:.2f}" if ratio else "–",
            row["target"],
            "yes" if row["met"] else "no",
        ]
        print("| " + " | ".join(map(str, cells)) + " |")
    for result in results[:1]:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        hardware = ", ".join(f"{key} {value}" for key, value in result["hardware"].items())
        print(f"\ncommit {result['commit']}; Python {result['python']}; {versions}; {hardware}")


def save_plot(results: Sequence[Result], png: Path) -> None:
    """Draw each workload's engines as bars of tokens a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[f"{result['workload']}, {result['threads']} threads"].append(result)
    lines = -(-len(groups) // _PANELS_A_LINE)
    figure, panels = pyplot.subplots(lines, _PANELS_A_LINE, figsize=(3 * _PANELS_A_LINE, 3 * lines), squeeze=False)
    for panel in panels.flat[len(groups) :]:
        panel.set_axis_off()
    for panel, (title, group) in zip(panels.flat, groups.items(), strict=False):
        panel.bar([r["engine"] for r in group], [r["best"] for r in group])
        panel.set_title(title, fontsize=8)
        panel.tick_params(axis="x", labelrotation=30, labelsize=7)
        panel.set_ylabel("tokens/s")
    figure.tight_layout()
    figure.savefig(png, dpi=120)
