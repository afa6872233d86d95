"""Anthropic content blocks to messages and back.

Why beside the dialect: one message of this API may be several of a chat's (tool results, and text around
them, stand inside a user message), and a tool's input must be an object, whatever the model sampled.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import orjson

from polar.contract.chat import Image, Message, Part, Text, ToolCall
from polar.dialects.base import CallError
from polar.dialects.signatures import read_signature, signature
from polar.dialects.unparsed import json_object, object_json, raw_text

Thinking = Literal["shown", "omitted", "hidden"]
"""How a reply's thinking reaches the client: as it is, as a block whose signature alone holds it, or not at all."""


class Source(msgspec.Struct):
    """Where an image or a document is."""

    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[Block] | None = None


class Block(msgspec.Struct):
    """A content block of any type: the fields that some type has. ``source`` of a search result is a string,
    ``content`` of a failed server tool is an object."""

    type: str
    text: str | None = None
    source: Source | str | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    is_error: bool | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw()
    thinking: str | None = None
    signature: str | None = None
    tool_name: str | None = None
    title: str | None = None
    context: str | None = None
    citations: Any = None
    tool: Any = None


class InMessage(msgspec.Struct):
    """A message of a request."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None
    clear_at: str | None = None
    output_config: dict[str, Any] | None = None


# ---- content ---------------------------------------------------------------------------------------------


def to_messages(message: InMessage, where: str, warnings: list[str]) -> list[Message]:
    """The messages that a message stands for, in the order of its blocks.

    Args:
        where: the message's place in the request, for errors.
        warnings: gets a line for each block that the model can't be given.

    Raises:
        CallError: ``bad_request``, with the field at fault.
    """
    warnings += [line for line in _unheeded(message) if line not in warnings]
    if not message.content and message.role == "system" and message.output_config:
        return []
    if message.content is None:
        raise CallError("bad_request", f"{where}.content: Field required")
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    if message.role == "assistant":
        return [_assistant(message.content, where, warnings)]
    if message.role == "system":
        return [Message("system", joined(_parts(message.content, where, warnings)))]
    return _user(message.content, where, warnings)


def added_tools(messages: list[InMessage]) -> list[Any]:
    """The definitions of tools that are added in the middle of a conversation."""
    blocks = [block for message in messages if isinstance(message.content, list) for block in message.content]
    added = [block.tool for block in blocks if block.type == "tool_addition" and isinstance(block.tool, dict)]
    return [tool["definition"] for tool in added if tool.get("definition")]


def _unheeded(message: InMessage) -> list[str]:
    """Without its place: such messages stand all over a conversation."""
    lines = []
    if message.clear_at == "next_user_message":
        lines.append("clear_at of a message was passed over: what was said stays in front of the model")
    if message.output_config:
        lines.append("output_config of a message was passed over: it is read at the top level only")
    return lines


def joined(parts: list[Part]) -> str | tuple[Part, ...]:
    """Parts as a message's content: one text is the same as a string."""
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    return tuple(parts) or ""


def _user(blocks: list[Block], where: str, warnings: list[str]) -> list[Message]:
    """Tool results are messages of their own, and so are the texts and images between them. A tool message
    holds text only: images in a result are the user's, right after it."""
    out: list[Message] = []
    parts: list[Part] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content.{index}"
        if block.type != "tool_result":
            parts += _parts([block], place, warnings)
            continue
        if parts:
            out.append(Message("user", joined(parts)))
        if isinstance(block.content, dict):
            raise CallError("bad_request", f"{place}.content: a string or a list of blocks is wanted")
        result = _parts(block.content, place, warnings)
        texts: list[Part] = [part for part in result if isinstance(part, Text)]
        parts = [part for part in result if isinstance(part, Image)]
        # A failed call says so in its text; with none, an empty result would read as a success.
        failed = "Error" if block.is_error else ""
        call_id = _required(block.tool_use_id, f"{place}.tool_use_id")
        out.append(Message("tool", joined(texts) or failed, tool_call_id=call_id))
    if parts or not out:
        out.append(Message("user", joined(parts)))
    return out


def _assistant(blocks: list[Block], where: str, warnings: list[str]) -> Message:
    """Text blocks are joined without anything between: a reply whose text was cut into several is one text."""
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content.{index}"
        if block.type == "text":
            text.append(block.text or "")
        elif block.type == "thinking":
            thoughts.append(block.thinking or read_signature(block.signature).reasoning or "")
        elif block.type == "tool_use":
            name = _required(block.name, f"{place}.name")
            calls.append(ToolCall(_required(block.id, f"{place}.id"), name, arguments_of(block.input, place)))
        elif block.type != "redacted_thinking":
            warnings.append(f"{place} of type '{block.type}' was dropped: it can't be given to this model")
    return Message("assistant", "".join(text), reasoning="".join(thoughts) or None, tool_calls=tuple(calls))


def _parts(content: str | list[Block] | dict[str, Any] | None, where: str, warnings: list[str]) -> list[Part]:
    """Texts and images, without empty texts. In place of what is neither, the model is told what it misses."""
    if content is None or isinstance(content, str):
        return [Text(content)] if content else []
    parts: list[Part] = []
    for block in content if isinstance(content, list) else ():
        source = block.source if isinstance(block.source, Source) else Source()
        if block.type == "text":
            parts += [Text(block.text)] if block.text else []
        elif block.type == "image" and source.url:
            parts.append(Image(source.url))
        elif block.type == "image" and source.data:
            parts.append(Image(f"data:{source.media_type or 'image/png'};base64,{source.data}"))
        elif block.type == "document" and source.type == "text" and source.data:
            parts += [*_heading(block, warnings), Text(source.data)]
        elif block.type == "document" and source.content:
            parts += [*_heading(block, warnings), *_parts(source.content, where, warnings)]
        elif block.type == "search_result":
            parts += [*_heading(block, warnings), *_parts(block.content, where, warnings)]
        elif block.type == "tool_reference":
            parts.append(Text(f"The tool {block.tool_name} can be called now."))
        elif block.type in ("tool_addition", "tool_removal"):
            change = "can be called now" if block.type == "tool_addition" else "can't be called any more"
            parts.append(Text(f"The tool {_changed_tool(block.tool)} {change}."))
        elif block.type == "image":
            warnings.append(f"an image in {where} was left out: its source is no base64 and no URL")
            parts.append(Text("[image left out: it can't be read from here]"))
        else:
            warnings.append(f"a block of type '{block.type}' in {where} was left out: it is no text and no image")
            parts.append(Text(f"[{block.type} left out: only text and images can be read]"))
    return parts


def _changed_tool(tool: Any) -> Any:
    """The name of the tool that a block adds or removes."""
    tool = tool if isinstance(tool, dict) else {}
    definition = tool.get("definition")
    named = definition if isinstance(definition, dict) else tool
    return named.get("name") or named.get("mcp_server_name") or named.get("server_name")


def _heading(block: Block, warnings: list[str]) -> list[Part]:
    """What a document or a search result says of itself: the model is to know it, as the vendor's does."""
    citations = "citations were asked for and are not in the reply"
    if isinstance(block.citations, dict) and block.citations.get("enabled") and citations not in warnings:
        warnings.append(citations)
    source = block.source if isinstance(block.source, str) else None
    named = (("Title", block.title), ("Source", source), ("Context", block.context))
    lines = "".join(f"{name}: {value}\n" for name, value in named if value)
    return [Text(lines)] if lines else []


def encode_blocks(message: Message, thinking: Thinking) -> list[dict[str, Any]]:
    """A reply's blocks: thinking, then text, then tool calls."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning and thinking != "hidden":
        shown = thinking == "shown"
        thought, signed = (message.reasoning, None) if shown else ("", message.reasoning)
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature(None, signed)})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({**tool_use(call), "input": orjson.Fragment(object_json(call.arguments))})
    return blocks


def tool_use(call: ToolCall) -> dict[str, Any]:
    """A tool call as it begins, without its input."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _required(value: str | None, field: str) -> str:
    if not value:
        raise CallError("bad_request", f"{field}: Field required")
    return value


# ---- arguments -------------------------------------------------------------------------------------------


def arguments_of(value: msgspec.Raw, where: str) -> str:
    """The arguments text of a tool's input: the client's own JSON, or the raw text that it wraps."""
    try:
        text = bytes(value).decode()
    except UnicodeError:
        raise CallError("bad_request", f"{where}.input: not valid UTF-8") from None
    raw = raw_text(json_object(text) or {})
    return text if raw is None else raw
