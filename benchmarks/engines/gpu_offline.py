"""Engines on one GPU, ours and vLLM, with the same limits, random weights and prompts.

``find`` gives a function from lengths to seconds, ``find_stepped`` an engine that is stepped, for requests that arrive
while others run. Ours can be tried on a CPU too.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.gpu_models import model_folder, random_prompts

MAX_MODEL_LEN, MAX_BATCHED_TOKENS, MAX_SEQS = 16_384, 16_384, 1024
_WEIGHTS = {"random-weights": {"uniform": 1e-3}}  # as vLLM's dummies: what is multiplied changes power, and so speed

Seconds = Callable[[Sequence[int], Sequence[int]], float]


class Stepped(Protocol):
    """An engine in this process's hands."""

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Hand in a greedy request that ends by its length."""

    def step(self) -> list[tuple[str, int, bool]]:
        """What became known: request, new tokens, whether it has ended."""

    def has_work(self) -> bool:
        """Whether a request has not ended."""


def find(engine: str, model: str, device: str = "cuda") -> Seconds:
    """An engine that has been started; ``mini-infer:flash-attn`` is ours with another attention backend.

    Raises:
        SystemExit: there is none of that name.
    """
    ours, attention = _is_ours(engine)
    return _ours(model, device, attention) if ours else _vllm(model)


def find_stepped(engine: str, model: str, *, budget: int, device: str = "cuda") -> Stepped:
    """An engine that has been started.

    Args:
        engine: as for ``find``.
        model: one of ``SHAPES``.
        budget: tokens of a step while requests decode: ours, ``max_tokens_beside_decodes``; vLLM's, of every step.
        device: ours only.
    """
    ours, attention = _is_ours(engine)
    return OurSteps(model, budget, device, attention) if ours else VllmSteps(model, budget)


def _is_ours(engine: str) -> tuple[bool, str]:
    """Whether it is, and which attention it names."""
    name, _, attention = engine.partition(":")
    if name not in ("mini-infer", "vllm"):
        raise SystemExit(f"no engine {engine!r}; there are mini-infer, mini-infer:ATTENTION and vllm")
    return name == "mini-infer", attention


def build(
    model: str,
    device: str = "cuda",
    *,
    plugins: Sequence[str] = ("default",),
    plugin: Mapping[str, Mapping[str, Any]] | None = None,
    attention: str = "",
    modules: Sequence[Any] = (),
) -> Any:
    """Our engine, as ``build_engine`` gives it.

    Args:
        model: one of ``SHAPES``.
        device: a CPU is for trying out.
        plugins: their names.
        plugin: settings of plugins.
        attention: a plugin to add, whose backend of the same name is used.
        modules: further plugins, objects.
    """
    from mini_infer.build import build_engine
    from mini_infer.settings import load_settings

    engine = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "max_num_seqs": MAX_SEQS,
        "skip_tokenizer": True,
        "load_format": "random",
        "dtype": "bfloat16",
        "device": device,
    }
    names = [*(module.name for module in modules), *plugins]
    if attention:
        engine["attention"] = attention
        names.append(attention)
    arguments = {
        "model": model_folder(model),
        "plugins": names,
        "without": ["prefix-cache"],  # the same prompts come again in each repeat
        "engine": engine,
        "plugin": {**_WEIGHTS, **(plugin or {})},
    }
    built = build_engine(load_settings(arguments=arguments, environ={}), modules=modules)
    print(*built.log, sep="\n")
    return built


def make_request(name: str, prompt: list[int], max_tokens: int) -> Any:
    """A greedy request to our engine that ends by its length."""
    from mini_infer.messages import EngineRequest
    from mini_infer.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)


class OurSteps:
    """``Stepped``: requests go straight to the engine, as they do from the server's process to the engine's."""

    def __init__(self, model: str, budget: int, device: str, attention: str = "") -> None:
        plugins, plugin = ["default", "chunked-prefill"], {"chunked-prefill": {"max_tokens_beside_decodes": budget}}
        self._engine = build(model, device, plugins=plugins, plugin=plugin, attention=attention).engine

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self._engine.add_request(make_request(name, prompt, max_tokens))

    def step(self) -> list[tuple[str, int, bool]]:
        deltas = self._engine.step()
        assert all(delta.error is None for delta in deltas), deltas
        return [(delta.request_id, len(delta.token_ids), delta.finish_reason is not None) for delta in deltas]

    def has_work(self) -> bool:
        return bool(self._engine.has_work())


def _ours(model: str, device: str, attention: str) -> Seconds:
    from mini_infer.garbage import frozen

    engine = build(model, device, attention=attention).engine

    def seconds(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        prompts = _prompts(model, prompt_lens, output_lens)
        requests = [make_request(str(i), *each) for i, each in enumerate(zip(prompts, output_lens, strict=True))]
        num_tokens = 0
        with frozen():
            started = time.perf_counter()
            for request in requests:
                engine.add_request(request)
            while engine.has_work():
                for delta in engine.step():
                    assert delta.error is None, delta.error
                    num_tokens += len(delta.token_ids)
            elapsed = time.perf_counter() - started
        assert num_tokens == sum(output_lens)
        return elapsed

    return seconds


def _prompts(model: str, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> list[list[int]]:
    """The same for the same lengths, whichever engine asks and whatever it ran before."""
    return random_prompts(model, prompt_lens, random.Random(repr((list(prompt_lens), list(output_lens)))))


def _start_vllm(model: str, max_num_batched_tokens: int) -> Any:
    from vllm import LLM

    return LLM(
        model_folder(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=MAX_SEQS,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
    )


class VllmSteps:
    """``Stepped`` over vLLM's ``LLMEngine``."""

    def __init__(self, model: str, budget: int) -> None:
        self._engine = _start_vllm(model, budget).llm_engine

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[tuple[str, int, bool]]:
        outputs = self._engine.step()
        # Newer releases put a word of their own behind the id.
        return [(o.request_id.split("-")[0], len(o.outputs[0].token_ids), o.finished) for o in outputs]

    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


def _vllm(model: str) -> Seconds:
    from vllm import SamplingParams

    llm = _start_vllm(model, MAX_BATCHED_TOKENS)

    def seconds(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        prompts = [{"prompt_token_ids": ids} for ids in _prompts(model, prompt_lens, output_lens)]
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False) for n in output_lens]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - started
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == sum(output_lens)
        return elapsed

    return seconds
