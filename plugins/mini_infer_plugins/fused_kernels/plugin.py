"""Fused kernels for decoder layers on a GPU: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING

from mini_infer.plugins import hookimpl
from mini_infer.triton_needs import expect_triton, missing_triton

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import ModelTransform

name = "fused-kernels"
api_version = 0
provides = ("operator-fusion",)
missing = missing_triton


@hookimpl
def model_transforms(context: "BuildContext") -> "Sequence[ModelTransform]":
    expect_triton(name, context.device)
    from mini_infer_plugins.fused_kernels.layer import FusedKernels

    return [FusedKernels(context.log)]
