"""When two messages are the same message.

Harnesses do not send history back as they received it: arguments are parsed and written again (key order,
spaces, 9000.0 for 9000), one text block becomes a string, empty text appears or disappears, thinking is
trimmed or left out. None of that changes what was said. What was said is the *key* of a message; two
messages with equal keys are the same. Token ids are never taken from what a client sent, only from our own
record of the message that it matched, so a generous match can't put a token into a context where it was not.

Thinking is not part of the key, because some harnesses drop it: ``reasoning_agrees`` compares it where both
sides have it. Tool-call ids are not part of it either, because some harnesses make their own.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from polar.contract.chat import Image, Message, Text, ToolCall

Key = tuple[Any, ...]


def message_key(message: Message) -> Key:
    """What was said, hashable: equal for two forms of the same message."""
    called = message.tool_calls
    calls = tuple([(call.name, arguments_key(call.arguments)) for call in called]) if called else ()
    content = message.content
    return (message.role, content if isinstance(content, str) else _content_key(content), calls)


def arguments_key(arguments: str) -> str:
    """Tool arguments as canonical JSON; text that is no JSON stands for itself."""
    if not arguments.strip():
        return "{}"
    return _short_key(arguments) if len(arguments) <= _SHORT else _json_key(arguments)


def _json_key(arguments: str) -> str:
    try:
        return msgspec.json.encode(_canonical(msgspec.json.decode(arguments)), order="sorted").decode()
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return arguments


def is_json_object(arguments: str) -> bool:
    """Whether the arguments parse, as harnesses expect them to."""
    if not arguments.strip():
        return True
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return False


def says_nothing(message: Message) -> bool:
    """A reply without text, thinking or calls."""
    return message.role == "assistant" and not message.reasoning and message_key(message)[1:] == ("", ())


def reasoning_agrees(recorded: str | None, sent: str | None) -> bool:
    """The client left the thinking out, or sent it back but for white space around it."""
    return not sent or not sent.strip() or sent.strip() == (recorded or "").strip()


def repaired_agrees(recorded: Message, sent: Message) -> bool:
    """The same reply, in which a harness repaired or replaced arguments that were no JSON.

    The calls are then the same by their ids, which are ours and can't be guessed. All else must agree: the text,
    the thinking, and the calls whose arguments do parse.
    """
    pairs = list(zip(recorded.tool_calls, sent.tool_calls, strict=False))
    if len(recorded.tool_calls) != len(sent.tool_calls) or all(is_json_object(ours.arguments) for ours, _ in pairs):
        return False
    return (
        message_key(recorded)[1] == message_key(sent)[1]
        and reasoning_agrees(recorded.reasoning, sent.reasoning)
        and all(ours.id == theirs.id and _call_agrees(ours, theirs) for ours, theirs in pairs)
    )


def _call_agrees(ours: ToolCall, theirs: ToolCall) -> bool:
    if not is_json_object(ours.arguments):
        return True
    return (ours.name, arguments_key(ours.arguments)) == (theirs.name, arguments_key(theirs.arguments))


_SHORT = 2048
_short_key = functools.lru_cache(maxsize=4096)(_json_key)
"""A conversation is sent again with every call: arguments seen before are not parsed again."""


def _content_key(content: tuple[Text | Image, ...]) -> Any:
    parts = tuple(part for part in content if isinstance(part, Image) or part.text)
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    return tuple(("image", part.url) if isinstance(part, Image) else part.text for part in parts)


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value
