"""Messages of OpenAI's Chat API as Polar's own, and back.

Why apart from the dialect: a conversation is sent again with every call, and grows; what was read before is not read
again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from polar.contract.chat import Image, Message, Part, Text, ToolCall
from polar.dialects.base import CallError
from polar.dialects.openai_items import arguments_text, content_of, custom_arguments


class _ImageURL(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    image_url: _ImageURL | str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Custom(msgspec.Struct):
    name: str
    input: str = ""


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    custom: _Custom | None = None
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


_message_decoder = msgspec.json.Decoder(_Message)


def messages(raws: Sequence[msgspec.Raw]) -> tuple[Message, ...]:
    """The messages of a request.

    Raises:
        CallError: ``bad_request``, naming the message.
    """
    read: list[Message] = []
    for index, raw in enumerate(raws):
        said = bytes(raw)
        message = _seen.get(said)
        if message is None:
            try:
                message = _message(_message_decoder.decode(said))
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                what, _, where = str(error).partition(" - at `$")
                where = f"$.messages[{index}]{where.removesuffix('`')}"
                raise CallError("bad_request", f"The request body is not valid: {what} - at `{where}`") from None
            _seen.put(said, message)
        read.append(message)
    return tuple(read)


class _Seen:
    """Messages by their JSON: a conversation is sent again with every call, and what was read before is not
    read again. The oldest go when there are ``limit`` bytes; large ones (images) are not kept at all."""

    def __init__(self, limit: int, largest: int) -> None:
        self._limit, self._largest = limit, largest
        self._messages: OrderedDict[bytes, Message] = OrderedDict()  # a dict finds its first slowly after many del
        self._size = 0
        self._lock = threading.Lock()  # large bodies are parsed in threads
        self.get = self._messages.get

    def put(self, said: bytes, message: Message) -> None:
        if len(said) > self._largest:
            return
        with self._lock:
            if self._messages.setdefault(said, message) is message:
                self._size += len(said)
            while self._size > self._limit:
                oldest, _ = self._messages.popitem(last=False)
                self._size -= len(oldest)


_seen = _Seen(limit=64 * 1024 * 1024, largest=256 * 1024)


def _message(message: _Message) -> Message:
    role, result_of = message.role, message.tool_call_id
    if role == "function":
        role, result_of = "tool", result_of or _FUNCTION_CALL
    calls = [_call(call, f"call_{index}") for index, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        calls.append(_call(_ToolCall(message.function_call), _FUNCTION_CALL))
    return Message(
        role="system" if role == "developer" else role,
        content=_content(message.content),
        reasoning=message.reasoning_content if message.reasoning_content is not None else message.reasoning,
        tool_calls=tuple(calls),
        tool_call_id=result_of,
        name=message.name,
    )


_FUNCTION_CALL = "call_0"
"""The id of a call from before calls had ids."""


def _call(call: _ToolCall, otherwise: str) -> ToolCall:
    if call.custom is not None:
        return ToolCall(call.id or otherwise, call.custom.name, custom_arguments(call.custom.input))
    if call.function is None:
        raise msgspec.ValidationError("A tool call must have a `function` - at `$.tool_calls`")
    return ToolCall(call.id or otherwise, call.function.name, arguments_text(call.function.arguments))


def _content(content: str | list[_Part] | None) -> str | tuple[Part, ...]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Part] = []
    for part in content:
        if part.image_url is not None:
            parts.append(Image(part.image_url if isinstance(part.image_url, str) else part.image_url.url))
        elif part.text is not None or part.refusal is not None:
            if part.text or part.refusal:
                parts.append(Text(part.text or part.refusal or ""))
        elif part.type != "text":
            raise CallError("bad_request", f"content part of type '{part.type}' is not supported here")
    return content_of(parts)


def encode_message(message: Message) -> dict[str, Any]:
    """An assistant message in this API's form."""
    body: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    elif body["content"] is None:
        body["content"] = ""
    return body
