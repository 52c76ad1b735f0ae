"""priority: the scheduler's contract, tokens as without it, who takes whose blocks, and a bounded wait."""

from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.reference.scheduler import ComposedScheduler, WholePrompts
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.contracts import scheduler_suite
from mini_infer.testing.contracts.scheduler import FakeRequest, World
from mini_infer_plugins.priority.urgency import LeastUrgent, UrgentFirst

AGEING = 2.0


def composed() -> ComposedScheduler:
    return ComposedScheduler(UrgentFirst(AGEING), LeastUrgent(AGEING), WholePrompts())


TestContract = scheduler_suite(composed)


def fake(name: str, arrival: float, priority: int, prompt: int = 4, output: int = 2) -> FakeRequest:
    return FakeRequest(name, arrival, prompt, output, priority, None, None)


def test_the_more_urgent_goes_first_until_the_other_has_aged() -> None:
    early, soon, late = fake("early", 0.0, 1), fake("soon", 1.9, 0), fake("late", 2.1, 0)
    assert UrgentFirst(AGEING).order([early, soon, late], 5.0) == [soon, early, late]


def test_an_endless_stream_of_urgent_requests_delays_one_by_no_more_than_its_ageing() -> None:
    """One slot, two steps a request, an urgent one always waiting: it is overtaken for priority x ageing seconds."""
    world = World.random(0)
    world.budget, world.max_num_seqs = 64, 1
    started, scheduler = world.now, composed()
    patient = fake("patient", world.now, 3)
    world.waiting.append(patient)
    for number in range(400):
        if len(world.waiting) < 3:
            world.waiting.append(fake(f"urgent-{number}", world.now, 0))
        world.step(scheduler)
        if patient.running:
            break
    in_front = 3 * 2 * 0.05  # those that arrived within the ageing and still wait, two steps each
    assert 3 * AGEING - in_front <= world.now - started <= 3 * AGEING + in_front + 0.1


def request(name: str, priority: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = [1 + len(name), *range(2, 17)]
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, priority=priority)


def test_an_urgent_request_takes_the_blocks_of_another_and_no_token_changes() -> None:
    """Blocks for one request. The urgent one arrives second and ends first; the other starts over."""
    ended: dict[str, list[str]] = {}
    tokens: dict[str, dict[str, list[int]]] = {}
    for plugins in ([], ["priority"]):
        engine = make_engine("llama", plugins=plugins, num_kv_blocks=10, block_size=4, max_model_len=40).engine
        order: list[str] = []
        written: dict[str, list[int]] = {"calm": [], "hurry!": []}
        engine.add_request(request("calm", 1))
        for step in range(200):
            if step == 3:
                engine.add_request(request("hurry!", -9))
            for delta in engine.step():
                written[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    order.append(delta.request_id)
            if not engine.has_work() and step > 3:
                break
        ended[str(plugins)], tokens[str(plugins)] = order, written
    assert ended == {"[]": ["calm", "hurry!"], "['priority']": ["hurry!", "calm"]}
    assert tokens["[]"] == tokens["['priority']"]


def test_it_composes_by_settings() -> None:
    built = make_engine("llama", plugins=["chunked-prefill", "priority"], victim="longest-remaining")
    chosen = {choice.name: choice.chosen for choice in built.choices}
    assert (chosen["engine.order"], chosen["engine.chunks"]) == ("priority", "chunked-prefill")
    assert len(run_engine(built.engine, [request("a", 0)])["a"].token_ids) == 20
