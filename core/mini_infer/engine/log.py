"""What the engine did, for observers and statistics: collected while a step runs, told once when it is read."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mini_infer.errors import PluginError, in_one_line
from mini_infer.interfaces.observer import Observer, RequestEvent, StepEvents
from mini_infer.messages import EngineStats

if TYPE_CHECKING:
    from mini_infer.engine.kv_manager import KVManager
    from mini_infer.engine.planner import RequestTable
    from mini_infer.engine.request import Request
    from mini_infer.plan import StepOutput, StepPlan

logger = logging.getLogger("mini_infer")


class EngineLog:
    """Counts and times; knows nothing of how the engine works."""

    def __init__(self, observers: Sequence[Observer], clock: Callable[[], float]) -> None:
        self._observers = observers
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._events: list[RequestEvent] = []
        self._started = clock()
        self._step_id = 0
        self.num_generated_tokens = 0
        self._counts = {"preempted": 0, "finished": 0, "aborted": 0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part of a step."""
        started = self._clock()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started

    def event(self, kind: str, request: "Request") -> None:
        """Something happened to a request."""
        if kind in self._counts:
            self._counts[kind] += 1
        if self._observers:
            detail: dict[str, int | float | str] = {
                "prompt_tokens": request.num_prompt_tokens,
                "output_tokens": len(request.token_ids) - request.num_prompt_tokens,
                "cached_tokens": request.num_cached_tokens,
                "finish_reason": request.finish_reason or "",
            }
            self._events.append(RequestEvent(kind, request.request_id, self._clock(), detail))

    def fault(self, error: Exception) -> None:
        """A step raised and its requests are tried again alone."""
        logger.warning("a step raised %s; its requests run again, each alone", in_one_line(error))

    def step(self, plan: "StepPlan", output: "StepOutput", table: "RequestTable", kv: "KVManager") -> None:
        """A step was read: tell the observers."""
        self._step_id = plan.step_id
        if self._observers:
            now = self._clock()
            drafted = [
                (len(g.draft_token_ids), len(r.token_ids) - 1) for g, r in zip(plan.grants, output.rows, strict=True)
            ]
            events = StepEvents(
                step_id=plan.step_id,
                started=self._started,
                ended=now,
                num_running=len(table.running),
                num_waiting=len(table.waiting),
                num_tokens=plan.num_tokens,
                num_sampled=sum(len(row.token_ids) for row in output.rows),
                num_drafted=sum(d for d, _ in drafted),
                num_accepted=sum(accepted for d, accepted in drafted if d),
                num_free_blocks=kv.device.num_free,
                num_total_blocks=kv.device.num_blocks,
                seconds=self._seconds,
                requests=self._events,
            )
            self._tell(events)
        self._started, self._seconds, self._events = self._clock(), {}, []

    def _tell(self, events: StepEvents) -> None:
        for observer in self._observers:
            try:
                observer.step(events)
            except Exception as error:
                raise PluginError(f"observer {type(observer).__name__} failed: {error!r}") from error

    def stats(self, num_running: int, num_waiting: int, num_free_blocks: int, num_total_blocks: int) -> EngineStats:
        """The counters as one message."""
        return EngineStats(
            step_id=self._step_id,
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=num_free_blocks,
            num_total_blocks=num_total_blocks,
            num_preemptions=self._counts["preempted"],
            num_generated_tokens=self.num_generated_tokens,
            num_finished=self._counts["finished"],
            num_aborted=self._counts["aborted"],
        )
