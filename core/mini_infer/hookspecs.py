"""The hooks of pluggy's project ``mini_infer``: all that a plugin can answer, complete.

Contract: every hook runs once, while an engine is built, with one argument and returns objects; the step loop calls
those objects through the interfaces of ``mini_infer.interfaces`` and no hook. A hook must not load weights or reserve
device memory. What it imports it imports inside the function, for only enabled plugins may cost anything.

Two kinds:

* One answer: ``scheduler``, ``cache_policy``, ``sampler``, ``executor``, ``step_runner``, ``proposer``. ``None`` means
  "not I"; with no answer the core's reference is used. Two answers are a ``PluginConflictError``, whatever their order.
* Lists: the rest. The engine joins them in the order of the setting ``plugins``; an empty list is an answer.

An implementation with ``hookimpl(wrapper=True)`` gets the result of the others (for one answer: the core's reference
where no plugin answered) from its ``yield`` and returns the one to use, so that it can wrap another plugin's scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import (
        AttentionBackend,
        CachePolicy,
        Executor,
        LogitsProcessor,
        ModelAdapter,
        ModelTransform,
        Observer,
        Proposer,
        Sampler,
        Scheduler,
        SchedulingPolicy,
        ServerExtension,
        StepRunner,
        WeightLoader,
    )

__all__ = ["LISTS", "ONE_ANSWER", "PROJECT"]

PROJECT = "mini_infer"
ONE_ANSWER = ("scheduler", "cache_policy", "sampler", "executor", "step_runner", "proposer")
LISTS = (
    "model_adapters",
    "weight_loaders",
    "attention_backends",
    "scheduling_policies",
    "logits_processors",
    "model_transforms",
    "extensions",
)

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec
def model_adapters(context: BuildContext) -> Sequence[ModelAdapter]:
    """Returns the model families of this plugin. The first that says it serves the model's config is used."""
    raise NotImplementedError


@hookspec
def weight_loaders(context: BuildContext) -> Sequence[WeightLoader]:
    """Returns the weight formats of this plugin. ``engine.load_format`` names one; "auto" asks each for the files."""
    raise NotImplementedError


@hookspec
def attention_backends(context: BuildContext) -> Sequence[type[AttentionBackend]]:
    """Returns classes of attention backends. The core makes one object of the class that it chose for each KV group.

    ``engine.attention`` names one; "auto" takes the first in the order of ``plugins`` whose capabilities fit, with the
    core's reference last, and records a ``Choice``.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def scheduler(context: BuildContext) -> Scheduler | None:
    """Returns a whole scheduler, or ``None``. The core's is put together of ``scheduling_policies``."""
    raise NotImplementedError


@hookspec(firstresult=True)
def cache_policy(context: BuildContext) -> CachePolicy | None:
    """Returns the policy for computed KV blocks, or ``None``. The core's frees them at once."""
    raise NotImplementedError


@hookspec(firstresult=True)
def sampler(context: BuildContext) -> Sampler | None:
    """Returns the sampler, or ``None``. The core's does all of ``SamplingParams`` in plain PyTorch."""
    raise NotImplementedError


@hookspec(firstresult=True)
def executor(context: BuildContext) -> Executor | None:
    """Returns the executor, or ``None``. The core's runs one worker in the engine's own thread."""
    raise NotImplementedError


@hookspec(firstresult=True)
def step_runner(context: BuildContext) -> StepRunner | None:
    """Returns what wraps the forward pass (graphs, compilation), or ``None``. The core's calls the model as it is."""
    raise NotImplementedError


@hookspec(firstresult=True)
def proposer(context: BuildContext) -> Proposer | None:
    """Returns the source of draft tokens, or ``None``. With no answer nothing is speculated."""
    raise NotImplementedError


@hookspec
def scheduling_policies(context: BuildContext) -> Sequence[SchedulingPolicy]:
    """Returns policies with a ``name``, each an ``OrderPolicy``, a ``VictimPolicy`` or a ``ChunkPolicy``.

    ``engine.order``, ``engine.victim`` and ``engine.chunks`` name one each; "auto" takes the first in the order of
    ``plugins``, with the core's (first come, first served; who came last yields; whole prompts) last, and records a
    ``Choice``. Where a plugin answers ``scheduler`` none is used.
    """
    raise NotImplementedError


@hookspec
def logits_processors(context: BuildContext) -> Sequence[LogitsProcessor]:
    """Returns processors that change logits before sampling, applied in the order of ``plugins``."""
    raise NotImplementedError


@hookspec
def model_transforms(context: BuildContext) -> Sequence[ModelTransform]:
    """Returns rewrites of the built module (quantise, fuse, shard), applied in the order of ``plugins``."""
    raise NotImplementedError


@hookspec
def extensions(context: BuildContext) -> Sequence[Observer | ServerExtension]:
    """Returns observers of each step's events, and additions to the server (routes, middleware)."""
    raise NotImplementedError
