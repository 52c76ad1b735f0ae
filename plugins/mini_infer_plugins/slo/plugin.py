"""Targets for first and next tokens: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import Observer, SchedulingPolicy
    from mini_infer_plugins.slo.targets import Goodput

name = "slo"
api_version = 0


class ClassSettings(BaseModel):
    """The targets of one class of requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_ms: PositiveFloat = Field(default=1000.0, description="milliseconds from arrival to the first token")
    itl_ms: PositiveFloat = Field(default=100.0, description="largest gap between tokens, in milliseconds")


class Settings(ClassSettings):
    """The table ``[plugin.slo]``."""

    classes: dict[int, ClassSettings] = Field(
        default={}, description="targets by request priority, such as classes.-1 = { ttft_ms = 200 }"
    )
    patience_seconds: PositiveFloat = Field(
        default=30.0, description="seconds past its target after which a request goes before all others"
    )
    log_every_seconds: PositiveFloat = Field(default=60.0, description="how often goodput is logged")
    unknown_tokens: PositiveInt = Field(
        default=512, description="tokens a step beside decodes, until it is known what steps take"
    )


@hookimpl
def scheduling_policies(context: "BuildContext") -> "list[SchedulingPolicy]":
    from mini_infer_plugins.slo.slack import SlackChunks, SlackOrder

    settings, goodput = context.settings_of(name, Settings), _goodput(context)
    return [
        SlackOrder(goodput.classes, settings.patience_seconds, goodput),
        SlackChunks(goodput.classes, settings.unknown_tokens),
    ]


@hookimpl
def extensions(context: "BuildContext") -> "list[Observer]":
    return [_goodput(context)]


def _goodput(context: "BuildContext") -> "Goodput":
    """The engine's one meter, which both hooks need."""
    from mini_infer_plugins.slo.targets import Classes, Goodput, Targets

    def targets(of: ClassSettings) -> Targets:
        return Targets(of.ttft_ms / 1e3, of.itl_ms / 1e3)

    settings = context.settings_of(name, Settings)
    classes = Classes(targets(settings), {priority: targets(each) for priority, each in settings.classes.items()})
    return context.shared(name, lambda: Goodput(classes, log_every=settings.log_every_seconds))
