"""From settings to a running engine: every choice is made here, once, and said aloud.

::

    settings ─> device ─> plugins ─> checkpoint ─> model ─> transforms ─> attention backends ─> KV memory ─> engine
                (auto)    (hooks)    (adapter,     (meta,    (in order)    (one a KV group)      (blocks;
                                      loader)      then weights)                                      measured)

Contract: what cannot be had is a ``ConfigError`` or ``PluginError`` before anything is served; no choice is silent.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mini_infer.build.attention_choice import choose_block_size
from mini_infer.build.composition import Composition, compose
from mini_infer.build.device import device_faults_in_plain_words
from mini_infer.build.kv_memory import (
    DeviceMemory,
    KVMemoryPlan,
    expect_weights_fit,
    free_memory,
    longest_sequence,
    memory_errors_in_plain_words,
    plan_kv_memory,
    size,
)
from mini_infer.build.largest_step import is_measured, largest_plan, peak_bytes, run_step
from mini_infer.choices import Choice
from mini_infer.engine import Engine, EngineLimits, EngineParts
from mini_infer.engine.kv_manager import KVManager
from mini_infer.interfaces import BatchLimits, LateLogitsProcessor, LogitsProcessor, Observer, ServerExtension
from mini_infer.messages import ModelFacts
from mini_infer.model.checkpoint import LoadedModel, attention_layers, load_checkpoint
from mini_infer.progress import counted_progress
from mini_infer.reference.cache_policy import FreeAtOnce
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
        with device_faults_in_plain_words(composition.context.device):
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
        self._layers = attention_layers(model.module)
        self._policy: CachePolicy = self._one("cache_policy", FreeAtOnce)
        self._sampler: Sampler = self._one("sampler", ReferenceSampler)
        self._runner: StepRunner = self._one("step_runner", PlainStepRunner)
        self._proposer: Proposer | None = self._one("proposer", lambda: None)
        self._block_size = choose_block_size(self._engine_settings.block_size, list(composition.backends.values()))
        self._invalid_token_ids = _invalid_token_ids(model.tokenizer, model.config.vocab_size)

    def _one(self, hook: str, default: Callable[[], Any]) -> Any:
        return self._c.manager.one(hook, self._c.context, default)

    def build(self, check: bool, clock: Callable[[], float]) -> BuiltEngine:
        """The engine, started."""
        processors = self._c.manager.many("logits_processors", self._c.context)
        extensions = self._c.manager.many("extensions", self._c.context)
        self._c.check_lengths(self._proposer)
        on_device = [p for p in processors if isinstance(p, LogitsProcessor)]
        memory = self._plan_memory()
        self._c.log.append(memory.note)
        worker = self._worker(self._runner, memory.num_blocks, memory.max_model_len, self._policy.tiers(), on_device)
        self._rehearse(worker)
        self._c.executor.start(worker)
        parts = EngineParts(
            executor=self._c.executor,
            scheduler=self._c.scheduler,
            kv=KVManager(memory.num_blocks, self._block_size, self._policy),
            limits=EngineLimits(
                max_model_len=memory.max_model_len,
                max_num_seqs=self._engine_settings.max_num_seqs,
                max_num_batched_tokens=self._engine_settings.max_num_batched_tokens,
                vocab_size=self._model.config.vocab_size,
            ),
            proposer=self._proposer,
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
            max_model_len=memory.max_model_len,
            max_tokens_in_pool=memory.num_blocks * self._block_size,
            extensions=[processor.name for processor in processors],
        )
        log = [*self._c.log, *(str(choice) for choice in self._c.choices)]
        server_extensions = [e for e in extensions if isinstance(e, ServerExtension)]
        return BuiltEngine(
            Engine(parts), facts, self._model.tokenizer, self._model.generation, self._c.choices, log, server_extensions
        )

    def _plan_memory(self) -> KVMemoryPlan:
        """The KV cache's size, on a GPU beside the largest step, which is run for it."""
        device, model_max_len = self._c.context.device, self._model.config.max_position_embeddings
        step_bytes = runner_bytes = 0
        if is_measured(device):
            limits = self._limits(longest_sequence(self._engine_settings, model_max_len))
            step_bytes = peak_bytes(lambda: self._run_largest_step(limits), device)
            runner_bytes = self._runner.reserve_bytes(step_bytes, limits.max_num_tokens)
        return plan_kv_memory(
            self._engine_settings,
            [layer.spec for layer in self._layers],
            block_size=self._block_size,
            memory=DeviceMemory(device, *free_memory(device), step_bytes, runner_bytes),
            model_max_len=model_max_len,
        )

    def _run_largest_step(self, limits: BatchLimits) -> None:
        max_drafts = self._proposer.max_drafts if self._proposer is not None else 0
        worker = self._worker(PlainStepRunner(), 0, limits.max_blocks_per_row * limits.block_size, {}, [])
        run_step(worker, largest_plan(limits, max_drafts))
        for layer in self._layers:
            layer.unbind()

    def _rehearse(self, worker: Worker) -> None:
        """Run the shapes that the step runner wants to have run, and say what that took."""
        total, device = worker.num_rehearsals, self._c.context.device
        if not total:
            return
        started, before = time.monotonic(), free_memory(device)[0]
        largest = max(shape.num_rows for shape in counted_progress("rehearsing", worker.rehearse(), total))
        seconds, taken = time.monotonic() - started, max(0, before - free_memory(device)[0])
        self._c.log.append(
            f"rehearsed {total} steps of up to {largest} rows in {seconds:.1f} s; they keep {size(taken)}"
        )

    def _limits(self, max_model_len: int) -> BatchLimits:
        return BatchLimits(
            max_num_rows=self._engine_settings.max_num_seqs,
            max_num_tokens=self._engine_settings.max_num_batched_tokens,
            max_blocks_per_row=-(-max_model_len // self._block_size),
            block_size=self._block_size,
        )

    def _worker(
        self,
        runner: "StepRunner",
        num_blocks: int,
        max_model_len: int,
        tiers: Mapping[str, int],
        processors: list[LogitsProcessor],
    ) -> Worker:
        """A worker over a KV cache of its own, to which the layers are bound."""
        settings, model, device = self._engine_settings, self._model, self._c.context.device
        backends = {spec: make(spec, device, self._block_size) for spec, make in self._c.backends.items()}
        runner.bind(list(backends.values()))
        sampling_state = SamplingState(
            settings.max_num_seqs, model.config.vocab_size, device, invalid_token_ids=self._invalid_token_ids
        )
        return Worker(
            WorkerParts(
                model=model.causal_lm,
                backends=list(backends.values()),
                kv_store=self._bound_kv_store(backends, num_blocks, tiers),
                sampler=self._sampler,
                sampling_state=sampling_state,
                logits_processors=processors,
                step_runner=runner,
                limits=runner.limits(self._limits(max_model_len)),
                max_num_seqs=settings.max_num_seqs,
                device=device,
            )
        )

    def _bound_kv_store(
        self, backends: "dict[KVCacheSpec, AttentionBackend]", num_blocks: int, tiers: Mapping[str, int]
    ) -> KVStore:
        store = KVStore(
            [backends[layer.spec] for layer in self._layers],
            [getattr(torch, layer.spec.dtype) for layer in self._layers],
            num_blocks,
            tiers,
            self._c.context.device,
        )
        for layer, cache in zip(self._layers, store.device_layers, strict=True):
            layer.bind(backends[layer.spec], cache)
        return store


def _invalid_token_ids(tokenizer: "Tokenizer | None", vocab_size: int) -> list[int]:
    """Ids inside the logits that the tokenizer does not know: never sampled."""
    return [] if tokenizer is None else [i for i in range(vocab_size) if i not in tokenizer.valid_ids]
