"""The plugin ``random-weights``: ``load_format = "random"``. Importing it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import WeightLoader

name = "random-weights"
api_version = 0


class Settings(BaseModel):
    """The table ``[plugin.random-weights]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    std: float = Field(default=0.02, gt=0, description="standard deviation of weights and biases; norms are 1")
    seed: int = Field(default=0, ge=0, description="of the generator; the same seed gives the same weights on a device")
    uniform: float = Field(default=0.0, ge=0, description="above 0: all evenly between its negative and itself")


@hookimpl
def weight_loaders(context: BuildContext) -> list[WeightLoader]:
    from mini_infer_models.random_weights.loader import RandomLoader

    settings = context.settings_of(name, Settings)
    return [RandomLoader(settings.std, settings.seed, settings.uniform)]
