"""Drawing tokens on a GPU: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING

from mini_infer.errors import ConfigError
from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import Sampler

name = "device-sampler"
api_version = 0


@hookimpl
def sampler(context: "BuildContext") -> "Sampler":
    from mini_infer_plugins.device_sampler.sampler import DeviceSampler

    if not context.device.startswith("cuda"):
        raise ConfigError(f"plugin device-sampler runs on a GPU, not on {context.device}: leave it out")
    return DeviceSampler()
