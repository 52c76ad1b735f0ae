"""The plugin ``ban-tokens``: tokens that a request must not get. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import LogitsProcessor

name = "ban-tokens"
api_version = 0


@hookimpl
def logits_processors(context: BuildContext) -> list[LogitsProcessor]:
    from mini_infer_example.banned import BanTokens

    return [BanTokens()]
