"""Resolves the setting ``engine.device``, and says in one line what a GPU lacks.

Contract: a device that is named is used or refused, never replaced; "auto" takes the first GPU that can be used, else
the CPU, and comes with its reason. torch is imported when a function is called, not before.
"""

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mini_infer.choices import Choice
from mini_infer.errors import ConfigError, in_one_line
from mini_infer.gpu import card, fault_in_words

_LONGEST_REASON = 300


def resolve_device(setting: str) -> tuple[str, Choice | None]:
    """Returns torch's name of the device, and the choice made if the setting was "auto".

    Raises:
        ConfigError: the GPU that was asked for is not there, or cannot be used.
    """
    import torch

    if setting == "cpu":
        return "cpu", None
    device = "cuda:0" if setting == "auto" else f"cuda:{int(setting.partition(':')[2] or 0)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, in many lines, of what is told here in one
        lack = _lack(device)
        if setting != "auto":
            if lack is not None:
                raise ConfigError(f"engine.device is '{setting}', but {': '.join(lack)}, or set engine.device to 'cpu'")
            return device, None
        if lack is not None:
            return "cpu", Choice("engine.device", "cpu", lack[0], (("cuda", lack[0]),))
        return device, Choice("engine.device", device, torch.cuda.get_device_name(device), (("cpu", "slower"),))


def expect_dtype(dtype: str, device: str) -> None:
    """Refuse a type that the device has no arithmetic for.

    Raises:
        ConfigError: bfloat16 on a GPU that is too old.
    """
    import torch

    if dtype == "bfloat16" and device.startswith("cuda") and torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(
            f"bfloat16 needs compute capability 8.0, this is {card(device)}: set engine.dtype to 'float16' or 'float32'"
        )


@contextmanager
def device_faults_in_plain_words(device: str) -> Iterator[None]:
    """Raises: ConfigError: where the device failed while the engine was built, or cannot run a kernel."""
    try:
        yield
    except Exception as error:
        said = fault_in_words(error)
        if said is not None:
            raise ConfigError(
                f"{device} failed while the engine was built: {said}: see nvidia-smi for its state and for what else "
                "uses it"
            ) from error
        if type(error).__module__.partition(".")[0] == "triton":
            said = in_one_line(error)
            said = said if len(said) <= _LONGEST_REASON else said[: _LONGEST_REASON - 3] + "..."
            raise ConfigError(
                f"a Triton kernel does not run on {card(device)}: {said}: leave out the plugin that brings it, or set "
                "plugins = [] to leave out all"
            ) from error
        raise


def _lack(device: str) -> tuple[str, str] | None:
    """Why a GPU cannot be used and what to do, or None."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch {torch.__version__} is built without CUDA", "install a build with it (pytorch.org)"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return _why_none()
    if int(device.partition(":")[2]) >= gpus:
        names = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        return f"torch sees {gpus} GPU{'s' if gpus > 1 else ''}", f"take {names}"
    if torch.version.hip is None and not _has_kernels(torch.cuda.get_device_capability(device)):
        found = ", ".join(torch.cuda.get_arch_list())
        return (
            f"PyTorch {torch.__version__} has no kernels for {card(device)}, only {found}",
            "install a build that has them (pytorch.org)",
        )
    return None


def _why_none() -> tuple[str, str]:
    """Why torch, built with CUDA, sees no GPU, and what to do."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        said = ""
    except (RuntimeError, AssertionError) as error:
        said = str(error)
    too_old = re.search(r"driver on your system is too old \(found version (\d+)\)", said)
    if too_old is not None:
        cuda = f"{int(too_old[1]) // 1000}.{int(too_old[1]) % 1000 // 10}"
        why = f"the NVIDIA driver is too old for PyTorch {torch.__version__}: it goes up to CUDA {cuda}"
        return why, f"update the driver, or install a PyTorch built for CUDA {cuda}"
    if "no NVIDIA driver" in said:
        return "there is no NVIDIA driver", "install one"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and (not said or "No CUDA GPUs" in said):
        return f"torch sees no GPU while CUDA_VISIBLE_DEVICES is '{hidden}'", "change or unset that"
    if not said or "No CUDA GPUs" in said:
        return "torch sees no GPU", "see whether nvidia-smi does"
    return f"CUDA does not start: {said.splitlines()[0].rstrip('.')}", "see what nvidia-smi says"


def _has_kernels(capability: tuple[int, int]) -> bool:
    """Whether torch was compiled for a card: the same generation up to its minor number, or PTX of an older one."""
    import torch

    built: Sequence[tuple[str, ...]] = re.findall(
        r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(torch.cuda.get_arch_list())
    )
    return not built or any(
        (int(major), int(minor)) == capability
        or (not only and (kind == "compute" or int(major) == capability[0]) and (int(major), int(minor)) <= capability)
        for kind, major, minor, only in built
    )
