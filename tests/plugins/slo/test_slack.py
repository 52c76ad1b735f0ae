"""slo: the scheduler's contract, tokens as without it, more goodput than by arrival, and nobody left behind."""

from functools import partial
from itertools import count

from mini_infer.interfaces import OrderPolicy, SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.reference.scheduler import ArrivalOrder, ComposedScheduler, LastArrived, WholePrompts
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.contracts import scheduler_suite
from mini_infer.testing.contracts.scheduler import FakeRequest, World
from mini_infer_plugins.slo.slack import SlackChunks, SlackOrder
from mini_infer_plugins.slo.targets import Classes, Goodput, Targets

CLASSES = Classes(Targets(ttft=2.0, itl=0.2), {-1: Targets(ttft=0.3, itl=0.1)})


def slack_order(patience: float = 30.0) -> SlackOrder:
    return SlackOrder(CLASSES, patience, Goodput(CLASSES))


def composed() -> ComposedScheduler:
    return ComposedScheduler(slack_order(), LastArrived(), SlackChunks(CLASSES, 8))


TestContract = scheduler_suite(composed)


def fake(name: str, arrival: float, priority: int = 0, prompt: int = 8, deadline: float | None = None) -> FakeRequest:
    return FakeRequest(name, arrival, prompt, 4, priority, deadline, None)


def num_in_time(order: OrderPolicy) -> int:
    """Of two bursts of 40 patient requests and 10 interactive ones each, those whose first token was in time."""
    world = World.random(0)
    world.budget, world.max_num_seqs = 64, 4
    scheduler = ComposedScheduler(order, LastArrived(), WholePrompts())
    requests: list[FakeRequest] = []
    first_token: dict[str, float] = {}
    for step in range(200):
        if step in (0, 60):
            burst = [fake(f"{step}-{number}", world.now, -1 if number % 5 == 4 else 0) for number in range(50)]
            requests += burst
            world.waiting += burst
        world.step(scheduler)
        for request in requests:
            if request.num_output_tokens:
                first_token.setdefault(request.request_id, world.now)
    return sum(first_token[request.request_id] <= CLASSES.due(request) for request in requests)


def test_more_requests_keep_their_targets_than_by_arrival() -> None:
    assert num_in_time(slack_order()) > num_in_time(ArrivalOrder())


def test_least_slack_first_and_what_is_lost_last() -> None:
    calm, interactive, lost = fake("calm", 10.0), fake("interactive", 10.4, -1), fake("lost", 10.0, -1)
    by_deadline, ancient = fake("deadline", 10.4, deadline=10.6), fake("ancient", 1.0)
    order = slack_order(patience=5.0).order([ancient, calm, lost, interactive, by_deadline], 10.5)
    assert order == [ancient, by_deadline, interactive, calm, lost]


def test_nobody_waits_for_ever() -> None:
    """One slot, an endless stream of requests that can keep their target: the lost one's turn comes by patience."""
    world = World.random(0)
    world.budget, world.max_num_seqs = 64, 1
    scheduler = ComposedScheduler(slack_order(patience=3.0), LastArrived(), WholePrompts())
    lost = fake("lost", world.now - 0.5, -1)
    world.waiting.append(lost)
    started = world.now
    while not lost.running:
        if len(world.waiting) < 3:
            world.waiting.append(fake(f"fresh-{len(world.log)}", world.now))
        world.step(scheduler)
        assert world.now - started <= 3.0 + 4 * 0.05 + 0.05  # patience, then what runs ends


def test_goodput_counts_those_that_kept_every_target_and_no_token_changes() -> None:
    requests = [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=list(range(1, 10 + number)),
            params=SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
            priority=-(number % 2),
        )
        for number in range(6)
    ]
    tokens = []
    table = {"ttft_ms": 1e6, "itl_ms": 1e6, "classes": {"-1": {"ttft_ms": 1e-3, "itl_ms": 1e6}}}
    for plugins, tables in ([], {}), (["slo"], {"slo": table}):
        clock = partial(next, count(0.0, 1e-3))
        built = make_engine(
            "llama", plugins=plugins, plugin=tables, num_kv_blocks=12, block_size=4, max_model_len=40, clock=clock
        )
        tokens.append({name: answer.token_ids for name, answer in run_engine(built.engine, requests).items()})
    assert tokens[0] == tokens[1]
    (goodput,) = [observer for observer in built.engine._log._observers if isinstance(observer, Goodput)]
    assert (goodput.num_good, goodput.num_ended) == (3, 6)
