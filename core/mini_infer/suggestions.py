"""The nearest valid name to a mistyped one.

Contract: pure functions of strings; a suggestion is always one of the names given.
"""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that ``name`` was most likely meant to be, or ``None``."""
    spelled = {candidate.lower().replace("_", "-"): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower().replace("_", "-"), spelled, n=1, cutoff=0.6)
    return spelled[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` to end a message with, or the list of what is known, or nothing if none is."""
    names = sorted(set(known))
    guess = nearest(name, names)
    if guess is not None:
        return f"; did you mean '{guess}'?"
    return f"; known: {', '.join(names)}" if names else ""
