"""The KV tensors of a worker, every layer and tier, and the copies between them.

::

    tier "device":  layer 0 [block 0 (null) | block 1 | block 2 | ...]   layer 1 [...]   ...
    tier "host":    layer 0 [block 0 unused | block 1 | ...]             ...            the same layout, pinned

Block b of a tier is slice b of every layer. Copies run in the order of plans, before the step's forward pass; one that
is done is reported with the next answer that reaches the host.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mini_infer.plan import DEVICE_TIER, BlockRef, Copy

if TYPE_CHECKING:
    from mini_infer.interfaces.attention import AttentionBackend


class KVStore:
    """Cache tensors by tier and layer.

    Args:
        backends: each attention layer's backend, which knows the layout.
        dtypes: each layer's cache dtype.
        num_blocks: blocks of the device tier, the null block not counted.
        tiers: further tiers and their blocks.
        device: torch device string.
    """

    def __init__(
        self,
        backends: "Sequence[AttentionBackend]",
        dtypes: Sequence[torch.dtype],
        num_blocks: int,
        tiers: Mapping[str, int],
        device: str,
    ) -> None:
        self._backends = backends
        pinned = device.startswith("cuda")
        self._layers = {DEVICE_TIER: self._make(num_blocks, dtypes, device, pin=False)}
        for tier, size in tiers.items():
            self._layers[tier] = self._make(size, dtypes, "cpu", pin=pinned)
        self._done: list[int] = []

    def _make(self, num_blocks: int, dtypes: Sequence[torch.dtype], device: str, *, pin: bool) -> list[torch.Tensor]:
        shapes = [backend.kv_cache_shape(num_blocks + 1) for backend in self._backends]
        return [
            torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    @property
    def device_layers(self) -> list[torch.Tensor]:
        """Each layer's cache tensor on the device."""
        return self._layers[DEVICE_TIER]

    def run(self, copies: Sequence[Copy]) -> None:
        """Launch copies; on a stream, so that they precede whatever is launched after."""
        for copy in copies:
            for layer in range(len(self._backends)):
                target, source = self._block(copy.target, layer), self._block(copy.source, layer)
                target.copy_(source, non_blocking=True)
            self._done.append(copy.copy_id)

    def take_done(self) -> list[int]:
        """Copies that are complete and not yet reported."""
        done, self._done = self._done, []
        return done

    def _block(self, ref: BlockRef, layer: int) -> torch.Tensor:
        cache = self._layers[ref.tier][layer]
        # Dimension 0 is the block unless it is the pair (keys, values): the contract of ``kv_cache_shape``.
        num_blocks = self._backends[layer].kv_cache_shape(1)
        return cache[ref.block_id] if num_blocks[0] == 1 else cache[:, ref.block_id]
