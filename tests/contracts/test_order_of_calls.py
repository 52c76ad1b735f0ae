"""``docs/contract.md`` is true: who is called when, while an engine is built, step by step, and at the end."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mini_infer import interfaces
from mini_infer.interfaces import (
    BlockKey,
    CachedBlock,
    CachePolicy,
    Executor,
    LateLogitsProcessor,
    LateRequest,
    LogitsProcessor,
    ModelTransform,
    Observer,
    Proposer,
    SamplingParams,
)
from mini_infer.messages import EngineRequest
from mini_infer.plugins import hookimpl
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.reference.scheduler import first_come_first_served
from mini_infer.reference.step_runner import PlainStepRunner
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.testing import make_engine, tiny_model
from mini_infer.testing.toy_model import ToyAdapter, ToyLoader

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"


class KeepAll(CachePolicy):
    def tiers(self) -> dict[str, int]:
        return {"host": 4}

    def keep(self, block: CachedBlock) -> bool:
        return True

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        return list(cached)[:count]


class Ones(Proposer):
    max_drafts = 2

    def propose(self, requests: Sequence[Any]) -> list[list[int]]:
        return [[1, 1] for _ in requests]


class Same(LogitsProcessor):
    name = "same"

    def wants(self, params: SamplingParams) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: Any, mine: list[int]) -> torch.Tensor:
        return logits


class AllAllowed(LateLogitsProcessor):
    name = "all-allowed"

    def wants(self, params: SamplingParams) -> bool:
        return True

    def masks(self, request: LateRequest, drafts: list[int]) -> tuple[list[bytes], int]:
        return [b""] * (1 + len(drafts)), len(drafts)


class AsItIs(ModelTransform):
    name = "as-it-is"

    def apply(self, module: Any, config: Any) -> Any:
        return module


class Silent(Observer):
    def step(self, events: Any) -> None:
        return


class Recorder:
    """A plugin that answers every hook, and writes down each call of an interface's method."""

    name, api_version = "recorder", 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def watch(self, interface: str, it: Any) -> Any:
        """Write down calls of the methods that an interface has, on an object or a class."""
        for name, method in vars(getattr(interfaces, interface)).items():
            if callable(method) and not name.startswith("_") and name != "unavailable":
                setattr(it, name, self.written_down(f"{interface}.{name}", getattr(it, name)))
        return it

    def written_down(self, call: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.calls[-1:] != [call]:  # once for several in a row
                self.calls.append(call)
            result = method(*args, **kwargs)
            if call == "ModelAdapter.build":
                self.watch("CausalLM", result)
            if call == "Executor.sample":
                self.watch("PendingOutput", result)
            return result

        return wrapper

    @hookimpl
    def model_adapters(self, context: object) -> list[Any]:
        return [self.watch("ModelAdapter", ToyAdapter())]

    @hookimpl
    def weight_loaders(self, context: object) -> list[Any]:
        return [self.watch("WeightLoader", ToyLoader())]

    @hookimpl
    def model_transforms(self, context: object) -> list[Any]:
        return [self.watch("ModelTransform", AsItIs())]

    @hookimpl
    def attention_backends(self, context: object) -> list[Any]:
        return [self.watch("AttentionBackend", type("Watched", (ReferenceAttention,), {"name": "watched"}))]

    @hookimpl
    def scheduler(self, context: object) -> Any:
        return self.watch("Scheduler", first_come_first_served())

    @hookimpl
    def cache_policy(self, context: object) -> Any:
        return self.watch("CachePolicy", KeepAll())

    @hookimpl
    def sampler(self, context: object) -> Any:
        return self.watch("Sampler", ReferenceSampler())

    @hookimpl
    def step_runner(self, context: object) -> Any:
        return self.watch("StepRunner", PlainStepRunner())

    @hookimpl
    def proposer(self, context: object) -> Any:
        return self.watch("Proposer", Ones())

    @hookimpl
    def logits_processors(self, context: object) -> list[Any]:
        return [self.watch("LogitsProcessor", Same()), self.watch("LateLogitsProcessor", AllAllowed())]

    @hookimpl
    def extensions(self, context: object) -> list[Any]:
        return [self.watch("Observer", Silent())]

    @hookimpl(wrapper=True)
    def executor(self, context: object) -> Iterator[None]:
        inner: Executor = yield  # type: ignore[assignment]
        return self.watch("Executor", inner)


def on_the_page(heading: str) -> list[str]:
    """The calls below a heading: the first word of each line of its fence."""
    section = re.search(rf"^## {heading}\n.*?```text\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, f"the page has no calls below '{heading}'"
    return [line.split()[0] for line in section[1].splitlines() if line.strip()]


def test_the_page_has_the_order_of_calls() -> None:
    recorder = Recorder()
    model = tiny_model("toy", layer_kinds=["full"])
    engine = make_engine(model, plugins=[recorder], block_size=4).engine
    parts = {"While an engine is built": recorder.calls[:]}

    def step(heading: str) -> None:
        recorder.calls.clear()
        engine.step()
        parts[heading] = recorder.calls[:]

    recorder.calls.clear()
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine.add_request(EngineRequest(request_id="r", prompt_token_ids=[5] * 9, params=params))
    parts["When a request arrives"] = recorder.calls[:]
    step("A step that runs its prompt")
    step("A step that verifies drafts")
    recorder.calls.clear()
    engine.abort("r")
    engine.add_request(EngineRequest(request_id="s", prompt_token_ids=[5] * 9, params=params))
    engine.step()
    parts["When it ends, and another begins alike"] = recorder.calls[:]
    recorder.calls.clear()
    engine.shutdown()
    parts["At the end"] = recorder.calls[:]
    for heading, calls in parts.items():
        assert calls == on_the_page(heading), f"'{heading}' has other calls"
