"""One server for all tests that leave its engine as they found it."""

from collections.abc import Iterator

import pytest
from tests.server.serving import Served, serving


@pytest.fixture(scope="session")
def shared() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def server(shared: Served) -> Iterator[Served]:
    """The shared server; afterwards it is as healthy and as idle as before."""
    yield shared
    assert shared.http.get("/health").status_code == 200
    canary = shared.complete(script="canary", max_tokens=20).json()
    assert canary["choices"][0]["text"] == "canary"
    assert not shared.engine.has_work() and len(shared.llm._book) == 0
