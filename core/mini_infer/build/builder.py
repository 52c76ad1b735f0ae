"""From settings to a running engine: every choice is made here, once, and said aloud.

::

    settings ─> device ─> plugins ─> checkpoint ─> model ─> transforms ─> attention backends ─> KV memory ─> engine
                (auto)    (hooks)    (adapter,     (meta,    (in order)    (one a KV group)      (blocks)
                                      loader)      then weights)

Contract: what cannot be had is a ``ConfigError`` or ``PluginError`` before anything is served; no choice is silent.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mini_infer.build.attention_choice import choose_block_size
from mini_infer.build.composition import Composition, compose
from mini_infer.build.kv_memory import (
    DeviceMemory,
    expect_weights_fit,
    free_memory,
    memory_errors_in_plain_words,
    plan_kv_memory,
)
from mini_infer.build.profile_run import measure_step
from mini_infer.choices import Choice
from mini_infer.engine import Engine, EngineLimits, EngineParts
from mini_infer.engine.kv_manager import KVManager
from mini_infer.interfaces import BatchLimits, LateLogitsProcessor, LogitsProcessor, Observer, ServerExtension
from mini_infer.messages import ModelFacts
from mini_infer.model.checkpoint import LoadedModel, attention_layers, load_checkpoint
from mini_infer.progress import counted_progress
from mini_infer.reference.cache_policy import FreeAtOnce
from mini_infer.reference.scheduler import first_come_first_served
from mini_infer.reference.step_runner import PlainStepRunner
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.sampling.state import SamplingState
from mini_infer.worker import Worker, WorkerParts
from mini_infer.worker.kv_store import KVStore

if TYPE_CHECKING:
    from mini_infer.interfaces import AttentionBackend, CachePolicy, KVCacheSpec, Proposer, Sampler, StepRunner
    from mini_infer.model.generation_config import GenerationConfig
    from mini_infer.settings import Settings
    from mini_infer.text.tokenizer import Tokenizer


@dataclass(slots=True)
class BuiltEngine:
    """An engine ready to step, and what a front end needs to know of it.

    Attributes:
        engine: not thread safe.
        facts: bounds for checking requests.
        tokenizer: None with ``engine.skip_tokenizer`` or for a model folder that has none.
        generation: stop ids and default sampling of the checkpoint.
        choices: what was chosen for each "auto", and why.
        log: the start log, one line each.
        extensions: server extensions of the enabled plugins.
    """

    engine: Engine
    facts: ModelFacts
    tokenizer: "Tokenizer | None"
    generation: "GenerationConfig"
    choices: list[Choice]
    log: list[str]
    extensions: list[Any] = field(default_factory=list)


def build_engine(
    settings: "Settings",
    *,
    modules: Sequence[Any] = (),
    check: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> BuiltEngine:
    """Compose and load an engine.

    Args:
        settings: resolved settings.
        modules: plugin modules that the caller holds already; settings name them like any other.
        check: prove the block accounting after every step (tests).
        clock: the engine's clock, in seconds.

    Raises:
        ConfigError: settings, model and memory do not fit together.
        PluginError: a plugin cannot be used.
    """
    with memory_errors_in_plain_words():
        composition = compose(settings, modules)
        expect_weights_fit(composition.found.on_paper(), composition.context.device)
        transforms = composition.manager.many("model_transforms", composition.context)
        model = load_checkpoint(composition.found, settings, transforms)
        return _Builder(composition, model).build(check, clock)


class _Builder:
    """Puts a composition and a loaded model together."""

    def __init__(self, composition: Composition, model: LoadedModel) -> None:
        self._c = composition
        self._engine_settings = composition.settings.engine
        self._model = model
        self._policy: CachePolicy = self._one("cache_policy", FreeAtOnce)
        self._block_size = choose_block_size(self._engine_settings.block_size, list(composition.backends.values()))
        self._sampler: Sampler = self._one("sampler", ReferenceSampler)
        self._runner: StepRunner = self._one("step_runner", PlainStepRunner)
        self._sampling_state = SamplingState(
            self._engine_settings.max_num_seqs,
            model.config.vocab_size,
            composition.context.device,
            invalid_token_ids=_invalid_token_ids(model.tokenizer, model.config.vocab_size),
        )
        self._memory = plan_kv_memory(
            self._engine_settings,
            [layer.spec for layer in attention_layers(model.module)],
            block_size=self._block_size,
            memory=self._device_memory(),
            model_max_len=model.config.max_position_embeddings,
        )
        composition.log.append(self._memory.note)

    def _device_memory(self) -> DeviceMemory:
        """What is free, and what a GPU must keep of it: for the largest step, and for the step runner."""
        settings, device = self._engine_settings, self._c.context.device
        if not device.startswith("cuda"):
            return DeviceMemory(device, *free_memory(device))
        step = measure_step(
            self._model.causal_lm,
            attention_layers(self._model.module),
            self._sampler,
            self._sampling_state,
            num_tokens=settings.max_num_batched_tokens,
            num_rows=settings.max_num_seqs,
            device=device,
        )
        runner = self._runner.reserve_bytes(step, settings.max_num_batched_tokens)
        return DeviceMemory(device, *free_memory(device), step, runner)

    def _one(self, hook: str, default: Callable[[], Any]) -> Any:
        return self._c.manager.one(hook, self._c.context, default)

    def build(self, check: bool, clock: Callable[[], float]) -> BuiltEngine:
        """The engine, started."""
        processors = self._c.manager.many("logits_processors", self._c.context)
        extensions = self._c.manager.many("extensions", self._c.context)
        proposer: Proposer | None = self._one("proposer", lambda: None)
        self._c.check_lengths(proposer)
        on_device = [p for p in processors if isinstance(p, LogitsProcessor)]
        worker = self._worker(on_device)
        self._rehearse(worker)
        self._c.executor.start(worker)
        parts = EngineParts(
            executor=self._c.executor,
            scheduler=self._one("scheduler", first_come_first_served),
            kv=KVManager(self._memory.num_blocks, self._block_size, self._policy),
            limits=EngineLimits(
                max_model_len=self._memory.max_model_len,
                max_num_seqs=self._engine_settings.max_num_seqs,
                max_num_batched_tokens=self._engine_settings.max_num_batched_tokens,
                vocab_size=self._model.config.vocab_size,
            ),
            proposer=proposer,
            logits_processors=on_device,
            late_processors=[p for p in processors if isinstance(p, LateLogitsProcessor)],
            observers=[e for e in extensions if isinstance(e, Observer)],
            overlap=self._c.overlap,
            check=check,
            clock=clock,
        )
        settings = self._c.settings
        facts = ModelFacts(
            name=settings.server.served_model_name or settings.model,
            vocab_size=self._model.config.vocab_size,
            max_model_len=self._memory.max_model_len,
            max_tokens_in_pool=self._memory.num_blocks * self._block_size,
            extensions=[processor.name for processor in processors],
        )
        log = [*self._c.log, *(str(choice) for choice in self._c.choices)]
        server_extensions = [e for e in extensions if isinstance(e, ServerExtension)]
        return BuiltEngine(
            Engine(parts), facts, self._model.tokenizer, self._model.generation, self._c.choices, log, server_extensions
        )

    def _rehearse(self, worker: Worker) -> None:
        """Run the shapes that the step runner wants to have run, and say what that took."""
        total, device = worker.num_rehearsals, self._c.context.device
        if not total:
            return
        started, before = time.monotonic(), _reserved_bytes(device)
        largest = max(shape.num_rows for shape in counted_progress("rehearsing", worker.rehearse(), total))
        seconds, taken = time.monotonic() - started, _reserved_bytes(device) - before
        self._c.log.append(
            f"rehearsed {total} steps of up to {largest} rows in {seconds:.1f} s; they keep {taken / 2**20:.0f} MiB"
        )

    def _worker(self, processors: list[LogitsProcessor]) -> Worker:
        settings, model, device = self._engine_settings, self._model, self._c.context.device
        limits = BatchLimits(
            max_num_rows=settings.max_num_seqs,
            max_num_tokens=settings.max_num_batched_tokens,
            max_blocks_per_row=-(-self._memory.max_model_len // self._block_size),
            block_size=self._block_size,
        )
        backends = {spec: make(spec, device, self._block_size) for spec, make in self._c.backends.items()}
        self._runner.bind(list(backends.values()))
        return Worker(
            WorkerParts(
                model=model.causal_lm,
                backends=list(backends.values()),
                kv_store=self._bound_kv_store(backends),
                sampler=self._sampler,
                sampling_state=self._sampling_state,
                logits_processors=processors,
                step_runner=self._runner,
                limits=self._runner.limits(limits),
                max_num_seqs=settings.max_num_seqs,
                device=device,
            )
        )

    def _bound_kv_store(self, backends: "dict[KVCacheSpec, AttentionBackend]") -> KVStore:
        layers = attention_layers(self._model.module)
        store = KVStore(
            [backends[layer.spec] for layer in layers],
            [getattr(torch, layer.spec.dtype) for layer in layers],
            self._memory.num_blocks,
            self._policy.tiers(),
            self._c.context.device,
        )
        for layer, cache in zip(layers, store.device_layers, strict=True):
            layer.bind(backends[layer.spec], cache)
        return store


def _reserved_bytes(device: str) -> int:
    return torch.cuda.memory_reserved(device) if device.startswith("cuda") else 0


def _invalid_token_ids(tokenizer: "Tokenizer | None", vocab_size: int) -> list[int]:
    """Ids inside the logits that the tokenizer does not know: never sampled."""
    return [] if tokenizer is None else [i for i in range(vocab_size) if i not in tokenizer.valid_ids]
