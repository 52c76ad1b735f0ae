"""Faults planted in the engine, one at a time: each must make some traffic fail that passes without it.

The traffics here are fixed, so that the time is spent on the faults; that random ones find them too is a matter of
numbers. A fault is a function that changes the engine through ``monkeypatch``; the list at the end says which
traffics look for which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from tests.core.fake_plugins import plugin

from mini_infer.engine import Engine, kv_manager
from mini_infer.engine.block_pool import BlockPool
from mini_infer.engine.kv_manager import KVManager
from mini_infer.engine.prefix_index import PrefixIndex, block_key
from mini_infer.engine.request import Request
from mini_infer.errors import EngineError, PluginError
from mini_infer.interfaces import BatchLimits, CachePolicy, Proposer, SamplingRows, StepRunner, StepShape
from mini_infer.messages import EngineRequest
from mini_infer.plugins import hookimpl
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.sampling.state import SamplingState
from mini_infer.sampling_params import SamplingParams
from mini_infer.testing.engines import make_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.toy_model import ToyAdapter
from mini_infer.testing.traffic import Traffic, check_traffic
from mini_infer.worker import Worker, step_inputs, worker
from mini_infer.worker.answer import PendingStep
from mini_infer.worker.batch_state import BatchState
from mini_infer.worker.step_inputs import StepInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

VOCAB_SIZE = 256
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": VOCAB_SIZE},
    "toy": {"hidden_size": 32, "head_dim": 8, "vocab_size": VOCAB_SIZE, "layer_kinds": ["sliding", "full"]},
}
MonkeyPatch = pytest.MonkeyPatch


# -- plugins that bring more of the engine into play ------------------------------------------------------------------


class PowersOfTwo(StepRunner):
    """Pads rows to a power of two."""

    def limits(self, limits: BatchLimits) -> BatchLimits:
        return replace(limits, max_num_rows=2 * limits.max_num_rows, max_num_tokens=2 * limits.max_num_tokens + 8)

    def shape(self, shape: StepShape) -> StepShape:
        rows = 1 << shape.num_rows.bit_length()
        return replace(shape, num_rows=rows, num_tokens=shape.num_tokens + rows - shape.num_rows)

    def run(self, forward: Any, batch: Any) -> torch.Tensor:
        return forward(batch)


class KeepAll(CachePolicy):
    """Keeps every block for as long as there is room."""

    def keep(self, block: Any) -> bool:
        return True

    def evict(self, tier: str, cached: Collection[bytes], count: int) -> Sequence[bytes]:
        return list(cached)[:count]


class Peeking(Proposer):
    """Drafts what the reference would say, every third token spoilt."""

    max_drafts = 3

    def __init__(self, script: dict[str, list[int]]) -> None:
        self._script = script

    def propose(self, requests: Sequence[Any]) -> list[list[int]]:
        drafts = []
        for request in requests:
            at = len(request.token_ids)
            ahead = self._script[request.view.request_id][at : at + self.max_drafts]
            drafts.append([(token + (at + i) % 3 // 2) % VOCAB_SIZE for i, token in enumerate(ahead)])
        return drafts


def answering(hook: str, answer: Any) -> Any:
    def implementation(context: Any) -> Any:
        return answer

    return plugin(hook.replace("_", "-"), implementation=hookimpl(specname=hook)(implementation))


# -- the traffics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A fixed traffic on a fixed engine."""

    traffic: Callable[[], Traffic]
    model: str = "llama"
    hook: str = ""  # of the plugin, if there is one
    overlap: bool = False

    def run(self) -> None:
        traffic = self.traffic()
        model = tiny_model(self.model, **MODELS[self.model])
        engine = make_engine(
            model, plugins=self._plugins(model, traffic), overlap=self.overlap, **traffic.engine
        ).engine
        check_traffic(engine, traffic, Equality(reference_of(model)))

    def _plugins(self, model: Any, traffic: Traffic) -> list[Any]:
        if not self.hook:
            return []
        if self.hook == "proposer":
            reference = reference_of(model)
            script = {r.request_id: r.prompt_token_ids + reference.generate(r).token_ids for r in traffic.requests}
            return [answering("proposer", Peeking(script))]
        return [answering(self.hook, {"step_runner": PowersOfTwo, "cache_policy": KeepAll}[self.hook]())]


@cache
def crowd() -> Traffic:
    """Choices, seeds and penalties, all in a pool that makes some start over, in slots used again and again."""
    requests = []
    for index in range(9):
        rng = Random(index)
        request = EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 20)),
            params=SamplingParams(
                temperature=[0.0, 1.0, 0.7][index % 3],
                top_k=[0, 0, 3, 0][index % 4],
                max_tokens=rng.randint(6, 20),
                min_tokens=[0, 4][index % 2],
                repetition_penalty=[1.0, 0.5, 2.0][index % 3],
                presence_penalty=[0.0, 1.5][index % 2],
                frequency_penalty=[0.0, 0.0, 1.0, 2.0][index % 4],
                logit_bias={5: 4.0} if index == 4 else {},
                stop_token_ids=tuple(rng.choices(range(VOCAB_SIZE), k=12)) if index % 3 == 1 else (),
                logprobs=2 if index % 4 == 0 else None,
                prompt_logprobs=1 if index == 6 else None,
            ),
            seed=index // 2,
            choice=index % 2,
        )
        requests.append(request)
    engine = {
        "block_size": 4,
        "num_kv_blocks": 14,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "max_model_len": 48,
    }
    return Traffic(requests, [0, 0, 0, 0, 1, 2, 5, 9, 14], {}, engine)


@cache
def family() -> Traffic:
    """Prompts that begin alike: whole blocks, known to the last token, or going on where an earlier answer ended."""
    stem = Random(0).choices(range(VOCAB_SIZE), k=16)
    prompts = [stem, [*stem, 1], [*stem, 1, 2, 3, 4], stem[4:8] + stem[4:], stem, [*stem, 1, 2, 3, 4], [*stem, 7]]
    params = SamplingParams(temperature=0, max_tokens=8)
    requests = [EngineRequest(request_id=f"f{i}", prompt_token_ids=p, params=params) for i, p in enumerate(prompts)]
    requests[5] = msgspec.structs.replace(requests[5], params=msgspec.structs.replace(params, prompt_logprobs=1))
    history = stem + reference_of(tiny_model("llama", **MODELS["llama"])).generate(requests[0]).token_ids
    requests.append(EngineRequest(request_id="f7", prompt_token_ids=[*history, 3], params=params))
    engine = {
        "block_size": 4,
        "num_kv_blocks": 12,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
    }
    return Traffic(requests, [0, 1, 6, 10, 14, 18, 22, 9], {}, engine)


@cache
def stops() -> Traffic:
    """Answers that meet a stop token just before, at and behind ``min_tokens``."""
    request = EngineRequest(
        request_id="s", prompt_token_ids=[3, 1, 4], params=SamplingParams(temperature=1.0, max_tokens=12), seed=5
    )
    stop = reference_of(tiny_model("llama", **MODELS["llama"])).generate(request).token_ids[4]
    requests = [
        msgspec.structs.replace(
            request,
            request_id=f"s{least}",
            params=msgspec.structs.replace(request.params, min_tokens=least, stop_token_ids=(stop,)),
        )
        for least in (0, 4, 5, 6)
    ]
    return Traffic(requests, [0, 0, 1, 2], {}, {"max_num_seqs": 2, "max_model_len": 48})


@cache
def echo() -> Traffic:
    """Penalties that ask for repetition, so that a token makes itself more likely at once; hardly room for two."""
    requests = [
        EngineRequest(
            request_id=f"e{index}",
            prompt_token_ids=Random(index).choices(range(VOCAB_SIZE), k=12),
            params=SamplingParams(
                temperature=index / 2,
                max_tokens=20,
                frequency_penalty=[-1.0, 0.0, 0.0][index],
                presence_penalty=[-2.0, 0.0, -1.0][index],
                repetition_penalty=[0.7, 0.5, 0.5][index],
            ),
        )
        for index in range(3)
    ]
    engine = {"block_size": 4, "num_kv_blocks": 14, "max_num_seqs": 3, "max_model_len": 48}
    return Traffic(requests, [0, 1, 2], {}, engine)


CASES = {
    "crowd": Case(crowd),
    "overlap": Case(crowd, overlap=True),
    "padded": Case(crowd, hook="step_runner"),
    "drafts": Case(crowd, hook="proposer"),
    "echo": Case(echo, hook="proposer"),
    "cached": Case(family, hook="cache_policy"),
    "sliding": Case(crowd, model="toy"),
    "stops": Case(stops),
    "stops, overlap": Case(stops, overlap=True),
}


# -- the faults --------------------------------------------------------------------------------------------------------


def slot_off_by_one(patch: MonkeyPatch) -> None:
    def fill(_: Any, self: StepInputs, layout: Any) -> None:
        self._slot_mapping[: layout.shape.num_tokens].add_(1)

    after(patch, StepInputs, "_fill", fill)


def block_table_not_extended(patch: MonkeyPatch) -> None:
    around(patch, BatchState, "extend", lambda call, self, new, grants: call(self, new, []))


def padding_in_a_real_block(patch: MonkeyPatch) -> None:
    after(patch, BatchState, "extend", lambda _, self, *rest: self.block_table[self.padding_slot].fill_(1))


def block_freed_in_flight(patch: MonkeyPatch) -> None:
    around(
        patch, BlockPool, "release", lambda call, self, block, **named: call(self, block, **{**named, "after_step": 0})
    )


def block_given_twice(patch: MonkeyPatch) -> None:
    def allocate(call: Any, self: BlockPool, count: int) -> list[int]:
        blocks = call(self, count)
        return [blocks[0]] * count if blocks else []

    around(patch, BlockPool, "allocate", allocate)


def block_leaked(patch: MonkeyPatch) -> None:
    def release(call: Any, self: KVManager, request: Request) -> None:
        request.block_ids = request.block_ids[1:]
        call(self, request)

    around(patch, KVManager, "release", release)


def rejected_drafts_kept(patch: MonkeyPatch) -> None:
    def advance(_: Any, self: Any, layout: Any, drawing: Any, emitted: Any, num_accepted: Any) -> None:
        for row, span in enumerate(drawing if num_accepted is not None else ()):
            self._state.num_computed[span.grant.slot] += span.num_drafts - num_accepted[row]

    after(patch, Worker, "_advance", advance)


def drafts_accepted_unseen(patch: MonkeyPatch) -> None:
    def accept(tokens: torch.Tensor, drafts: list[list[int]]) -> Any:
        first, changed = 0, tokens.clone()
        for draft in drafts:
            if draft:
                changed[first] = draft[0]
            first += 1 + len(draft)
        return real(changed, drafts)

    real = worker.accept
    patch.setattr(worker, "accept", accept)


def penalties_without_drafts(patch: MonkeyPatch) -> None:
    rows_changed(patch, lambda rows, _: replace(rows, drafts_before=None))


def seed_by_step(patch: MonkeyPatch) -> None:
    rows_changed(patch, lambda rows, step: replace(rows, positions=torch.full_like(rows.positions, step)))


def choice_ignored(patch: MonkeyPatch) -> None:
    after(patch, SamplingState, "add", lambda _, self, *rows: self.choices.zero_())


def sampling_parameters_not_cleared(patch: MonkeyPatch) -> None:
    patch.setattr(SamplingState, "remove", lambda self, *slots: None)


def counts_not_cleared(patch: MonkeyPatch) -> None:
    def remove(call: Any, self: SamplingState, *slots: int) -> None:
        counts = None if self.output_counts is None else self.output_counts.clone()
        call(self, *slots)
        if self.output_counts is not None and counts is not None:
            self.output_counts.copy_(counts)

    around(patch, SamplingState, "remove", remove)


def output_is_prompt_after_preemption(patch: MonkeyPatch) -> None:
    def add(call: Any, self: SamplingState, *rows: Any) -> None:
        call(self, *(msgspec.structs.replace(row, num_prompt_tokens=len(row.token_ids)) for row in rows))

    around(patch, SamplingState, "add", add)


def prompt_forgotten_after_preemption(patch: MonkeyPatch) -> None:
    def shortened(row: Any) -> Any:
        if len(row.token_ids) == row.num_prompt_tokens:
            return row
        return msgspec.structs.replace(row, token_ids=row.token_ids[row.num_prompt_tokens :], num_prompt_tokens=0)

    def add(call: Any, self: SamplingState, *rows: Any) -> None:
        call(self, *map(shortened, rows))

    around(patch, SamplingState, "add", add)


def position_off_after_preemption(patch: MonkeyPatch) -> None:
    def enter(_: Any, self: BatchState, new: Any) -> None:
        for row in new:
            self.num_computed[row.slot] += len(row.token_ids) > row.num_prompt_tokens

    after(patch, BatchState, "enter", enter)


def last_token_of_another_row(patch: MonkeyPatch) -> None:
    def lay_out(call: Any, *args: Any) -> Any:
        host = call(*args)
        return replace(host, last_token_slots=host.last_token_slots[::-1])

    around(patch, step_inputs, "lay_out", lay_out)


def tokens_of_another_row(patch: MonkeyPatch) -> None:
    """The answers of the last two rows change places."""

    def rows_of(call: Any, self: Any, *args: Any) -> Any:
        rows = call(self, *args)
        return [*rows[:-2], *rows[-2:][::-1]]

    around(patch, PendingStep, "_rows", rows_of)


def answer_to_the_slots_next_request(patch: MonkeyPatch) -> None:
    """A step's answers go to whoever has the slots by the time they are read."""

    def update(call: Any, self: Engine, plan: Any, requests: list[Request], output: Any) -> None:
        now = {request.slot: request for request in self._table.running}
        call(self, plan, [now.get(grant.slot, r) for grant, r in zip(plan.grants, requests, strict=True)], output)

    around(patch, Engine, "_update", update)


def stop_seen_one_token_late(patch: MonkeyPatch) -> None:
    def append(call: Any, self: Request, token_ids: list[int]) -> Any:
        spec, stop_ids = self.spec, set(self.spec.params.stop_token_ids)
        seen = stop_ids.intersection(self.token_ids[self.num_prompt_tokens :])
        late = tuple(range(VOCAB_SIZE)) if seen else ()
        self.spec = msgspec.structs.replace(spec, params=msgspec.structs.replace(spec.params, stop_token_ids=late))
        try:
            return call(self, token_ids)
        finally:
            self.spec = spec

    around(patch, Request, "append", append)


def min_tokens_off_by_one(patch: MonkeyPatch) -> None:
    def append(call: Any, self: Request, token_ids: list[int]) -> Any:
        spec = self.spec
        params = msgspec.structs.replace(spec.params, min_tokens=spec.params.min_tokens + 1)
        self.spec = msgspec.structs.replace(spec, params=params)
        try:
            return call(self, token_ids)
        finally:
            self.spec = spec

    around(patch, Request, "append", append)


def logprobs_of_changed_logits(patch: MonkeyPatch) -> None:
    def keep_raw(self: Any, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        return logits

    patch.setattr(Worker, "_keep_raw", keep_raw)


def prompt_logprobs_one_off(patch: MonkeyPatch) -> None:
    def prompt_logprobs(call: Any, self: Any, span: Any, output: Any) -> Any:
        return call(self, replace(span, first_position=span.first_position + 1), output)

    around(patch, Worker, "_prompt_logprobs", prompt_logprobs)


def causal_mask_one_short(patch: MonkeyPatch) -> None:
    def masks(call: Any, self: Any, blocks: Any, lens: torch.Tensor, queries: int) -> Any:
        return call(self, blocks, lens - 1, queries)

    around(patch, ReferenceAttention, "_masks", masks)


def sliding_window_one_wide(patch: MonkeyPatch) -> None:
    def build(call: Any, self: Any, config: Any) -> Any:
        return call(self, replace(config, hf={**config.hf, "sliding_window": config.hf["sliding_window"] + 1}))

    around(patch, ToyAdapter, "build", build)


def hit_to_the_last_token(patch: MonkeyPatch) -> None:
    def matchable_keys(self: KVManager, request: Request) -> list[bytes]:
        num_blocks = len(request.token_ids) // self.block_size
        self._extend_keys(request, num_blocks)
        return request.block_keys[:num_blocks]

    patch.setattr(KVManager, "_matchable_keys", matchable_keys)


def hit_hides_prompt_logprobs(patch: MonkeyPatch) -> None:
    def matchable_keys(self: KVManager, request: Request) -> list[bytes]:
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        self._extend_keys(request, num_blocks)
        return request.block_keys[:num_blocks]

    patch.setattr(KVManager, "_matchable_keys", matchable_keys)


def block_matched_anywhere(patch: MonkeyPatch) -> None:
    """A block's key forgets what comes before it."""
    patch.setattr(kv_manager, "block_key", lambda parent, tokens, extra: block_key(b"", tokens, extra))


def block_cached_before_it_is_full(patch: MonkeyPatch) -> None:
    """A block counts as known as soon as it has one token."""

    def commit(call: Any, self: KVManager, request: Request) -> None:
        computed = request.num_computed_tokens
        request.num_computed_tokens = min(computed + self.block_size - 1, len(request.block_ids) * self.block_size)
        call(self, request)
        request.num_computed_tokens = computed

    around(patch, KVManager, "commit", commit)


def stale_block_matched(patch: MonkeyPatch) -> None:
    """What was evicted stays in the index."""
    patch.setattr(KVManager, "_forget", lambda self, block: None)
    patch.setattr(PrefixIndex, "remove", lambda self, tier, block_id: None)


# -- planting ----------------------------------------------------------------------------------------------------------


def around(patch: MonkeyPatch, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """``replacement(original, *args)`` runs in place of a method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: replacement(original, *args, **named))


def after(patch: MonkeyPatch, owner: type, name: str, more: Callable[..., Any]) -> None:
    """``more(result, *args)`` runs behind a method."""

    def both(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        more(result, *args, **named)
        return result

    around(patch, owner, name, both)


def rows_changed(patch: MonkeyPatch, change: Callable[[SamplingRows, int], SamplingRows]) -> None:
    """``change(rows, number of the step)`` takes the place of what is about to draw."""
    steps = iter(range(10**6))

    def sampling_rows(call: Any, *args: Any) -> Any:
        index, rows, num_drafts = call(*args)
        return index, change(rows, next(steps)), num_drafts

    around(patch, StepInputs, "sampling_rows", sampling_rows)


FAULTS: dict[Callable[[MonkeyPatch], None], str] = {
    slot_off_by_one: "crowd",
    block_table_not_extended: "crowd",
    padding_in_a_real_block: "padded",
    block_freed_in_flight: "overlap",
    block_given_twice: "crowd",
    block_leaked: "crowd",
    rejected_drafts_kept: "drafts",
    drafts_accepted_unseen: "drafts",
    penalties_without_drafts: "echo",
    seed_by_step: "crowd",
    choice_ignored: "crowd",
    sampling_parameters_not_cleared: "crowd",
    counts_not_cleared: "crowd",
    output_is_prompt_after_preemption: "echo",
    prompt_forgotten_after_preemption: "echo",
    position_off_after_preemption: "crowd",
    last_token_of_another_row: "crowd",
    tokens_of_another_row: "crowd",
    answer_to_the_slots_next_request: "stops, overlap",
    stop_seen_one_token_late: "stops",
    min_tokens_off_by_one: "stops",
    logprobs_of_changed_logits: "crowd",
    prompt_logprobs_one_off: "crowd",
    causal_mask_one_short: "crowd",
    sliding_window_one_wide: "sliding",
    hit_to_the_last_token: "cached",
    hit_hides_prompt_logprobs: "cached",
    block_matched_anywhere: "cached",
    block_cached_before_it_is_full: "cached",
    stale_block_matched: "cached",
}


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_each_traffic_passes(case: str) -> None:
    CASES[case].run()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found(fault: Callable[[MonkeyPatch], None], monkeypatch: MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, EngineError, PluginError)):
        CASES[FAULTS[fault]].run()
