"""Messages and tools in OpenAI's chat form, which is what trainers, chat templates and dataset viewers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar.contract.chat import Image, Message, Text, Tool


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as OpenAI chat dicts; thinking is ``reasoning_content``."""
    return [_message(message) for message in messages]


def chat_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as OpenAI function definitions."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _message(message: Message) -> dict[str, Any]:
    form: dict[str, Any] = {"role": message.role, "content": _content(message.content)}
    if message.reasoning is not None:
        form["reasoning_content"] = message.reasoning
    if message.tool_calls:
        form["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        form["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        form["name"] = message.name
    return form


def _content(content: str | tuple[Text | Image, ...]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part.url}}
        if isinstance(part, Image)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def _function(tool: Tool) -> dict[str, Any]:
    form: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        form["description"] = tool.description
    form["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    if tool.strict is not None:
        form["strict"] = tool.strict
    return form
