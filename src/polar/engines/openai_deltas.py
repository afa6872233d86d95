"""Why: engines stream tool calls in shapes of their own (an index that never moves, an id on every piece, a
name that comes late). Here their deltas become ours, and the message is what our deltas add up to.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from polar.contract.chat import Delta, Message, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta


class WireFunction(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class WireToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: WireFunction | None = None


class WireDelta(msgspec.Struct):
    """A delta of a stream, or the message of a whole reply. Reasoning has two names in the field."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[WireToolCall] | None = None


@dataclass(slots=True)
class _Call:
    index: int
    id: str | None = None
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    begun: bool = False


class DeltaReader:
    """Collects deltas. ``take`` gives ours since the last ``take``; ``message`` what they add up to."""

    def __init__(self) -> None:
        self._new: list[Delta] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._at: dict[int, _Call] = {}

    def feed(self, delta: WireDelta) -> None:
        """One delta, or a whole message."""
        reasoning = delta.reasoning or delta.reasoning_content
        if reasoning:
            self._reasoning.append(reasoning)
            self._new.append(ReasoningDelta(reasoning))
        if delta.content:
            self._content.append(delta.content)
            self._new.append(TextDelta(delta.content))
        for place, piece in enumerate(delta.tool_calls or ()):
            self._feed_call(place if piece.index is None else piece.index, piece)

    def take(self) -> list[Delta]:
        new, self._new = self._new, []
        return new

    def message(self) -> Message:
        """The whole message; calls that never got a name begin now, under an empty one."""
        for call in self._calls:
            if not call.begun:
                self._begin(call)
        return Message(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning) if self._reasoning else None,
            tool_calls=tuple(ToolCall(c.id or "", c.name, "".join(c.arguments)) for c in self._calls),
        )

    def _feed_call(self, place: int, piece: WireToolCall) -> None:
        call = self._at.get(place)
        if call is None or (piece.id and call.id and piece.id != call.id):
            call = self._at[place] = _Call(len(self._calls))
            self._calls.append(call)
        call.id = call.id or piece.id
        function = piece.function or WireFunction()
        arguments = _text(function.arguments)
        if arguments:
            call.arguments.append(arguments)
        if call.begun:
            if arguments:
                self._new.append(ToolCallDelta(call.index, arguments))
        elif function.name:
            call.name = function.name
            self._begin(call)

    def _begin(self, call: _Call) -> None:
        call.begun = True
        call.id = call.id or f"call_{uuid.uuid4().hex[:24]}"
        self._new.append(ToolCallDelta(call.index, "".join(call.arguments), id=call.id, name=call.name))


def _text(arguments: Any) -> str:
    """Arguments are text as sampled; some servers send the parsed object instead."""
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
