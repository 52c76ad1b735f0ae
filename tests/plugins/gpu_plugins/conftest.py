"""What holds for all tests of GPU plugins: a step that raises fails the test, although an engine would run it again."""

import pytest

from mini_infer.engine import Engine


@pytest.fixture(autouse=True)
def no_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(engine: Engine, error: Exception) -> None:
        raise AssertionError(f"a step raised {error!r}") from error

    monkeypatch.setattr(Engine, "_isolate", give_up)
