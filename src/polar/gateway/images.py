"""Why: token ids carry text alone. An image that the user sends is refused: a model that saw only where it was would
answer from nothing. One that a tool brought is another matter: the model opened a picture among its files, and a
refusal would end the session, since Claude Code, Codex and Gemini CLI send it whatever the model. It is told that the
image can't be shown, as other harnesses do themselves, and a line says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from polar.contract.chat import Chat, Image, Message, Text
from polar.dialects.base import CallError

LEFT_OUT = "[The image is left out: this model reads text only.]"


def heed_images(chat: Chat) -> tuple[Chat, tuple[str, ...]]:
    """The call as text alone, and a line where that leaves something out.

    Raises:
        CallError: ``bad_request``: there are images that no tool brought.
    """
    messages = _text_of_tools(chat.messages)
    if any(_has_image(message) for message in messages):
        way_out = "start Polar with --mode chat and an engine that reads them"
        raise CallError("bad_request", f"Images can't be sent as token ids: {way_out}")
    if all(old is new for old, new in zip(chat.messages, messages, strict=True)):
        return chat, ()
    warning = "images of tool results were left out: token ids carry text alone (--mode chat sends them)"
    return msgspec.structs.replace(chat, messages=messages), (warning,)


def _text_of_tools(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with a line for each image that a tool brought: those of its result, and those that some
    harnesses send in a message behind it. The beginning of a conversation comes out as it does in the whole."""
    told: list[Message] = []
    behind_tool = False
    for message in messages:
        behind_tool = message.role == "tool" or (behind_tool and message.role != "assistant")
        told.append(_as_text(message) if behind_tool and _has_image(message) else message)
    return tuple(told)


def _has_image(message: Message) -> bool:
    return isinstance(message.content, tuple) and any(isinstance(part, Image) for part in message.content)


def _as_text(message: Message) -> Message:
    assert isinstance(message.content, tuple)
    parts = tuple(Text(LEFT_OUT) if isinstance(part, Image) else part for part in message.content)
    return msgspec.structs.replace(message, content=parts)
