"""Probe: a proposer that peeks at the right tokens and spoils some, so that drafts are accepted and rejected."""

import random
from collections.abc import Mapping, Sequence

from mini_infer.interfaces import DraftRequest, Proposer
from mini_infer.plugins import hookimpl


class ScriptedProposer(Proposer):
    """Drafts in every other step only, so that overlapped steps and drafting ones follow each other."""

    max_drafts = 3

    def __init__(self, script: Mapping[str, Sequence[int]], vocab_size: int) -> None:
        self.script, self.vocab_size = script, vocab_size
        self.num_widths = self.num_accepted = self.num_rejected = 0

    def width(self, num_decoding: int) -> int:
        self.num_widths += 1
        return self.max_drafts if self.num_widths % 2 else 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self.drafts(request.view.request_id, request.token_ids) for request in requests]

    def drafts(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        script, at = self.script[request_id], len(token_ids)
        rng = random.Random(f"{request_id} {at}")
        right = script[at : at + rng.randint(0, self.max_drafts)]
        return [token if rng.random() < 0.7 else rng.randrange(self.vocab_size) for token in right]

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        self.num_accepted += num_accepted
        self.num_rejected += num_drafted - num_accepted


class Probe:
    name = "scripted-proposer"
    api_version = 0

    def __init__(self, script: Mapping[str, Sequence[int]], vocab_size: int) -> None:
        self.made = ScriptedProposer(script, vocab_size)

    @hookimpl
    def proposer(self, context):
        return self.made
