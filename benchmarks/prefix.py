"""What ``prefix-cache`` saves where prompts share their beginning, and what it costs where they share nothing.

Contract: ours with and without it in one process, in turns; random token ids, greedy, float32, no text. Every prompt is
new but for the beginning that it is meant to share.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import click

PROMPT, SHARED = 1024, 922  # tokens; nine tenths
TURNS, ADDED, ANSWER = 8, 40, 40  # of a chat
CROWD, CROWD_PROMPT, CROWD_OUTPUT = 8, 64, 64  # requests that share nothing
_VOCAB_SIZE = 40_000  # the demo's, and others', have more
_T_OF_95 = {14: 2.145, 19: 2.093, 29: 2.045}  # Student's t by degrees of freedom


def measure(model: str, threads: int, pairs: int) -> dict[str, float]:
    """Figures by name.

    Args:
        model: as the setting.
        threads: of PyTorch.
        pairs: of runs that share nothing; 15, 20 or 30.
    """
    import torch

    torch.set_num_threads(threads)
    rng = random.Random(0)
    with _llm(model, plugin=True) as cached, _llm(model, plugin=False) as plain:
        prompt = _prompts(rng)
        figures = _first_tokens(cached, prompt)
        figures["chat: computed / new"] = _chat(cached, prompt)
        for llm in (cached, plain):
            _crowd(llm, prompt)
        figures |= _cost(cached, plain, prompt, pairs)
    return figures


def _llm(model: str, *, plugin: bool) -> Any:
    from mini_infer import LLM

    engine = {"max_model_len": 2048, "skip_tokenizer": True}
    return LLM(model, without=[] if plugin else ["prefix-cache"], engine=engine)


def _prompts(rng: random.Random) -> Callable[[int], list[int]]:
    return lambda count: rng.choices(range(_VOCAB_SIZE), k=count)


def _first_tokens(llm: Any, prompt: Callable[[int], list[int]]) -> dict[str, float]:
    """Seconds to the first token: of a prompt that nobody has seen, and of one that begins as it."""
    stem = prompt(SHARED)
    cold, warm = [], []
    for _ in range(3):
        cold.append(_seconds(llm, [prompt(PROMPT)], 1))
    _seconds(llm, [stem + prompt(PROMPT - SHARED)], 1)
    for _ in range(3):
        warm.append(_seconds(llm, [stem + prompt(PROMPT - SHARED)], 1))
    return {"cold, s": min(cold), "nine tenths shared, s": min(warm), "shared / cold": min(warm) / min(cold)}


def _chat(llm: Any, prompt: Callable[[int], list[int]]) -> float:
    """Prompt tokens computed for each that is new, over a chat whose every turn begins with all before it."""
    from mini_infer import SamplingParams

    history: list[int] = []
    computed = new = 0
    for turn in range(TURNS):
        history = history + prompt(ADDED)
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        (output,) = llm.generate([history], params)
        computed += len(history) - output.num_cached_tokens
        new += ADDED + (ANSWER if turn else 0)
        history = history + list(output.outputs[0].token_ids)
    return computed / new


def _cost(cached: Any, plain: Any, prompt: Callable[[int], list[int]], pairs: int) -> dict[str, float]:
    """Throughput with the plugin as a share of that without, where nothing is shared: mean and 95% interval."""
    ratios = []
    for index in range(pairs):
        first, second = (cached, plain) if index % 2 else (plain, cached)
        seconds = {id(llm): _crowd(llm, prompt) for llm in (first, second)}
        ratios.append(seconds[id(plain)] / seconds[id(cached)])
    half = _T_OF_95[pairs - 1] * statistics.stdev(ratios) / pairs**0.5
    mean = statistics.mean(ratios)
    return {"nothing shared, with / without": mean, "least of 95%": mean - half, "most of 95%": mean + half}


def _crowd(llm: Any, prompt: Callable[[int], list[int]]) -> float:
    return _seconds(llm, [prompt(CROWD_PROMPT) for _ in range(CROWD)], CROWD_OUTPUT)


def _seconds(llm: Any, prompts: list[list[int]], num_output: int) -> float:
    from mini_infer import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - started


@click.command("prefix")
@click.option("--model", default="demo", show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--pairs", default=20, show_default=True, type=click.Choice([15, 20, 30]))
@click.option("--json", "target", type=click.Path(), required=True)
def prefix(model: str, threads: int, pairs: int, target: str) -> None:
    """Prompts that share their beginning, a chat, and prompts that share nothing, with and without prefix-cache."""
    import json
    from pathlib import Path

    from benchmarks.record import provenance

    figures = measure(model, threads, pairs)
    for name, value in figures.items():
        click.echo(f"{name:34} {value:.3f}")
    record = {"what": "prefix", "model": model, "threads": threads, "pairs": pairs, "figures": figures, **provenance()}
    Path(target).write_text(json.dumps(record, indent=1) + "\n")
