"""The plugin ``testing``: the model "script" (``script_model``). Importing it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import LogitsProcessor, ModelAdapter, WeightLoader

name = "testing"
api_version = 0


class Settings(BaseModel):
    """The table ``[plugin.testing]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_ms: float = Field(default=0.0, ge=0, description="how long a step of the model 'script' takes at least")


def _plays(context: BuildContext) -> bool:
    """With any other model the plugin does nothing, so that it can stay enabled."""
    return context.settings.model == "script"


@hookimpl
def model_adapters(context: BuildContext) -> list[ModelAdapter]:
    if not _plays(context):
        return []
    from mini_infer.testing.script_model import ScriptAdapter

    return [ScriptAdapter(context.settings_of(name, Settings).step_ms / 1e3)]


@hookimpl
def weight_loaders(context: BuildContext) -> list[WeightLoader]:
    if not _plays(context):
        return []
    from mini_infer.testing.script_model import ScriptLoader

    return [ScriptLoader()]


@hookimpl
def logits_processors(context: BuildContext) -> list[LogitsProcessor]:
    if not _plays(context):
        return []
    from mini_infer.testing.script_model import ScriptProcessor

    return [ScriptProcessor()]
