"""Engines on one GPU as functions from lengths to seconds: ours and vLLM, with the same limits and random weights."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_models import SHAPES, model_folder

MAX_MODEL_LEN, MAX_BATCHED_TOKENS, MAX_SEQS = 16_384, 16_384, 1024


def find(engine: str, model: str) -> Callable[[Sequence[int], Sequence[int]], float]:
    """An engine that has been started; ``mini-infer:flash-attn`` is ours with another attention backend.

    Raises:
        SystemExit: there is none of that name.
    """
    ours, _, attention = engine.partition(":")
    if ours == "mini-infer":
        return _ours(model, attention)
    if engine == "vllm":
        return _vllm(model)
    raise SystemExit(f"no engine {engine!r}; there are mini-infer, mini-infer:ATTENTION and vllm")


def _prompts(model: str, lens: Sequence[int], rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(1, SHAPES[model]["vocab_size"] - 1000) for _ in range(n)] for n in lens]


def build(model: str, plugin: Mapping[str, Mapping[str, Any]] | None = None, attention: str = "") -> Any:
    """Our engine with its default plugins, as ``build_engine`` gives it.

    Args:
        model: a name of ``SHAPES``.
        plugin: settings of plugins.
        attention: a plugin to add, whose backend of the same name is used.
    """
    from mini_infer.build import build_engine
    from mini_infer.settings import load_settings

    engine = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "max_num_seqs": MAX_SEQS,
        "skip_tokenizer": True,
        "load_format": "random",
        "device": "cuda",
    }
    arguments = {"model": model_folder(model), "engine": engine, "plugin": plugin or {}}
    if attention:
        engine["attention"] = attention
        arguments["plugins"] = ["default", attention]
    return build_engine(load_settings(arguments=arguments, environ={}))


def _ours(model: str, attention: str) -> Callable[[Sequence[int], Sequence[int]], float]:
    """Requests go straight to the engine, as they do from the server's process to the engine's."""
    from mini_infer.garbage import frozen
    from mini_infer.messages import EngineRequest
    from mini_infer.sampling_params import SamplingParams

    built = build(model, attention=attention)
    print(*built.log, sep="\n")
    rng = random.Random(0)

    def seconds(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        requests = [
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
            )
            for i, (prompt, max_tokens) in enumerate(zip(_prompts(model, prompt_lens, rng), output_lens, strict=True))
        ]
        num_tokens = 0
        with frozen():
            started = time.perf_counter()
            for request in requests:
                built.engine.add_request(request)
            while built.engine.has_work():
                for delta in built.engine.step():
                    assert delta.error is None, delta.error
                    num_tokens += len(delta.token_ids)
            elapsed = time.perf_counter() - started
        assert num_tokens == sum(output_lens)
        return elapsed

    return seconds


def _vllm(model: str) -> Callable[[Sequence[int], Sequence[int]], float]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model_folder(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_num_seqs=MAX_SEQS,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
    )
    rng = random.Random(0)

    def seconds(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        prompts = [{"prompt_token_ids": ids} for ids in _prompts(model, prompt_lens, rng)]
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False) for n in output_lens]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - started
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == sum(output_lens)
        return elapsed

    return seconds
