"""A model call in Polar's own terms: what every dialect is parsed into and every template renders from.

Messages keep the client's own order. Provider fields that no template and no sampler reads (cache
markers, client ids) are not here: they stay in the dialect that knows them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A piece of text inside a message of several parts."""

    text: str


class Image(msgspec.Struct, frozen=True, tag="image"):
    """An image inside a message: an https URL or a data URL."""

    url: str


Part = Text | Image


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function call made by the model. ``arguments`` is the raw text as sampled, JSON or not."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation.

    ``reasoning`` is the assistant's thinking where the client has it; ``None`` says it sent none.
    """

    role: Role
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function the model may call. ``parameters`` is a JSON schema object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to sample. ``None`` leaves a setting open: where token ids are sent it is then neutral (temperature 1,
    nothing cut off, no penalty), and in chat mode the engine's own default. Logit biases are keyed by token id."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None


class Chat(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model call: the conversation so far and what is asked of the model.

    ``tool_choice`` is "auto", "none", "required" or a tool's name. ``response_format`` is an OpenAI-shaped
    structured-output request. ``template_args`` go to the chat template (``enable_thinking`` and the like).

    ``prompt`` stands in place of messages where there is no conversation: plain text, or token ids as they are.
    Text gets the tokenizer's own special tokens (a BOS) unless ``template_args`` has ``add_special_tokens: false``.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str | None = None
    sampling: Sampling = Sampling()
    response_format: dict[str, Any] | None = None
    template_args: dict[str, Any] = {}
    prompt: str | tuple[int, ...] | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one call; ``cached_tokens`` of the prompt came from the engine's prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


# What a reply is made of while it streams. Concatenated, the deltas of a reply are its message.


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the model's thinking."""

    text: str


class TextDelta(msgspec.Struct, frozen=True):
    """More of the visible answer."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A tool call begins (``id`` and ``name`` set) or its arguments go on (only ``arguments``)."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Delta = ReasoningDelta | TextDelta | ToolCallDelta
