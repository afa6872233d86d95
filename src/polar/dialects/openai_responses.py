"""OpenAI Responses: ``POST /v1/responses``.

The dialect of Codex, which speaks no other, and of opencode and pi where they are told to. Source of the shapes:
the public API reference, the vendor's SDK and the wire as those three speak it. A conversation comes as items
(``openai_items``), a reply goes out as items (``openai_output``), and a stream tells the life of each item in strict
order. Request fields that nothing here reads are named in a warning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from polar.contract.chat import (
    Chat,
    Delta,
    Message,
    ReasoningDelta,
    Sampling,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)
from polar.dialects import openai_items
from polar.dialects.base import (
    Answer,
    Call,
    CallError,
    PreviousNotFound,
    Response,
    Route,
    StreamEncoder,
    decode,
    told_role,
)
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_fields import ends_in_reply, other_choice, parallel, token_limit, unread
from polar.dialects.openai_items import ToolNames, read
from polar.dialects.openai_output import (
    CallItem,
    OutputItem,
    ReasoningItem,
    Status,
    TextItem,
    encode_usage,
    response_body,
    response_head,
    status_of,
    text_of,
    to_json,
)
from polar.dialects.unheeded import effort_args, unheeded

# ---- parse request ---------------------------------------------------------------------------------------


class _Format(msgspec.Struct):
    type: str = "text"
    name: str = "reply"
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _TextOptions(msgspec.Struct):
    format: _Format | None = None


class _ReasoningOptions(msgspec.Struct):
    effort: str | None = None


class _Request(msgspec.Struct):
    model: str = ""
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    metadata: dict[str, str | int | float | bool | None] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None


_decoder = msgspec.json.Decoder(_Request)


class _Options(msgspec.Struct, frozen=True):
    """What the encoder must know of a request: fields that the reply repeats, and the client's tool names."""

    echo: dict[str, msgspec.Raw]
    names: ToolNames


class OpenAIResponses:
    """The dialect (see ``polar.dialects.base.Dialect``)."""

    name = "openai_responses"
    routes: Sequence[Route] = (
        Route("POST", r"/v1/responses", "generate"),
        Route("POST", r"/v1/responses/(?P<count>input_tokens)", "count"),
        Route("GET", r"/v1/responses", "upgrade_refused"),
    )

    def parse(self, body: bytes, headers: Mapping[str, str], path: Mapping[str, str]) -> Call:
        request = decode(_decoder, body)
        _refuse(request, counting="count" in path)
        names = ToolNames()
        tools, warnings = openai_items.tools(request.tools or (), names)
        items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
        messages, dropped = openai_items.messages(items or (), names)
        if not messages and request.previous_response_id is None:
            raise CallError("bad_request", "'input' must have at least one message")
        if request.instructions:
            messages.insert(0, Message("system", request.instructions))
        warnings += [*dropped, *unread(body, _Request), *_unheeded(request), *ends_in_reply(messages)]
        limit = token_limit(request.max_output_tokens, "max_output_tokens")
        chat = Chat(
            model=request.model,
            messages=tuple(messages),
            tools=tools,
            tool_choice=_tool_choice(request, names, warnings) if tools else None,
            sampling=Sampling(temperature=request.temperature, top_p=request.top_p, max_tokens=limit),
            response_format=_response_format(request),
            template_args=_template_args(request, warnings),
        )
        return Call(
            chat,
            bool(request.stream),
            _Options(_echo(request), names),
            tuple(warnings),
            role_hint=_role_hint(headers),
            previous_id=_previous_id(request),
            instructions=1 if request.instructions else 0,
        )

    # ---- encode reply ------------------------------------------------------------------------------------

    def encode(self, call: Call, answer: Answer) -> Response:
        options: _Options = call.options
        status, details = status_of(answer)
        message = answer.message
        items: list[OutputItem] = []
        if message.reasoning:
            items.append(ReasoningItem(answer.completion_id, len(items), message.reasoning))
        if message.content or not (message.reasoning or message.tool_calls):
            items.append(TextItem(answer.completion_id, len(items), text_of(message)))
        items += [
            CallItem(answer.completion_id, index, tool_call, options.names)
            for index, tool_call in enumerate(message.tool_calls, len(items))
        ]
        output = [item.body("completed" if item is not items[-1] else status) for item in items]
        head = response_head(answer.completion_id, answer.created, answer.model)
        body = response_body(head, options.echo, status, output, usage=encode_usage(answer.usage), details=details)
        return Response(200, to_json(body))

    # ---- encode stream -----------------------------------------------------------------------------------

    def stream(self, call: Call) -> StreamEncoder:
        return _ResponsesStream(call)

    # ---- errors ------------------------------------------------------------------------------------------

    def error(self, error: CallError) -> Response:
        """OpenAI's error shape is that of its other APIs, but for one error that only this one has."""
        if isinstance(error, PreviousNotFound):
            body = {
                "message": f"Previous response with id 'resp_{error.previous_id}' not found.",
                "type": "invalid_request_error",
                "param": "previous_response_id",
                "code": "previous_response_not_found",
            }
            return Response(400, to_json({"error": body}))
        return OpenAIChat().error(error)

    # ---- side routes -------------------------------------------------------------------------------------

    def count(self, tokens: int) -> Response:
        return Response(200, to_json({"object": "response.input_tokens", "input_tokens": tokens}))

    def models(self, names: Sequence[str]) -> Response:
        return OpenAIChat().models(names)

    def model(self, name: str) -> Response:
        return OpenAIChat().model(name)


def _refuse(request: _Request, *, counting: bool) -> None:
    """What would lose context or never answer is an error, not a warning."""
    if not request.model and not counting:
        raise CallError("bad_request", "'model' is missing")
    if request.conversation is not None:
        raise CallError(
            "bad_request", "'conversation' is not kept here: use 'previous_response_id' or send all items"
        )
    if request.prompt is not None:
        raise CallError("bad_request", "'prompt' names a stored template, and none are kept here: send 'input'")
    if request.background:
        raise CallError("bad_request", "'background' is not served: ask for a stream")


def _tool_choice(request: _Request, names: ToolNames, warnings: list[str]) -> str | None:
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, str):
        raise CallError(
            "bad_request", f"'tool_choice' must be 'auto', 'none', 'required' or a tool, and is '{choice}'"
        )
    kind, name = choice.get("type"), choice.get("name")
    if kind in ("function", "custom") and isinstance(name, str):
        namespace = choice.get("namespace")
        return names.flat(namespace if isinstance(namespace, str) else None, name)
    return other_choice(kind, choice.get("mode"), warnings)


def _response_format(request: _Request) -> dict[str, Any] | None:
    wanted = read(request.text or {}, _TextOptions, "text").format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = {"name": wanted.name, "schema": wanted.schema or {}, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": {key: value for key, value in schema.items() if value is not None}}


def _template_args(request: _Request, warnings: list[str]) -> dict[str, Any]:
    effort = read(request.reasoning or {}, _ReasoningOptions, "reasoning").effort
    return effort_args(effort, "reasoning.effort", warnings)


def _unheeded(request: _Request) -> list[str]:
    warnings = parallel(request.parallel_tool_calls, bool(request.tools))
    if request.truncation == "auto":
        warnings.append("truncation: auto is not done: a prompt over the context is refused")
    warnings += unheeded(request.text or {}, _TextOptions, where="text.")
    warnings += unheeded(request.reasoning or {}, _ReasoningOptions, _SUMMARY, where="reasoning.")
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        warnings.append("logprobs were asked for and are not in the reply: Polar keeps them in its record")
    return warnings


_SUMMARY = ("summary", "generate_summary")
"""The thinking itself is in the reply, so nobody is left without a summary of it."""


def _previous_id(request: _Request) -> str | None:
    previous = request.previous_response_id
    return None if previous is None else previous.removeprefix("resp_")


def _echo(request: _Request) -> dict[str, msgspec.Raw]:
    """The request's fields that a response object repeats, as JSON: a stream tells them three times."""
    fields = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None} | (request.reasoning or {}),
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}} | (request.text or {}),
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": request.top_p,
        "truncation": "disabled",
    }
    try:
        return {name: msgspec.Raw(to_json(value)) for name, value in fields.items()}
    except RecursionError:
        raise CallError("bad_request", "The request body is nested too deeply") from None


class _TurnMetadata(msgspec.Struct):
    request_kind: str | None = None


def _role_hint(headers: Mapping[str, str]) -> str | None:
    """What Codex says of a call itself, and what any harness may."""
    try:
        metadata = msgspec.json.decode(headers.get("x-codex-turn-metadata", "{}"), type=_TurnMetadata)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        metadata = _TurnMetadata()
    subagent = headers.get("x-openai-subagent")
    if metadata.request_kind in ("compaction", "prewarm") or subagent == "compact":
        return "auxiliary"
    return "subagent" if subagent else told_role(headers)


# ---- stream ----------------------------------------------------------------------------------------------


class _ResponsesStream:
    """One streamed reply as events.

    Items live one after another, each ended before the next begins. A call is ended only in ``finish``, once
    the reply is durable: clients run a tool as soon as its call has ended, even if the stream breaks after it.
    So what comes after the first call (more calls, as a rule) is told in ``finish`` too.
    """

    content_type = "text/event-stream; charset=utf-8"
    keepalive = b": keepalive\n\n"

    def __init__(self, call: Call) -> None:
        options: _Options = call.options
        self._echo, self._names = options.echo, options.names
        self._model = call.chat.model
        self._completion_id = ""
        self._head: dict[str, Any] = {}
        self._events = 0
        self._open: OutputItem | None = None
        self._output: list[dict[str, Any]] = []
        self._sent = {ReasoningItem: 0, TextItem: 0}
        self._calls = 0

    def start(self, completion_id: str, created: float, model: str, prompt_tokens: int) -> bytes:
        self._completion_id = completion_id
        self._head = response_head(completion_id, created, model)
        response = response_body(self._head, self._echo, "in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        if isinstance(self._open, CallItem) and not self._continues(delta):
            return self.keepalive
        return self._tell(delta)

    def finish(self, answer: Answer) -> bytes:
        events = [self._tell(delta) for delta in self._untold(answer.message)]
        if self._open is None and not self._output:
            events.append(self._begin(TextItem(self._completion_id, 0)))
        status, details = status_of(answer)
        events.append(self._end(status))
        usage = encode_usage(answer.usage)
        response = response_body(self._head, self._echo, status, self._output, usage=usage, details=details)
        events.append(self._event(f"response.{status}", response=response))
        return b"".join(events)

    def error(self, error: CallError) -> bytes:
        opening = b"" if self._head else self.start("0", time.time(), self._model, 0)
        body = {"code": _FAILED.get(error.kind, "server_error"), "message": error.message}
        response = response_body(self._head, self._echo, "failed", self._output, error=body)
        return opening + self._event("response.failed", response=response)

    # ---- what is told, and what is not yet -----------------------------------------------------------------

    def _continues(self, delta: Delta) -> bool:
        """Whether it is more of the call that is open."""
        return isinstance(delta, ToolCallDelta) and delta.id is None and delta.index == self._calls - 1

    def _untold(self, message: Message) -> list[Delta]:
        """What of the reply no event has told, in the order of a whole reply but for the call that is open."""
        deltas: list[Delta] = []
        if isinstance(self._open, CallItem):
            arguments = message.tool_calls[self._calls - 1].arguments[len(self._open.text) :]
            deltas.append(ToolCallDelta(self._calls - 1, arguments))
        deltas.append(ReasoningDelta((message.reasoning or "")[self._sent[ReasoningItem] :]))
        deltas.append(TextDelta(text_of(message)[self._sent[TextItem] :]))
        for index, call in enumerate(message.tool_calls[self._calls :], self._calls):
            deltas.append(ToolCallDelta(index, call.arguments, call.id, call.name))
        return [delta for delta in deltas if isinstance(delta, ToolCallDelta) or delta.text]

    def _tell(self, delta: Delta) -> bytes:
        events = b""
        index = len(self._output) + (self._open is not None)
        if isinstance(delta, ToolCallDelta):
            text = delta.arguments
            if delta.id is not None:
                self._calls += 1
                call = ToolCall(delta.id, delta.name or "", "")
                events = self._begin(CallItem(self._completion_id, index, call, self._names))
        else:
            text = delta.text
            kind = ReasoningItem if isinstance(delta, ReasoningDelta) else TextItem
            self._sent[kind] += len(text)
            if not isinstance(self._open, kind):
                events = self._begin(kind(self._completion_id, index))
        return events + self._more(text)

    def _begin(self, item: OutputItem) -> bytes:
        """End what is open and open this item."""
        events = self._end("completed")
        self._open = item
        events += self._event("response.output_item.added", output_index=item.index, item=item.body("in_progress"))
        if (part := item.part("")) is not None:
            events += self._item_event("response.content_part.added", part=part)
        return events

    def _more(self, text: str) -> bytes:
        item = self._open
        if item is None or not text:
            return b""
        item.pieces.append(text)
        if isinstance(item, CallItem) and item.origin.custom:
            return self.keepalive  # its input can be told only once the arguments around it are whole
        logprobs: dict[str, Any] = {"logprobs": []} if isinstance(item, TextItem) else {}
        return self._item_event(f"response.{item.event}.delta", delta=text, **logprobs)

    def _end(self, status: Status) -> bytes:
        item = self._open
        if item is None:
            return b""
        events = b""
        if isinstance(item, CallItem) and item.origin.custom:
            events += self._item_event(f"response.{item.event}.delta", delta=item.done()["input"])
        events += self._item_event(f"response.{item.event}.done", **item.done())
        if (part := item.part(item.text)) is not None:
            events += self._item_event("response.content_part.done", part=part)
        body = item.body(status)
        events += self._event("response.output_item.done", output_index=item.index, item=body)
        self._output.append(body)
        self._open = None
        return events

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        item = self._open
        assert item is not None
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if not isinstance(item, CallItem):
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


_FAILED = {"context_length": "context_length_exceeded", "bad_request": "invalid_prompt"}
"""Codes of ``response.failed`` that clients take as final; on any other they ask again."""
