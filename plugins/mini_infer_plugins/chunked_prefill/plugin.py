"""Prompts in chunks beside running decodes: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import SchedulingPolicy

name = "chunked-prefill"
api_version = 0
provides = ("chunked-prefill",)


class Settings(BaseModel):
    """The table ``[plugin.chunked-prefill]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens_beside_decodes: PositiveInt = Field(
        default=512,
        description="tokens that a step may run, prompts and decodes together, while most requests decode; "
        "four times as many as decode, where that is more",
    )
    equal_history: PositiveInt = Field(
        default=49_152,
        description="tokens of history that make a prompt's token cost twice as much as one without: chunks shrink by "
        "as much, so that a long prompt's last steps take no longer than its first",
    )
    itl_target_ms: PositiveFloat | None = Field(
        default=None,
        description="milliseconds that a step may take while requests decode; chunks follow it by what steps took so "
        "far; unset: max_tokens_beside_decodes alone",
    )
    long_prompt: PositiveInt = Field(default=2048, description="tokens from which on a prompt is long")
    max_long_tokens: PositiveInt | None = Field(
        default=None,
        description="tokens a step from long prompts together while there are shorter ones, which go ahead of those "
        "that get nothing; unset: no limit",
    )


@hookimpl
def scheduling_policies(context: "BuildContext") -> "list[SchedulingPolicy]":
    from mini_infer_plugins.chunked_prefill.chunks import ChunksBesideDecodes

    settings = context.settings_of(name, Settings)
    target = settings.itl_target_ms
    return [
        ChunksBesideDecodes(
            settings.max_tokens_beside_decodes,
            settings.equal_history,
            itl_target=None if target is None else target / 1e3,
            long_prompt=settings.long_prompt,
            max_long_tokens=settings.max_long_tokens,
        )
    ]
