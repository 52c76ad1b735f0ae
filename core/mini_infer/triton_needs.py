"""What Triton's kernels need of a machine, told at the start instead of at the first launch.

Contract: ``missing_triton`` is a plugin's ``missing`` and imports nothing; ``expect_triton`` is for its hooks, which
know the device. Each line says what to install.
"""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from mini_infer.errors import ConfigError, in_one_line
from mini_infer.gpu import expect_gpu

LOWEST_CAPABILITY = (8, 0)


def missing_triton() -> str | None:
    """What is not installed, in one line, or None."""
    if find_spec("triton") is None:
        return "it needs the package triton, which a PyTorch for CUDA brings along on Linux: pip install triton"
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and CC names '{compiler}', which is none: correct or unset CC"
    if compiler is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton needs a C compiler: install gcc or clang, or name one in the environment variable CC"
    headers = _python_headers()
    elsewhere = os.environ.get("CPATH") or os.environ.get("C_INCLUDE_PATH")  # where the compiler looks, too
    if not (headers / "Python.h").is_file() and not elsewhere:
        return f"Triton needs Python's C headers, and there is no {headers}/Python.h: install python3-dev"
    return None


def expect_triton(plugin: str, device: str) -> None:
    """Refuse a plugin whose kernels could not be launched on a device; builds and loads Triton's driver.

    Raises:
        ConfigError: no GPU, one too old, or Triton does not find its way to it.
    """
    expect_gpu(plugin, device, LOWEST_CAPABILITY)
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # a compiler, a loader, ldconfig, a folder that cannot be written: each has its own
        raise ConfigError(
            f"plugin {plugin} cannot be used: Triton does not work on {device}: {in_one_line(error)}: make its "
            f"compiler and driver work, or leave the plugin out with without = ['{plugin}']"
        ) from error


def _python_headers() -> Path:
    """The folder that Triton passes to the compiler; on Debian that is not the default one."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
