"""Drawing tokens on a GPU: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING

from mini_infer.plugins import hookimpl
from mini_infer.triton_needs import expect_triton, missing_triton

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import Sampler

name = "device-sampler"
api_version = 0
missing = missing_triton


@hookimpl
def sampler(context: "BuildContext") -> "Sampler":
    expect_triton(name, context.device)
    from mini_infer_plugins.device_sampler.sampler import DeviceSampler

    return DeviceSampler()
