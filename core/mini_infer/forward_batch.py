"""What one forward pass gets beside token ids and positions: a packed batch of rows over paged blocks.

All tensors are views into buffers with fixed addresses, made once (device graphs stay valid)::

    rows            row 0 (decode)   row 1 (decode)   row 2 (prompt chunk of 4)      padding
    input_ids       [ t17          ][ t5            ][ t0    t1    t2    t3        ][ 0 ]
    positions       [ 17           ][ 5             ][ 0     1     2     3         ][ 0 ]
    slot_mapping    [ where each token's key and value go                          ][ 0 ]   block 0 is the null block
    cu_seqlens_q    0                1                2                              6     7
    seq_lens        18               6                4                                    1
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from mini_infer.layers.attention import Attention


@dataclass(frozen=True, slots=True)
class StepShape:
    """How large the padded step is. A ``StepRunner`` may enlarge it to a bucket, never shrink it.

    Attributes:
        num_rows: rows, padding counted.
        num_tokens: tokens, padding counted.
        num_decode_rows: leading rows of ``decode_query_len`` tokens each, padding rows counted if they follow.
        decode_query_len: 1 for plain decode, 1 + drafts for verification; 0 if no row is uniform.
        max_query_len: longest row.
        last_only: of each row only the last token's hidden state is wanted, so a model may leave the others out of its
            last layer.
    """

    num_rows: int
    num_tokens: int
    num_decode_rows: int
    decode_query_len: int
    max_query_len: int
    last_only: bool = False

    @classmethod
    def of(cls, query_lens: "Sequence[int]", decode_query_len: int, last_only: bool = False) -> "StepShape":
        """The shape of rows of so many tokens, the first of them uniform unless ``decode_query_len`` is 0."""
        num_decode_rows = next((i for i, n in enumerate(query_lens) if n != decode_query_len), len(query_lens))
        uniform = num_decode_rows == len(query_lens)
        longest = max(query_lens)
        return cls(
            len(query_lens), sum(query_lens), num_decode_rows, decode_query_len, longest, last_only and not uniform
        )

    @property
    def gives(self) -> "Literal['logits', 'last', 'hidden']":
        """What a forward pass of this shape gives.

        ``logits``: every token's, as all rows are uniform and each token draws; ``last``: the hidden state of each
        row's last token; ``hidden``: every token's.
        """
        if self.num_decode_rows == self.num_rows:
            return "logits"
        return "last" if self.last_only else "hidden"


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A packed batch (see the module's drawing).

    Attributes:
        shape: padded sizes.
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        slot_mapping: [num_tokens] int64.
        cu_seqlens_q: [num_rows + 1] int32.
        seq_lens: [num_rows] int32, this step's tokens counted.
        block_table: [num_rows, max_blocks_per_row] int32; unused entries are 0.
        query_lens_host: each row's tokens, on the host (never wrong: drafts that fail shorten ``seq_lens`` only).
        seq_lens_host: upper bounds of ``seq_lens`` on the host; exact unless drafts are accepted on the device.
        around_attention: takes the place of ``backend.attend`` in each ``Attention`` layer, given layer and query,
            while a step runner captures the model in pieces; None in every other step.
    """

    shape: StepShape
    input_ids: "torch.Tensor"
    positions: "torch.Tensor"
    slot_mapping: "torch.Tensor"
    cu_seqlens_q: "torch.Tensor"
    seq_lens: "torch.Tensor"
    block_table: "torch.Tensor"
    query_lens_host: list[int]
    seq_lens_host: list[int]
    around_attention: "Callable[[Attention, torch.Tensor], torch.Tensor] | None" = None

    def last_tokens(self, *values: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
        """Each row's last token of tensors [num_tokens, any]: [num_rows, any]."""
        index = self.cu_seqlens_q[1:] - 1
        return tuple(value.index_select(0, index) for value in values)
