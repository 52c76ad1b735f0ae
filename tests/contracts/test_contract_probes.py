"""The contract carries what later optimisations need: six probes, each alone and all at once, under random traffic.

Each probe does in at most 60 lines what a real plugin will do (graphs, an engine on other machines, speculation, latent
attention, a host tier, a grammar). Tokens must be those of each request alone, with and without any probe.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import msgspec
import numpy as np
from tests.contracts import (
    bucketed_runner,
    late_executor,
    late_mask,
    scripted_proposer,
    slow_copies,
    tiered_cache,
    two_kv_groups,
)

from mini_infer.interfaces import Observer, StepEvents
from mini_infer.messages import EngineRequest
from mini_infer.plugins import hookimpl
from mini_infer.testing.engines import VOCAB_SIZE, make_engine, tiny_model
from mini_infer.testing.reference import Equality, Reference
from mini_infer.testing.reference_sampler import Draw
from mini_infer.testing.traffic import Traffic, check_traffic

MODEL = "toy"  # one layer of keys and values, one of latent vectors: two KV groups


class MaskedReference(Reference):
    """As the reference, with the late mask where a request asks for it."""

    def _draw(self, request: EngineRequest, row: Any, output: Sequence[int]) -> Draw:
        if late_mask.NAME in request.params.extensions:
            previous = [*request.prompt_token_ids, *output][-1]
            allowed = [late_mask.allows(previous, token) for token in range(len(row))]
            row = np.where(allowed, row, -np.inf)
        return super()._draw(request, row, output)


@cache
def reference() -> MaskedReference:
    return MaskedReference(tiny_model(MODEL))


class Watcher(Observer):
    """Counts what happened, and is the plugin that brings itself."""

    name = "watcher"
    api_version = 0

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def step(self, events: StepEvents) -> None:
        self.seen.update(event.kind for event in events.requests)

    @hookimpl
    def extensions(self, context: object) -> list[Observer]:
        return [self]


def masked(traffic: Traffic, rng: Random) -> Traffic:
    """The same, with every other request under the late mask."""

    def maybe(request: EngineRequest) -> EngineRequest:
        extensions = {late_mask.NAME: True} if rng.randint(0, 1) else {}
        params = msgspec.structs.replace(request.params, extensions=extensions)
        return msgspec.structs.replace(request, params=params)

    return replace(traffic, requests=[maybe(request) for request in traffic.requests])


def run(traffic: Traffic, names: Sequence[str], overlap: bool) -> Counter[str]:
    """Run a traffic with some probes on, prove every token, and say what happened."""
    watcher = Watcher()
    script = {r.request_id: [*r.prompt_token_ids, *expected_tokens(r)] for r in traffic.requests}
    runner, executor, copies = bucketed_runner.Probe(), late_executor.Probe(), slow_copies.Probe()
    proposer, cache_, mask = scripted_proposer.Probe(script, VOCAB_SIZE), tiered_cache.Probe(), late_mask.Probe()
    probes = [runner, executor, copies, proposer, cache_, mask, two_kv_groups]
    enabled = [probe for probe in probes if probe.name in names]
    built = make_engine(MODEL, plugins=[watcher, *enabled], overlap=overlap, **traffic.engine)
    check_traffic(built.engine, traffic, Equality(reference()))
    watcher.seen.update(
        padded=runner.runner.num_padded,
        replayed=runner.runner.num_replayed,
        late=sum(made.num_late for made in executor.executors),
        accepted=proposer.proposer_.num_accepted,
        rejected=proposer.proposer_.num_rejected,
        hits=cache_.policy.num_hits,
        evicted=cache_.policy.num_evicted,
        promoted=sum(made.num_promoted for made in copies.executors),
        demoted=sum(made.num_demoted for made in copies.executors),
        masks=mask.processor.num_masks,
        voided=mask.processor.num_voided,
    )
    assert not mask.processor.live, "the mask was not told that a request ended"
    return watcher.seen
