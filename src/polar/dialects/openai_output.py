"""Replies of OpenAI's Responses API: a response object, and the items in it.

Why apart from the dialect: a whole reply and a stream tell the same items, in any state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import msgspec

from polar.contract.chat import Message, ToolCall, Usage
from polar.dialects.base import Answer
from polar.dialects.openai_items import ToolNames, custom_input, seal

# ---- response object -------------------------------------------------------------------------------------


def response_head(completion_id: str, created: float, model: str) -> dict[str, Any]:
    """What every state of a response begins with."""
    return {"id": f"resp_{completion_id}", "object": "response", "created_at": int(created), "model": model}


def response_body(
    head: dict[str, Any],
    echo: dict[str, msgspec.Raw],
    status: str,
    output: list[dict[str, Any]],
    *,
    usage: dict[str, Any] | None = None,
    details: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A response in any state; ``echo`` are the request's fields that it repeats."""
    state = {"status": status, "error": error, "incomplete_details": details, "output": output, "usage": usage}
    return head | {"background": False} | state | echo


def status_of(answer: Answer) -> tuple[Literal["completed", "incomplete"], dict[str, Any] | None]:
    """How a whole reply ended, and why it is incomplete if it is."""
    if answer.finish_reason == "length":
        return "incomplete", {"reason": "max_output_tokens"}
    return "completed", None


def encode_usage(usage: Usage) -> dict[str, Any]:
    """Counts. How many tokens were thinking is not known apart."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def text_of(message: Message) -> str:
    """The visible text of a reply."""
    return message.content if isinstance(message.content, str) else ""


def to_json(body: Any) -> bytes:
    """The JSON of a body."""
    return msgspec.json.encode(body)


# ---- output items ----------------------------------------------------------------------------------------

Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """One item of a reply: its body in any state, and what its events are called.

    ``event`` names the events of its text: ``response.{event}.delta`` and ``.done``.
    """

    prefix: str
    event: str

    def __init__(self, completion_id: str, index: int, text: str = "") -> None:
        self.id = f"{self.prefix}_{completion_id}_{index}"
        self.index = index
        self.pieces = [text]

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.pieces)

    @abstractmethod
    def body(self, status: Status) -> dict[str, Any]:
        """The item; without its text while it is in progress."""

    def part(self, text: str) -> dict[str, Any] | None:
        """The content part that holds its text; ``None`` where the text stands in the item itself."""
        return None

    def done(self) -> dict[str, Any]:
        """The fields of the event that ends its text."""
        return {"text": self.text}


class ReasoningItem(OutputItem):
    """The thinking, in the open and sealed: some clients send back the one, some the other."""

    prefix, event = "rs", "reasoning_text"

    def body(self, status: Status) -> dict[str, Any]:
        """The item."""
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        if status == "in_progress":
            return item | {"content": [], "encrypted_content": None}
        return item | {"content": [self.part(self.text)], "encrypted_content": seal(self.text)}

    def part(self, text: str) -> dict[str, Any]:
        """Its content part."""
        return {"type": "reasoning_text", "text": text}


class TextItem(OutputItem):
    """The visible answer."""

    prefix, event = "msg", "output_text"

    def body(self, status: Status) -> dict[str, Any]:
        """The item."""
        content = [self.part(self.text)] if status != "in_progress" else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        """Its content part."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def done(self) -> dict[str, Any]:
        """The fields of ``response.output_text.done``."""
        return {"text": self.text, "logprobs": []}


class CallItem(OutputItem):
    """A call, under the client's own name for the tool. Its text is the arguments as sampled."""

    def __init__(self, completion_id: str, index: int, call: ToolCall, names: ToolNames) -> None:
        self.origin = names.origin(call.name)
        self.prefix = "ctc" if self.origin.custom else "fc"
        self.event = "custom_tool_call_input" if self.origin.custom else "function_call_arguments"
        self.call_id = call.id
        super().__init__(completion_id, index, call.arguments)

    def body(self, status: Status) -> dict[str, Any]:
        """The item."""
        origin = self.origin
        kind = "custom_tool_call" if origin.custom else "function_call"
        item = {"id": self.id, "type": kind, "status": status, "call_id": self.call_id, "name": origin.name}
        if origin.namespace is not None:
            item["namespace"] = origin.namespace
        field, text = self._said()
        return item | {field: text if status != "in_progress" else ""}

    def done(self) -> dict[str, Any]:
        """The fields of the event that ends the arguments or the input."""
        field, text = self._said()
        return {field: text} if self.origin.custom else {field: text, "name": self.origin.name}

    def _said(self) -> tuple[str, str]:
        return ("input", custom_input(self.text)) if self.origin.custom else ("arguments", self.text)
