"""ModelAdapter: what a model family brings, and what a layer tells the core of its cache."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mini_infer.forward_batch import ForwardBatch

KVKind = Literal["full", "sliding", "latent"]


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps of a token. Layers of equal spec form a KV group, served by one attention backend.

    Attributes:
        kind: ``full`` keeps keys and values of every token; ``sliding`` the same, of which only the last
            ``sliding_window`` are read; ``latent`` one vector of ``head_dim`` whose first ``v_head_dim`` numbers are
            the value (DeepSeek's MLA).
        num_kv_heads: on this rank.
        head_dim: numbers of a key.
        v_head_dim: numbers of a value; equal to ``head_dim`` unless latent.
        dtype: torch dtype's name, such as ``float32``.
        sliding_window: tokens that a query sees, itself counted; None unless ``sliding``.
    """

    kind: KVKind
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    sliding_window: int | None = None

    @property
    def numbers_per_token(self) -> int:
        """Numbers kept a token and layer."""
        if self.kind == "latent":
            return self.num_kv_heads * self.head_dim
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's own description, resolved once.

    Attributes:
        hf: ``config.json`` as it stands, with nested text configs flattened.
        dtype: the dtype that weights and activations have here.
        device: torch device string.
        max_position_embeddings: longest sequence that the checkpoint was made for, RoPE scaling counted.
        vocab_size: width of the logits.
        path: folder or file of the checkpoint, if there is one.
    """

    hf: Mapping[str, Any]
    dtype: "torch.dtype"
    device: str
    max_position_embeddings: int
    vocab_size: int
    path: str | None = None


class CausalLM(ABC):
    """What an adapter's module can do. The module itself is a ``torch.nn.Module`` made of core layers."""

    leaves_out: ClassVar[bool] = False
    """It honours ``batch.shape.last_only``: ``forward`` then gives [num_rows, hidden_size], each row's last token."""

    @abstractmethod
    def forward(self, input_ids: "torch.Tensor", positions: "torch.Tensor", batch: "ForwardBatch") -> "torch.Tensor":
        """Hidden states after the final norm.

        Args:
            input_ids: [num_tokens] int64, all rows packed one after another.
            positions: [num_tokens] int64, each token's index in its own sequence.
            batch: what attention needs; handed to every ``Attention`` layer, never looked into by the model but for
                ``shape.last_only`` if the class says that it honours that.

        Returns:
            [num_tokens, hidden_size] in the model's dtype; [num_rows, hidden_size] where ``shape.gives`` is "last".
        """

    @abstractmethod
    def logits(self, hidden: "torch.Tensor") -> "torch.Tensor":
        """[num_rows, hidden_size] -> [num_rows, vocab_size], in the model's dtype."""


class ModelAdapter(ABC):
    """One model family: which checkpoints it serves, how its module is built, and what its weights are called."""

    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]  # values of ``architectures`` in config.json that it serves

    @abstractmethod
    def check(self, config: ModelConfig) -> None:
        """Refuse what this family cannot honour (an unknown RoPE scaling, an unknown activation).

        Raises:
            ConfigError: naming the key of config.json and its value.
        """

    @abstractmethod
    def build(self, config: ModelConfig) -> "nn.Module":
        """The module (also a ``CausalLM``) with unset weights, on ``torch.device("meta")`` or not as the core chose.

        Every attention goes through ``mini_infer.layers.Attention``; the core finds those layers, groups them by
        their ``KVCacheSpec`` and binds caches and backends to them.
        """

    @abstractmethod
    def load(self, module: "nn.Module", weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        """Copy a checkpoint's tensors, as they come, into the module's parameters (merging QKV and gate/up).

        Raises:
            ConfigError: a tensor is missing, unknown or of the wrong shape; it is named with both shapes.
        """
