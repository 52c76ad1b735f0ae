"""In bfloat16 log-probabilities are as close to float32 as transformers' own, by the largest difference of any token.

Given tokens, as prompts and token by token, with and without plugins: for what has no float32 (FlashAttention) there is
no other proof. transformers' own is the largest of its two kinds of attention, on prompts and token by token. One
model's largest difference is one token's: between equals it is off by a tenth either way, so it is the mean of several
models that must not be larger.
"""

from functools import cache
from random import Random
from statistics import mean
from typing import Any

import pytest
from benchmarks.gpu_quality import Logprobs, Ours, Theirs
from tests.plugins.gpu_plugins.test_random_traffic import CHUNKS, DRAWS, FUSED, GRAPHS, TRITON, cases

from mini_infer.testing.engines import scratch_folder
from mini_infer.testing.models import tiny_checkpoint

VOCAB_SIZE, PROMPT_TOKENS = 512, 40
NUM_MODELS = {"cpu": 1, "cuda": 12}
NUM_TEXTS = {"cpu": 16, "cuda": 64}
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 3}
MOST = {"cpu": 1.5, "cuda": 1.0}
"""Of transformers' own. On a CPU, of one model and few texts, only that the test works is shown."""

Texts = list[list[int]]


def model(seed: int) -> str:
    folder = scratch_folder() / f"for-bfloat16-{seed}"
    if not folder.exists():
        tiny_checkpoint(folder, "qwen2", seed, std=0.05, vocab_size=VOCAB_SIZE, **SHAPE)
    return str(folder)


def prompts_and_texts(num_texts: int) -> tuple[Texts, Texts]:
    rng = Random(0)
    prompts, texts = ([rng.choices(range(VOCAB_SIZE), k=PROMPT_TOKENS) for _ in range(num_texts)] for _ in range(2))
    return prompts, texts


@cache
def truth_and_theirs(seed: int, device: str) -> tuple[Logprobs, float]:
    """Log-probabilities in float32, and the largest difference of transformers in bfloat16."""
    given = prompts_and_texts(NUM_TEXTS[device])
    truth = Theirs(model(seed), "float32", device).of_prompts(*given)
    worst = 0.0
    for attention in ("sdpa", "eager"):
        theirs = Theirs(model(seed), "bfloat16", device, attention)
        worst = max(worst, largest(truth, theirs.of_prompts(*given)), largest(truth, theirs.of_decodes(*given)))
    return truth, worst


def largest(truth: Logprobs, found: Logprobs) -> float:
    return max(abs(a - b) for pair in zip(truth, found, strict=True) for a, b in zip(*pair, strict=True))


@cases(
    [(), (TRITON,), (TRITON, GRAPHS), (TRITON, FUSED, DRAWS, GRAPHS, CHUNKS)],
    [(), ("cpu-attention", "cpu-kernels")],
)
def test_log_probabilities(device: str, plugins: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    given = prompts_and_texts(NUM_TEXTS[device])
    few_graphs = {GRAPHS: {"batch_sizes": [NUM_TEXTS[device]], "num_tokens": [NUM_TEXTS[device] * PROMPT_TOKENS]}}
    allowed, of_prompts, of_decodes = [], [], []
    for seed in range(NUM_MODELS[device]):
        truth, theirs = truth_and_theirs(seed, device)
        ours = Ours(model(seed), "bfloat16", device, plugins, few_graphs if GRAPHS in plugins else None)
        allowed.append(theirs)
        of_prompts.append(largest(truth, ours.of_prompts(*given)))
        of_decodes.append(largest(truth, ours.of_decodes(*given)))
        ours.close()
    for what, found in (("prompts", of_prompts), ("decodes", of_decodes)):
        said = f"{what}: {found} of log-probability, transformers {allowed}"
        assert mean(found) <= MOST[device] * mean(allowed), said
