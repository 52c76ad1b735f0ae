"""Chunked prefill: the scheduler's contract, tokens as without it, and what a step runs."""

from random import Random

from mini_infer.interfaces import SamplingParams, Wish
from mini_infer.messages import EngineRequest
from mini_infer.reference.scheduler import ArrivalOrder, ComposedScheduler, LastArrived
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.contracts import scheduler_suite
from mini_infer.testing.contracts.scheduler import FakeRequest, World
from mini_infer_plugins.chunked_prefill.chunks import ChunksBesideDecodes


def composed(most: int = 5) -> ComposedScheduler:
    return ComposedScheduler(ArrivalOrder(), LastArrived(), ChunksBesideDecodes(most))


TestContract = scheduler_suite(composed)


def request(name: str, num_tokens: int, max_tokens: int = 12) -> EngineRequest:
    rng = Random(name)
    prompt = [rng.randrange(1, 100) for _ in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)


def steps_of(most: int, decoding: str = "abcd", long: int = 40, **more: int) -> tuple[list[int], dict[str, list[int]]]:
    """Tokens run in each step, and each request's tokens: some decode when a long prompt arrives."""
    settings = {"chunked-prefill": {"max_tokens_beside_decodes": most, **more}}
    engine = make_engine("llama", plugins=["chunked-prefill"], plugin=settings, max_model_len=512).engine
    sizes: list[int] = []
    execute = engine._execute
    engine._execute = lambda plan, requests: (sizes.append(plan.num_tokens), execute(plan, requests))[1]  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {name: [] for name in (*decoding, "z")}
    for name in decoding:
        engine.add_request(request(name, 3, 20))
    for step in range(200):
        if step == 2:
            engine.add_request(request("z", long))
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
        if not engine.has_work():
            break
    return sizes, tokens


def test_a_prompt_is_cut_beside_decodes_and_changes_no_token() -> None:
    sizes, tokens = steps_of(20)
    # At first nobody decodes and all four prompts run at once. z: 16 tokens a step beside the others' four.
    assert sizes[:7] == [12, 4, 20, 20, 12, 5, 5]
    whole_sizes, whole_tokens = steps_of(1000)
    assert whole_sizes[:4] == [12, 4, 44, 5]
    assert tokens == whole_tokens


def test_chunks_shrink_by_tiles_as_a_prompt_s_history_grows() -> None:
    """252 tokens' room. With a history of 252 the price of 256 buys 113, of 376 it buys 89: nearest is a tile less."""
    sizes, tokens = steps_of(256, long=480, equal_history=200)
    assert sizes[:6] == [12, 4, 4 + 252, 4 + 124, 4 + 104, 5]
    assert tokens == steps_of(1000, long=480)[1]


def test_decodes_are_at_most_a_quarter_of_a_step_with_prompts() -> None:
    assert steps_of(4)[0][:6] == [12, 4, 16, 16, 16, 8]


def test_while_few_decode_a_prompt_is_whole() -> None:
    assert steps_of(12, "abc")[0][:4] == [9, 3, 43, 4]


def test_alone_a_prompt_is_whole() -> None:
    engine = make_engine("llama", plugins=["chunked-prefill"], max_model_len=128).engine
    assert len(run_engine(engine, [request("a", 100, 1)])["a"].token_ids) == 1


TestContractWithTarget = scheduler_suite(
    lambda: ComposedScheduler(
        ArrivalOrder(), LastArrived(), ChunksBesideDecodes(5, itl_target=0.02, long_prompt=20, max_long_tokens=3)
    ),
    num_traffics=2,
)


def fake(name: str, prompt: int, output: int = 1000) -> FakeRequest:
    return FakeRequest(name, 0.0, prompt, output, 0, None, None)


def test_steps_keep_the_target_once_their_cost_is_known() -> None:
    """A device of 4 ms a step, 20 us a token and 3 ns a token and token of history, and prompts of many lengths."""
    world = World.random(3)
    world.budget, world.max_num_seqs, world.now = 8192, 64, 0.0
    target = 0.012
    scheduler = ComposedScheduler(ArrivalOrder(), LastArrived(), ChunksBesideDecodes(8192, itl_target=target))
    world.running = [fake(str(number), 8) for number in range(8)]
    for request in world.running:
        request.running, request.num_computed, request.num_output_tokens = True, 8, 1
    late: list[float] = []
    for step in range(400):
        if step % 20 == 0:
            world.waiting.append(fake(f"p{step}", world.rng.randint(300, 6000), 3))
        schedule = scheduler.schedule(world.view())
        seconds = 0.004
        for wish in schedule.wishes:
            history = wish.request.num_tokens - wish.request.num_tokens_to_do
            seconds += wish.num_tokens * (20e-6 + 3e-9 * history)
            world.grant(Wish(wish.request, wish.num_tokens))
        world.now += seconds
        if step >= 100:
            late.append(seconds / target)
    assert max(late) < 1.05
    assert sum(share > 0.9 for share in late) > 30  # and no chunk is smaller than it need be


def test_short_prompts_slip_past_long_ones() -> None:
    chunks = ChunksBesideDecodes(512, long_prompt=100, max_long_tokens=40)
    world = World.random(0)
    world.budget, world.max_num_seqs = 64, 8
    world.waiting = [fake("long", 300), fake("longer", 400), fake("short", 10)]
    wishes = ComposedScheduler(ArrivalOrder(), LastArrived(), chunks).schedule(world.view()).wishes
    assert [(wish.request.request_id, wish.num_tokens) for wish in wishes] == [("long", 40), ("short", 10)]
