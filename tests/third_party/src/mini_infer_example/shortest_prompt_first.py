"""The plugin ``shortest-prompt-first``: short prompts do not wait behind long ones. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import Scheduler

name = "shortest-prompt-first"
api_version = 0


class Settings(BaseModel):
    """The table ``[plugin.shortest-prompt-first]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ageing: float = Field(
        default=100.0,
        gt=0,
        allow_inf_nan=False,
        description="prompt tokens that a second of waiting counts for: however long a prompt is, its turn comes",
    )


@hookimpl
def scheduler(context: BuildContext) -> Scheduler:
    from mini_infer_example.shortest_first import shortest_prompt_first

    return shortest_prompt_first(context.settings_of(name, Settings).ageing)
