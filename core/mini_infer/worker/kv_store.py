"""The KV tensors of a worker, every layer and tier, and the copies between them.

::

    tier "device":  layer 0 [block 0 (null) | block 1 | block 2 | ...]   layer 1 [...]   ...
    tier "host":    layer 0 [block 0 unused | block 1 | ...]             ...            the same layout, pinned

Block b of a tier is slice b of every layer. Copies run in the order of plans, before the step's forward pass; they are
reported with the answer of their step, or with the next that reaches the host where that one is lost.
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
        self._launched: list[tuple[int, int]] = []  # (step, copy) not yet reported

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

    def run(self, copies: Sequence[Copy], step_id: int) -> None:
        """Launch a step's copies; on its stream, so that they precede whatever is launched after."""
        for copy in copies:
            for layer in range(len(self._backends)):
                target, source = self._block(copy.target, layer), self._block(copy.source, layer)
                target.copy_(source, non_blocking=True)
            self._launched.append((step_id, copy.copy_id))

    def take_done(self, step_id: int) -> list[int]:
        """Copies not yet reported that are complete, the device having reached the end of step ``step_id``."""
        done = [copy_id for step, copy_id in self._launched if step <= step_id]
        self._launched = [(step, copy_id) for step, copy_id in self._launched if step > step_id]
        return done

    def _block(self, ref: BlockRef, layer: int) -> torch.Tensor:
        cache = self._layers[ref.tier][layer]
        # Dimension 0 is the block unless it is the pair (keys, values): the contract of ``kv_cache_shape``.
        num_blocks = self._backends[layer].kv_cache_shape(1)
        return cache[ref.block_id] if num_blocks[0] == 1 else cache[:, ref.block_id]
