"""What a GPU is, can do and says when it fails, each in the words of one line.

Contract: torch is imported when a function is called, not before. Nothing here uses the device's memory.
"""

from mini_infer.errors import ConfigError

_OF_THE_DRIVER = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "cuDNN error")


def card(device: str) -> str:
    """A GPU for people: ``cuda:0 (Tesla T4, compute capability 7.5)``."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"


def expect_gpu(plugin: str, device: str, lowest: tuple[int, int] = (0, 0)) -> None:
    """Refuse a plugin on a device that it cannot use.

    Args:
        plugin: its name.
        device: resolved, such as ``"cuda:0"``.
        lowest: the compute capability that it needs.

    Raises:
        ConfigError: the device is no GPU, or an older one.
    """
    import torch

    if not device.startswith("cuda"):
        raise ConfigError(f"plugin {plugin} runs on a GPU, not on {device}: leave it out")
    if torch.cuda.get_device_capability(device) < lowest:
        raise ConfigError(
            f"plugin {plugin} needs compute capability {lowest[0]}.{lowest[1]}, this is {card(device)}: leave it out "
            f"with without = ['{plugin}'], or set plugins = [] to leave out all"
        )


def fault_in_words(error: BaseException) -> str | None:
    """What driver or kernel library said, in one line; None for an error of another kind, and where memory ran out."""
    import torch

    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return None
    said = next(iter(str(error).strip().splitlines()), "")  # torch's further lines are advice for who writes kernels
    return said.rstrip(".") if isinstance(error, torch.AcceleratorError) or said.startswith(_OF_THE_DRIVER) else None


def device_fault(error: BaseException) -> str | None:
    """As ``fault_in_words``, but only if the device is of no more use.

    A launch that was wrong and one on a lost device may raise the same ``RuntimeError``; so the device is asked.
    """
    import torch

    said = fault_in_words(error)
    if said is None or isinstance(error, torch.AcceleratorError):
        return said
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except torch.AcceleratorError as fault:
        return fault_in_words(fault)
    return None
