"""The forward pass through ``torch.compile``: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import ModelTransform, StepRunner

name = "torch-compile"
api_version = 0
conflicts = ("cuda-graphs", "operator-fusion")  # one runs the steps too; the other's kernels Inductor cannot see into


class Settings(BaseModel):
    """The table ``[plugin.torch-compile]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        default="default",
        description="torch.compile's mode: max-autotune-no-cudagraphs tries several kernels for each matrix product "
        "and starts slower; the modes with CUDA graphs cannot run attention over paged blocks",
    )
    rehearse: bool = Field(
        default=True,
        description="compile before the first request; if false, the first step of each kind waits for the compiler",
    )


@hookimpl
def model_transforms(context: "BuildContext") -> "Sequence[ModelTransform]":
    from mini_infer_plugins.torch_compile.opaque_attention import OpaqueAttention

    return [OpaqueAttention()]


@hookimpl
def step_runner(context: "BuildContext") -> "StepRunner":
    from mini_infer_plugins.torch_compile.compiled_step import CompiledStepRunner

    settings = context.settings_of(name, Settings)
    return CompiledStepRunner(settings.mode, rehearse=settings.rehearse)
