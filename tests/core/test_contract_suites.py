"""The contract suites can fail: each of these is wrong in one way, and the test that is about it says so."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from mini_infer.interfaces import AttentionCapabilities, Schedule, SchedulerView, Wish
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.reference.cache_policy import FreeAtOnce
from mini_infer.reference.scheduler import ComposedScheduler, first_come_first_served
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.testing import tiny_model
from mini_infer.testing.contracts import (
    attention_backend_suite,
    cache_policy_suite,
    model_adapter_suite,
    sampler_suite,
    scheduler_suite,
)
from mini_infer.testing.toy_model import ToyAdapter


def expect_failure(suite: type, test: str) -> None:
    """Run one test of a suite, with all of its parameters, and fail unless it does."""
    function = getattr(suite, test)
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    for values in product(*(mark.args[1] for mark in marks)):
        try:
            function(suite(), *values)
        except pytest.skip.Exception as skipped:
            raise AssertionError(f"{test} was skipped: {skipped}") from skipped
        except (TypeError, AttributeError):
            raise  # the implementation is wrong in some other way
        except (Exception, pytest.fail.Exception):
            return
    raise AssertionError(f"{test} found nothing wrong")


def wrong(cases: dict[str, tuple[Any, str]]) -> Any:
    return pytest.mark.parametrize(("implementation", "test"), cases.values(), ids=cases)


# -- attention --------------------------------------------------------------------------------------------------------


class SeesTheNextSlot(ReferenceAttention):
    def prepare(self, batch: Any) -> None:
        super().prepare(replace(batch, seq_lens=batch.seq_lens + 1))


class TrustsTheHost(ReferenceAttention):
    def prepare(self, batch: Any) -> None:
        super().prepare(replace(batch, seq_lens=torch.tensor(batch.seq_lens_host, dtype=torch.int32)))


class PreparesOnce(ReferenceAttention):
    def prepare(self, batch: Any) -> None:
        if not self._segments or len(batch.query_lens_host) != 6:
            super().prepare(batch)


class NanTimesNothing(ReferenceAttention):
    """Masks scores only: a value that is not a number times a weight of 0 is none either."""

    def _masks(self, blocks: torch.Tensor, lens: torch.Tensor, queries: int) -> Any:
        masks = super()._masks(blocks, lens, queries)
        return replace(masks, hidden=torch.zeros_like(masks.hidden))


class MixesHeads(ReferenceAttention):
    def attend(self, layer: Any, query: torch.Tensor, batch: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().attend(layer, query.flip(1), batch).flip(1)


class AnswersElsewhere(ReferenceAttention):
    def attend(self, layer: Any, query: torch.Tensor, batch: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().attend(layer, query, batch)


class ForgetsTheWindow(ReferenceAttention):
    def __init__(self, spec: Any, device: str, block_size: int) -> None:
        super().__init__(replace(spec, sliding_window=None), device, block_size)


class OneCacheForAll(ReferenceAttention):
    def bind(self, layer: Any) -> None:
        self.first = getattr(self, "first", layer)

    def write_kv(self, layer: Any, query: Any, key: torch.Tensor, value: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().write_kv(self.first, query, key, value, batch)

    def attend(self, layer: Any, query: torch.Tensor, batch: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().attend(self.first, query, batch, out)


class WastesMemory(ReferenceAttention):
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (*super().kv_cache_shape(num_blocks), 2)


class ReadsListsInAGraph(ReferenceAttention):
    capabilities = AttentionCapabilities(("cpu",), ("float32",), ("full",), graphs="decode")

    def attend(self, layer: Any, query: torch.Tensor, batch: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        self.prepare(batch)
        return super().attend(layer, query, replace(batch), out)


class LeavesOutTheScale(ReferenceAttention):
    def attend(self, layer: Any, query: torch.Tensor, batch: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().attend(layer, query / layer.scale, batch, out)


@wrong(
    {
        "sees the next slot": (SeesTheNextSlot, "test_slots_past_the_end_do_not_matter"),
        "trusts the host": (TrustsTheHost, "test_lengths_on_the_host_are_bounds_only"),
        "prepares once": (PreparesOnce, "test_rows_of_every_kind_beside_each_other"),
        "NaN times nothing": (NanTimesNothing, "test_slots_past_the_end_do_not_matter"),
        "mixes heads": (MixesHeads, "test_rows_of_every_kind_beside_each_other"),
        "answers elsewhere": (AnswersElsewhere, "test_attending_apart_from_writing"),
        "forgets the window": (ForgetsTheWindow, "test_rows_of_every_kind_beside_each_other"),
        "one cache for all layers": (OneCacheForAll, "test_rows_of_every_kind_beside_each_other"),
        "wastes memory": (WastesMemory, "test_caches_have_the_layout_that_copies_rely_on"),
        "leaves out the scale": (LeavesOutTheScale, "test_uniform_rows_of_several_tokens"),
    }
)
def test_attention_backends(implementation: Any, test: str) -> None:
    expect_failure(attention_backend_suite(implementation), test)


def test_a_backend_whose_graphs_would_read_the_host() -> None:
    expect_failure(attention_backend_suite(ReadsListsInAGraph), "test_a_captured_step_can_be_replayed")


# -- schedulers -------------------------------------------------------------------------------------------------------


class Changed(ComposedScheduler):
    """First come, first served, its wishes changed by a function."""

    change: Callable[[SchedulerView, list[Wish]], list[Wish]] = staticmethod(lambda view, wishes: wishes)

    def __init__(self) -> None:
        vars(self).update(vars(first_come_first_served()))

    def schedule(self, view: SchedulerView) -> Schedule:
        return Schedule(type(self).change(view, list(super().schedule(view).wishes)))


def changed(change: Callable[[SchedulerView, list[Wish]], list[Wish]]) -> type[Changed]:
    return type("Changed", (Changed,), {"change": staticmethod(change)})


class NamesAStranger(Changed):
    def victim(self, asker: Any, candidates: Sequence[Any]) -> Any:
        return replace(asker)


class TakesTheList(Changed):
    def schedule(self, view: SchedulerView) -> Schedule:
        view.waiting.sort(key=lambda request: request.num_tokens)  # type: ignore[attr-defined]
        return super().schedule(view)


def by_the_clock(view: SchedulerView, wishes: list[Wish]) -> list[Wish]:
    return wishes if time.monotonic() > 0 else []


def greedy_for_drafts(view: SchedulerView, wishes: list[Wish]) -> list[Wish]:
    return [Wish(w.request, w.num_tokens, w.request.num_drafts_offered) for w in wishes]


RULES = "test_wishes_keep_the_rules_and_everybody_ends"
DICE = Random()


@wrong(
    {
        "one token too many": (changed(lambda v, w: [Wish(x.request, x.num_tokens + 1) for x in w]), RULES),
        "twice": (changed(lambda v, w: w + w[:1]), RULES),
        "nothing for somebody": (changed(lambda v, w: [Wish(x.request, 0) for x in w]), RULES),
        "over budget": (changed(greedy_for_drafts), RULES),
        "nobody at all": (changed(lambda v, w: []), RULES),
        "one is forgotten": (changed(lambda v, w: [x for x in w if x.request.tenant != "a"]), RULES),
        "too many run": (
            changed(lambda v, w: [Wish(r, 1) for r in (*v.running, *v.waiting)][: v.token_budget]),
            RULES,
        ),
        "takes the list": (TakesTheList, RULES),
        "another clock": (changed(by_the_clock), RULES),
        "by chance": (changed(lambda v, w: w[: DICE.randint(1, 9)]), "test_the_same_views_give_the_same_wishes"),
        "names a stranger": (NamesAStranger, "test_a_victim_is_one_of_the_candidates"),
    }
)
def test_schedulers(implementation: Any, test: str) -> None:
    expect_failure(scheduler_suite(implementation), test)


# -- cache policies ---------------------------------------------------------------------------------------------------


class Keeps(FreeAtOnce):
    reuses = True

    def keep(self, block: Any) -> bool:
        return True


class KeepsMaybe(Keeps):
    def keep(self, block: Any) -> Any:
        return None


class EvictsTooFew(Keeps):
    def evict(self, tier: str, cached: Any, count: int) -> Any:
        return list(cached)[: count - 1]


class EvictsAnother(Keeps):
    def evict(self, tier: str, cached: Any, count: int) -> Any:
        return [b"another"] * count


class EvictsInPlace(Keeps):
    def evict(self, tier: str, cached: Any, count: int) -> Any:
        return [cached.pop() for _ in range(count)]


class TiersAtRandom(Keeps):
    def tiers(self) -> dict[str, int]:
        return {"host": DICE.randint(1, 10**9)}


class TakesTheDevice(Keeps):
    def tiers(self) -> dict[str, int]:
        return {"device": 5}


class WishesForTheMoon(Keeps):
    def tiers(self) -> dict[str, int]:
        return {"host": 5}

    def wishes(self, view: Any) -> Any:
        from mini_infer.interfaces import Demote

        return [Demote(b"key", "moon")]


class ReadsAClock(Keeps):
    def touch(self, keys: Any) -> None:
        self.at = time.time()


class KnowsEveryBlock(Keeps):
    def gone(self, tier: str, key: bytes) -> None:
        raise KeyError(key)


ANSWERS = "test_every_answer_is_one_that_was_asked_for"


@wrong(
    {
        "keeps maybe": (KeepsMaybe, ANSWERS),
        "evicts too few": (EvictsTooFew, ANSWERS),
        "evicts another": (EvictsAnother, ANSWERS),
        "evicts in place": (EvictsInPlace, ANSWERS),
        "tiers at random": (TiersAtRandom, "test_its_tiers_never_change"),
        "takes the device": (TakesTheDevice, ANSWERS),
        "wishes for the moon": (WishesForTheMoon, ANSWERS),
        "reads a clock": (ReadsAClock, ANSWERS),
        "knows every block": (KnowsEveryBlock, "test_a_block_that_it_never_heard_of_may_go"),
    }
)
def test_cache_policies(implementation: Any, test: str) -> None:
    expect_failure(cache_policy_suite(implementation), test)


# -- samplers ---------------------------------------------------------------------------------------------------------


class ForgetsDrafts(ReferenceSampler):
    def sample(self, logits: torch.Tensor, rows: Any, state: Any) -> torch.Tensor:
        return super().sample(logits, replace(rows, drafts_before=None), state)


class NoiseByRow(ReferenceSampler):
    def sample(self, logits: torch.Tensor, rows: Any, state: Any) -> torch.Tensor:
        positions = rows.positions + torch.arange(len(rows.slots_host))
        return super().sample(logits, replace(rows, positions=positions), state)


class Rounds(ReferenceSampler):
    def sample(self, logits: torch.Tensor, rows: Any, state: Any) -> torch.Tensor:
        return super().sample(logits.bfloat16().float(), rows, state)


class LastOfEquals(ReferenceSampler):
    def sample(self, logits: torch.Tensor, rows: Any, state: Any) -> torch.Tensor:
        tokens = super().sample(logits.clone(), rows, state)
        best = logits.gather(1, tokens[:, None])
        return torch.where(logits == best, torch.arange(logits.shape[1]), -1).amax(1)


class RemembersSlots(ReferenceSampler):
    """Looks a slot's temperature up once."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], float] = {}

    def sample(self, logits: torch.Tensor, rows: Any, state: Any) -> torch.Tensor:
        for slot in rows.slots_host:
            state.temperature[slot] = self.seen.setdefault((id(state), slot), float(state.temperature[slot]))
        return super().sample(logits, rows, state)


class Floats(ReferenceSampler):
    def sample(self, logits: torch.Tensor, rows: Any, state: Any) -> torch.Tensor:
        return super().sample(logits, rows, state).float()


class MasksWithABigNumber(ReferenceSampler):
    def sample(self, logits: torch.Tensor, rows: Any, state: Any) -> torch.Tensor:
        return super().sample(logits.clamp(min=-5.0), rows, state)


class GreedyLastOfEquals(ReferenceSampler):
    def greedy(self, logits: torch.Tensor, invalid_token_ids: Any) -> Any:
        tokens, ok = super().greedy(logits.flip(1), None)
        return logits.shape[1] - 1 - tokens, ok


class GreedyTrustsEveryRow(ReferenceSampler):
    def greedy(self, logits: torch.Tensor, invalid_token_ids: Any) -> Any:
        tokens, ok = super().greedy(logits, invalid_token_ids)
        return tokens, ok | True


class GreedyOfInvalidIds(ReferenceSampler):
    def greedy(self, logits: torch.Tensor, invalid_token_ids: Any) -> Any:
        return super().greedy(logits, None)


GREEDY = "test_greedy_gives_the_lowest_id_of_the_largest_logit"
DRAWS = "test_every_row_draws_what_the_definition_says"


@wrong(
    {
        "forgets drafts": (ForgetsDrafts, DRAWS),
        "forgets drafts of one request": (ForgetsDrafts, "test_many_positions_of_one_request_in_one_step"),
        "noise by row": (NoiseByRow, "test_the_batch_does_not_matter"),
        "rounds": (Rounds, DRAWS),
        "the last of equals": (LastOfEquals, DRAWS),
        "floats": (Floats, DRAWS),
        "greedy, the last of equals": (GreedyLastOfEquals, GREEDY),
        "greedy, no flags": (GreedyTrustsEveryRow, GREEDY),
        "greedy, invalid ids": (GreedyOfInvalidIds, GREEDY),
        "a big number": (MasksWithABigNumber, "test_what_may_not_be_drawn_is_not_drawn"),
    }
)
def test_samplers(implementation: Any, test: str) -> None:
    expect_failure(sampler_suite(implementation), test)


def test_a_sampler_that_remembers_slots() -> None:
    class AfterAnother(sampler_suite(RemembersSlots)):  # type: ignore[misc]
        def state(self, cases: Any, first_slot: int = 0) -> Any:
            made = super().state(cases, first_slot)
            self.draw(self.sampler, cases, made)
            return made

        sampler = RemembersSlots()
        make = staticmethod(lambda: AfterAnother.sampler)

    expect_failure(AfterAnother, "test_nothing_of_a_request_reaches_the_next_one_in_its_slot")


# -- model families ---------------------------------------------------------------------------------------------------


def broken_module(change: Callable[[Any], None]) -> type[ToyAdapter]:
    """The toy, its module changed once it is built."""

    class Broken(ToyAdapter):
        def build(self, config: Any) -> Any:
            module = super().build(config)
            change(module)
            return module

    return Broken


def counts_from_the_batch(module: Any) -> None:
    """Positions in the batch instead of positions in the sequence."""
    inner = module.forward
    module.forward = lambda ids, positions, batch: inner(ids, torch.arange(len(ids)), batch)


def mixes_rows(module: Any) -> None:
    inner = module.forward
    module.forward = lambda ids, positions, batch: inner(ids, positions, batch) * (1 + 0.01 * len(ids))


def opens_the_batch(module: Any) -> None:
    inner = module.forward
    module.forward = lambda ids, positions, batch: inner(ids, positions, batch) * batch.shape.num_rows


def one_dtype(module: Any) -> None:
    module.float()


def declares_other_heads(module: Any) -> None:
    spec = module.layers[0].attn.spec
    module.layers[0].attn.spec = replace(spec, num_kv_heads=spec.num_kv_heads * 2)


class LoadsAnything(ToyAdapter):
    def load(self, module: Any, weights: Any) -> None:
        weights = dict(weights)
        weights["norm.weight"] = weights.get("norm.weight", torch.ones(64))[:64]
        weights.pop("model.layers.0.no_such_part.weight", None)
        super().load(module, weights.items())


class LoadsInOrder(ToyAdapter):
    def load(self, module: Any, weights: Any) -> None:
        weights = list(weights)
        super().load(module, weights)
        with torch.no_grad():
            module.norm.weight.add_(float(len(weights[0][0])))


class SaysNothing(ToyAdapter):
    def load(self, module: Any, weights: Any) -> None:
        from mini_infer.errors import ConfigError

        try:
            super().load(module, weights)
        except ConfigError as error:
            raise ConfigError("a tensor does not fit") from error


CUT = "test_a_prompt_can_be_cut_anywhere"


@wrong(
    {
        "counts from the batch": (broken_module(counts_from_the_batch), CUT),
        "mixes rows": (broken_module(mixes_rows), "test_rows_do_not_notice_each_other"),
        "opens the batch": (broken_module(opens_the_batch), "test_the_batch_is_handed_on_unopened"),
        "one dtype for all": (broken_module(one_dtype), "test_it_runs_in_the_dtype_that_the_core_chose"),
        "declares other heads": (broken_module(declares_other_heads), "test_neither_blocks_nor_their_size_matter"),
        "takes what is missing": (LoadsAnything, "test_each_tensor_that_is_missing_is_named"),
        "takes what has no place": (LoadsAnything, "test_a_tensor_that_has_no_place_is_named"),
        "in order": (LoadsInOrder, "test_every_parameter_is_set_whatever_the_order"),
        "says nothing": (SaysNothing, "test_each_tensor_of_a_wrong_shape_is_named_with_both_shapes"),
    }
)
def test_model_adapters(implementation: Any, test: str) -> None:
    expect_failure(model_adapter_suite(implementation, lambda: tiny_model("toy")), test)
