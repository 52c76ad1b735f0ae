"""What the engine promises whatever a plugin does: no standstill, no fault that spreads, no message that is stuck."""

from collections.abc import Collection, Generator, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import nn

from mini_infer.errors import PluginError
from mini_infer.forward_batch import StepShape
from mini_infer.interfaces import (
    BlockKey,
    BlockRef,
    CachedBlock,
    CachePolicy,
    CacheView,
    Copy,
    Demote,
    Executor,
    Grant,
    LateInputs,
    LogitsProcessor,
    ModelConfig,
    ModelTransform,
    NewRow,
    PendingOutput,
    Promote,
    Proposer,
    RowOutput,
    SamplingParams,
    StepOutput,
    StepPlan,
    StepRunner,
    TokenLogprobs,
)
from mini_infer.messages import EngineRequest, TokenDelta
from mini_infer.plugins import hookimpl
from mini_infer.reference.step_runner import PlainStepRunner
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.testing import assert_idle, make_engine, run_engine

BAD = 7
"""A token that brings what is not a number."""


class Plugin:
    """Answers one hook with what it is given."""

    api_version = 0

    def __init__(self, hook: str, answer: Any) -> None:
        self.name = hook.replace("_", "-")

        def implementation(context: object) -> Any:
            return answer

        setattr(self, hook, hookimpl(implementation))


def request(name: str, prompt: Sequence[int], max_tokens: int = 6, **params: Any) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": max_tokens, **params}
    return EngineRequest(request_id=name, prompt_token_ids=list(prompt), params=SamplingParams(**params))


class BadInput(ModelTransform):
    """The token's embedding is not a number, and so are its keys and values."""

    name: ClassVar[str] = "bad-input"

    def apply(self, module: nn.Module, config: ModelConfig) -> nn.Module:
        with torch.no_grad():
            module.embed_tokens.weight[BAD] = torch.nan
        return module


class BadOutput(ModelTransform):
    """What the model says behind the token is not a number; keys and values are sound."""

    name: ClassVar[str] = "bad-output"

    def apply(self, module: nn.Module, config: ModelConfig) -> nn.Module:
        inner = module.forward
        module.forward = lambda ids, *args: inner(ids, *args).masked_fill((ids == BAD)[:, None], torch.nan)
        return module


# -- messages ---------------------------------------------------------------------------------------------------------


def test_every_message_passes_a_wire() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], logit_bias={4: 1.5}, extensions={"x": {"y": [1]}})
    row = NewRow(0, [1, 2], 2, 0, [5], params, seed=2**64 - 1, choice=1)
    copy = Copy(1, BlockRef("device", 2), BlockRef("host", 3), after_step=4)
    logprobs = TokenLogprobs(1, -0.5, 1, [(1, -0.5)])
    messages = [
        StepPlan(1, [Grant(0, 2, True, [5], [9, 9])], [row], [3], [copy]),
        LateInputs({0: [b"\x01", b""]}, {0: 1}),
        StepOutput(1, [RowOutput([1], True, [logprobs], [logprobs])], [1], [2]),
        EngineRequest(request_id="r", prompt_token_ids=[1], params=params),
        TokenDelta(request_id="r", token_ids=[1], finish_reason="stop"),
    ]
    for message in messages:
        for codec in (msgspec.msgpack, msgspec.json):
            assert codec.decode(codec.encode(message), type=type(message)) == message


# -- copies -----------------------------------------------------------------------------------------------------------


class HeldCopies(Executor):
    """Copies run so many steps late."""

    def __init__(self, inner: Executor, steps: int) -> None:
        self.inner, self.max_in_flight, self.steps = inner, inner.max_in_flight, steps
        self.held: list[list[Copy]] = []

    def start(self, worker: Any) -> None:
        self.inner.start(worker)

    def forward(self, plan: StepPlan) -> None:
        self.held.append(plan.copies)
        due = self.held.pop(0) if len(self.held) > self.steps else []
        self.inner.forward(msgspec.structs.replace(plan, copies=due))

    def sample(self, late: LateInputs) -> PendingOutput:
        return self.inner.sample(late)


class Slow:
    name, api_version = "slow", 0

    @hookimpl(wrapper=True)
    def executor(self, context: object) -> Generator[None, Executor, Executor]:
        return HeldCopies((yield), steps=4)


class ToAndFro(CachePolicy):
    """Moves every block that nobody holds to the host and back, for ever."""

    def __init__(self) -> None:
        self.device: dict[BlockKey, None] = {}
        self.host: dict[BlockKey, None] = {}
        self.num_promoted = 0

    def tiers(self) -> dict[str, int]:
        return {"host": 16}

    def keep(self, block: CachedBlock) -> bool:
        self.device[block.key] = None
        return True

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        return list(cached)[:count]

    def arrived(self, tier: str, key: BlockKey) -> None:
        (self.device if tier == "device" else self.host)[key] = None
        self.num_promoted += tier == "device"

    def gone(self, tier: str, key: BlockKey) -> None:
        (self.device if tier == "device" else self.host).pop(key, None)

    def wishes(self, view: CacheView) -> list[Demote | Promote]:
        return [*(Promote(key, "host") for key in self.host), *(Demote(key, "host") for key in self.device)]


def test_the_engine_asks_for_copies_when_nothing_else_is_to_do() -> None:
    policy = ToAndFro()
    policy.wishes = lambda view: [Demote(key, "host") for key in policy.device]  # type: ignore[method-assign]
    engine = make_engine("toy", plugins=[Slow(), Plugin("cache_policy", policy)], block_size=4).engine
    run_engine(engine, [request("kept", range(20)), request("last", [1], 1)], arrivals=[0, 40])
    assert_idle(engine)
    assert len(policy.host) == 6 and not policy.device


@pytest.mark.parametrize("overlap", [False, True])
def test_a_policy_that_moves_blocks_for_ever_holds_nobody_back(overlap: bool) -> None:
    policy = ToAndFro()
    plugins = [Slow(), Plugin("cache_policy", policy)]
    limits = {"block_size": 2, "num_kv_blocks": 12, "max_num_seqs": 2}
    engine = make_engine("toy", plugins=plugins, overlap=overlap, **limits).engine
    to_come = [(when, request(f"r{i}", [*range(10), i, i + 1])) for i, when in enumerate([0, 0, 9, 15, 30, 30])]
    ended: set[str] = set()
    for step in range(1_000):
        while to_come and to_come[0][0] <= step:
            engine.add_request(to_come.pop(0)[1])
        ended |= {delta.request_id for delta in engine.step() if delta.finish_reason}
        if len(ended) == 6:
            break
    assert len(ended) == 6, "blocks go to and fro, and requests stand still"
    assert policy.num_promoted > 0


# -- rows that fail ---------------------------------------------------------------------------------------------------


class AlwaysBad(Proposer):
    """Drafts the token that the model cannot bear."""

    max_drafts = 2

    def __init__(self) -> None:
        self.widths: list[int] = []

    def width(self, num_decoding: int) -> int:
        self.widths.append(num_decoding)
        return self.max_drafts

    def propose(self, requests: Sequence[Any]) -> list[list[int]]:
        return [[BAD, BAD] for _ in requests]


def test_a_rejected_draft_cannot_fail_its_request() -> None:
    asked = request("r", range(20, 30), 12, logit_bias={BAD: -100})
    transform = Plugin("model_transforms", [BadOutput()])
    plain = run_engine(make_engine("toy", plugins=[transform]).engine, [asked])["r"]
    proposer = AlwaysBad()
    drafted = run_engine(make_engine("toy", plugins=[transform, Plugin("proposer", proposer)]).engine, [asked])["r"]
    assert drafted.finish_reason == "length" and drafted.token_ids == plain.token_ids
    assert proposer.widths == [1] * 11, "the width is asked once a step that has decoding requests"


class Nothing(LogitsProcessor):
    name: ClassVar[str] = "nothing"

    def wants(self, params: SamplingParams) -> bool:
        return "nothing" in params.extensions

    def apply(self, logits: torch.Tensor, rows: Any, mine: list[int]) -> torch.Tensor:
        logits[mine] = -torch.inf
        return logits


def test_a_row_with_nothing_left_to_draw_ends_as_an_error() -> None:
    engine = make_engine("toy", plugins=[Plugin("logits_processors", [Nothing()])]).engine
    outputs = run_engine(engine, [request("masked", [1, 2], extensions={"nothing": True}), request("free", [1, 2])])
    assert outputs["masked"].finish_reason == "error" and not outputs["masked"].token_ids
    assert outputs["free"].finish_reason == "length"


class KeepAll(CachePolicy):
    def keep(self, block: CachedBlock) -> bool:
        return True

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        return list(cached)[:count]


def test_blocks_of_a_row_that_is_not_finite_are_never_matched() -> None:
    """Its first chunk is computed and known before any logits show that it is worth nothing."""
    plugins = [Plugin("model_transforms", [BadInput()]), Plugin("cache_policy", KeepAll())]
    engine = make_engine("toy", plugins=plugins, block_size=4, max_num_batched_tokens=8).engine
    prompt = [BAD, *range(20, 40)]
    first = run_engine(engine, [request("first", prompt)])["first"]
    assert first.finish_reason == "error"
    again = run_engine(engine, [request("again", prompt), request("other", range(20, 41))])
    assert again["again"].finish_reason == "error" and again["again"].num_cached_tokens == 0
    assert again["other"].finish_reason == "length"
    assert run_engine(engine, [request("hit", range(20, 41))])["hit"].num_cached_tokens == 20


class _Failing:
    def __init__(self, pending: PendingOutput, fails: bool) -> None:
        self.pending, self.fails = pending, fails

    def result(self) -> StepOutput:
        output = self.pending.result()
        if self.fails:
            raise ValueError("this request cannot be computed")
        return output


class FailsLate(Executor):
    """A step with a prompt that begins with ``BAD`` fails when it is read, as it does where steps run elsewhere."""

    max_in_flight = 2

    def __init__(self, inner: Executor) -> None:
        self.inner, self.bad, self.plan = inner, set[int](), StepPlan(0, [])

    def start(self, worker: Any) -> None:
        self.inner.start(worker)

    def forward(self, plan: StepPlan) -> None:
        self.plan = plan
        self.bad -= set(plan.released)
        self.bad |= {new.slot for new in plan.new if new.token_ids[0] == BAD}
        self.inner.forward(plan)

    def sample(self, late: LateInputs) -> PendingOutput:
        return _Failing(self.inner.sample(late), any(grant.slot in self.bad for grant in self.plan.grants))


class Late:
    name, api_version = "late", 0

    @hookimpl(wrapper=True)
    def executor(self, context: object) -> Iterator[None]:
        return FailsLate((yield))  # type: ignore[return-value]


def test_steps_in_flight_that_fail_alike_end_the_culprit_alone() -> None:
    engine = make_engine("toy", plugins=[Late()], overlap=True).engine
    asked = [request("bad", [BAD, 1, 2]), request("good", [1, 2, 3]), request("fine", [4, 5])]
    outputs = run_engine(engine, asked)
    assert outputs["bad"].finish_reason == "error" and "cannot be computed" in str(outputs["bad"].error)
    alone = run_engine(make_engine("toy").engine, asked[1:])
    assert {name: outputs[name].token_ids for name in alone} == {name: o.token_ids for name, o in alone.items()}
    assert_idle(engine)


class Raises(CachePolicy):
    """Breaks down where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def keep(self, block: CachedBlock) -> bool:
        if self.where == "keep":
            raise ValueError("lost count")
        return True

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        raise ValueError("lost count")


@pytest.mark.parametrize("where", ["keep", "evict"])
def test_a_policy_that_raises_ends_the_engine_and_is_named(where: str) -> None:
    """It is asked while a step is read; that is no fault of the requests in it."""
    plugins = [Plugin("cache_policy", Raises(where))]
    engine = make_engine("toy", plugins=plugins, block_size=4, num_kv_blocks=6).engine
    with pytest.raises(PluginError, match="cache policy Raises failed: ValueError: lost count"):
        run_engine(engine, [request(f"r{i}", range(i, i + 15)) for i in range(3)])


# -- step runners -----------------------------------------------------------------------------------------------------


def test_a_step_runner_is_told_the_backends_before_the_first_step() -> None:
    class Runner(StepRunner):
        def bind(self, backends: Sequence[Any]) -> None:
            self.kinds = [backend.spec.kind for backend in backends]

        def shape(self, shape: Any) -> Any:
            return shape

        def run(self, forward: Any, batch: Any) -> torch.Tensor:
            return forward(batch)

    runner = Runner()
    make_engine("toy", plugins=[Plugin("step_runner", runner)])
    assert runner.kinds == ["full", "latent"]


def test_only_steps_that_give_logits_are_rehearsed_up_to_the_sampler() -> None:
    """A prompt's rehearsal gives hidden states, which no sampler can draw from."""

    class Rehearsing(PlainStepRunner):
        def rehearsals(self) -> list[StepShape]:
            return [StepShape(1, 8, 0, 0, 8), StepShape.of([1, 1], 1)]

    class Watched(ReferenceSampler):
        def greedy(self, logits: torch.Tensor, invalid_token_ids: torch.Tensor | None) -> Any:
            shapes.append(tuple(logits.shape))
            return super().greedy(logits, invalid_token_ids)

    shapes: list[tuple[int, ...]] = []
    plugins = [Plugin("step_runner", Rehearsing()), Plugin("sampler", Watched())]
    built = make_engine("toy", plugins=plugins, block_size=4)
    assert shapes == [(2, built.facts.vocab_size)]
    assert any(line.startswith("rehearsed 2 steps of up to 2 rows") for line in built.log)
