"""Native products of few rows, norms and gates for CPUs: see the README beside this file."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import ModelTransform

name = "cpu-kernels"
api_version = 0
provides = ("operator-fusion",)


class Settings(BaseModel):
    """The table ``[plugin.cpu-kernels]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wait: bool = Field(
        default=False,
        description="serve only when the native kernels are built, so that no token takes the slower plain path",
    )
    blocks: bool = Field(
        default=True,
        description="read float32 weights that are exactly blocks of 4 or 8 bits as such: the same numbers, faster",
    )


@hookimpl
def model_transforms(context: "BuildContext") -> "Sequence[ModelTransform]":
    if context.device != "cpu" or context.dtype not in ("float32", "bfloat16"):
        context.log(f"cpu-kernels: not used, for there are none for {context.dtype} on {context.device}")
        return []
    from mini_infer_plugins.cpu_kernels.few_rows import FewRows
    from mini_infer_plugins.cpu_kernels.native import native_build

    native_build().start(context.log)
    settings = context.settings_of(name, Settings)
    if settings.wait:
        native_build().wait()
    return [FewRows(context.log, blocks=settings.blocks)]
