"""OpenAI Chat Completions: ``POST /v1/chat/completions``.

The dialect of most harnesses and of every inference engine. Source of the shapes: the public API reference
and the wire as pi, Qwen Code, opencode and mini-swe-agent speak it. Unknown request fields are passed over,
as vendors add some every week.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from polar.contract.chat import (
    Chat,
    Delta,
    Image,
    Message,
    Part,
    ReasoningDelta,
    Sampling,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from polar.dialects.base import Answer, Call, CallError, Response, Route, StreamEncoder, decode, told_role
from polar.dialects.errors import ERRORS, error_text, retry_headers

# ---- parse request ---------------------------------------------------------------------------------------


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


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _FunctionTool | None = None


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedTool(msgspec.Struct):
    function: _NamedFunction


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Request(msgspec.Struct):
    model: str
    messages: list[msgspec.Raw]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Request)
_message_decoder = msgspec.json.Decoder(_Message)


class OpenAIChat:
    """The dialect (see ``polar.dialects.base.Dialect``)."""

    name = "openai_chat"
    routes: Sequence[Route] = (
        Route("POST", r"/v1/chat/completions", "generate"),
        Route("GET", r"/v1/models", "models"),
        Route("GET", r"/v1/models/(?P<model>.+)", "model"),
    )

    def parse(self, body: bytes, headers: Mapping[str, str], path: Mapping[str, str]) -> Call:
        request = decode(_decoder, body)
        if not request.messages:
            raise CallError("bad_request", "'messages' must have at least one message")
        if request.n is not None and request.n != 1:
            raise CallError("bad_request", "'n' must be 1: ask again for another sample")
        tools, warnings = _tools(request)
        chat = Chat(
            model=request.model,
            messages=_messages(request.messages),
            tools=tools,
            tool_choice=_tool_choice(request) if tools else None,
            sampling=_sampling(request),
            response_format=request.response_format,
            template_args=request.chat_template_kwargs or {},
        )
        include_usage = bool(request.stream_options and request.stream_options.include_usage)
        return Call(chat, bool(request.stream), include_usage, tuple(warnings), told_role(headers))

    # ---- encode reply ------------------------------------------------------------------------------------

    def encode(self, call: Call, answer: Answer) -> Response:
        body = {
            "id": f"chatcmpl-{answer.completion_id}",
            "object": "chat.completion",
            "created": int(answer.created),
            "model": answer.model,
            "choices": [
                {
                    "index": 0,
                    "message": encode_message(answer.message),
                    "logprobs": None,
                    "finish_reason": _finish_reason(answer.finish_reason),
                }
            ],
            "usage": encode_usage(answer.usage),
        }
        return Response(200, orjson.dumps(body))

    # ---- encode stream -----------------------------------------------------------------------------------

    def stream(self, call: Call) -> StreamEncoder:
        return _ChatStream(include_usage=bool(call.options))

    # ---- errors ------------------------------------------------------------------------------------------

    def error(self, error: CallError) -> Response:
        return Response(ERRORS[error.kind].status, orjson.dumps(error_body(error)), retry_headers(error))

    # ---- side routes -------------------------------------------------------------------------------------

    def count(self, tokens: int) -> Response:
        return Response(200, orjson.dumps({"input_tokens": tokens}))

    def models(self, names: Sequence[str]) -> Response:
        return Response(200, orjson.dumps({"object": "list", "data": [_model(name) for name in names]}))

    def model(self, name: str) -> Response:
        return Response(200, orjson.dumps(_model(name)))


def _messages(raws: Sequence[msgspec.Raw]) -> tuple[Message, ...]:
    messages: list[Message] = []
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
        messages.append(message)
    return tuple(messages)


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
    role = message.role
    if role == "function":
        role = "tool"
    return Message(
        role="system" if role == "developer" else role,
        content=_content(message.content),
        reasoning=message.reasoning_content if message.reasoning_content is not None else message.reasoning,
        tool_calls=tuple(
            ToolCall(call.id or f"call_{index}", call.function.name, _arguments(call.function.arguments))
            for index, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _arguments(arguments: str | dict[str, Any] | None) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


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
    if all(isinstance(part, Text) for part in parts):
        return parts[0].text if len(parts) == 1 and isinstance(parts[0], Text) else tuple(parts) or ""
    return tuple(parts)


def _tools(request: _Request) -> tuple[tuple[Tool, ...], list[str]]:
    tools: list[Tool] = []
    warnings: list[str] = []
    for index, tool in enumerate(request.tools or ()):
        if tool.function is None:
            warnings.append(f"tools[{index}] of type '{tool.type}' was dropped: only functions reach the model")
            continue
        function = tool.function
        tools.append(Tool(function.name, function.description, function.parameters, function.strict))
    if request.logprobs:
        warnings.append("logprobs were asked for and are not in the reply: Polar keeps them in its record")
    return tuple(tools), warnings


def _tool_choice(request: _Request) -> str | None:
    choice = request.tool_choice
    return choice.function.name if isinstance(choice, _NamedTool) else choice


def _sampling(request: _Request) -> Sampling:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    try:
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()} or None
    except ValueError:
        raise CallError("bad_request", "'logit_bias' must map token ids to numbers") from None
    limit = request.max_completion_tokens
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        max_tokens=limit if limit is not None else request.max_tokens,
        stop=tuple(text for text in stop if text),
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=bias,
    )


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


def encode_usage(usage: Usage) -> dict[str, Any]:
    """Token counts in this API's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _finish_reason(reason: str) -> str:
    return "stop" if reason == "abort" else reason


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "polar"}


class _ChatStream:
    """One streamed reply as ``chat.completion.chunk`` events."""

    content_type = "text/event-stream; charset=utf-8"
    keepalive = b": keepalive\n\n"

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._head: dict[str, Any] = {}

    def start(self, completion_id: str, created: float, model: str, prompt_tokens: int) -> bytes:
        self._head = {
            "id": f"chatcmpl-{completion_id}",
            "object": "chat.completion.chunk",
            "created": int(created),
            "model": model,
        }
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, TextDelta):
            return self._chunk({"content": delta.text})
        if isinstance(delta, ReasoningDelta):
            return self._chunk({"reasoning_content": delta.text})
        return self._chunk({"tool_calls": [_call_delta(delta)]})

    def finish(self, answer: Answer) -> bytes:
        last = self._chunk({}, _finish_reason(answer.finish_reason))
        if self._include_usage:
            last += event({**self._head, "choices": [], "usage": encode_usage(answer.usage)})
        return last + b"data: [DONE]\n\n"

    def error(self, error: CallError) -> bytes:
        return event(error_body(error))

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        body = {**self._head, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return event(body)


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.id is None:
        return {"index": delta.index, "function": function}
    function["name"] = delta.name
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


_OVER = (
    "This model's maximum context length is {limit} tokens. However, your messages resulted in {prompt} tokens. "
    "Please reduce the length of the messages."
)


def error_body(error: CallError) -> dict[str, Any]:
    """An error in this API's form."""
    told, message = ERRORS[error.kind], error_text(error, _OVER, "{message}")
    return {"error": {"message": message, "type": told.openai, "param": None, "code": told.code}}
