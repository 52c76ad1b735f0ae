"""What an engine is made of: the build step's answer, the engine's only argument."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mini_infer.engine.kv_manager import KVManager
    from mini_infer.interfaces.executor import Executor
    from mini_infer.interfaces.observer import Observer
    from mini_infer.interfaces.proposer import Proposer
    from mini_infer.interfaces.sampler import LateLogitsProcessor, LogitsProcessor
    from mini_infer.interfaces.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of one engine, resolved: ``max_model_len`` tokens a request, and so on."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int


@dataclass(slots=True)
class EngineParts:
    """What the build step composed."""

    executor: "Executor"
    scheduler: "Scheduler"
    kv: "KVManager"
    limits: EngineLimits
    proposer: "Proposer | None" = None
    logits_processors: Sequence["LogitsProcessor"] = ()  # asked here only whether they can take a request
    late_processors: Sequence["LateLogitsProcessor"] = ()
    observers: Sequence["Observer"] = ()
    overlap: bool = False
    check: bool = False  # prove the block accounting after every step (tests)
    clock: Callable[[], float] = field(default=time.monotonic)
