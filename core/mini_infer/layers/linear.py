"""Matrix products, plain at world size 1, with the loading rules that merging and sharding need.

Contract: a layer holds ``weight`` [out_features, in_features] of this rank and perhaps ``bias`` [out_features], both
unset until ``load`` has been called for each of its ``slots``. A layer may be built on the meta device and materialised
later. Transforms replace a layer in place by one that keeps ``forward``, ``slots`` and ``load``::

    QKVParallelLinear.weight     rows of the checkpoint's three matrices, this rank's heads only
        [ q_proj: num_heads * head_dim ][ k_proj: num_kv_heads * head_dim ][ v_proj: num_kv_heads * head_dim ]
    MergedColumnParallelLinear   the same for any named parts, such as gate and up
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mini_infer.parallel import SINGLE, ParallelContext

Slot = tuple[str, str]
"""(parameter, part): what one tensor of a checkpoint fills; part is "" for a layer that is not merged."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where one of the checkpoint's matrices lies in a merged weight.

    Attributes:
        offset: its first row here.
        size: its rows here, on this rank.
        total: its rows in the checkpoint.
        start: the checkpoint's row that comes first here.
    """

    offset: int
    size: int
    total: int
    start: int


class Linear(nn.Module):
    """y = x Wᵀ + b, whole on each rank.

    Args:
        in_features: width of x on this rank.
        out_features: width of y on this rank.
        bias: whether there is a b.
        dtype: of the parameters.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return F.linear(x, self.weight, self.bias)

    def slots(self) -> Iterator[Slot]:
        """What ``load`` must be called for."""
        yield "weight", ""
        if self.bias is not None:
            yield "bias", ""

    def load(self, tensor: torch.Tensor, part: str = "", parameter: str = "weight") -> None:
        """Copy one of the checkpoint's tensors, whole as it stands there, into its place.

        Args:
            tensor: on any device, of any floating dtype.
            part: which of the merged matrices; "" if the layer is not merged.
            parameter: ``weight`` or ``bias``.

        Raises:
            ValueError: it has the wrong shape; both are named.
        """
        copy_exactly(getattr(self, parameter), tensor)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class StackedLinear(Linear):
    """Several of the checkpoint's matrices as one product.

    Args:
        in_features: width of the input, whole on each rank.
        parts: where each matrix lies, by name.
        bias: whether the matrices have biases.
        dtype: of the parameters.
    """

    def __init__(self, in_features: int, parts: Mapping[str, Part], bias: bool = False, *, dtype: torch.dtype) -> None:
        super().__init__(in_features, sum(part.size for part in parts.values()), bias, dtype=dtype)
        self.parts = dict(parts)

    def slots(self) -> Iterator[Slot]:
        for parameter, _ in super().slots():
            for part in self.parts:
                yield parameter, part

    def load(self, tensor: torch.Tensor, part: str = "", parameter: str = "weight") -> None:
        place = self.parts[part]
        target: torch.Tensor = getattr(self, parameter)
        expect_shape(tensor, (place.total, *target.shape[1:]))
        target[place.offset : place.offset + place.size].copy_(tensor[place.start : place.start + place.size])


class MergedColumnParallelLinear(StackedLinear):
    """Several matrices of one input as one product; each is split by output rows over the ranks.

    Args:
        in_features: width of the input, whole on each rank.
        sizes: rows of each matrix in the checkpoint, by name, in the order in which they lie here.
        bias: whether the matrices have biases.
        dtype: of the parameters.
        parallel: this rank.
    """

    def __init__(
        self,
        in_features: int,
        sizes: Mapping[str, int],
        bias: bool = False,
        *,
        dtype: torch.dtype,
        parallel: ParallelContext = SINGLE,
    ) -> None:
        parts: dict[str, Part] = {}
        offset = 0
        for name, total in sizes.items():
            size = parallel.share(total, f"the {total} outputs of {name or 'a linear layer'}")
            parts[name] = Part(offset, size, total, parallel.rank * size)
            offset += size
        super().__init__(in_features, parts, bias, dtype=dtype)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One matrix split by output rows over the ranks: each rank has a slice of y."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        dtype: torch.dtype,
        parallel: ParallelContext = SINGLE,
    ) -> None:
        super().__init__(in_features, {"": out_features}, bias, dtype=dtype, parallel=parallel)


class QKVParallelLinear(StackedLinear):
    """Queries, keys and values as one product, split by heads over the ranks.

    Ranks beyond ``num_kv_heads`` share key and value heads: each rank has at least one.

    Args:
        hidden_size: width of the input.
        num_heads: query heads of the whole model.
        num_kv_heads: key and value heads of the whole model.
        head_dim: numbers a head.
        bias: whether the three matrices have biases.
        dtype: of the parameters.
        parallel: this rank.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        *,
        dtype: torch.dtype,
        parallel: ParallelContext = SINGLE,
    ) -> None:
        copies = max(1, parallel.world_size // num_kv_heads)
        kv_rank = ParallelContext(parallel.rank // copies, parallel.world_size // copies)
        heads = parallel.share(num_heads, "num_attention_heads")
        kv_heads = kv_rank.share(num_kv_heads, "num_key_value_heads")
        q, kv = heads * head_dim, kv_heads * head_dim
        parts = {
            "q": Part(0, q, num_heads * head_dim, parallel.rank * q),
            "k": Part(q, kv, num_kv_heads * head_dim, kv_rank.rank * kv),
            "v": Part(q + kv, kv, num_kv_heads * head_dim, kv_rank.rank * kv),
        }
        super().__init__(hidden_size, parts, bias, dtype=dtype)
        self.head_dim = head_dim
        self.heads = [heads, kv_heads, kv_heads]

    @property
    def num_heads(self) -> int:
        """Query heads on this rank."""
        return self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads on this rank."""
        return self.heads[1]

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The product's views by head.

        Args:
            qkv: [num_tokens, out_features], what ``forward`` gave.

        Returns:
            query [num_tokens, num_heads, head_dim]; key and value [num_tokens, num_kv_heads, head_dim].
        """
        query, key, value = torch.split(qkv.view(qkv.shape[0], -1, self.head_dim), self.heads, dim=1)
        return query, key, value


class RowParallelLinear(Linear):
    """One matrix split by input columns over the ranks.

    At world size above 1 ``forward`` gives this rank's summand, the bias counted on rank 0 only; who splits the model
    replaces the layer by one that also sums over the ranks.

    Args:
        in_features: width of the input of the whole model.
        out_features: width of the output.
        bias: whether there is a bias.
        dtype: of the parameters.
        parallel: this rank.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        dtype: torch.dtype,
        parallel: ParallelContext = SINGLE,
    ) -> None:
        share = parallel.share(in_features, f"the {in_features} inputs of a linear layer")
        super().__init__(share, out_features, bias, dtype=dtype)
        self.total_in_features = in_features
        self.rank = parallel.rank

    def load(self, tensor: torch.Tensor, part: str = "", parameter: str = "weight") -> None:
        if parameter == "bias":
            assert self.bias is not None
            copy_exactly(self.bias, tensor)
            if self.rank:
                self.bias.zero_()
            return
        expect_shape(tensor, (self.out_features, self.total_in_features))
        start = self.rank * self.in_features
        self.weight.copy_(tensor[:, start : start + self.in_features])


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An unset parameter on the default device; nothing here is ever trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def expect_shape(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError if ``tensor`` has another shape (both are named), or is quantised: no plain numbers."""
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise ValueError(f"holds {str(tensor.dtype).removeprefix('torch.')}, which is no plain weight")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"has shape {list(tensor.shape)}, but config.json asks for {list(shape)}")


def copy_exactly(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy into ``target``, which must have the same shape."""
    expect_shape(tensor, tuple(target.shape))
    target.copy_(tensor)
