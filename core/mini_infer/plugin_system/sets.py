"""Names for sets of plugins: ``default``, and one for each mechanism that users know by name.

Contract: a set resolves by device type to plugin names in their order, without importing any of them. A set that has
nothing for a device is an error when it is named, save ``default``, which may be empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PluginSet:
    """One name and what it stands for.

    Attributes:
        what: the mechanism in a few words, for ``mini-infer plugins`` and ``config explain``.
        members: plugin names by device type.
    """

    what: str
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


PLUGIN_SETS: Mapping[str, PluginSet] = {
    "default": PluginSet(
        "what serves best on this device",
        {
            "cpu": ("cpu-attention", "cpu-kernels", "prefix-cache"),
            "cuda": (
                "triton-attention",
                "fused-kernels",
                "device-sampler",
                "cuda-graphs",
                "chunked-prefill",
                "prefix-cache",
            ),
        },
    ),
    "paged-attention": PluginSet(
        "attention over block tables", {"cpu": ("cpu-attention",), "cuda": ("triton-attention",)}
    ),
    "speculative-decoding": PluginSet("drafts that the model verifies", {}),
    "tensor-parallel": PluginSet("one model over several devices", {}),
    "quantization": PluginSet("weights of fewer bits", {}),
    "operator-fusion": PluginSet(
        "several operators in one kernel", {"cpu": ("cpu-kernels",), "cuda": ("fused-kernels",)}
    ),
}
