"""How torch's CPU threads wait for each other.

An OpenMP thread that waits spins for a long while by default. On cores that others use too (containers with a quota,
laptops) every spin takes the core from a thread that has work: two threads then decode ten times slower than one.
"""

from collections.abc import MutableMapping

SPINS = "1000"
"""Some microseconds: longer than the gaps between two operators, far shorter than a time slice."""


def wait_briefly(environ: MutableMapping[str, str]) -> None:
    """Make waiting threads sleep soon; whoever has set how they wait is obeyed. Works before torch is imported only."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = SPINS
