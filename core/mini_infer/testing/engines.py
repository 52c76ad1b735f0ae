"""Engines on tiny random models, and running token-level requests through them.

Contract: no download, no settings file, no environment: an engine is what the arguments say. The block accounting is
proved after every step. A folder of ``tiny_model`` is made once a process and is gone with it; nobody may write to it.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.testing.models import FAMILIES, tiny_checkpoint
from mini_infer.testing.tokenizers import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mini_infer.build import BuiltEngine
    from mini_infer.engine import Engine
    from mini_infer.llm import LLM
    from mini_infer.messages import EngineRequest, TokenDelta
    from mini_infer.plan import TokenLogprobs

SCRIPT = "script"
VOCAB_SIZE = 384
"""Logits of a tiny model; its tokenizer knows the first 320 ids."""


def tiny_model(family: str = "llama", seed: int = 0, **config: Any) -> Path:
    """The folder of a tiny random model with the byte tokenizer "T1", whose EOS is the model's.

    Args:
        family: one of ``testing.models.FAMILIES``.
        seed: of the weights.
        config: as for ``tiny_checkpoint``.
    """
    return _tiny_model(family, seed, json.dumps({"vocab_size": VOCAB_SIZE, **config}, sort_keys=True))


@cache
def _tiny_model(family: str, seed: int, config: str) -> Path:
    folder = tiny_checkpoint(
        Path(scratch_folder(), f"{family}-{len(list(scratch_folder().iterdir()))}"), family, seed, **json.loads(config)
    )
    byte_tokenizer().save(folder)
    return folder


@cache
def scratch_folder() -> Path:
    """A folder that is gone with this process."""
    folder = Path(tempfile.mkdtemp(prefix="mini-infer-testing-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_engine(
    model: str | Path = "llama",
    *,
    plugins: Sequence[Any] = (),
    plugin: Mapping[str, Mapping[str, Any]] | None = None,
    skip_tokenizer: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **engine: Any,
) -> BuiltEngine:
    """An engine that proves each plan (``plan_check``) and, after every step, its block accounting.

    Args:
        model: a family of ``tiny_model``, ``"script"``, or whatever the setting ``model`` may be.
        plugins: the whole list; names, or plugin modules (anything with a plugin's attributes).
        plugin: settings of plugins, ``{"prefix-cache": {"eviction": "lfu"}}``.
        skip_tokenizer: as the setting of that name.
        clock: the engine's.
        engine: the table ``[engine]``.
    """
    from mini_infer.build import build_engine
    from mini_infer.settings import EngineSettings, Settings
    from mini_infer.testing import plan_check, toy_plugin

    plugins = [plan_check, *plugins]  # the first is the outermost
    names = [entry if isinstance(entry, str) else entry.name for entry in plugins]
    modules = [entry for entry in plugins if not isinstance(entry, str)]
    path = tiny_model(str(model)) if model in FAMILIES else Path(model)
    if model == SCRIPT and "testing" not in names:
        names.append("testing")
    if _is_toy(path) and toy_plugin.name not in names:
        names.append(toy_plugin.name)
        modules.append(toy_plugin)
    settings = Settings(
        model=str(path),
        plugins=tuple(names),
        engine=EngineSettings(skip_tokenizer=skip_tokenizer, **engine),
        plugin={name: dict(table) for name, table in (plugin or {}).items()},
    )
    return build_engine(settings, modules=modules, check=True, clock=clock)


def _is_toy(path: Path) -> bool:
    config = path / "config.json"
    return config.is_file() and json.loads(config.read_text()).get("model_type") == "toy"


def make_llm(
    model: str | Path = "llama",
    *,
    plugins: Sequence[Any] = (),
    plugin: Mapping[str, Mapping[str, Any]] | None = None,
    skip_tokenizer: bool = False,
    seed: int | None = 0,
    **engine: Any,
) -> LLM:
    """An ``LLM`` over ``make_engine``; ``seed`` is where the seeds of unseeded requests come from."""
    from mini_infer.llm import LLM

    built = make_engine(model, plugins=plugins, plugin=plugin, skip_tokenizer=skip_tokenizer, **engine)
    return LLM.from_engine(built, seed=seed)


@dataclass(slots=True)
class EngineOutput:
    """All that an engine said of one request. Attributes as those of ``TokenDelta``."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    def take(self, delta: TokenDelta) -> None:
        """Add what became known."""
        assert self.finish_reason is None, f"{self.request_id}: {delta} after it had finished"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason, self.stop_token_id = delta.finish_reason, delta.stop_token_id
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.error = delta.error


def run_engine(
    engine: Engine,
    requests: Sequence[EngineRequest],
    arrivals: Sequence[int] | None = None,
    aborts: Mapping[str, int] | None = None,
    *,
    max_steps: int = 5_000,
) -> dict[str, EngineOutput]:
    """Run requests to their ends; what was said of each, by id.

    Args:
        engine: steps until it has no work.
        requests: in the order in which they are added.
        arrivals: before which step, from 0, each is added; by default all before the first.
        aborts: request id -> before which step it is aborted (nothing happens if it has not arrived or has ended).
        max_steps: more are an ``AssertionError``: the engine hangs.
    """
    arrivals = [0] * len(requests) if arrivals is None else arrivals
    to_come = sorted(zip(arrivals, range(len(requests)), requests, strict=True), reverse=True)
    outputs: dict[str, EngineOutput] = {}
    step = 0
    while to_come or engine.has_work():
        while to_come and to_come[-1][0] <= step:
            request = to_come.pop()[2]
            outputs[request.request_id] = EngineOutput(request.request_id)
            engine.add_request(request)
        for request_id, when in (aborts or {}).items():
            if when == step:
                engine.abort(request_id)
        for delta in engine.step():
            outputs[delta.request_id].take(delta)
        step += 1
        assert step < max_steps, f"still busy after {max_steps} steps: {engine.stats()}"
    unfinished = [output.request_id for output in outputs.values() if output.finish_reason is None]
    assert not unfinished, f"the engine has no work, but never finished {unfinished}"
    return outputs


def assert_idle(engine: Engine) -> None:
    """Nothing is held: every block is free or cached, every slot is free, nobody waits."""
    kv, table = engine._kv, engine._table
    cached = len(kv.device.cached)
    free = kv.device.num_free
    assert free + cached == kv.device.num_blocks, f"{free} free and {cached} cached of {kv.device.num_blocks} blocks"
    assert not table.running and not table.waiting, f"requests are left: {table.running} {table.waiting}"
    num_slots = engine._parts.limits.max_num_seqs
    assert sorted(table.free_slots) == list(range(num_slots)), f"free slots are {table.free_slots} of {num_slots}"


def assert_same_tokens(a: Any, b: Any) -> None:
    """Fail where two sets of answers differ, and say where first.

    Args:
        a, b: what ``LLM.generate`` or ``run_engine`` gave, or lists (or dicts) of token ids.
    """
    left, right = _tokens(a), _tokens(b)
    assert left.keys() == right.keys(), f"answers to {sorted(left)} and to {sorted(right)} cannot be compared"
    for key, tokens in left.items():
        others = right[key]
        if tokens != others:
            pairs = enumerate(zip(tokens, others, strict=False))
            at = next((i for i, (x, y) in pairs if x != y), min(len(tokens), len(others)))
            raise AssertionError(f"answer {key} differs from token {at} on:\n  {tokens[at:]}\n  {others[at:]}")


def _tokens(answers: Any) -> dict[str, list[int]]:
    if hasattr(answers, "items"):
        pairs = [(str(key), answer) for key, answer in answers.items()]
    else:
        pairs = [(str(index), answer) for index, answer in enumerate(answers)]
    found: dict[str, list[int]] = {}
    for key, answer in pairs:
        choices = getattr(answer, "outputs", [answer])
        for index, choice in enumerate(choices):
            found[f"{key}.{index}" if len(choices) > 1 else key] = list(getattr(choice, "token_ids", choice))
    return found
