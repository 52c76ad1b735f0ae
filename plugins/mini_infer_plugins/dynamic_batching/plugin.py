"""Arrivals collected for a moment: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Generator

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import Scheduler

name = "dynamic-batching"
api_version = 0


class Settings(BaseModel):
    """The table ``[plugin.dynamic-batching]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window_ms: float = Field(
        default=20.0, ge=0, allow_inf_nan=False, description="longest that a request is held while others run"
    )
    idle_window_ms: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="longest that one is held while nothing else runs",
    )
    deadline_margin_ms: float = Field(
        default=100.0, ge=0, allow_inf_nan=False, description="before its deadline nobody is held for so long"
    )
    urgent_priority: int = Field(
        default=-1, description="requests of this priority, or a more urgent (lower) one, are never held"
    )


@hookimpl(wrapper=True)
def scheduler(context: "BuildContext") -> "Generator[None, Scheduler, Scheduler]":
    from mini_infer_plugins.dynamic_batching.window import Window, WindowScheduler

    settings = context.settings_of(name, Settings)
    inside = yield
    window = Window(
        busy=settings.window_ms / 1e3,
        idle=settings.idle_window_ms / 1e3,
        margin=settings.deadline_margin_ms / 1e3,
        urgent_priority=settings.urgent_priority,
    )
    return WindowScheduler(inside, window)
