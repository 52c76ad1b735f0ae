"""From a checkpoint to a module that is ready to be transformed and bound: the adapter, the loader, the weights.

Contract: exactly one adapter and one loader are chosen, or a ``ConfigError`` lists what there is. The module is built
without memory, materialised on its device, and every parameter is set before it is returned.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError
from mini_infer.progress import loading_progress

if TYPE_CHECKING:
    from torch import nn

    from mini_infer.interfaces.model import ModelAdapter, ModelConfig
    from mini_infer.interfaces.weight_loader import WeightLoader


def choose_adapter(adapters: "Sequence[ModelAdapter]", hf: Mapping[str, Any]) -> "ModelAdapter":
    """The first adapter that serves one of the checkpoint's architectures.

    Raises:
        ConfigError: none does; those supported are listed.
    """
    architectures = hf.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ConfigError(f"config.json: architectures must be a list of names, not {architectures!r:.80}")
    for adapter in adapters:
        if any(name in adapter.architectures for name in architectures):
            return adapter
    names = " or ".join(" ".join(name.split()) for name in architectures)
    wanted = f"architecture {names}" if architectures else "a config.json without architectures"
    supported = ", ".join(sorted({name for adapter in adapters for name in adapter.architectures})) or "none"
    raise ConfigError(f"{wanted} is not supported; supported: {supported}")


def choose_loader(loaders: "Sequence[WeightLoader]", path: Path, load_format: str = "auto") -> "WeightLoader":
    """The loader that ``engine.load_format`` names, or for "auto" the first that finds its files at ``path``.

    Raises:
        ConfigError: there is no such loader, or no loader finds anything.
    """
    names = ", ".join(loader.name for loader in loaders) or "none"
    if load_format != "auto":
        for loader in loaders:
            if loader.name == load_format:
                return loader
        raise ConfigError(f"engine.load_format '{load_format}' is unknown; known: auto, {names}")
    for loader in loaders:
        if loader.accepts(path):
            return loader
    if path.is_dir() and (pickles := sorted(file.name for file in path.glob("*.bin"))):
        raise ConfigError(
            f"{path} has its weights in {pickles[0]} only: a pickle can run code and is never opened; "
            "give a folder with safetensors files"
        )
    raise ConfigError(f"{path} holds no weights that a loader knows (loaders: {names})")


def load_module(adapter: "ModelAdapter", loader: "WeightLoader", path: Path, config: "ModelConfig") -> "nn.Module":
    """The checkpoint's module on ``config.device``, in evaluation mode.

    Args:
        adapter: of the checkpoint's family; its ``check`` has passed.
        loader: of its format.
        path: the checkpoint, as the loader's ``accepts`` saw it.
        config: its ``max_position_embeddings`` is the longest sequence that will be served.

    Raises:
        ConfigError: the weights do not fit the config, or cannot be read.
    """
    import torch

    with torch.device("meta"):
        module = adapter.build(config)
    module = module.to_empty(device=config.device).eval()
    if not loader.fill(module, config):
        num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        adapter.load(module, loading_progress(loader.weights(path, config), num_bytes))
    return module
