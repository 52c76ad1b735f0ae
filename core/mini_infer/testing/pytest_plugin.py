"""The pytest plugin ``mini_infer``, on wherever Mini-Infer is installed: fixtures for tests of plugins.

Contract: loading it imports neither torch nor anything of the engine; a fixture imports what it needs when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mini_infer.llm import LLM


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """``mini_infer.testing.engines.make_llm``; what it makes is closed after the test."""
    from mini_infer.testing import engines

    made: list[LLM] = []

    def make(*args: Any, **kwargs: Any) -> LLM:
        made.append(engines.make_llm(*args, **kwargs))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def tiny_model() -> Callable[..., Path]:
    """``mini_infer.testing.engines.tiny_model``: a family's name to the folder of a tiny random model."""
    from mini_infer.testing import engines

    return engines.tiny_model
