"""AttentionBackend: how keys and values lie in memory, and how queries read them over block tables.

One backend instance serves one KV group (all layers of equal ``KVCacheSpec``). The calls of its life, in order:
``check`` → ``kv_cache_shape`` → ``bind`` (each layer) → ``buffers`` → and every step ``prepare``, then for each layer
``write_kv`` and ``attend``. All KV writes of a layer precede its reads.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces.model import KVCacheSpec
    from mini_infer.layers.attention import Attention


GraphSupport = Literal["none", "decode", "verify", "mixed"]
"""Steps in which ``attend`` can be captured in a device graph, each kind with those before it.

A graph of a mixed step is replayed for any rows of as many tokens: what depends on them, ``prepare`` puts where the
graph reads it.
"""


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """What a backend can do; the core refuses at build what it cannot.

    Attributes:
        devices: device types, such as ``("cpu",)``.
        dtypes: dtype names of queries and cache.
        kinds: kinds of ``KVCacheSpec``.
        head_dims: supported head dims; empty means any.
        block_sizes: supported block sizes; empty means any.
        graphs: in which steps ``attend`` can be captured in a device graph. ``write_kv`` may be captured in any step,
            whatever is declared here.
        needs_host_lengths: ``prepare`` reads ``batch.seq_lens_host``; conflicts with acceptance on the device.
        fuses_rope: gets unrotated queries and keys, and ``batch.positions``, and rotates them itself.
    """

    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...] = ("full",)
    head_dims: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    graphs: GraphSupport = "none"
    needs_host_lengths: bool = False
    fuses_rope: bool = False


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Upper bounds for buffers that are made once.

    Attributes:
        max_num_rows: rows of a step, padding rows counted.
        max_num_tokens: tokens of a step, padding counted.
        max_blocks_per_row: width of the block table.
        block_size: tokens a block.
    """

    max_num_rows: int
    max_num_tokens: int
    max_blocks_per_row: int
    block_size: int


class AttentionBackend(ABC):
    """Writes keys and values of a packed batch into paged blocks and attends over them.

    Args of the constructor: ``spec`` (the group's), ``device`` (torch device string), ``block_size``.
    """

    name: ClassVar[str]
    capabilities: ClassVar[AttentionCapabilities]

    def __init__(self, spec: "KVCacheSpec", device: str, block_size: int) -> None:
        self.spec = spec
        self.device = device
        self.block_size = block_size

    @property
    def graphs(self) -> GraphSupport:
        """What of ``capabilities`` holds for this cache on this device, or more."""
        return self.capabilities.graphs

    @classmethod
    def unavailable(cls, spec: "KVCacheSpec", device: str) -> str | None:
        """Why this backend cannot serve the group here (a missing library, a compiler, a card), or None."""
        return None

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor for ``num_blocks`` blocks (the null block, id 0, counted).

        Dimension 0 must be the block, or dimension 1 if dimension 0 has size 2 (keys, values). Element count is
        ``num_blocks * block_size * spec.numbers_per_token``.
        """

    def bind(self, layer: "Attention") -> None:
        """Called once a layer after all model transforms, when ``layer.kv_cache`` is set. Nothing by default.

        On a GPU a first set of instances is bound for the step that is measured before the KV cache is sized, and let
        go of after it: so keep what is made of a layer in the instance, and the layer as it is.
        """
        return

    def buffers(self, limits: BatchLimits) -> None:
        """Make metadata buffers at fixed addresses. Nothing by default."""
        return

    def prepare(self, batch: "ForwardBatch") -> None:
        """Compute this step's metadata in place, on padded shapes, outside any graph. Nothing by default."""
        return

    @abstractmethod
    def write_kv(
        self,
        layer: "Attention",
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        batch: "ForwardBatch",
    ) -> Any:
        """Write keys and values at ``batch.slot_mapping``; the answer is what ``attend`` gets as its query.

        With ``fuses_rope``, query and key come as they are projected. A backend may rotate them here or in ``attend``,
        and may leave the writing of a step of uniform rows to ``attend`` too.

        Args:
            layer: its ``kv_cache`` has the shape of ``kv_cache_shape``.
            query: [num_tokens, num_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: [num_tokens, num_kv_heads, v_head_dim]; ignored for latent specs.
            batch: ``slot_mapping`` [num_tokens] int64 = block id * block_size + offset; padding goes to block 0.

        Returns:
            The query, of the same shape; where ``batch.around_attention`` is None it may be anything that carries it.
        """

    @abstractmethod
    def attend(
        self, layer: "Attention", query: Any, batch: "ForwardBatch", out: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Causal attention of each row's queries over its whole sequence.

        The last query of row i sits at position ``seq_lens[i] - 1``. Cache slots at or past ``seq_lens[i]`` may hold
        anything, NaN too, and must not reach the output. Padding tokens may get any finite output.

        Args:
            layer: gives ``scale``.
            query: what ``write_kv`` gave.
            batch: ``cu_seqlens_q``, ``seq_lens``, ``block_table``.
            out: where the answer goes, contiguous; None for a new tensor.

        Returns:
            [num_tokens, num_heads, v_head_dim], in the query's dtype.
        """
