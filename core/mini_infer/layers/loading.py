"""From a checkpoint's (name, tensor) pairs to a module's merged and sharded parameters.

Contract: a module's layers mirror the checkpoint's names but for merged ones, which ``merged`` maps. Every layer that
has ``slots`` and ``load`` (all of ``mini_infer.layers``) is filled exactly once a slot, or a ``ConfigError`` names the
tensor that is missing, unknown, twice there or of the wrong shape.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from mini_infer.errors import ConfigError
from mini_infer.layers.linear import Slot

Merged = Mapping[str, tuple[str, str]]
"""A module's name in the checkpoint -> the merged layer's name here, and its part of it."""

QKV_AND_GATE_UP: Merged = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}

_NAMED = 5  # tensors that one message names


@runtime_checkable
class Loadable(Protocol):
    """A layer that is filled from a checkpoint."""

    def slots(self) -> Iterator[Slot]: ...

    def load(self, tensor: torch.Tensor, part: str = "", parameter: str = "weight") -> None: ...


def expected_tensors(module: nn.Module, merged: Merged = QKV_AND_GATE_UP) -> dict[str, tuple[Loadable, Slot]]:
    """The checkpoint's name of each tensor that ``module`` needs, and where it goes."""
    unmerged = {place: name for name, place in merged.items()}
    expected: dict[str, tuple[Loadable, Slot]] = {}
    for path, layer in module.named_modules():
        if not isinstance(layer, Loadable):
            continue
        parent, _, own = path.rpartition(".")
        for parameter, part in layer.slots():
            name = unmerged[own, part] if part else own
            expected[".".join(filter(None, (parent, name, parameter)))] = layer, (parameter, part)
    return expected


def load_weights(
    module: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    merged: Merged = QKV_AND_GATE_UP,
    prefix: str = "model.",
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",),
) -> None:
    """Fill ``module`` from a checkpoint.

    Args:
        module: materialised.
        weights: (name, tensor) as they come.
        merged: which of the checkpoint's modules are parts of one layer here.
        prefix: what a checkpoint of the bare decoder leaves off its names.
        ignored: endings of names that need no place: what can be computed, and a tied output matrix.

    Raises:
        ConfigError: naming the tensor, and both shapes if that is wrong.
    """
    expected = expected_tensors(module, merged)
    missing = dict.fromkeys(expected)
    with torch.no_grad():
        for given, tensor in weights:
            name = given if given in expected else prefix + given
            if name not in expected:
                if given.endswith(ignored):
                    continue
                raise ConfigError(f"the checkpoint's tensor {given} has no place in {type(module).__name__}")
            if name not in missing:
                raise ConfigError(f"the checkpoint holds the tensor {given} twice")
            layer, (parameter, part) = expected[name]
            try:
                layer.load(tensor, part, parameter)
            except ValueError as error:
                raise ConfigError(f"the checkpoint's tensor {given} {error}") from error
            del missing[name]
    if missing:
        names = ", ".join(list(missing)[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        raise ConfigError(f"the checkpoint lacks {len(missing)} of {len(expected)} tensors: {names}")
