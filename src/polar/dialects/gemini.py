"""Google Gemini: ``POST /v1beta/models/{model}:generateContent`` and ``:streamGenerateContent``.

The dialect of Gemini CLI, and one of those that opencode and pi speak. Source of the shapes: the public API
reference and the wire as those harnesses and the vendor's SDKs speak it. Keys may be in camel or snake case,
as in the vendor's API. Request fields that nothing here reads are named in a warning.

The route says whether a reply is streamed, and ``?alt=sse`` in which form: as server-sent events, or else as
one JSON array that arrives in pieces. Function calls are sent whole, in the last chunk: their args must be an
object, and only the whole text tells whether it is one. Gemini CLI breaks on comments and ``event:`` lines, so
the event stream has neither: while nothing happens, a chunk with an empty text is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from polar.contract.chat import Chat, Delta, ReasoningDelta, Sampling, TextDelta, Tool, Usage
from polar.dialects.base import Answer, Call, CallError, Response, Route, StreamEncoder, told_role
from polar.dialects.errors import ERRORS, error_text, retry_headers
from polar.dialects.gemini_content import (
    Content,
    InPart,
    Reader,
    call_parts,
    camel,
    encode_parts,
    json_schema,
    text_part,
)
from polar.dialects.unheeded import effort_args, unheeded

# ---- parse request ---------------------------------------------------------------------------------------


class _Function(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _Calling(msgspec.Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: _Calling | None = None


class _Thinking(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: float | None = None
    thinking_level: str | None = None


class _Generation(msgspec.Struct, rename="camel"):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: float | None = None
    stop_sequences: list[str] | None = None
    seed: float | None = None
    candidate_count: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[str] | None = None
    response_logprobs: bool | None = None
    thinking_config: _Thinking | None = None


class _Request(msgspec.Struct, rename="camel"):
    contents: list[Content] | None = None
    system_instruction: Content | list[InPart] | str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _Generation | None = None
    cached_content: str | None = None


_NEUTRAL = ("model", "safetySettings", "labels", "store", "serviceTier")
"""Fields without which the reply would be the same."""


@dataclass(frozen=True, slots=True)
class Options:
    """What an encoder must know: whether thoughts are shown, and the form of a stream."""

    thoughts: bool
    sse: bool


class Gemini:
    """The dialect (see ``polar.dialects.base.Dialect``)."""

    name = "gemini"
    routes: Sequence[Route] = (
        Route(
            "POST",
            r"/v1(?:beta|alpha)?/(?:models|tunedModels)/(?P<model>.+):(?P<verb>generateContent|streamGenerateContent)",
            "generate",
        ),
        Route("POST", r"/v1(?:beta|alpha)?/(?:models|tunedModels)/(?P<model>.+):(?P<verb>countTokens)", "count"),
        Route("GET", r"/v1(?:beta|alpha)/models", "models"),
        Route("GET", r"/v1(?:beta|alpha)/models/(?P<model>.+)", "model"),
        Route("GET", r"/v1/models", "models", header="x-goog-api-key"),
        Route("GET", r"/v1/models/(?P<model>.+)", "model", header="x-goog-api-key"),
    )

    def parse(self, body: bytes, headers: Mapping[str, str], path: Mapping[str, str]) -> Call:
        try:
            given = _given(body)
            call = _call(msgspec.convert(given, _Request), path)
            return replace(call, warnings=(*call.warnings, *_unheeded(given)), role_hint=told_role(headers))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise CallError("bad_request", f"The request body is not valid: {error}") from None

    # ---- encode reply ------------------------------------------------------------------------------------

    def encode(self, call: Call, answer: Answer) -> Response:
        parts = encode_parts(answer.message, thoughts=call.options.thoughts)
        return Response(200, _dumps(_response(answer.completion_id, answer.model, parts, answer)))

    # ---- encode stream -----------------------------------------------------------------------------------

    def stream(self, call: Call) -> StreamEncoder:
        return _ContentStream(_Events() if call.options.sse else _Array(), thoughts=call.options.thoughts)

    # ---- errors ------------------------------------------------------------------------------------------

    def error(self, error: CallError) -> Response:
        return Response(ERRORS[error.kind].status, orjson.dumps(_error_body(error)), retry_headers(error))

    # ---- side routes -------------------------------------------------------------------------------------

    def count(self, tokens: int) -> Response:
        return Response(200, orjson.dumps({"totalTokens": tokens}))

    def models(self, names: Sequence[str]) -> Response:
        return Response(200, orjson.dumps({"models": [_model(name) for name in names]}))

    def model(self, name: str) -> Response:
        return Response(200, orjson.dumps(_model(name)))


def _given(body: bytes) -> Any:
    plain = camel(msgspec.json.decode(body))
    if isinstance(plain, dict) and isinstance(plain.get("generateContentRequest"), dict):
        return plain["generateContentRequest"]  # a form of countTokens
    return plain


def _call(request: _Request, path: Mapping[str, str]) -> Call:
    if not request.contents:
        raise CallError("bad_request", "contents: at least one content is required")
    if request.cached_content:
        raise CallError("bad_request", "cachedContent: there is no cached content here; send it in contents")
    generation = request.generation_config or _Generation()
    tools, warnings = _tools(request)
    reader = _read(request)
    if not reader.messages:
        raise CallError("bad_request", "contents: nothing is said in them")
    if reader.messages[-1].role == "assistant":
        warnings.append("the last content is the model's: the reply is a turn of its own and does not go on from it")
    chat = Chat(
        model=path.get("model", ""),
        messages=tuple(reader.messages),
        tools=tools,
        tool_choice=_tool_choice(request, tools, warnings),
        sampling=_sampling(generation, warnings),
        response_format=_response_format(generation, warnings),
        template_args=_template_args(generation, warnings),
    )
    thinking = generation.thinking_config or _Thinking()
    options = Options(thoughts=bool(thinking.include_thoughts), sse=path.get("alt") == "sse")
    streamed = path.get("verb") == "streamGenerateContent"
    return Call(chat, streamed, options, (*warnings, *reader.warnings))


def _read(request: _Request) -> Reader:
    reader = Reader()
    system = request.system_instruction
    if isinstance(system, str):
        system = [InPart(text=system)]
    if system is not None:
        content = Content(system) if isinstance(system, list) else system
        reader.system(content, "systemInstruction")
    for index, content in enumerate(request.contents or ()):
        reader.read(content, f"contents[{index}]")
    reader.close()
    return reader


def _tools(request: _Request) -> tuple[tuple[Tool, ...], list[str]]:
    tools: list[Tool] = []
    warnings: list[str] = []
    for index, tool in enumerate(request.tools or ()):
        for kind in tool:
            if kind != "functionDeclarations":
                warnings.append(f"tools[{index}].{kind} was dropped: only functions reach the model")
        for function in msgspec.convert(tool.get("functionDeclarations") or [], list[_Function]):
            schema = function.parameters_json_schema
            if schema is None and function.parameters is not None:
                schema = json_schema(function.parameters)
            tools.append(Tool(function.name, function.description, schema))
    return tuple(tools), warnings


def _unheeded(given: dict[str, Any]) -> list[str]:
    """What was asked for, in fields that nothing here reads."""
    generation = given.get("generationConfig") or {}
    config = given.get("toolConfig") or {}
    functions = [function for tool in given.get("tools") or () for function in tool.get("functionDeclarations") or ()]
    declared = {name: value for function in functions for name, value in function.items()}
    return [
        *unheeded(given, _Request, _NEUTRAL),
        *unheeded(generation, _Generation, ("logprobs",), where="generationConfig."),
        *unheeded(generation.get("thinkingConfig") or {}, _Thinking, where="generationConfig.thinkingConfig."),
        *unheeded(config, _ToolConfig, where="toolConfig."),
        *unheeded(config.get("functionCallingConfig") or {}, _Calling, where="toolConfig.functionCallingConfig."),
        *unheeded(declared, _Function, where="tools.functionDeclarations."),
    ]


def _tool_choice(request: _Request, tools: tuple[Tool, ...], warnings: list[str]) -> str | None:
    calling = request.tool_config.function_calling_config if request.tool_config else None
    if calling is None or calling.mode is None or not tools:
        return None
    mode = _MODES.get(calling.mode.upper())
    if mode is None:
        raise CallError("bad_request", f"toolConfig.functionCallingConfig.mode: '{calling.mode}' is not known")
    if calling.mode.upper() == "VALIDATED":
        warnings.append("functionCallingConfig.mode VALIDATED was taken as AUTO: calls are not held to their schema")
    allowed = calling.allowed_function_names or []
    if mode != "required" or not allowed:
        if allowed and mode == "auto":
            warnings.append("allowedFunctionNames were passed over: outside mode ANY the model may call any function")
        return mode
    unknown = set(allowed) - {tool.name for tool in tools}
    if unknown:
        field = "toolConfig.functionCallingConfig.allowedFunctionNames"
        raise CallError("bad_request", f"{field}: no declared function is called '{min(unknown)}'")
    if len(allowed) > 1:
        warnings.append("allowedFunctionNames of several names was taken as 'any function'")
        return mode
    return allowed[0]


_MODES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}


def _sampling(generation: _Generation, warnings: list[str]) -> Sampling:
    if (_whole(generation.candidate_count, "candidateCount") or 1) != 1:
        raise CallError("bad_request", "generationConfig.candidateCount must be 1: ask again for another sample")
    if generation.response_logprobs:
        warnings.append("responseLogprobs were asked for and are not in the reply: Polar keeps them in its record")
    limit = _whole(generation.max_output_tokens, "maxOutputTokens")
    if limit is not None and limit < 1:
        raise CallError("bad_request", "generationConfig.maxOutputTokens must be at least 1")
    return Sampling(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=_whole(generation.top_k, "topK"),
        max_tokens=limit,
        stop=tuple(text for text in generation.stop_sequences or () if text),
        seed=_whole(generation.seed, "seed"),
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
    )


def _whole(value: float | None, field: str) -> int | None:
    """An integer, which the vendor's SDK may write as ``40.0``."""
    if value is not None and not (value.is_integer() and abs(value) < 2**53):
        raise CallError("bad_request", f"generationConfig.{field}: {value} is no integer, or too large")
    return None if value is None else int(value)


def _response_format(generation: _Generation, warnings: list[str]) -> dict[str, Any] | None:
    other = [name for name in generation.response_modalities or () if name.upper() != "TEXT"]
    if other:
        warnings.append(f"responseModalities {', '.join(other)} were asked for: the reply is text")
    kind = generation.response_mime_type or "application/json"
    if kind not in ("application/json", "text/plain"):
        warnings.append(f"responseMimeType '{kind}' was dropped: replies are text or JSON")
        return None
    schema = generation.response_json_schema
    if schema is None:
        schema = generation.response_schema
    if schema is not None:
        # Gemini CLI writes the vendor's own types (``OBJECT``) as a JSON schema, too.
        form = {"name": "output", "schema": json_schema(schema), "strict": True}
        return {"type": "json_schema", "json_schema": form}
    return {"type": "json_object"} if generation.response_mime_type == "application/json" else None


def _template_args(generation: _Generation, warnings: list[str]) -> dict[str, Any]:
    """A budget of 0 is no thinking; without a budget it is left to the template."""
    thinking = generation.thinking_config or _Thinking()
    budget, level = thinking.thinking_budget, (thinking.thinking_level or "").lower()
    if budget is not None and budget > 0:
        warnings.append("thinkingBudget only switches thinking on: maxOutputTokens alone bounds a reply")
    effort = None if level in ("", "thinking_level_unspecified") else level
    switch = {} if budget is None else {"enable_thinking": budget != 0}
    return switch | effort_args(effort, "thinkingLevel", warnings)


def _response(
    completion_id: str, model: str, parts: list[dict[str, Any]], answer: Answer | None = None
) -> dict[str, Any]:
    """A response, or a chunk of one; the last chunk has the whole ``answer``."""
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    body: dict[str, Any] = {"candidates": [candidate], "modelVersion": model, "responseId": completion_id}
    if answer is not None:
        candidate["finishReason"] = "MAX_TOKENS" if answer.finish_reason == "length" else "STOP"
        body["usageMetadata"] = _usage(answer.usage)
    return body


def _usage(usage: Usage) -> dict[str, Any]:
    """Thoughts are among the candidate's tokens: how many of them is not known."""
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    return counts


def _model(name: str) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "version": "1",
        "displayName": name,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


class _ContentStream:
    """One streamed reply as response chunks. Each has a part, if only an empty text: the vendor's Python SDK
    forgets a turn with a chunk that has none."""

    def __init__(self, frame: _Events | _Array, *, thoughts: bool) -> None:
        self.content_type = frame.content_type
        self.keepalive = frame.keepalive
        self._frame = frame
        self._thoughts = thoughts
        self._thought: list[str] = []
        self._signed = ""
        self._head = ("", "")

    def start(self, completion_id: str, created: float, model: str, prompt_tokens: int) -> bytes:
        self._head = (completion_id, model)
        return b""

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, ReasoningDelta):
            self._thought.append(delta.text)
            if not self._thoughts or not delta.text:
                return b""
            return self._frame.chunk(_response(*self._head, [{"text": delta.text, "thought": True}]))
        if isinstance(delta, TextDelta) and delta.text:
            return self._frame.chunk(_response(*self._head, [text_part(delta.text, self._unsigned())]))
        return b""

    def finish(self, answer: Answer) -> bytes:
        self._thought = [answer.message.reasoning or ""]
        unsigned = self._unsigned()
        parts = call_parts(answer.message.tool_calls, unsigned) or [text_part("", unsigned)]
        return self._frame.chunk(_response(*self._head, parts, answer)) + self._frame.end()

    def error(self, error: CallError) -> bytes:
        return self._frame.error(_error_body(error))

    def _unsigned(self) -> str | None:
        """The thinking, if no part was signed for it yet."""
        thought = "".join(self._thought)
        if thought == self._signed:
            return None
        self._thought, self._signed = [thought], thought
        return thought


class _Events:
    """Chunks as server-sent events. An error is bare JSON, as the vendor sends it: its SDKs raise on it."""

    content_type = "text/event-stream; charset=utf-8"
    keepalive = b'data: {"candidates":[{"content":{"parts":[{"text":""}],"role":"model"},"index":0}]}\n\n'

    def chunk(self, body: dict[str, Any]) -> bytes:
        return b"data: " + _dumps(body) + b"\n\n"

    def error(self, body: dict[str, Any]) -> bytes:
        return _dumps(body) + b"\n\n"

    def end(self) -> bytes:
        return b""


class _Array:
    """Chunks as the items of a JSON array, in which white space means nothing."""

    content_type = "application/json"
    keepalive = b"\n"

    def __init__(self) -> None:
        self._before = b"["

    def chunk(self, body: dict[str, Any]) -> bytes:
        before, self._before = self._before, b",\n"
        return before + _dumps(body)

    def error(self, body: dict[str, Any]) -> bytes:
        return self.chunk(body) + self.end()

    def end(self) -> bytes:
        return b"]\n"


def _dumps(body: dict[str, Any]) -> bytes:
    """JSON in one line, whatever a client takes for a line end: the vendor's SDKs cut at these three, too."""
    data = orjson.dumps(body)
    for raw, escaped in ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085")):
        data = data.replace(raw, escaped)
    return data


_OVER = "The input token count ({prompt}) exceeds the maximum number of tokens allowed ({limit})."
_OVER_UNKNOWN = "The input token count exceeds the maximum number of tokens allowed: {message}"
"""The vendor's words: harnesses act on them."""


def _error_body(error: CallError) -> dict[str, Any]:
    told, message = ERRORS[error.kind], error_text(error, _OVER, _OVER_UNKNOWN)
    return {"error": {"code": told.status, "message": message, "status": told.google}}
