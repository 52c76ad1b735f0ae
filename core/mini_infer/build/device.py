"""Resolves the setting ``engine.device``.

Contract: a device that is named is used or refused, never replaced; "auto" comes with its reason. torch is imported
when a function is called, not before.
"""

from mini_infer.choices import Choice
from mini_infer.errors import ConfigError


def resolve_device(setting: str) -> tuple[str, Choice | None]:
    """Returns torch's name of the device, and the choice made if the setting was "auto".

    Raises:
        ConfigError: the GPU that was asked for is not there.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto":
        if gpus:
            return "cuda:0", Choice("engine.device", "cuda:0", torch.cuda.get_device_name(0), (("cpu", "slower"),))
        return "cpu", Choice("engine.device", "cpu", "torch sees no GPU", (("cuda", "torch sees no GPU"),))
    if setting == "cpu":
        return "cpu", None
    index = int(setting.partition(":")[2] or 0)
    if index >= gpus:
        raise ConfigError(f"engine.device is '{setting}', but torch sees {gpus} GPUs: set it to 'cpu' or 'auto'")
    return f"cuda:{index}", None
