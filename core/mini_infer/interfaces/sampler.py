"""Sampler: logits to tokens. Noise and the acceptance of drafts are the core's (``mini_infer.sampling.noise``)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from mini_infer.interfaces.scheduler import RequestView
    from mini_infer.plan import NewRow
    from mini_infer.sampling.state import SamplingState
    from mini_infer.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Positions that draw a token in this step, one row each: (request, position).

    A verified request has one row for its sampled position and one for each draft, one after another.

    Attributes:
        slots: [num_rows] int64, index into ``SamplingState``.
        positions: [num_rows] int64, t: index in prompt + output of the token to be drawn.
        drafts_before: [num_rows, max_drafts] int64, the drafts that precede the position in this step, -1 padded;
            part of the row's history for penalties. None if no row has drafts.
        slots_host: the same as ``slots``, on the host.
        draft_index_host: how many drafts precede each row's position, on the host.
    """

    slots: "torch.Tensor"
    positions: "torch.Tensor"
    drafts_before: "torch.Tensor | None"
    slots_host: list[int]
    draft_index_host: list[int]


class Sampler(ABC):
    """Draws x_t = argmax over v of (l_t(v) / T + g), l after penalties, bias, masks and top-k/top-p/min-p.

    g is ``mini_infer.sampling.noise.gumbel`` of (seed, token id, t, choice); ties go to the lowest id; at T = 0, g = 0.
    Output is one function of (seed, logits): never of the batch, the row or the step.
    """

    @abstractmethod
    def sample(self, logits: "torch.Tensor", rows: SamplingRows, state: "SamplingState") -> "torch.Tensor":
        """Tokens [num_rows] int64 on the logits' device, with no host synchronisation a request.

        Args:
            logits: [num_rows, vocab_size] float32, logits processors already applied; may be overwritten.
            rows: what each row is.
            state: sampling parameters, penalty counts and seeds by slot.
        """

    def greedy(
        self, logits: "torch.Tensor", invalid_token_ids: "torch.Tensor | None"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """What ``sample`` gives for rows at T = 0 without penalties or bias; asked when all rows of a step are so.

        No host synchronisation. Ties go to the lowest id; a row that is not finite gives some id of the vocabulary.

        Args:
            logits: [num_rows, vocab_size] as the model gave them, in its dtype; may be overwritten.
            invalid_token_ids: ``SamplingState.invalid_token_ids``.

        Returns:
            Tokens [num_rows] int64, and [num_rows] bool, whether all of a row's logits are finite.
        """
        from mini_infer.sampling.greedy import greedy

        return greedy(logits, invalid_token_ids)


class LogitsProcessor(ABC):
    """Changes logits on the device, batched, before penalties and sampling."""

    name: ClassVar[str]

    @abstractmethod
    def wants(self, params: "SamplingParams") -> bool:
        """Whether it applies to a request.

        Raises:
            RequestError: ``params.extensions[name]`` is malformed.
        """

    def add(self, row: "NewRow") -> None:
        """A request that wants it enters the workers' state at ``row.slot``. Nothing by default."""
        return

    def remove(self, slot: int) -> None:
        """That request is released. Nothing by default."""
        return

    @abstractmethod
    def apply(self, logits: "torch.Tensor", rows: SamplingRows, mine: list[int]) -> "torch.Tensor":
        """Logits [num_rows, vocab_size] float32 with rows ``mine`` (indices, host) changed; in place is fine."""


class LateLogitsProcessor(ABC):
    """Makes masks on the host from tokens already read, while the forward pass runs. Only its rows wait for it."""

    name: ClassVar[str]

    @abstractmethod
    def wants(self, params: "SamplingParams") -> bool:
        """As ``LogitsProcessor.wants``."""

    @abstractmethod
    def masks(self, request: "LateRequest", drafts: list[int]) -> tuple[list[bytes], int]:
        """Masks for the next position and for each draft kept, and how many drafts it allows.

        Returns:
            (``1 + kept`` masks as ``LateInputs.masks`` has them, ``kept``).
        """

    def released(self, request_id: str) -> None:
        """The request ended; forget it. Nothing by default."""
        return


class LateRequest(ABC):
    """What a late processor sees: every token, exactly."""

    view: "RequestView"
    params: "SamplingParams"
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    vocab_size: int
