"""The plugin ``llama``. Importing it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import ModelAdapter

name = "llama"
api_version = 0


@hookimpl
def model_adapters(context: BuildContext) -> list[ModelAdapter]:
    from mini_infer_models.llama.model import LlamaAdapter

    return [LlamaAdapter()]
