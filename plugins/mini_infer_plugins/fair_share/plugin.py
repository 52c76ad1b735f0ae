"""Equal service to tenants: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import SchedulingPolicy

name = "fair-share"
api_version = 0


class Settings(BaseModel):
    """The table ``[plugin.fair-share]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_weight: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="what a prompt token counts in a tenant's service"
    )
    output_weight: float = Field(
        default=2.0, gt=0, allow_inf_nan=False, description="what an output token counts in a tenant's service"
    )


@hookimpl
def scheduling_policies(context: "BuildContext") -> "list[SchedulingPolicy]":
    from mini_infer_plugins.fair_share.counters import FairShare

    settings = context.settings_of(name, Settings)
    return [FairShare(settings.input_weight, settings.output_weight)]
