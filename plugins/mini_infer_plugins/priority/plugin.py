"""The more urgent request first: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import SchedulingPolicy

name = "priority"
api_version = 0


class Settings(BaseModel):
    """The table ``[plugin.priority]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ageing_seconds: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds of waiting that are worth one step of priority, so that nobody waits for ever",
    )


@hookimpl
def scheduling_policies(context: "BuildContext") -> "list[SchedulingPolicy]":
    from mini_infer_plugins.priority.urgency import LeastUrgent, UrgentFirst

    ageing = context.settings_of(name, Settings).ageing_seconds
    return [UrgentFirst(ageing), LeastUrgent(ageing)]
