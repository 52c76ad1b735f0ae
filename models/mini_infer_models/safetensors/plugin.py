"""The plugin ``safetensors``: weights from a Hugging Face folder. Importing it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import WeightLoader

name = "safetensors"
api_version = 0


@hookimpl
def weight_loaders(context: BuildContext) -> list[WeightLoader]:
    from mini_infer_models.safetensors.loader import SafetensorsLoader

    return [SafetensorsLoader()]
