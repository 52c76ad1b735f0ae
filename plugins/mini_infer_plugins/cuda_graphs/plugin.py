"""Decode steps as CUDA graphs. Importing this module imports nothing heavy."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mini_infer.gpu import expect_gpu
from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import StepRunner

name = "cuda-graphs"
api_version = 0


class Settings(BaseModel):
    """The table ``[plugin.cuda-graphs]``: the steps that have graphs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_sizes: list[PositiveInt] = Field(
        default=[1, 2, 4, 8, *range(16, 257, 8)],
        description="decode steps of up to so many rows; an empty list: no decode step has a graph",
    )
    num_tokens: list[PositiveInt] = Field(
        default=[16, *range(32, 513, 32), *range(640, 1025, 128), *range(1280, 2049, 256)],
        description="steps with prompts of up to so many tokens; an empty list: no step with prompts has graphs",
    )


@hookimpl
def step_runner(context: "BuildContext") -> "StepRunner":
    expect_gpu(name, context.device)
    from mini_infer_plugins.cuda_graphs.graphs import CudaGraphRunner

    settings = context.settings_of(name, Settings)
    return CudaGraphRunner(settings.batch_sizes, settings.num_tokens, context.log)
