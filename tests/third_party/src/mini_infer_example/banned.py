"""Banned tokens: ``SamplingParams.extensions["ban-tokens"]`` is a list of ids that the request never draws."""

from typing import ClassVar

import torch

from mini_infer.errors import RequestError
from mini_infer.interfaces import LogitsProcessor, NewRow, SamplingParams, SamplingRows


class BanTokens(LogitsProcessor):
    """Sets the logits of banned tokens to minus infinity. Ids beyond the vocabulary are never drawn anyway."""

    name: ClassVar[str] = "ban-tokens"

    def __init__(self) -> None:
        self._banned: dict[int, list[int]] = {}  # slot -> token ids

    def wants(self, params: SamplingParams) -> bool:
        banned = params.extensions.get(self.name, [])
        if not isinstance(banned, list) or not all(type(token) is int and token >= 0 for token in banned):
            raise RequestError(f"{self.name} must be a list of token ids, integers >= 0", param=self.name)
        return bool(banned)

    def add(self, row: NewRow) -> None:
        self._banned[row.slot] = row.params.extensions[self.name]

    def remove(self, slot: int) -> None:
        del self._banned[slot]

    def apply(self, logits: torch.Tensor, rows: SamplingRows, mine: list[int]) -> torch.Tensor:
        num_logits = logits.shape[1]
        pairs = [(row, t) for row in mine for t in self._banned[rows.slots_host[row]] if t < num_logits]
        if pairs:
            row_ids, token_ids = torch.tensor(pairs, device=logits.device).unbind(1)
            logits[row_ids, token_ids] = float("-inf")
        return logits
