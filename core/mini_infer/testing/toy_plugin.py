"""The plugin ``toy``: the toy model and a loader for its weights, so that tests of the core need no model family.

Contract: not installed as an entry point; ``make_engine("toy")`` and tests hand the module over. Importing it imports
nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import ModelAdapter, WeightLoader

name = "toy"
api_version = 0


@hookimpl
def model_adapters(context: BuildContext) -> list[ModelAdapter]:
    from mini_infer.testing.toy_model import ToyAdapter

    return [ToyAdapter()]


@hookimpl
def weight_loaders(context: BuildContext) -> list[WeightLoader]:
    from mini_infer.testing.toy_model import ToyLoader

    return [ToyLoader()]
