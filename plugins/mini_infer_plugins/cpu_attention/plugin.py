"""Paged attention for CPUs: see the README beside this file."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import AttentionBackend

name = "cpu-attention"
api_version = 0
provides = ("paged-kv", "multi-token-verify")


class Settings(BaseModel):
    """The table ``[plugin.cpu-attention]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wait: bool = Field(
        default=False,
        description="serve only when the native kernels are built, so that no token takes the slower plain path",
    )


@hookimpl
def attention_backends(context: "BuildContext") -> "Sequence[type[AttentionBackend]]":
    from mini_infer_plugins.cpu_attention.native import native_build
    from mini_infer_plugins.cpu_attention.paged_attention import CpuAttention

    if context.device == "cpu":
        native_build().start(context.log)
        if context.settings_of(name, Settings).wait:
            native_build().wait()
    return [CpuAttention]
