"""OpenAI Chat Completions: ``POST /v1/chat/completions``.

The dialect of most harnesses and of every inference engine. Source of the shapes: the public API reference
and the wire as pi, Qwen Code, opencode and mini-swe-agent speak it. Request fields that nothing here reads are
named in a warning.

Logprobs are told with the end of a stream, and of all sampled tokens, those of thinking and markup too: which tokens
a piece of text is made of is known for sure only once the reply is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
import orjson

from polar.contract.chat import (
    Chat,
    Delta,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolCallDelta,
    Usage,
)
from polar.dialects.base import Answer, Call, CallError, Response, Route, StreamEncoder, decode, told_role
from polar.dialects.errors import ERRORS, error_text, retry_headers
from polar.dialects.openai_fields import (
    SamplingFields,
    ends_in_reply,
    other_choice,
    parallel,
    sampling,
    token_limit,
    token_names,
    unread,
)
from polar.dialects.openai_messages import encode_message, messages
from polar.dialects.resent import Resent, Shortened
from polar.dialects.unheeded import effort_args

# ---- parse request ---------------------------------------------------------------------------------------


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


class _AllowedTools(msgspec.Struct):
    mode: str | None = None


class _ToolChoice(msgspec.Struct):
    type: str = "function"
    function: _NamedFunction | None = None
    allowed_tools: _AllowedTools | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Request(SamplingFields, kw_only=True):
    model: str
    messages: list[msgspec.Raw]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[_Tool] | None = None
    functions: list[Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None


class _Options(msgspec.Struct, frozen=True):
    """What the encoder must know: whether usage ends a stream, and which logprobs are asked for."""

    include_usage: bool
    logprobs: bool
    top: bool


_decoder = msgspec.json.Decoder(_Request)
_resent = Resent()


class OpenAIChat:
    """The dialect (see ``polar.dialects.base.Dialect``)."""

    name = "openai_chat"
    routes: Sequence[Route] = (
        Route("POST", r"/v1/chat/completions", "generate"),
        Route("GET", r"/v1/models", "models"),
        Route("GET", r"/v1/models/(?P<model>.+)", "model"),
    )

    def parse(self, body: bytes, headers: Mapping[str, str], path: Mapping[str, str]) -> Call:
        key = headers.get("authorization", "")
        short = _resent.shorten(key, body)
        if short.known:
            with suppress(CallError):  # which is raised again by reading all of it, with its place in that
                return self._parse(key, body, short, headers)
        return self._parse(key, body, Shortened(body), headers)

    def _parse(self, key: str, body: bytes, short: Shortened, headers: Mapping[str, str]) -> Call:
        request = decode(_decoder, short.body)
        _refuse(request)
        tools, warnings = _tools(request)
        new = short.new(request.messages)
        if new is None:
            raise CallError("bad_request", "'messages' is given twice")
        conversation = short.known + messages(new)
        _resent.keep(key, body, short, request.messages, conversation)
        warnings += [*unread(short.body, _Request), *ends_in_reply(conversation)]
        limit = token_limit(request.max_completion_tokens, "max_completion_tokens")
        older = token_limit(request.max_tokens, "max_tokens")
        chat = Chat(
            model=request.model,
            messages=conversation,
            tools=tools,
            tool_choice=_tool_choice(request, warnings) if tools else None,
            sampling=sampling(request, older if limit is None else limit),
            response_format=request.response_format,
            template_args=effort_args(request.reasoning_effort, "reasoning_effort", warnings)
            | (request.chat_template_kwargs or {}),
        )
        include_usage = bool(request.stream_options and request.stream_options.include_usage)
        options = _Options(include_usage, logprobs=bool(request.logprobs), top=bool(request.top_logprobs))
        return Call(chat, bool(request.stream), options, tuple(warnings), told_role(headers))

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
                    "logprobs": _logprobs(call, answer),
                    "finish_reason": _finish_reason(answer.finish_reason),
                }
            ],
            "usage": encode_usage(answer.usage),
        }
        return Response(200, orjson.dumps(body))

    # ---- encode stream -----------------------------------------------------------------------------------

    def stream(self, call: Call) -> StreamEncoder:
        return _ChatStream(call)

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


def _refuse(request: _Request) -> None:
    """What would make another reply than the one that is given."""
    if not request.messages:
        raise CallError("bad_request", "'messages' must have at least one message")
    if request.n is not None and request.n != 1:
        raise CallError("bad_request", "'n' must be 1: ask again for another sample")
    if request.functions:
        raise CallError("bad_request", "'functions' is not served: send them as 'tools'")
    if request.top_logprobs and not request.logprobs:
        raise CallError("bad_request", "'top_logprobs' needs 'logprobs': true")


def _tools(request: _Request) -> tuple[tuple[Tool, ...], list[str]]:
    tools: list[Tool] = []
    warnings: list[str] = []
    for index, tool in enumerate(request.tools or ()):
        if tool.function is None:
            warnings.append(f"tools[{index}] of type '{tool.type}' was dropped: only functions reach the model")
            continue
        function = tool.function
        tools.append(Tool(function.name, function.description, function.parameters, function.strict))
    warnings += parallel(request.parallel_tool_calls, bool(tools))
    if (request.top_logprobs or 0) > 1:
        warnings.append("top_logprobs are those of the sampled tokens only")
    if request.web_search_options is not None:
        warnings.append("web_search_options was passed over: nothing here searches")
    return tuple(tools), warnings


def _tool_choice(request: _Request, warnings: list[str]) -> str | None:
    choice = request.tool_choice
    if not isinstance(choice, _ToolChoice):
        return choice
    if choice.function is not None:
        return choice.function.name
    if choice.type == "function":
        raise CallError("bad_request", "'tool_choice' must name a function")
    return other_choice(choice.type, choice.allowed_tools and choice.allowed_tools.mode, warnings)


def _logprobs(call: Call, answer: Answer) -> dict[str, Any] | None:
    """The logprob of each sampled token, where it is asked for and every one has its own."""
    options: _Options = call.options
    tokens = answer.tokens
    if not options.logprobs or tokens is None:
        return None
    logprobs: list[float] = tokens.logprobs.tolist()
    if len(tokens.ids) != len(logprobs) or not all(map(math.isfinite, logprobs)):
        return None
    content = []
    for name, logprob in zip(token_names(tokens), logprobs, strict=True):
        # A token may be half a character: then its bytes are not known.
        said = None if tokens.text is None or "\ufffd" in name else list(name.encode("utf-8", "surrogatepass"))
        one = {"token": name, "logprob": logprob, "bytes": said}
        content.append({**one, "top_logprobs": [one] if options.top else []})
    return {"content": content, "refusal": None}


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

    def __init__(self, call: Call) -> None:
        options: _Options = call.options
        self._call = call
        self._include_usage = options.include_usage
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
        last = self._chunk({}, _finish_reason(answer.finish_reason), _logprobs(self._call, answer))
        if self._include_usage:
            last += event({**self._head, "choices": [], "usage": encode_usage(answer.usage)})
        return last + b"data: [DONE]\n\n"

    def error(self, error: CallError) -> bytes:
        return event(error_body(error))

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
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
