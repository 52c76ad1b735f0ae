"""Token ids to vectors and back.

Contract: both split the vocabulary by rows over the ranks. A tied ``LMHead`` owns no parameter: it reads the weight of
its embedding at each call, so that materialising, moving or replacing that weight needs no second step.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from mini_infer.layers.linear import ColumnParallelLinear, Slot, empty_parameter, expect_shape
from mini_infer.parallel import SINGLE, ParallelContext


class VocabParallelEmbedding(nn.Module):
    """One vector a token id.

    At world size above 1 ``forward`` gives zeros for ids of other ranks; who splits the model sums over the ranks.

    Args:
        vocab_size: ids of the whole model.
        hidden_size: numbers a vector.
        dtype: of the weight.
        parallel: this rank.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, parallel: ParallelContext = SINGLE
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.rows = parallel.share(vocab_size, "vocab_size")
        self.first = parallel.rank * self.rows
        self.weight: torch.Tensor = empty_parameter(self.rows, hidden_size, dtype=dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        if self.rows == self.vocab_size:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.first
        foreign = (local < 0) | (local >= self.rows)
        return F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill(foreign[:, None], 0)

    def slots(self) -> Iterator[Slot]:
        """What ``load`` must be called for."""
        yield "weight", ""

    def load(self, tensor: torch.Tensor, part: str = "", parameter: str = "weight") -> None:
        """Copy the checkpoint's [vocab_size, hidden_size]; ValueError if it has another shape."""
        expect_shape(tensor, (self.vocab_size, self.weight.shape[1]))
        self.weight.copy_(tensor[self.first : self.first + self.rows])

    def extra_repr(self) -> str:
        return f"vocab_size={self.vocab_size}, hidden_size={self.weight.shape[1]}"


class LMHead(ColumnParallelLinear):
    """Hidden states to logits over this rank's part of the vocabulary.

    Args:
        hidden_size: width of the input.
        vocab_size: logits of the whole model.
        tied_to: the embedding whose weight is also this layer's, or None for a weight of its own.
        dtype: of the weight.
        parallel: this rank.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        tied_to: VocabParallelEmbedding | None = None,
        *,
        dtype: torch.dtype,
        parallel: ParallelContext = SINGLE,
    ) -> None:
        super().__init__(hidden_size, vocab_size, dtype=dtype, parallel=parallel)
        self._embedding = (tied_to,)  # in a tuple, so that it is no submodule a second time
        if tied_to is not None:
            del self.weight

    @property
    def tied(self) -> bool:
        """Whether the weight is the embedding's."""
        return self._embedding[0] is not None

    @property
    def matrix(self) -> torch.Tensor:
        """[vocab_size of this rank, hidden_size], wherever it is kept."""
        embedding = self._embedding[0]
        return self.weight if embedding is None else embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size of this rank]."""
        return F.linear(x, self.matrix)

    def slots(self) -> Iterator[Slot]:
        if not self.tied:
            yield from super().slots()
