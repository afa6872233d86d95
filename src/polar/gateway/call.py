"""One model call as its clients see it: sampled once, read by any number of them.

The call runs on its own; HTTP requests only follow it. So a client may go away and come back (a retry joins
the call, from its first delta), two requests that are the same call get the same answer, and a call that
nobody waits for any more is given up after a short grace.
"""

from __future__ import annotations

import asyncio
import time

from polar.contract.chat import Delta, Message, ReasoningDelta, TextDelta, ToolCallDelta
from polar.dialects.base import Answer, CallError


class ModelCall:
    """A call in flight or finished.

    Args:
        call_id: becomes the completion's id.
        grace: seconds that an unwatched call goes on before it is given up.
    """

    def __init__(self, call_id: str, *, grace: float) -> None:
        self.call_id = call_id
        self.created_at = time.time()
        self.deltas: list[Delta] = []
        self.answer: Answer | None = None
        self.error: CallError | None = None
        self.prompt_tokens: int | None = None
        self.waiting = 0
        self.delivered = False
        self.committing = False
        """Its answer is being made durable: it is not given up any more."""
        self._given_up = False
        self._grace = grace
        self._task: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._rejoined: asyncio.Event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    # ---- the side that samples ---------------------------------------------------------------------------

    def run(self, task: asyncio.Task[None]) -> None:
        """The task that does the work: cancelled when the call is given up."""
        self._task = task

    def begin(self, prompt_tokens: int) -> None:
        """The prompt is known."""
        self.prompt_tokens = prompt_tokens
        self._notify()

    def push(self, delta: Delta) -> None:
        """More of the reply."""
        self.deltas.append(delta)
        self._notify()

    def end(self, outcome: Answer | CallError) -> None:
        """The answer, durable by now, or the error."""
        if isinstance(outcome, CallError):
            self.error = outcome
        else:
            self.answer = outcome
        self._notify()
        if self._ended is not None:
            self._ended.set_result(None)

    async def watched(self) -> None:
        """Wait until somebody waits for the answer. If nobody comes within the grace, the call is cancelled."""
        while not self.waiting:
            await self._rejoined.wait()

    # ---- the side that reads -----------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """It ended without an answer, or is about to, because it was given up."""
        return self.error is not None or (self._given_up and self.answer is None)

    @property
    def finished(self) -> bool:
        """It ended, in whatever way."""
        return self.error is not None or self.answer is not None

    def join(self) -> None:
        """A client waits for this call."""
        self.waiting += 1
        self._rejoined.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        """A client has its answer, or has gone away."""
        self.waiting -= 1
        if self.waiting == 0:
            self._rejoined.clear()
            if self.answer is not None:
                self.deltas = _whole(self.answer.message)
            elif not self.finished and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._grace, self.give_up)

    def give_up(self) -> None:
        """End the generation; what was sampled is kept as ``abandoned``."""
        self._timer = None
        if self._task is not None and not self.finished and not self.committing:
            self._given_up = True
            self._task.cancel()

    async def settled(self) -> None:
        """Wait until the call has ended and is recorded."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def changed(self) -> asyncio.Future[None]:
        """Done as soon as there is anything new: the prompt, a delta, the end."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def ended(self) -> asyncio.Future[None]:
        """Done as soon as the call has ended, for a reader that waits for nothing else."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
            if self.finished:
                self._ended.set_result(None)
        return self._ended

    def _notify(self) -> None:
        if self._changed is not None:
            changed, self._changed = self._changed, None
            changed.set_result(None)


def _whole(message: Message) -> list[Delta]:
    """A message as the fewest deltas: what a finished call keeps for a client that asks again."""
    deltas: list[Delta] = []
    if message.reasoning:
        deltas.append(ReasoningDelta(message.reasoning))
    if isinstance(message.content, str) and message.content:
        deltas.append(TextDelta(message.content))
    for index, call in enumerate(message.tool_calls):
        deltas.append(ToolCallDelta(index, call.arguments, call.id, call.name))
    return deltas
