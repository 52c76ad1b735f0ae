"""``shortest-prompt-first``: its order, and that nobody starves."""

from types import SimpleNamespace
from typing import Any

from mini_infer_example.shortest_first import ShortestFirst

from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.testing import make_engine


def ordered(ageing: float, *requests: tuple[int, float], now: float = 10.0) -> list[int]:
    """Where requests of (tokens to do, arrival) went."""
    waiting: list[Any] = [SimpleNamespace(num_tokens_to_do=tokens, arrival=arrival) for tokens, arrival in requests]
    return [waiting.index(request) for request in ShortestFirst(ageing).order(waiting, now)]


def test_shorter_prompts_come_first_and_of_two_alike_the_older() -> None:
    assert ordered(1e-9, (30, 0.0), (10, 1.0), (20, 2.0), (10, 3.0)) == [1, 3, 2, 0]


def test_waiting_counts() -> None:
    assert ordered(10.0, (30, 0.0), (10, 1.0)) == [1, 0]
    assert ordered(10.0, (30, 0.0), (10, 2.1)) == [0, 1]


def served(ageing: float) -> list[str]:
    """A long prompt beside a new short one each second, on an engine of one seat: who was answered, in order."""
    now = 0.0
    table = {"shortest-prompt-first": {"ageing": ageing}}
    built = make_engine(plugins=["shortest-prompt-first"], plugin=table, max_num_seqs=1, clock=lambda: now)
    answered = []
    for second in range(20):
        now = float(second)
        arriving = {f"short {second}": 4} | ({"long": 40} if second == 0 else {})
        for name, length in arriving.items():
            params = SamplingParams(max_tokens=1, temperature=0)
            built.engine.add_request(EngineRequest(request_id=name, prompt_token_ids=[1] * length, params=params))
        answered += [delta.request_id for delta in built.engine.step()]
    built.engine.shutdown()
    return answered


def test_a_long_prompt_waits_no_longer_than_the_setting_says() -> None:
    assert served(ageing=1e-3) == [f"short {second}" for second in range(20)]
    shorts = [f"short {second}" for second in range(19)]
    assert served(ageing=4.0) == [*shorts[:9], "long", *shorts[9:]]
