"""The thread that computes: it owns the scheduler, and the rest of the engine talks to it through here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from polar.contract.arrays import Floats, Ids
from polar.contract.chat import Sampling
from polar.engines.base import EngineError, TokenChunk
from polar.engines.local.packed import PackedModel
from polar.engines.local.sampler import Sampler
from polar.engines.local.scheduler import Call, Scheduler

T = TypeVar("T")
Job = Callable[[Scheduler], None]

_CLOSED = EngineError("unavailable", "the embedded engine is closed")


class Worker:
    """Runs steps while there is something to do, and jobs (new calls, new weights, scoring) between steps."""

    def __init__(self, model: PackedModel, version: str, *, max_running: int, kv_tokens: int, threads: int) -> None:
        self._vocab_size = model.config.vocab_size
        self._threads = threads
        self._wake = threading.Condition()
        self._jobs: list[tuple[Job, Callable[[EngineError], None]]] = []
        self._ended: EngineError | None = None
        scheduler = Scheduler(model, version, max_running=max_running, kv_tokens=kv_tokens)
        self._thread = threading.Thread(target=self._run, args=(scheduler,), name="polar-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Ids,
        sampling: Sampling,
        stop_ids: frozenset[int],
        max_tokens: int,
        emit: Callable[[TokenChunk | EngineError], None],
    ) -> Call:
        """Queue a call. Setting ``cancelled`` on it ends it within a step.

        Raises:
            EngineError: the thread has ended.
        """

        def guarded(item: TokenChunk | EngineError) -> None:
            try:
                emit(item)
            except RuntimeError:
                # The caller's event loop is gone, and with it the caller.
                call.cancelled = True

        call = Call(prompt, Sampler(sampling, prompt, self._vocab_size), stop_ids, max_tokens, guarded)
        self._send(lambda scheduler: scheduler.add(call), lambda error: _end_call(call, error))
        return call

    def load(self, model: PackedModel, version: str) -> Future[None]:
        """Use other weights from the next step on."""
        return self._ask(lambda scheduler: scheduler.load(model, version))

    def score(self, ids: Ids, temperature: float) -> Future[Floats]:
        """Logprobs of a given sequence."""
        return self._ask(lambda scheduler: scheduler.score(ids, temperature))

    def close(self) -> None:
        """End all calls with the finish reason "abort" and the thread with them; wait until it is over."""
        with self._wake:
            self._ended = self._ended or _CLOSED
            self._wake.notify()
        self._thread.join()

    def _ask(self, question: Callable[[Scheduler], T]) -> Future[T]:
        future: Future[T] = Future()

        def job(scheduler: Scheduler) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(question(scheduler))
                except Exception as error:
                    future.set_exception(EngineError("internal", f"the embedded engine: {_one_line(error)}"))

        def fail(error: EngineError) -> None:
            if not future.done():
                future.set_exception(error)

        self._send(job, fail)
        return future

    def _send(self, job: Job, fail: Callable[[EngineError], None]) -> None:
        with self._wake:
            if self._ended:
                raise EngineError(self._ended.kind, str(self._ended))
            self._jobs.append((job, fail))
            self._wake.notify()

    def _run(self, scheduler: Scheduler) -> None:
        try:
            torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while self._next(scheduler):
                    scheduler.step()
        except BaseException as error:
            self._finish(scheduler, _failure(error))
        else:
            self._finish(scheduler, _CLOSED)

    def _next(self, scheduler: Scheduler) -> bool:
        """Wait for something to do and take the jobs in. False: the engine was closed."""
        with self._wake:
            while not (self._jobs or scheduler.busy or self._ended):
                self._wake.wait()
            if self._ended:
                return False
            jobs = list(self._jobs)
        for job, _ in jobs:
            job(scheduler)
            with self._wake:
                del self._jobs[0]
        return True

    def _finish(self, scheduler: Scheduler, error: EngineError) -> None:
        with self._wake:
            self._ended = error
            jobs, self._jobs = self._jobs, []
        for call in scheduler.calls:
            _end_call(call, error)
        for _, fail in jobs:
            fail(error)


def _end_call(call: Call, error: EngineError) -> None:
    """A closed engine ends its calls in an orderly way; a failed one passes its failure on."""
    failed = error.kind == "internal"
    call.emit(error if failed else TokenChunk([], [], None, "abort", call.cached))


def _failure(error: BaseException) -> EngineError:
    return EngineError("internal", f"the embedded engine stopped: {_one_line(error)}; start it again")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
