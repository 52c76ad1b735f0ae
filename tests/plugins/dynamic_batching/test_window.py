"""dynamic-batching: the scheduler's contract, who is held for how long, and tokens as without it."""

from functools import partial
from itertools import count
from random import Random

import pytest

from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.reference.scheduler import first_come_first_served
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.contracts import scheduler_suite
from mini_infer.testing.contracts.scheduler import FakeRequest, World
from mini_infer_plugins.dynamic_batching.window import Window, WindowScheduler

WINDOW = Window(busy=0.2, idle=0.0, margin=0.1, urgent_priority=-1)


def windowed(window: Window = WINDOW) -> WindowScheduler:
    return WindowScheduler(first_come_first_served(), window)


TestContract = scheduler_suite(windowed)
TestContractIdle = scheduler_suite(lambda: windowed(Window(0.2, 0.2, 0.1, -1)), num_traffics=4)


def fake(name: str, arrival: float, prompt: int = 8, priority: int = 0, deadline: float | None = None) -> FakeRequest:
    return FakeRequest(name, arrival, prompt, 50, priority, deadline, None)


def busy_world() -> World:
    """One request decodes; a step takes 50 ms."""
    world = World.random(0)
    world.budget, world.max_num_seqs = 64, 16
    running = fake("running", world.now, 1)
    running.running, running.num_computed, running.num_output_tokens = True, 1, 1
    world.running.append(running)
    return world


def steps_until_admitted(world: World, scheduler: WindowScheduler, request: FakeRequest) -> int:
    for step in range(100):
        if request.running:
            return step
        world.step(scheduler)
    raise AssertionError(f"{request.request_id} was never admitted")


@pytest.mark.parametrize(("more", "steps"), [({}, 5), ({"priority": -1}, 1), ({"deadline": 0.2}, 3)])
def test_a_request_is_held_for_the_window_unless_it_is_urgent(more: dict[str, float], steps: int) -> None:
    world = busy_world()
    deadline = world.now + more["deadline"] if "deadline" in more else None
    held = fake("held", world.now, priority=int(more.get("priority", 0)), deadline=deadline)
    world.waiting.append(held)
    assert abs(steps_until_admitted(world, windowed(), held) - steps) <= 1  # a step's end may fall on the window's


def test_like_lengths_run_together() -> None:
    world, scheduler = busy_world(), windowed()
    for number in range(4):
        world.waiting.append(fake(f"short-{number}", world.now, 8 + number))
        world.step(scheduler)
    late = fake("long", world.now, 40)
    world.waiting.append(late)
    while not all(request.running for request in (*world.running, late)) or world.waiting:
        world.step(scheduler)
    with_prompts = [sorted(name for name, tokens, _ in step if tokens > 1) for step in world.log]
    assert [names for names in with_prompts if names] == [[f"short-{n}" for n in range(4)], ["long"]]


def test_an_idle_device_gets_work_at_once_and_a_full_group_does_not_wait() -> None:
    world = World.random(0)
    world.budget, world.max_num_seqs = 64, 4
    world.waiting.append(fake("first", world.now))
    assert len(windowed().schedule(world.view()).wishes) == 1
    world = busy_world()
    world.max_num_seqs = 4
    world.waiting += [fake(str(number), world.now) for number in range(3)]
    assert len(windowed().schedule(world.view()).wishes) == 4


def test_an_idle_window_ends_by_the_clock() -> None:
    world, scheduler = World.random(0), windowed(Window(0.2, 0.3, 0.1, -1))
    world.budget, world.max_num_seqs = 64, 4
    world.waiting.append(fake("only", world.now))
    schedule = scheduler.schedule(world.view())
    assert not schedule.wishes and schedule.wake_at == world.now + 0.3


def test_tokens_are_those_without_it() -> None:
    rng = Random(5)
    requests = [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[rng.randrange(1, 100) for _ in range(rng.randint(1, 20))],
            params=SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
        for number in range(8)
    ]
    tokens = []
    for plugins in ([], ["dynamic-batching", "chunked-prefill", "priority"]):
        clock = partial(next, count(0.0, 1e-3))
        engine = make_engine("llama", plugins=plugins, num_kv_blocks=12, block_size=4, max_model_len=40, clock=clock)
        done = run_engine(engine.engine, requests)
        tokens.append({name: answer.token_ids for name, answer in done.items()})
    assert tokens[0] == tokens[1]
