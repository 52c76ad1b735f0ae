"""What ours must reach on one NVIDIA H200 in bfloat16, and what the card allows: the project's table of targets."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """Of one figure of one model.

    Attributes:
        ratio: how many times better than the peer, measured beside it.
        reach: the figure itself, whatever the peer does.
        limit: what the card's bandwidth and arithmetic allow.
    """

    ratio: float | None = None
    reach: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.ratio} x" if self.ratio is not None else "", "" if self.reach is None else f"{self.reach:g}"]
        return ", ".join(filter(None, parts))

    def met(self, unit: str, ours: float, peer: float | None) -> bool | None:
        """Whether ours is good enough; None if that cannot be said: no target, or a ratio and no peer."""
        answers: list[bool | None] = []
        if self.reach is not None:
            answers.append(ours >= self.reach if unit == "tok/s" else ours <= self.reach)
        if self.ratio is not None:
            answers.append(None if peer is None else times_better(unit, ours, peer) >= self.ratio)
        if False in answers:
            return False
        return None if not answers or None in answers else True


def times_better(unit: str, ours: float, peer: float) -> float:
    """``tok/s``: more is better; ``ms`` and ``us``: less is."""
    return ours / peer if unit == "tok/s" else peer / ours


_BATCHES = {f"batch-{n}": Target(1.10) for n in (8, 32, 64, 128, 256)}
_CLIENTS = {f"clients-{n}": Target(1.10) for n in (1, 8, 64, 256)}

TARGETS: dict[str, dict[str, Target]] = {
    "qwen2.5-7b": {
        "decode-1": Target(reach=255, limit=298),
        **_BATCHES,
        "decode-64-at-1k": Target(reach=11_700, limit=14_890),
        "ttft-1k": Target(reach=24, limit=18),
        "ttft-8k": Target(reach=185, limit=159),
        "prefill": Target(reach=48_000, limit=57_900),
        "mixed-256": Target(1.10),
        "gap-at-1k": Target(reach=12),
        "late-ttft-1k": Target(reach=32),
        "gap-at-8k": Target(reach=14),
        "late-ttft-8k": Target(reach=225),
        **_CLIENTS,
    },
    "qwen2.5-1.5b": {
        "decode-1": Target(1.5, reach=714, limit=1366),
        **_BATCHES,
        **{name: Target(1.10) for name in ("decode-64-at-1k", "ttft-1k", "ttft-8k", "prefill", "mixed-256")},
    },
}
ATTENTION_RATIO = {"decode": 0.95, "prefill": 0.85}
"""Least speed against FlashAttention-3."""
MOST_GAP = 0.03
"""Of a decode step, between its last kernel and the next step's first."""


def target_of(record: dict[str, Any], name: str) -> Target:
    """Of a record's figure; an empty one if there is none."""
    return TARGETS.get(record["model"], {}).get(name, Target())
