"""Waiting threads sleep soon, unless somebody has said how they wait."""

from mini_infer.openmp import SPINS, wait_briefly


def test_waiting_threads_sleep_soon_unless_told_otherwise() -> None:
    environ: dict[str, str] = {}
    wait_briefly(environ)
    assert environ == {"GOMP_SPINCOUNT": SPINS}
    for given in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        environ = dict(given)
        wait_briefly(environ)
        assert environ == given
