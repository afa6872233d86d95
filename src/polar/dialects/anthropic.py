"""Anthropic Messages: ``POST /v1/messages``.

The dialect of Claude Code, and one of those that opencode, pi and OpenHands speak. Source of the shapes: the
public API reference and the wire as those harnesses and the vendor's SDKs speak it. Request fields that nothing
here reads are named in a warning.

Thinking is in a reply only if the request asks for it, as clients of this API expect; the record has it in
any case. Where a client wants it without its text, the signature holds the text, and gives it back. Tool calls
are sent whole, at the end of a stream: their input must be an object, and only the whole text tells whether it
is one. What is held back or hidden is a ``ping``, so that no client takes it for silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from polar.contract.chat import (
    Chat,
    Delta,
    Message,
    Part,
    ReasoningDelta,
    Sampling,
    Text,
    TextDelta,
    Tool,
    Usage,
)
from polar.dialects.anthropic_content import (
    Block,
    InMessage,
    Thinking,
    added_tools,
    encode_blocks,
    joined,
    to_messages,
    tool_use,
)
from polar.dialects.base import Answer, Call, CallError, Response, Route, StreamEncoder, decode, told_role
from polar.dialects.errors import ERRORS, error_text, retry_headers
from polar.dialects.signatures import signature
from polar.dialects.unheeded import effort_args, unheeded
from polar.dialects.unparsed import object_json

BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with this line. It has a hash of the first user message, so it differs
between conversations that are otherwise the same."""

# ---- parse request ---------------------------------------------------------------------------------------


class _Tool(msgspec.Struct):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str
    display: str | None = None
    budget_tokens: int | None = None


class _Format(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None
    effort: str | None = None
    task_budget: Any = None


class _ContextManagement(msgspec.Struct):
    edits: list[dict[str, Any]] | None = None


class _Request(msgspec.Struct):
    model: str
    messages: list[InMessage]
    system: str | list[Block] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    mcp_servers: list[Any] | None = None
    context_management: _ContextManagement | None = None
    thread: Any = None
    compaction: Any = None


_decoder = msgspec.json.Decoder(_Request)
_fields: msgspec.json.Decoder[Mapping[str, Any]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NEUTRAL = (
    *("anthropic_beta", "anthropic_version", "betas", "metadata", "diagnostics", "cache_control", "fallbacks"),
    *("billing_policy", "fallback_credit_token", "user_profile_id", "workspace_id"),
    *("inference_geo", "service_tier", "speed"),
)
"""Fields without which the reply would be the same."""


class AnthropicMessages:
    """The dialect (see ``polar.dialects.base.Dialect``)."""

    name = "anthropic"
    routes: Sequence[Route] = (
        Route("POST", r"/v1/messages", "generate"),
        Route("POST", r"/v1/messages/count_tokens", "count"),
        Route("GET", r"/v1/models", "models", header="anthropic-version"),
        Route("GET", r"/v1/models/(?P<model>.+)", "model", header="anthropic-version"),
    )

    def parse(self, body: bytes, headers: Mapping[str, str], path: Mapping[str, str]) -> Call:
        request = decode(_decoder, body)
        _refuse(request)
        tools, warnings = _tools(request)
        warnings += [*unheeded(decode(_fields, body), _Request, _NEUTRAL), *_unheeded(request)]
        messages, subagent = _system(request.system, warnings)
        try:
            for index, message in enumerate(request.messages):
                messages += to_messages(message, f"messages.{index}", warnings)
        except RecursionError:
            raise CallError("bad_request", "messages: documents are nested too deeply") from None
        chat = Chat(
            model=request.model,
            messages=tuple(messages),
            tools=tools,
            tool_choice=_tool_choice(request, tools, warnings),
            sampling=_sampling(request),
            response_format=_response_format(request),
            template_args=_template_args(request, warnings),
        )
        subagent = subagent or "x-claude-code-agent-id" in headers
        hint = "subagent" if subagent else told_role(headers)
        return Call(chat, bool(request.stream), _thinking(request), tuple(warnings), hint)

    # ---- encode reply ------------------------------------------------------------------------------------

    def encode(self, call: Call, answer: Answer) -> Response:
        body = {
            **_head(answer.completion_id, answer.model, answer.usage),
            "content": encode_blocks(answer.message, call.options),
            "stop_reason": _stop_reason(answer),
            "stop_sequence": _stop_sequence(answer),
        }
        return Response(200, orjson.dumps(body))

    # ---- encode stream -----------------------------------------------------------------------------------

    def stream(self, call: Call) -> StreamEncoder:
        return _MessageStream(thinking=call.options)

    # ---- errors ------------------------------------------------------------------------------------------

    def error(self, error: CallError) -> Response:
        status, headers = ERRORS[error.kind].status, retry_headers(error)
        if status < 500:
            # The vendor's SDKs obey this header; without it some try a 401 or a 410 again.
            headers["x-should-retry"] = "false"
        return Response(status, orjson.dumps(_error_body(error)), headers)

    # ---- side routes -------------------------------------------------------------------------------------

    def count(self, tokens: int) -> Response:
        return Response(200, orjson.dumps({"input_tokens": tokens}))

    def models(self, names: Sequence[str]) -> Response:
        data = [_model(name) for name in names]
        first, last = (names[0], names[-1]) if names else (None, None)
        return Response(200, orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last}))

    def model(self, name: str) -> Response:
        return Response(200, orjson.dumps(_model(name)))


class _Unthreaded(CallError):
    """The vendor's SDK asks for a conversation that the server holds, in its tool runner by itself, and then sends no
    more than the news. It goes on without one where the error says so in a way of its own."""


def _refuse(request: _Request) -> None:
    """What would lose context or give another reply than asked for is an error, not a warning."""
    if not request.messages:
        raise CallError("bad_request", "messages: at least one message is required")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise CallError("bad_request", "max_tokens: must be at least 1")
    if request.thread:
        raise _Unthreaded("bad_request", "thread: no conversation is held here; send all of it in messages")
    if request.compaction:
        raise CallError("bad_request", "compaction: not served here; ask for a summary in messages")


def _system(system: str | list[Block] | None, warnings: list[str]) -> tuple[list[Message], bool]:
    """The system message, if there is one, without the billing line, and whether that line says that a
    sub-agent calls."""
    foreign = [block.type for block in system if block.type != "text"] if isinstance(system, list) else []
    warnings += [f"a block of type '{kind}' in system was left out: it is no text" for kind in foreign]
    texts = [system] if isinstance(system, str) else [block.text or "" for block in system or ()]
    subagent = False
    parts: list[Part] = []
    for text in texts:
        if text.startswith(BILLING):
            line, _, rest = text.partition("\n")
            subagent = subagent or "cc_is_subagent=true" in line
            text = rest.lstrip("\n")
        if text:
            parts.append(Text(text))
    return ([Message("system", joined(parts))] if parts else []), subagent


def _tools(request: _Request) -> tuple[tuple[Tool, ...], list[str]]:
    tools: list[Tool] = []
    warnings: list[str] = []
    for index, tool in enumerate([*(request.tools or ()), *_added(request)]):
        if tool.input_schema is None and tool.type not in (None, "custom"):
            warnings.append(f"tools.{index} of type '{tool.type}' was dropped: nothing here can run or describe it")
        elif not tool.name:
            raise CallError("bad_request", f"tools.{index}.name: Field required")
        else:
            tools.append(Tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return tuple(tools), warnings


def _added(request: _Request) -> list[_Tool]:
    """The tools that the conversation adds to those of the request."""
    try:
        added = msgspec.convert(added_tools(request.messages), list[_Tool])
    except (msgspec.ValidationError, RecursionError) as error:
        raise CallError("bad_request", f"tool_addition: the definition is not valid: {error}") from None
    known = {tool.name for tool in request.tools or ()}
    return list({tool.name: tool for tool in added if tool.name not in known}.values())


_NO_PREFILL = "the last message is the assistant's: the reply is a turn of its own and does not go on from it"


def _unheeded(request: _Request) -> list[str]:
    """What was asked for and is not done."""
    tools, bound = request.tools or (), "max_tokens alone bounds a reply"
    thinking, output = request.thinking or _Thinking(""), request.output_config or _OutputConfig()
    callers = {caller for tool in tools for caller in tool.allowed_callers or ()}
    lines = {
        "mcp_servers were passed over: the harness must run them": request.mcp_servers,
        "tools: defer_loading was passed over: the model is given every tool": any(t.defer_loading for t in tools),
        "tools: input_examples were passed over: no template reads them": any(t.input_examples for t in tools),
        "tools: allowed_callers were passed over: the model calls every tool itself": callers - {"direct"},
        f"thinking.budget_tokens was passed over: {bound}": thinking.budget_tokens,
        f"output_config.task_budget was passed over: {bound}": output.task_budget,
        _NO_PREFILL: request.messages[-1].role == "assistant",
    }
    edits = request.context_management.edits if request.context_management else None
    for edit in edits or ():
        if edit.get("keep") not in ("all", {"type": "all"}):
            lines[f"context_management: '{edit.get('type')}' was passed over: the context is as it was sent"] = True
    return [line for line, asked in lines.items() if asked]


def _tool_choice(request: _Request, tools: tuple[Tool, ...], warnings: list[str]) -> str | None:
    choice = request.tool_choice
    if choice is None or not tools:
        return None
    if choice.disable_parallel_tool_use:
        warnings.append("tool_choice.disable_parallel_tool_use was passed over: the model may make several calls")
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if not choice.name:
        raise CallError("bad_request", "tool_choice.name: Field required")
    if choice.name not in [tool.name for tool in tools]:
        warnings.append(f"tool_choice was dropped: there is no tool '{choice.name}'")
        return None
    return choice.name


def _sampling(request: _Request) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        max_tokens=request.max_tokens,
        stop=tuple(text for text in request.stop_sequences or () if text),
    )


def _response_format(request: _Request) -> dict[str, Any] | None:
    wanted = (request.output_config.format if request.output_config else None) or request.output_format
    if wanted is None:
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise CallError("bad_request", "output_config.format: type 'json_schema' with a schema is wanted")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema, "strict": True}}


def _template_args(request: _Request, warnings: list[str]) -> dict[str, Any]:
    """``adaptive`` leaves it to the model, and so to its template."""
    kind = request.thinking.type if request.thinking else None
    effort = request.output_config.effort if request.output_config else None
    switch = {"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {}
    return effort_args(effort, "output_config.effort", warnings) | switch


def _thinking(request: _Request) -> Thinking:
    if request.thinking is None or request.thinking.type == "disabled":
        return "hidden"
    return "omitted" if request.thinking.display == "omitted" else "shown"


def _head(completion_id: str, model: str, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{completion_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop_reason(answer: Answer) -> str:
    if _stop_sequence(answer) is not None:
        return "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish_reason, "end_turn")


def _stop_sequence(answer: Answer) -> str | None:
    """The stop sequence, if it is why the reply ended: tool calls before it are still to be run."""
    return answer.stop_sequence if answer.finish_reason == "stop" else None


def _model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


class _MessageStream:
    """One streamed reply as ``message_start`` ... ``message_stop`` events."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, *, thinking: Thinking) -> None:
        self.keepalive = b": keepalive\n\n"  # clients want message_start to be the first event
        self._thinking = thinking
        self._open: str | None = None  # the type of the block that is being sent
        self._unsaid: list[str] = []  # the thinking that its signature must hold
        self._index = 0

    def start(self, completion_id: str, created: float, model: str, prompt_tokens: int) -> bytes:
        self.keepalive = _PING
        return _event("message_start", message=_head(completion_id, model, Usage(prompt_tokens, 0)))

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, TextDelta):
            return self._enter("text", text="") + self._piece("text_delta", text=delta.text) if delta.text else b""
        if not isinstance(delta, ReasoningDelta) or self._thinking == "hidden":
            return _PING
        if not delta.text:
            return b""
        begin = self._enter("thinking", thinking="", signature="")
        if self._thinking == "omitted":
            self._unsaid.append(delta.text)
            return begin + _PING
        return begin + self._piece("thinking_delta", thinking=delta.text)

    def finish(self, answer: Answer) -> bytes:
        out = [self._leave()]
        for call in answer.message.tool_calls:
            out.append(self._enter(**tool_use(call)))
            out.append(self._piece("input_json_delta", partial_json=object_json(call.arguments).decode()))
            out.append(self._leave())
        ending = {"stop_reason": _stop_reason(answer), "stop_sequence": _stop_sequence(answer)}
        out.append(_event("message_delta", delta=ending, usage=_usage(answer.usage)))
        out.append(_event("message_stop"))
        return b"".join(out)

    def error(self, error: CallError) -> bytes:
        return _event(**_error_body(error))

    def _enter(self, type: str, **fields: Any) -> bytes:
        """Begin a block of this type, unless one is open."""
        if self._open == type:
            return b""
        out = self._leave()
        self._open = type
        return out + _event("content_block_start", index=self._index, content_block={"type": type, **fields})

    def _leave(self) -> bytes:
        """End the open block, if there is one."""
        if self._open is None:
            return b""
        out = b""
        if self._open == "thinking":
            out = self._piece("signature_delta", signature=signature(None, "".join(self._unsaid)))
            self._unsaid = []
        out += _event("content_block_stop", index=self._index)
        self._open = None
        self._index += 1
        return out

    def _piece(self, type: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": type, **fields})


def _event(type: str, **fields: Any) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + orjson.dumps({"type": type, **fields}) + b"\n\n"


_PING = _event("ping")

_OVER = "prompt is too long: {prompt} tokens > {limit} maximum"
"""The words that make Claude Code compact."""


def _error_body(error: CallError) -> dict[str, Any]:
    message = error_text(error, _OVER, "prompt is too long: {message}")
    body: dict[str, Any] = {"type": ERRORS[error.kind].anthropic, "message": message}
    if isinstance(error, _Unthreaded):
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body}
