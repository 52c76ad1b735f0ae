"""Random traffic through small engines that have one part from elsewhere; each request must get its own tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from mini_infer.interfaces import Observer, StepEvents
from mini_infer.plugins import hookimpl
from mini_infer.testing.engines import make_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.traffic import check_traffic, random_traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mini_infer.messages import EngineRequest
    from mini_infer.testing.traffic import Traffic

VOCAB_SIZE = 256


@cache
def small_model() -> Path:
    """A toy with two KV groups: keys and values, and latent vectors."""
    return tiny_model("toy", vocab_size=VOCAB_SIZE, hidden_size=32, head_dim=8, layer_kinds=["full", "latent"])


class Part(Observer):
    """A plugin that answers one hook with what ``make`` gives, and counts what happens to requests."""

    name = "part"
    api_version = 0

    def __init__(self, hook: str, make: Callable[[], Any]) -> None:
        self.seen: Counter[str] = Counter()

        def implementation(context: object) -> Any:
            return make()

        setattr(self, hook, hookimpl(implementation))

    def step(self, events: StepEvents) -> None:
        self.seen.update(event.kind for event in events.requests)

    @hookimpl
    def extensions(self, context: object) -> list[Observer]:
        return [self]


def with_shared_prompts(traffic: Traffic, rng: Random) -> Traffic:
    """The same, with two prompts of three beginning as the first does."""
    stem = traffic.requests[0].prompt_token_ids

    def change(request: EngineRequest) -> EngineRequest:
        prompt = request.prompt_token_ids
        shared = min(len(stem), len(prompt) - 1) if rng.randint(0, 2) else 0
        return msgspec.structs.replace(request, prompt_token_ids=stem[:shared] + prompt[shared:])

    return replace(traffic, requests=[change(request) for request in traffic.requests])


def check_engines(
    hook: str,
    make: Callable[[], Any],
    num_traffics: int,
    plugins: Sequence[Callable[[], Any]] = (),
    device: str = "cpu",
) -> Counter[str]:
    """Random traffics, every other one overlapped, on engines whose one hook is answered by ``make``.

    Args:
        hook: such as ``scheduler``.
        make: makes the hook's answer, a fresh one for each engine.
        num_traffics: how many.
        plugins: make further ones, fresh for each engine.
        device: where the engines run.

    Returns:
        How often requests arrived, were preempted, ended, ...

    Raises:
        AssertionError, EngineError, PluginError: a token is wrong, a block is lost, a rule broken.
    """
    seen: Counter[str] = Counter()
    equality = Equality(reference_of(small_model()))
    for seed in range(num_traffics):
        rng = Random(seed)
        traffic = with_shared_prompts(random_traffic(rng, VOCAB_SIZE), rng)
        part = Part(hook, make)
        built = make_engine(
            small_model(),
            plugins=[part, *(make_plugin() for make_plugin in plugins)],
            overlap=bool(seed % 2),
            device=device,
            clock=partial(next, count(0.0, 1e-2)),
            **traffic.engine,
        )
        check_traffic(built.engine, traffic, equality)
        seen += part.seen
    return seen
