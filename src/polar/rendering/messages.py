"""Messages to the dicts that chat templates read.

Why this is more than a copy: clients send what their provider allows (system messages anywhere, arguments
that are no JSON, lists of text parts), while a template knows only what its model was trained on. Whatever
is changed here for a template's sake keeps this: a conversation, its reply and more begins with the text of
that conversation.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from polar.contract.chat import Image, Message, Text, Tool, ToolCall
from polar.rendering.base import RenderError
from polar.rendering.traits import Traits

RAW_ARGUMENTS = "raw_arguments"
"""Where a template takes only an object as arguments, text that is none is given to it under this key."""

MAX_DEPTH = 100
"""Objects and lists in each other that are given to a template as such. It walks down them by itself, and one with
macros (Gemma's) comes to Python's limit at 170."""

_NINE = re.compile(r"[A-Za-z0-9]{9}")

Dict = dict[str, Any]
Protect = Callable[[Any], Any]


def conversation(messages: Sequence[Message], traits: Traits, protect: Protect) -> list[Dict]:
    """Template dicts, in order, with control tokens in client text protected.

    Leading system messages become one, joined by a blank line. A system message that the template would
    refuse or move goes into the user turn before it, else the one after it, else a user turn of its own, as
    ``<system-reminder>``. Neighbouring user messages are joined where the template refuses them, and one that
    follows a tool's result goes into it where it is refused there. Text of a reply
    that calls follows its thinking, as part of it, where the template refuses both. Ids of calls are made such as
    the template takes.

    Raises:
        RenderError: there is an image and the template takes none.
    """
    names: dict[str, str] = {}
    ids: dict[str, str] = {}
    out: list[Dict] = []
    for message in _placed(messages, traits):
        names.update((call.id, call.name) for call in message.tool_calls)
        ids.update((call.id, _template_id(call, len(ids), traits)) for call in message.tool_calls)
        out.append(protect(_as_dict(message, traits, names, ids)))
        if message.reasoning and traits.inline_reasoning:
            thought = protect(message.reasoning)
            _prepend(out[-1], f"<think>\n{thought}\n</think>\n\n")
    return out


def tool_objects(tools: Sequence[Tool]) -> list[Dict]:
    """OpenAI function objects. A tool without a schema takes no arguments."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def parse_arguments(raw: str) -> Dict | str:
    """Arguments as a template should see them: the object that the text is, ``{}`` for no text at all, and
    otherwise the text itself. An object with a repeated key or a half surrogate stays text too: as an object
    it would lose something. So does one that is over ``MAX_DEPTH`` levels deep."""
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw, object_pairs_hook=_distinct)
        if isinstance(value, dict) and not _too_deep(value):
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return value
    except (ValueError, RecursionError):
        pass
    return raw


def join_text(message: Message) -> str:
    """The text of a message; its text parts joined by line ends. Images are passed over."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content if isinstance(part, Text))


def has_images(message: Message) -> bool:
    """Whether any part is an image."""
    return not isinstance(message.content, str) and any(isinstance(part, Image) for part in message.content)


def _placed(messages: Sequence[Message], traits: Traits) -> list[Message]:
    """System messages where the template can take them, and user messages joined if they must be."""
    lead = 0
    while lead < len(messages) and messages[lead].role == "system":
        lead += 1
    out: list[Message] = []
    waiting: list[str] = []  # reminders for the next user turn
    if lead:
        text = "\n\n".join(join_text(message) for message in messages[:lead])
        if traits.system:
            out.append(Message(role="system", content=text))
        else:
            waiting.append(_reminder(text))
    for message in messages[lead:]:
        if message.role == "system" and not traits.late_system:
            if out and out[-1].role == "user":
                out[-1] = _joined(out[-1], Message(role="user", content=_reminder(join_text(message))))
            else:
                waiting.append(_reminder(join_text(message)))
            continue
        if waiting:
            reminder = Message(role="user", content="\n".join(waiting))
            waiting = []
            if message.role == "user":
                message = _joined(reminder, message)
            else:
                _put(out, reminder, traits)
        _put(out, message, traits)
    if waiting:
        _put(out, Message(role="user", content="\n".join(waiting)), traits)
    return out


def _put(out: list[Message], message: Message, traits: Traits) -> None:
    """Append a message, or put a user's into the one before it where it could not follow."""
    before = out[-1] if out and message.role == "user" else None
    if before is not None and before.role == "user" and not traits.neighbours:
        out[-1] = _joined(before, message)
    elif before is not None and before.role == "tool" and not traits.user_after_result and not has_images(message):
        content = f"{join_text(before)}\n\n{join_text(message)}"
        out[-1] = msgspec.structs.replace(before, content=content)
    else:
        out.append(message)


def _joined(first: Message, second: Message) -> Message:
    if has_images(first) or has_images(second):
        return Message(role="user", content=(*_parts(first), *_parts(second)))
    return Message(role="user", content=f"{join_text(first)}\n\n{join_text(second)}")


def _parts(message: Message) -> tuple[Text | Image, ...]:
    return (Text(message.content),) if isinstance(message.content, str) else message.content


def _reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def _as_dict(message: Message, traits: Traits, names: dict[str, str], ids: dict[str, str]) -> Dict:
    if message.reasoning and message.tool_calls and traits.reasoning_or_text and join_text(message).strip():
        thought = f"{message.reasoning}\n\n{join_text(message)}"
        message = msgspec.structs.replace(message, reasoning=thought, content="")
    out: Dict = {"role": message.role, "content": _content(message, traits)}
    if message.reasoning:
        out.update((name, message.reasoning) for name in traits.reasoning_fields)
    if message.tool_calls:
        out["content"] = None if traits.null_content and not join_text(message) else out["content"]
        out["tool_calls"] = [_call(call, ids[call.id], traits) for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = ids.get(message.tool_call_id, message.tool_call_id)
    name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else None)
    if name:
        out["name"] = name
    return out


def _content(message: Message, traits: Traits) -> str | list[Dict]:
    if has_images(message):
        if not traits.images:
            raise RenderError("this model's chat template takes no images")
        return [_part(part) for part in message.content]  # type: ignore[arg-type]
    text = join_text(message)
    if message.reasoning and traits.reasoning_parts:
        thought = {"type": "thinking", "thinking": message.reasoning}
        return [thought, {"type": "text", "text": text}] if text else [thought]
    return [{"type": "text", "text": text}] if traits.text_parts else text


def _template_id(call: ToolCall, number: int, traits: Traits) -> str:
    """A call's id as the template takes it. ``number``: how many calls came before it."""
    if traits.call_ids == "functions":
        return f"functions.{call.name}:{number}"
    if traits.call_ids == "nine" and not _NINE.fullmatch(call.id):
        return hashlib.blake2b(call.id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:9]
    return call.id


def _part(part: Text | Image) -> Dict:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image", "image": part.url, "image_url": {"url": part.url}}


def _call(call: ToolCall, call_id: str, traits: Traits) -> Dict:
    arguments = parse_arguments(call.arguments)
    if traits.text_arguments:
        arguments = call.arguments if call.arguments.strip() else "{}"
    elif isinstance(arguments, str) and traits.object_arguments:
        arguments = {RAW_ARGUMENTS: arguments}
    return {"type": "function", "id": call_id, "function": {"name": call.name, "arguments": arguments}}


def _function(tool: Tool) -> Dict:
    out: Dict = {"name": tool.name}
    if tool.description is not None:
        out["description"] = tool.description
    out["parameters"] = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    if tool.strict is not None:
        out["strict"] = tool.strict
    return out


def _prepend(message: Dict, text: str) -> None:
    content = message["content"]
    message["content"] = [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + content


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = itertools.chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in inner if isinstance(each, dict | list)]
    return bool(level)


def _distinct(pairs: list[tuple[str, Any]]) -> Dict:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("repeated key")
    return out
