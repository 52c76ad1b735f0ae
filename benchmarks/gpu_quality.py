"""How far a dtype takes us from float32, beside how far it takes transformers: the demo model, the same weights.

Contract: the texts are transformers' greedy ones in float32 without TF32. Prompts have one length, so no side pads.
Every figure is a mean over prompts, the least first:

* ``teacher-forced, prompt``: |difference of log-probability| of the texts' tokens, the whole text run as a prompt;
* ``teacher-forced, decode``: the same, token by token through the cache;
* ``common prefix``: how many of the tokens of the greedy text are those in float32.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from mini_infer.interfaces import LogitsProcessor
from mini_infer.plugins import hookimpl

PROMPT_TOKENS = 16
PROMPTS = (
    "The old lighthouse keeper climbed the spiral stairs every evening to light the lamp, because ships",
    "To bake a loaf of bread you need flour, water, salt and yeast. First, you mix the flour with",
    "In the year 1969 two astronauts walked on the surface of the Moon for the first time. They",
    "Photosynthesis is the process by which green plants turn sunlight, water and carbon dioxide into sugar, and",
    "The capital of France is Paris, a city that is known all over the world for its museums and",
    "Once upon a time there was a small village at the edge of a dark forest, where a girl named",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\nprint(",
    "A triangle has three sides and three angles. The sum of the angles of any triangle is always equal to",
    "Dear Sir or Madam, I am writing to you to complain about the washing machine that I bought last",
    "The human heart has four chambers that pump blood through the body without a pause, and every day it",
    "Question: What is the difference between a virus and a bacterium? Answer: A virus is much smaller than a",
    "The train left the station at half past seven, and by the time the sun had risen over the hills",
    "Water boils at a lower temperature on a mountain than at the sea, because the pressure of the air there",
    "Here is a list of ten animals that live in the rainforest of South America: 1. jaguar, 2. sloth, 3.",
    "She opened the letter with trembling hands and read the first line again and again until the words",
    "The stock market fell sharply on Monday after the central bank had announced that it would raise interest",
    "In chess, the queen is the strongest piece on the board because she can move any number of squares",
    "SELECT name, age FROM users WHERE age > 18 ORDER BY name; This statement returns the names of all users",
    "Bees are important for farming, because they carry the pollen of one flower to the next while they look",
    "The recipe is simple: chop two onions, fry them in butter until they are golden, then add the rice and",
    "Albert Einstein was born in the German city of Ulm in 1879 and became one of the greatest physicists of",
    "When the teacher asked the class who had broken the window, nobody said a word, until a boy in the",
    "A good password is long, is used for one purpose only, and cannot be guessed by somebody who knows your",
    "The river flows from the mountains in the north through wide green valleys down to the sea, and on its",
    "If you multiply any number by zero, the result is zero. If you multiply it by one, the result is the",
    "The doctor listened to his lungs, looked at the chart once more, and told him that he would have to stay",
    "Volcanoes are openings in the crust of the Earth through which molten rock, ash and gases rise from the",
    "Our company was founded twenty years ago in a garage by three friends who wanted to build a better kind of",
    "The museum is open every day except Monday from ten in the morning to six in the evening, and tickets",
    "Dogs and cats are the most popular pets in the world, but many people also keep birds, fish or small",
    "It was raining when the detective arrived at the house, and the first thing that he noticed was that the",
    "The quick way to learn a language is to speak it every day with people who will correct you when you make",
)


def measure(num_prompts: int, num_tokens: int, dtype: str, device: str) -> dict[str, dict[str, Any]]:
    """By figure: ``ours``, ``transformers``, their ``difference`` with its 95% ``interval``, and ``met``.

    ``met`` is the strict comparison; a difference within its interval may be chance.
    """
    from transformers import AutoTokenizer

    from benchmarks.demo_folder import demo_folder

    folder = demo_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in PROMPTS[:num_prompts]]
    assert {len(prompt) for prompt in prompts} == {PROMPT_TOKENS}
    exact = Theirs(folder, "float32", device)
    texts = exact.greedy(prompts, num_tokens)
    truth = exact.of_prompts(prompts, texts)
    del exact
    theirs, ours = Theirs(folder, dtype, device), Ours(folder, dtype, device)
    figures = {
        "teacher-forced, prompt": _compare(
            _distances(truth, ours.of_prompts(prompts, texts)), _distances(truth, theirs.of_prompts(prompts, texts)), -1
        ),
        "teacher-forced, decode": _compare(
            _distances(truth, ours.of_decodes(prompts, texts)), _distances(truth, theirs.of_decodes(prompts, texts)), -1
        ),
        "common prefix": _compare(
            _prefixes(texts, ours.greedy(prompts, num_tokens)), _prefixes(texts, theirs.greedy(prompts, num_tokens)), 1
        ),
    }
    ours.close()
    return figures


Texts = Sequence[Sequence[int]]
Logprobs = list[list[float]]


class Theirs:
    """transformers. All prompts have one length, and so have all texts."""

    def __init__(self, folder: str, dtype: str, device: str, attention: str = "sdpa") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._torch, self._device = torch, device
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention)
        self._model = model.to(device).eval()

    def greedy(self, prompts: Texts, num_tokens: int) -> list[list[int]]:
        """The most likely token, again and again, whatever it is."""
        torch = self._torch
        found = []
        with torch.inference_mode():
            out = self._model(torch.tensor(prompts, device=self._device), use_cache=True)
            for _ in range(num_tokens):
                token = out.logits[:, -1].float().argmax(-1, keepdim=True)
                found.append(token)
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
        texts: list[list[int]] = torch.cat(found, dim=1).tolist()
        return texts

    def of_prompts(self, prompts: Texts, texts: Texts) -> Logprobs:
        """Log-probabilities of the texts' tokens, in one pass."""
        torch = self._torch
        first = len(prompts[0])
        ids = torch.tensor([[*p, *t] for p, t in zip(prompts, texts, strict=True)], device=self._device)
        with torch.inference_mode():
            logits = self._model(ids).logits[:, first - 1 : -1].float()
        chosen: Logprobs = logits.log_softmax(-1).gather(2, ids[:, first:, None]).squeeze(2).tolist()
        return chosen

    def of_decodes(self, prompts: Texts, texts: Texts) -> Logprobs:
        """The same, token by token through the cache."""
        torch = self._torch
        forced = torch.tensor(texts, device=self._device)
        found = []
        with torch.inference_mode():
            out = self._model(torch.tensor(prompts, device=self._device), use_cache=True)
            for token in forced.split(1, dim=1):
                found.append(out.logits[:, -1].float().log_softmax(-1).gather(1, token))
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
        chosen: Logprobs = torch.cat(found, dim=1).tolist()
        return chosen


class Ours:
    """Our engine.

    Args:
        folder, dtype, device: as the settings of these names.
        plugins: their names.
        plugin: settings of plugins.
    """

    def __init__(
        self,
        folder: str,
        dtype: str,
        device: str,
        plugins: Sequence[str] = ("default",),
        plugin: Mapping[str, Any] | None = None,
    ) -> None:
        from mini_infer.build import build_engine
        from mini_infer.settings import load_settings

        forcing = Forcing()
        engine = {"dtype": dtype, "device": device, "max_model_len": 512, "max_num_seqs": 64, "skip_tokenizer": True}
        names = [forcing.name, *plugins]
        arguments = {"model": folder, "plugins": names, "engine": engine, "plugin": plugin or {}}
        self._engine = build_engine(load_settings(arguments=arguments, environ={}), modules=[forcing]).engine

    def greedy(self, prompts: Texts, num_tokens: int) -> list[list[int]]:
        return [each.token_ids for each in self._run(prompts, [{"max_tokens": num_tokens}] * len(prompts))]

    def of_prompts(self, prompts: Texts, texts: Texts) -> Logprobs:
        whole = [[*p, *t] for p, t in zip(prompts, texts, strict=True)]
        outputs = self._run(whole, [{"max_tokens": 1, "prompt_logprobs": 0}] * len(whole))
        first = len(prompts[0])
        return [[given.logprob for given in each.prompt_logprobs[first - 1 :]] for each in outputs]

    def of_decodes(self, prompts: Texts, texts: Texts) -> Logprobs:
        asked = [{"max_tokens": len(t), "logprobs": 0, "extensions": {Forcing.name: list(t)}} for t in texts]
        outputs = self._run(prompts, asked)
        assert [each.token_ids for each in outputs] == [list(text) for text in texts]
        return [[given.logprob for given in each.logprobs] for each in outputs]

    def close(self) -> None:
        self._engine.shutdown()

    def _run(self, prompts: Texts, asked: Sequence[dict[str, Any]]) -> list[Any]:
        from mini_infer.messages import EngineRequest
        from mini_infer.sampling_params import SamplingParams
        from mini_infer.testing import run_engine

        requests = [
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=list(prompt),
                params=SamplingParams(temperature=0.0, ignore_eos=True, **params),
            )
            for index, (prompt, params) in enumerate(zip(prompts, asked, strict=True))
        ]
        outputs = run_engine(self._engine, requests)
        assert all(output.error is None for output in outputs.values())
        return [outputs[request.request_id] for request in requests]


class Forcing(LogitsProcessor):
    """A plugin that leaves one token to draw: ``params.extensions["forcing"]``, one by one. Log-probabilities stay."""

    name = "forcing"
    api_version = 0

    def __init__(self) -> None:
        self._texts: dict[int, tuple[int, list[int]]] = {}  # slot -> length of the prompt, text

    def wants(self, params: Any) -> bool:
        return self.name in params.extensions

    def add(self, row: Any) -> None:
        self._texts[row.slot] = row.num_prompt_tokens, row.params.extensions[self.name]

    def apply(self, logits: Any, rows: Any, mine: list[int]) -> Any:
        positions = rows.positions.tolist()
        for index in mine:
            num_prompt, text = self._texts[rows.slots_host[index]]
            token = text[min(positions[index] - num_prompt, len(text) - 1)]
            logits[index].fill_(-math.inf)
            logits[index, token] = 0.0
        return logits

    @hookimpl
    def logits_processors(self, context: object) -> list[LogitsProcessor]:
        return [self]


def _distances(truth: Logprobs, found: Logprobs) -> list[float]:
    """Mean of each prompt."""
    return [mean(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in zip(truth, found, strict=True)]


def _prefixes(truth: Texts, found: Texts) -> list[float]:
    """Length of what each text has in common with the true one."""
    return [float(common_prefix(*pair)) for pair in zip(truth, found, strict=True)]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _compare(ours: list[float], theirs: list[float], sign: int) -> dict[str, Any]:
    """``sign``: 1 if more is better, -1 if less is."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    interval = 1.96 * stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    better = sign * mean(differences)
    met = "yes" if better >= 0 else "within chance" if -better <= interval else "no"
    return {
        "ours": mean(ours),
        "transformers": mean(theirs),
        "difference": mean(differences),
        "interval": interval,
        "met": met,
    }
