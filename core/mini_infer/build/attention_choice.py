"""Which attention backend serves each KV group, and why the others do not.

Contract: a backend that is named is used or refused; "auto" takes the first in the order of ``plugins`` that fits, the
core's reference last, and records why each of the others was not taken.
"""

from typing import TYPE_CHECKING

from mini_infer.choices import Choice
from mini_infer.errors import ConfigError
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.suggestions import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.interfaces.attention import AttentionBackend
    from mini_infer.interfaces.model import KVCacheSpec

DEFAULT_BLOCK_SIZE = 16


def misfit(backend: "type[AttentionBackend]", spec: "KVCacheSpec", device: str) -> str | None:
    """Why a backend cannot serve a group here, or None."""
    can = backend.capabilities
    device_type = device.partition(":")[0]
    if device_type not in can.devices:
        return f"it runs on {', '.join(can.devices)}, not on {device_type}"
    if spec.dtype not in can.dtypes:
        return f"it does {', '.join(can.dtypes)}, not {spec.dtype}"
    if spec.kind not in can.kinds:
        return f"it does {', '.join(can.kinds)} caches, not {spec.kind}"
    if can.head_dims and spec.head_dim not in can.head_dims:
        return f"it does head dims {', '.join(map(str, can.head_dims))}, not {spec.head_dim}"
    return backend.unavailable(spec, device)


def choose_backend(
    setting: str, offered: "Sequence[type[AttentionBackend]]", spec: "KVCacheSpec", device: str
) -> "tuple[type[AttentionBackend], Choice]":
    """The backend of one group.

    Raises:
        ConfigError: the one that is named is unknown or does not fit, or none fits.
    """
    candidates: list[type[AttentionBackend]] = [*offered, ReferenceAttention]
    by_name = {backend.name: backend for backend in candidates}
    if setting != "auto":
        if setting not in by_name:
            hint = did_you_mean(setting, by_name)
            raise ConfigError(f"engine.attention: no enabled plugin brings a backend '{setting}'{hint}")
        why_not = misfit(by_name[setting], spec, device)
        if why_not is not None:
            raise ConfigError(f"engine.attention = '{setting}' cannot serve this model here: {why_not}")
        return by_name[setting], Choice("engine.attention", setting, "as set")
    rejected: list[tuple[str, str]] = []
    chosen: type[AttentionBackend] | None = None
    for backend in by_name.values():
        why_not = misfit(backend, spec, device)
        if why_not is not None:
            rejected.append((backend.name, why_not))
        elif chosen is None:
            chosen = backend
        else:
            rejected.append((backend.name, f"{chosen.name} comes first in the order of plugins"))
    if chosen is None:
        raise ConfigError(
            "no attention backend can serve this model: " + "; ".join(f"{name}: {why}" for name, why in rejected)
        )
    reason = f"first that fits {spec.kind} caches of head dim {spec.head_dim} in {spec.dtype} on {device}"
    return chosen, Choice("engine.attention", chosen.name, reason, tuple(rejected))


def choose_block_size(setting: int | None, backends: "Sequence[type[AttentionBackend]]") -> int:
    """A block size that every backend in use supports.

    Raises:
        ConfigError: there is none, or the one set is not among them.
    """
    limited = [set(b.capabilities.block_sizes) for b in backends if b.capabilities.block_sizes]
    common = set.intersection(*limited) if limited else None
    if setting is not None:
        if common is not None and setting not in common:
            raise ConfigError(f"engine.block_size {setting} is not supported here; supported: {sorted(common)}")
        return setting
    if common is None or DEFAULT_BLOCK_SIZE in common:
        return DEFAULT_BLOCK_SIZE
    if not common:
        names = ", ".join(sorted({b.name for b in backends}))
        raise ConfigError(f"the attention backends {names} have no block size in common: choose others")
    return min(common)
