"""The engine: requests in, tokens out, one step at a time. ``schedule → prepare → execute → update``.

Contract: exactly one thread calls it. Every request added ends with one last ``TokenDelta`` that has a
``finish_reason``. One request's failure ends that request; a policy's broken promise (``PluginError``) or a lost device
(``EngineError``) ends the engine.

Two loops side by side: the plain one, and one that launches the next step before it reads the last. Tokens are the
same; what ends one step late is discarded exactly.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_infer.engine.asking import check_extensions
from mini_infer.engine.drafting import Drafting
from mini_infer.engine.late_inputs import LateMasks
from mini_infer.engine.log import EngineLog
from mini_infer.engine.parts import EngineParts
from mini_infer.engine.planner import Planner, RequestTable
from mini_infer.engine.request import Request, Status
from mini_infer.errors import EngineError, PluginError, RequestError, in_one_line
from mini_infer.messages import EngineRequest, EngineStats, FinishReason, TokenDelta

if TYPE_CHECKING:
    from mini_infer.interfaces.executor import PendingOutput
    from mini_infer.plan import Grant, RowOutput, StepOutput, StepPlan

MAX_FAILURES = 3
"""Steps of a request that may raise although it does not raise alone."""


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: "StepPlan"
    requests: list[Request]
    pending: "PendingOutput"


class Engine:
    """Runs requests on an executor."""

    def __init__(self, parts: EngineParts) -> None:
        limits = parts.limits
        self._parts = parts
        self._executor, self._kv, self._clock = parts.executor, parts.kv, parts.clock
        self._max_in_flight = parts.executor.max_in_flight if parts.overlap else 1
        self._requests: dict[str, Request] = {}
        self._table = RequestTable(free_slots=list(range(limits.max_num_seqs - 1, -1, -1)))
        self._planner = Planner(
            parts.scheduler, parts.kv, self._table, limits.max_num_batched_tokens, limits.max_num_seqs
        )
        self._drafting = Drafting(parts.proposer, limits.vocab_size)
        self._late = LateMasks(parts.late_processors, limits.vocab_size)
        self._launched: deque[_Launched] = deque()
        self._deltas: list[TokenDelta] = []
        self._at_fault: list[Request] = []  # whose step is being run or read
        self._next_step_id = 1
        self._log = EngineLog(parts.observers, parts.clock)

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, spec: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is taken, it can never fit, or a logits processor refuses it. (Everything else the
                front end has checked.)
        """
        limits, num_prompt = self._parts.limits, len(spec.prompt_token_ids)
        longest = min(limits.max_model_len, self._kv.device.num_blocks * self._kv.block_size)
        if spec.request_id in self._requests:
            raise RequestError(f"request id {spec.request_id!r} is in use", param="request_id")
        if spec.params.max_tokens is None or num_prompt == 0 or num_prompt + spec.params.max_tokens > longest:
            raise RequestError(
                f"prompt of {num_prompt} tokens and max_tokens {spec.params.max_tokens} exceed the {longest} tokens "
                "that a request can hold",
                param="prompt",
                code="context_length_exceeded",
            )
        check_extensions((*self._parts.logits_processors, *self._parts.late_processors), spec.params)
        now = self._clock()
        deadline = None if spec.deadline_ms is None else now + spec.deadline_ms / 1e3
        request = Request(spec, arrival=now, deadline=deadline, token_ids=list(spec.prompt_token_ids))
        self._requests[spec.request_id] = request
        self._table.wait(request)
        self._late.enter(request)
        self._log.event("arrived", request)

    def abort(self, request_id: str) -> None:
        """End a request now; nothing happens if it has ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    def has_work(self) -> bool:
        """Whether ``step`` would do anything (now or at ``wake_at``)."""
        return bool(self._requests or self._launched or self._deltas or self._kv.copying)

    def wake_at(self) -> float | None:
        """Seconds on the engine's clock until which the scheduler holds all waiting work back; None otherwise."""
        busy = self._launched or self._table.running or self._kv.copying
        return None if busy else self._planner.wake_at

    def stats(self) -> EngineStats:
        """The engine's state now."""
        device = self._kv.device
        return self._log.stats(len(self._table.running), len(self._table.waiting), device.num_free, device.num_blocks)

    def shutdown(self) -> None:
        """Release the workers."""
        self._executor.shutdown()

    # -- the step loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Run one step; what became known of any request."""
        try:
            self._step_overlapped() if self._max_in_flight > 1 else self._step_plain()
        except (EngineError, PluginError):
            raise
        except Exception as error:
            self._isolate(error)
        except BaseException:  # Ctrl-C in a notebook: the step is lost, the engine is not
            self._start_over()
            raise
        if self._parts.check:
            self._kv.check_integrity(list(self._requests.values()))
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step_plain(self) -> None:
        self._drafting.decide(self._table.running)
        if self._schedule_and_execute():
            self._read_oldest()

    def _step_overlapped(self) -> None:
        if self._drafting.decide(self._table.running):
            self._drain()  # drafts continue tokens that have been read
        if not self._schedule_and_execute() or len(self._launched) >= self._max_in_flight:
            self._read_oldest()

    def _schedule_and_execute(self) -> bool:
        planned = self._schedule()
        if planned is not None:
            self._execute(*planned)
        return planned is not None

    def _schedule(self) -> tuple["StepPlan", list[Request]] | None:
        self._at_fault = []
        with self._log.part("schedule"):
            self._drafting.propose(self._table.running)
            planned = self._planner.plan(self._next_step_id, self._clock(), len(self._launched))
        for request in self._planner.preempted:
            self._log.event("preempted", request)
        if planned is not None:
            self._kv.launched_step = self._next_step_id
            self._next_step_id += 1
        return planned

    def _execute(self, plan: "StepPlan", requests: list[Request]) -> None:
        self._at_fault = requests
        with self._log.part("forward"):
            self._executor.forward(plan)
        if self._late.concerns(requests):
            self._drain()  # masks are made from every token before them
            self._at_fault = requests
        with self._log.part("sample"):
            pending = self._executor.sample(self._late.inputs(plan, requests))
        self._launched.append(_Launched(plan, requests, pending))

    def _drain(self) -> None:
        while self._launched:
            self._read_oldest()

    def _read_oldest(self) -> None:
        if not self._launched:
            return
        step = self._launched.popleft()
        self._at_fault = step.requests
        with self._log.part("wait"):
            output = step.pending.result()
        with self._log.part("update"):
            self._update(step.plan, step.requests, output)
        self._log.step(step.plan, output, self._table, self._kv)

    # -- update -------------------------------------------------------------------------------------------------------

    def _update(self, plan: "StepPlan", requests: list[Request], output: "StepOutput") -> None:
        for request, grant, row in zip(requests, plan.grants, output.rows, strict=True):
            self._advance(request, grant, row)
        self._kv.complete(plan.step_id)
        self._end_copies(output)

    def _end_copies(self, output: "StepOutput") -> None:
        for copy_id in output.copies_done:
            self._kv.end_copy(copy_id, done=True)
        for copy_id in output.copies_failed:
            self._kv.end_copy(copy_id, done=False)

    def _advance(self, request: Request, grant: "Grant", row: "RowOutput") -> None:
        launched = request.land()
        if request.status is Status.FINISHED:
            return  # it ended while this step ran: what the step drew for it is discarded
        if not row.ok:
            self._kv.distrust(request)
            self._finish(request, "error", error="the model gave logits that are not finite, or all were masked")
            return
        request.suspect = False
        if not launched.stale:
            request.num_computed_tokens += grant.num_tokens + max(len(row.token_ids) - 1, 0)
        prompt_logprobs = request.new_prompt_logprobs(row.prompt_logprobs) if row.prompt_logprobs else []
        token_ids, reason, stop_id = request.append(row.token_ids)
        if not launched.stale:
            self._kv.commit(request)
        if grant.draft_token_ids:
            self._drafting.observe(request, grant, row)
        if not (token_ids or prompt_logprobs or reason):
            return
        self._log.num_generated_tokens += len(token_ids)
        delta = TokenDelta(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=row.logprobs[: len(token_ids)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=stop_id,
            num_cached_tokens=request.num_cached_tokens,
        )
        self._deltas.append(delta)
        if reason is not None:
            self._remove(request, reason)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self._deltas.append(TokenDelta(request_id=request.request_id, finish_reason=reason, error=error))
        self._remove(request, reason)

    def _remove(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._kv.release(request)
            self._table.stop(request)
        else:
            self._table.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._late.leave(request)
        self._log.event("aborted" if reason == "abort" else "finished", request)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _isolate(self, error: Exception) -> None:
        """A host exception that names no row: its requests run again, each alone once; then the culprit ends."""
        if not self._at_fault:
            raise EngineError(f"the engine failed outside any request's step: {error!r}") from error
        culprits = [r for r in self._at_fault if r.status is not Status.FINISHED]
        self._start_over()
        alone = len(culprits) == 1 and culprits[0].suspect
        for request in culprits:
            request.num_failures += 1
            request.suspect = True
            if alone or request.num_failures > MAX_FAILURES:
                self._finish(request, "error", error=in_one_line(error))
        self._log.fault(error)

    def _start_over(self) -> None:
        """Drop all unread steps and let every running request start over, which gives the same tokens again.

        For noise is a function of seed and position. Slots are released on the workers even if a lost plan named them.
        """
        while self._launched:
            self._drop_unread(self._launched.popleft())
        for request in list(self._table.running):
            self._planner.preempt(request)
        for request in self._requests.values():
            request.forget_flights()
        self._kv.complete(self._kv.launched_step)
        self._table.released_slots = sorted(self._table.free_slots)

    def _drop_unread(self, step: _Launched) -> None:
        """Its rows come to nothing, but what it copied between tiers is true."""
        try:
            output = step.pending.result()
        except EngineError:
            raise
        except Exception:  # it may fail for the same reason; then a later answer names its copies
            return
        self._end_copies(output)
