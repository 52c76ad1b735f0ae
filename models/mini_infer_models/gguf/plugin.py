"""The plugin ``gguf``: models in one file of llama.cpp's format. Importing it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import WeightLoader

name = "gguf"
api_version = 0


class Settings(BaseModel):
    """The table ``[plugin.gguf]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["auto", "llama", "qwen2"] = Field(
        default="auto",
        description="auto: the file's own; qwen2 serves a Llama file as Qwen2 with QKV biases of zero, the same logits",
    )


@hookimpl
def weight_loaders(context: BuildContext) -> list[WeightLoader]:
    from mini_infer_models.gguf.loader import GGUFLoader

    return [GGUFLoader(context.settings_of(name, Settings).family, context.dtype)]


def converted(path: Path, family: str, dtype: str) -> Path:
    """The plain Hugging Face folder made of a GGUF file; ``mini_infer.model.demo`` finds this by the entry point."""
    from mini_infer_models.gguf import loader

    return loader.converted(path, family, dtype)
