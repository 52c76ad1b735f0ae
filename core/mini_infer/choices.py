"""What the engine chose for each "auto", and why: the log at start and ``config explain`` print these.

Contract: a choice names every alternative that was considered, so that nothing is chosen silently.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision that the engine took by itself.

    Attributes:
        name: the setting decided, as a user would set it, such as ``engine.attention``.
        chosen: the value taken, as a user would write it.
        reason: why, in a few words.
        rejected: each alternative with the reason why it lost, best first.
    """

    name: str
    chosen: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        losers = "".join(f"; not {name}: {why}" for name, why in self.rejected)
        return f"{self.name} = {self.chosen} ({self.reason}{losers})"
