"""What goes wrong for one request stays with it: the others get their tokens, and nothing is held at the end."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.core.fake_plugins import answering, plugin

from mini_infer.errors import EngineError, PluginError, RequestError
from mini_infer.interfaces import Executor, LateLogitsProcessor, LogitsProcessor, SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.plugins import hookimpl
from mini_infer.testing.engines import EngineOutput, assert_idle, make_engine, run_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of

VOCAB_SIZE = 256
MODEL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "head_dim": 8}
TIGHT: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 16}
BROKEN = 77
"""A token whose embedding is NaN in the model ``broken``."""

Outputs = dict[str, EngineOutput]
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("toy", **MODEL)


def request(index: int, **params: Any) -> EngineRequest:
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(0, BROKEN, (3 + 3 * (index % 4),), generator=generator).tolist()
    given = {"temperature": index % 2, "max_tokens": 12, "logit_bias": {BROKEN: -100.0}, **params}
    return EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, params=SamplingParams(**given), seed=index)


def check_others(
    model: Path, requests: list[EngineRequest], outputs: dict[str, EngineOutput], failed: set[str]
) -> None:
    """The failed ended in error, and kept what they had; the others got what they get alone."""
    ended = {name for name, output in outputs.items() if output.finish_reason == "error"}
    assert ended == failed, f"{ended} ended in error, not {failed}: {[outputs[name].error for name in ended ^ failed]}"
    assert all(outputs[name].error and "\n" not in outputs[name].error for name in failed)
    Equality(reference_of(model)).check([r for r in requests if r.request_id not in failed], outputs)


# -- a plugin raises ---------------------------------------------------------------------------------------------------


class Moody(LogitsProcessor):
    """Raises for the requests that say where: ``{"moody": "apply"}``; ``times`` times in all."""

    name = "moody"

    def __init__(self, times: int = 10**6) -> None:
        self.times = times
        self.places: dict[int, str] = {}

    def wants(self, params: SamplingParams) -> bool:
        if params.extensions.get(self.name) == "wants":
            raise KeyError("no such mood")
        if params.extensions.get(self.name) == "refused":
            raise RequestError("moody must be kind", param=self.name)
        return self.name in params.extensions

    def _raise(self, slot: int, place: str) -> None:
        if self.places.get(slot) == place and self.times:
            self.times -= 1
            raise RuntimeError(f"moody in\n{place}")

    def add(self, row: Any) -> None:
        self.places[row.slot] = row.params.extensions[self.name]
        self._raise(row.slot, "add")

    def remove(self, slot: int) -> None:
        place = self.places.pop(slot)
        if place == "remove":
            raise RuntimeError("moody in remove")

    def apply(self, logits: torch.Tensor, rows: Any, mine: list[int]) -> torch.Tensor:
        for row in mine:
            self._raise(rows.slots_host[row], "apply")
        return logits


@both_loops
@pytest.mark.parametrize("place", ["add", "apply"])
def test_who_makes_a_processor_raise_ends_alone(model: Path, place: str, overlap: bool) -> None:
    requests = [request(i, **({"extensions": {"moody": place}} if i == 3 else {})) for i in range(7)]
    engine = make_engine(model, plugins=[answering("logits_processors", [Moody()])], overlap=overlap, **TIGHT).engine
    outputs = run_engine(engine, requests, [0, 0, 0, 2, 2, 6, 9])
    check_others(model, requests, outputs, {"r3"})
    assert outputs["r3"].error == f"RuntimeError: moody in {place}"
    assert_idle(engine)


@both_loops
@pytest.mark.parametrize("place", ["add", "apply", "remove"])
def test_a_fault_that_passes_costs_nobody_a_token(model: Path, place: str, overlap: bool) -> None:
    requests = [request(i, **({"extensions": {"moody": place}} if i == 3 else {})) for i in range(7)]
    engine = make_engine(model, plugins=[answering("logits_processors", [Moody(1)])], overlap=overlap, **TIGHT).engine
    outputs = run_engine(engine, requests, [0, 0, 0, 2, 2, 6, 9])
    check_others(model, requests, outputs, set())
    assert_idle(engine)


@both_loops
def test_when_every_request_fails_the_engine_lives(model: Path, overlap: bool) -> None:
    requests = [request(i, extensions={"moody": "apply"}) for i in range(6)]
    engine = make_engine(model, plugins=[answering("logits_processors", [Moody()])], overlap=overlap, **TIGHT).engine
    check_others(model, requests, run_engine(engine, requests), {r.request_id for r in requests})
    check_others(model, [request(9)], run_engine(engine, [request(9)]), set())
    assert_idle(engine)


@pytest.mark.parametrize("late", [False, True], ids=["on the device", "late"])
@pytest.mark.parametrize("place", ["wants", "refused"])
def test_a_request_that_a_processor_cannot_take_never_enters(model: Path, place: str, late: bool) -> None:
    class Late(LateLogitsProcessor):
        name = "moody"
        wants = Moody.wants

        def masks(self, request: Any, drafts: list[int]) -> tuple[list[bytes], int]:
            return [b""] * (len(drafts) + 1), len(drafts)

    engine = make_engine(model, plugins=[answering("logits_processors", [Late() if late else Moody()])], **TIGHT).engine
    engine.add_request(request(0))
    with pytest.raises(RequestError, match="moody"):
        engine.add_request(request(1, extensions={"moody": place}))
    check_others(model, [request(2)], run_engine_with(engine, {"r0": EngineOutput("r0")}, [request(2)]), set())
    assert_idle(engine)


def run_engine_with(
    engine: Any, known: dict[str, EngineOutput], requests: list[EngineRequest]
) -> dict[str, EngineOutput]:
    """As ``run_engine``, on an engine that has requests already."""
    outputs = dict(known)
    for spec in requests:
        engine.add_request(spec)
        outputs[spec.request_id] = EngineOutput(spec.request_id)
    while engine.has_work():
        for delta in engine.step():
            outputs[delta.request_id].take(delta)
    return outputs


class Failing(Executor):
    """Raises in the ``at``-th call of one of its halves."""

    def __init__(self, inner: Executor, half: str, at: int, error: BaseException) -> None:
        self.inner, self.half, self.error = inner, half, error
        self.max_in_flight = inner.max_in_flight
        self.calls = iter(range(10**6))
        self.at = at

    def _raise(self, half: str) -> None:
        if half == self.half and next(self.calls) == self.at:
            raise self.error

    def start(self, worker: Any) -> None:
        self.inner.start(worker)

    def forward(self, plan: Any) -> None:
        self._raise("before forward")
        self.inner.forward(plan)
        self._raise("after forward")

    def sample(self, late: Any) -> Any:
        pending = self.inner.sample(late)
        self._raise("sample")
        return Answer(self, pending)


class Answer:
    def __init__(self, executor: Failing, pending: Any) -> None:
        self.executor, self.pending = executor, pending

    def result(self) -> Any:
        self.executor._raise("result")
        return self.pending.result()


def failing(half: str, at: int, error: BaseException) -> Any:
    def implementation(context: Any) -> Iterator[None]:
        inner = yield
        return Failing(inner, half, at, error)

    return plugin("failing", implementation=hookimpl(wrapper=True, specname="executor")(implementation))


HALVES = ["before forward", "after forward", "sample", "result"]


@both_loops
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("at", [0, 3, 8])
def test_a_step_that_raises_once_changes_nothing(model: Path, half: str, at: int, overlap: bool) -> None:
    requests = [request(i, logprobs=1, prompt_logprobs=1 if i % 3 else None) for i in range(6)]
    engine = make_engine(model, plugins=[failing(half, at, ValueError("once"))], overlap=overlap, **TIGHT).engine
    outputs = run_engine(engine, requests, [0, 0, 1, 3, 4, 9])
    check_others(model, requests, outputs, set())
    assert_idle(engine)


@both_loops
@pytest.mark.parametrize("half", HALVES)
def test_an_interrupted_step_can_be_gone_on_from(model: Path, half: str, overlap: bool) -> None:
    requests = [request(i, frequency_penalty=1.0, top_k=5) for i in range(6)]
    engine = make_engine(model, plugins=[failing(half, 4, KeyboardInterrupt())], overlap=overlap, **TIGHT).engine
    outputs = {spec.request_id: EngineOutput(spec.request_id) for spec in requests}
    for spec in requests:
        engine.add_request(spec)
    interrupted = 0
    while engine.has_work():
        try:
            for delta in engine.step():
                outputs[delta.request_id].take(delta)
        except KeyboardInterrupt:
            interrupted += 1
            engine.abort("r1")
    assert interrupted == 1 and outputs["r1"].finish_reason == "abort"
    check_others(model, requests, outputs, set())
    assert_idle(engine)


@both_loops
def test_a_lost_device_ends_the_engine(model: Path, overlap: bool) -> None:
    engine = make_engine(model, plugins=[failing("result", 2, EngineError("gone"))], overlap=overlap, **TIGHT).engine
    with pytest.raises(EngineError, match="gone"):
        run_engine(engine, [request(0)])


def test_a_policy_that_raises_ends_the_engine(model: Path) -> None:
    from mini_infer.reference.scheduler import ComposedScheduler, first_come_first_served

    scheduler: ComposedScheduler = first_come_first_served()
    scheduler.schedule = lambda view: 1 // 0  # type: ignore[assignment, method-assign, return-value]
    engine = make_engine(model, plugins=[answering("scheduler", scheduler)], **TIGHT).engine
    with pytest.raises((EngineError, PluginError), match="division"):
        run_engine(engine, [request(0)])


def test_a_suspect_gets_the_blocks_of_those_before_it(model: Path) -> None:
    """Alone, the long prompt gets a token more than beside the other, and so needs a block that the other holds."""
    long = EngineRequest(request_id="long", prompt_token_ids=list(range(30)), params=SamplingParams(max_tokens=2))
    requests = [request(3, max_tokens=4), long]
    limits = {"block_size": 4, "num_kv_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 17}
    engine = make_engine(model, plugins=[failing("after forward", 1, ValueError("once"))], **limits).engine
    check_others(model, requests, run_engine(engine, requests, [0, 1]), set())
    assert_idle(engine)


# -- numbers that are none ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"][BROKEN] = float("nan")
    save_file(weights, folder / "model.safetensors")
    return folder


@both_loops
def test_a_row_without_finite_logits_ends_alone(broken: Path, overlap: bool) -> None:
    requests = [request(i) for i in range(8)]
    failed = {"r2", "r5"}
    for index in (2, 5):  # in the first chunk of a prompt that takes several steps, and in a short one
        prompt = [*requests[index].prompt_token_ids, BROKEN, *range(20 if index == 2 else 0)]
        requests[index] = EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, params=requests[index].params)
    engine = make_engine(broken, overlap=overlap, **TIGHT).engine
    outputs = run_engine(engine, requests, [0, 0, 0, 2, 2, 3, 9, 9])
    check_others(broken, requests, outputs, failed)
    assert all("not finite" in str(outputs[name].error) and not outputs[name].token_ids for name in failed)
    assert_idle(engine)


def test_a_row_that_turns_bad_later_keeps_what_it_had(model: Path) -> None:
    class Spoiling(LogitsProcessor):
        name = "spoil"

        def wants(self, params: SamplingParams) -> bool:
            return self.name in params.extensions

        def apply(self, logits: torch.Tensor, rows: Any, mine: list[int]) -> torch.Tensor:
            for row in mine:
                if int(rows.positions[row]) >= 9:
                    logits[row] = -torch.inf
            return logits

    requests = [request(0), request(5, extensions={"spoil": True}), request(2)]
    engine = make_engine(model, plugins=[answering("logits_processors", [Spoiling()])], **TIGHT).engine
    outputs = run_engine(engine, requests)
    check_others(model, requests, outputs, {"r5"})
    kept = outputs["r5"].token_ids
    assert kept == reference_of(model).generate(requests[1]).token_ids[: len(kept)] and len(kept) == 3
    assert_idle(engine)


# -- clients that leave ------------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("step", range(16))
def test_abort_at_every_stage(model: Path, step: int, overlap: bool) -> None:
    """Waiting, in the midst of its prompt, decoding, preempted, just finished; the last one before it arrives."""
    requests = [request(i, max_tokens=14) for i in range(6)]
    requests[1] = EngineRequest(request_id="r1", prompt_token_ids=list(range(30)), params=SamplingParams(max_tokens=4))
    engine = make_engine(model, overlap=overlap, **TIGHT).engine
    aborts = {"r1": step, "r2": step, "r4": step + 3}
    outputs = run_engine(engine, requests, [0, 1, 1, 2, 4, 30], aborts)
    check_others(model, requests, outputs, set())
    assert_idle(engine)


def test_abort_of_the_unknown_and_of_all(model: Path) -> None:
    engine = make_engine(model, **TIGHT).engine
    engine.abort("nobody")
    for index in range(6):
        engine.add_request(request(index))
    engine.step()
    for index in range(6):
        engine.abort(f"r{index}")
        engine.abort(f"r{index}")
    ended = [delta.request_id for delta in engine.step() if delta.finish_reason == "abort"]
    assert sorted(ended) == [f"r{index}" for index in range(6)]
    assert not engine.has_work()
    assert_idle(engine)


# -- requests that never fit, ids in use -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda r: {"prompt_token_ids": []}, "prompt"),
        (lambda r: {"prompt_token_ids": list(range(60))}, "prompt"),
        (lambda r: {"params": SamplingParams(max_tokens=None)}, "prompt"),
        (lambda r: {"params": SamplingParams(max_tokens=48)}, "prompt"),
        (lambda r: {"request_id": "r0"}, "request_id"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_no_trace(
    model: Path, change: Callable[[EngineRequest], dict[str, Any]], param: str
) -> None:
    import msgspec

    engine = make_engine(model, **TIGHT).engine
    engine.add_request(request(0))
    with pytest.raises(RequestError) as refused:
        engine.add_request(msgspec.structs.replace(request(1), **change(request(1))))
    assert refused.value.param == param
    outputs = run_engine_with(engine, {"r0": EngineOutput("r0")}, [request(2)])
    check_others(model, [request(0), request(2)], outputs, set())
    assert_idle(engine)


# -- preemption with a step in flight ----------------------------------------------------------------------------------


def test_prompt_logprobs_survive_a_preemption_that_overtakes_their_step(model: Path) -> None:
    """The first token ends the request, and is read after the request was made to start over."""
    first = request(0, max_tokens=20)
    late = request(3, max_tokens=8, prompt_logprobs=1, logprobs=1)
    stop = reference_of(model).generate(late).token_ids[0]
    late = request(3, max_tokens=8, prompt_logprobs=1, logprobs=1, stop_token_ids=[stop])
    for num_blocks in range(6, 9):
        engine = make_engine(model, overlap=True, **{**TIGHT, "num_kv_blocks": num_blocks}).engine
        for arrival in range(12):
            check_others(model, [first, late], run_engine(engine, [first, late], [0, arrival]), set())
