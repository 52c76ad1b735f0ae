"""The contract carries what later optimisations need: six probes, each alone and all at once, under random traffic.

Each probe does in at most 60 lines what a real plugin will do (graphs, an engine elsewhere, speculation, latent caches,
a host tier, a grammar), over the public contract alone. Whatever is on, a request gets the tokens that it gets alone
without any of them, and those of a reference that shares no code with the engine; blocks add up after every step.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts import (
    bucketed_runner,
    chaos,
    faulty_executor,
    late_executor,
    late_mask,
    scripted_proposer,
    tiered_cache,
    two_kv_groups,
)

from mini_infer.interfaces import Observer, StepEvents
from mini_infer.messages import EngineRequest
from mini_infer.plugins import hookimpl
from mini_infer.testing.contracts.engines import VOCAB_SIZE, small_model, with_shared_prompts
from mini_infer.testing.engines import EngineOutput, assert_idle, make_engine, run_engine
from mini_infer.testing.reference import Equality, Reference
from mini_infer.testing.reference_sampler import Draw
from mini_infer.testing.slow_copies import SlowCopies
from mini_infer.testing.traffic import MAX_MODEL_LEN, Traffic, check_traffic, random_traffic

NUM_TRAFFICS = 250 if os.environ.get("MINI_INFER_TEST_FULL") == "1" else 25
ALL = (
    "bucketed-runner",
    "late-executor",
    "slow-copies",
    "scripted-proposer",
    "tiered-cache",
    "late-mask",
    "two-groups",
)

# Which probes are on, and what must have happened for the test to mean anything.
ALONE = {
    "padded replays": (("bucketed-runner", "two-groups"), ("padded", "replayed")),
    "late answers": (("late-executor",), ("late",)),
    "drafts": (("scripted-proposer",), ("accepted", "rejected")),
    "two KV groups": (("two-groups",), ()),
    "tiers": (("tiered-cache", "slow-copies"), ("hits", "evicted", "demoted", "promoted")),
    "late masks": (("late-mask",), ("masks",)),
}


class MaskedReference(Reference):
    """As the reference, with the late mask where a request asks for it."""

    def _draw(self, request: EngineRequest, row: Any, output: Sequence[int]) -> Draw:
        if late_mask.NAME in request.params.extensions:
            previous = [*request.prompt_token_ids, *output][-1]
            row = np.where([late_mask.allows(previous, token) for token in range(VOCAB_SIZE)], row, -np.inf)
        return super()._draw(request, row, output)


@cache
def reference() -> Reference:
    return MaskedReference(small_model())


@cache
def alone(request: bytes) -> EngineOutput:
    """What a request gets in a plain engine by itself, with no probe but the mask."""
    given = msgspec.msgpack.decode(request, type=EngineRequest)
    return run_engine(plain_engine(), [given])[given.request_id]


@cache
def plain_engine() -> Any:
    return make_engine(small_model(), plugins=[late_mask.Probe()], max_model_len=MAX_MODEL_LEN, max_num_seqs=1).engine


class Watcher(Observer):
    """Counts what happened to requests; it is also the plugin that brings it."""

    name = "watcher"
    api_version = 0

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def step(self, events: StepEvents) -> None:
        self.seen.update(event.kind for event in events.requests)

    @hookimpl
    def extensions(self, context: object) -> list[Observer]:
        return [self]


class Probes:
    """One of each, and what they saw."""

    def __init__(self, names: Sequence[str], script: dict[str, list[int]], rng: Random) -> None:
        self.runner = bucketed_runner.Probe()
        self.executor = late_executor.Probe()
        self.faulty = faulty_executor.Probe(rng)
        self.copies = SlowCopies()
        self.proposer = scripted_proposer.Probe(script, VOCAB_SIZE)
        self.cache = tiered_cache.Probe()
        self.mask = late_mask.Probe()
        self.chaos = chaos.Probe(rng)
        self.watcher = Watcher()
        made = (self.runner, self.faulty, self.executor, self.copies, self.proposer, self.cache, self.mask, self.chaos)
        self.enabled = [self.watcher, *(probe for probe in (*made, two_kv_groups) if probe.name in names)]

    def seen(self) -> Counter[str]:
        return self.watcher.seen + Counter(
            padded=self.runner.made.num_padded,
            replayed=self.runner.made.num_replayed,
            late=self.executor.made.num_late if self.executor in self.enabled else 0,
            faults=self.faulty.made.num_faults if self.faulty in self.enabled else 0,
            demoted=self.copies.num_demoted,
            promoted=self.copies.num_promoted,
            accepted=self.proposer.made.num_accepted,
            rejected=self.proposer.made.num_rejected,
            hits=self.cache.made.num_hits,
            evicted=self.cache.made.num_evicted,
            masks=self.mask.made.num_masks,
            voided=self.mask.made.num_voided,
        )


def probe_traffic(rng: Random, *, masks: bool) -> Traffic:
    """Random traffic in which many prompts begin alike, and about half of the requests are under the mask if asked."""

    def masked(request: EngineRequest) -> EngineRequest:
        extensions = {late_mask.NAME: True} if masks and rng.randint(0, 1) else {}
        params = msgspec.structs.replace(request.params, extensions=extensions)
        return msgspec.structs.replace(request, params=params)

    traffic = with_shared_prompts(random_traffic(rng, VOCAB_SIZE), rng)
    return replace(traffic, requests=[masked(request) for request in traffic.requests])


def check_what_ended_well(engine: Any, traffic: Traffic) -> dict[str, EngineOutput]:
    """Run a traffic in which some requests end as errors; the others, and as far as they went these too, are right."""
    outputs = run_engine(engine, traffic.requests, traffic.arrivals, traffic.aborts)
    assert_idle(engine)
    for request in traffic.requests:
        if outputs[request.request_id].finish_reason != "error":
            reference().check(request, outputs[request.request_id])
    return outputs


def run(traffic: Traffic, names: Sequence[str], overlap: bool, rng: Random) -> Counter[str]:
    """Run a traffic with these probes on, prove every token and block, and say what happened."""
    outputs_alone = {r.request_id: alone(msgspec.msgpack.encode(r)) for r in traffic.requests}
    script = {r.request_id: [*r.prompt_token_ids, *outputs_alone[r.request_id].token_ids] for r in traffic.requests}
    probes = Probes(names, script, rng)
    engine = make_engine(small_model(), plugins=probes.enabled, overlap=overlap, **traffic.engine).engine
    equality = Equality(reference())
    faulty = "faulty-executor" in names
    outputs = check_what_ended_well(engine, traffic) if faulty else check_traffic(engine, traffic, equality)
    for request_id, output in outputs.items():
        same = outputs_alone[request_id].token_ids[: len(output.token_ids)] == output.token_ids
        assert same or equality.num_cuts, f"{request_id} got {output.token_ids}, alone {outputs_alone[request_id]}"
    assert not probes.mask.made.live, "the mask was not told that a request ended"
    return probes.seen() + Counter(output.finish_reason for output in outputs.values())


def run_many(names: Sequence[str], num_traffics: int) -> Counter[str]:
    """Run random traffics in both loops; what happened in all of them."""
    total: Counter[str] = Counter()

    @settings(max_examples=num_traffics)
    @given(seed=st.integers(0, 2**32 - 1), overlap=st.booleans())
    def each(seed: int, overlap: bool) -> None:
        rng = Random(seed)
        has_two_in_flight = "late-executor" in names
        traffic = probe_traffic(rng, masks="late-mask" in names)
        total.update(run(traffic, names, overlap or (has_two_in_flight and bool(rng.randint(0, 3))), rng))

    each()
    return total


@pytest.mark.parametrize("probe", ALONE)
def test_alone(probe: str) -> None:
    names, must_happen = ALONE[probe]
    seen = run_many(names, NUM_TRAFFICS // 2)
    missing = [what for what in (*must_happen, "preempted") if not seen[what]]
    assert not missing, f"never happened: {missing}; seen: {dict(seen)}"


def test_all_on_at_once() -> None:
    seen = run_many(ALL, NUM_TRAFFICS)
    must_happen = {what for _, happens in ALONE.values() for what in happens} | {"preempted", "aborted", "voided"}
    missing = [what for what in must_happen if not seen[what]]
    assert not missing, f"never happened: {missing}; seen: {dict(seen)}"


@pytest.mark.parametrize(
    "probe", [bucketed_runner, late_executor, scripted_proposer, two_kv_groups, tiered_cache, late_mask]
)
def test_each_is_small(probe: Any) -> None:
    """What takes more than a page is not carried by the contract but by its user."""
    assert len(Path(probe.__file__).read_text().splitlines()) <= 60


def test_policies_that_act_at_random() -> None:
    """The core owns correctness: no scheduler and no cache policy that keeps the rules can change a token."""
    seen = run_many([name for name in (*ALL, "chaos") if name != "tiered-cache"], NUM_TRAFFICS)
    missing = [what for what in ("preempted", "demoted", "promoted", "accepted", "late") if not seen[what]]
    assert not missing, f"never happened: {missing}; seen: {dict(seen)}"


def test_steps_that_raise_at_random() -> None:
    """Three steps in flight, any of which may fail: what is lost is run again, and nobody else notices."""
    seen = run_many([*ALL, "faulty-executor"], NUM_TRAFFICS)
    missing = [what for what in ("faults", "length", "accepted", "promoted") if not seen[what]]
    assert not missing, f"never happened: {missing}; seen: {dict(seen)}"
    assert seen["error"] < seen["length"], "a fault that comes and goes may end few requests"
