"""Decode steps as CUDA graphs. Importing this module imports nothing heavy."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import StepRunner

name = "cuda-graphs"
api_version = 0


class Settings(BaseModel):
    """``[plugin.cuda-graphs]``: the batch sizes that have graphs."""

    model_config = ConfigDict(extra="forbid")

    buckets: list[int] = [1, 2, 4, 8, *range(16, 257, 8)]


@hookimpl
def step_runner(context: "BuildContext") -> "StepRunner":
    from mini_infer_plugins.cuda_graphs.graphs import CudaGraphRunner

    return CudaGraphRunner(context.settings_of(name, Settings).buckets, context.log)
