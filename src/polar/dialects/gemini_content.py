"""Gemini contents to messages and back.

Why beside the dialect: a content of this API is a list of parts, and what a chat calls a message may be a part
of one (function responses stand inside a user content) or several (the vendor's SDK keeps each chunk of a
stream as a content of its own). Function calls need not have ids, and some clients make their own. So a
conversation is read as a whole: a response goes to its call by id, else to the first call of its name that
has no response yet.

Clients of this API drop the text of thoughts but return every ``thoughtSignature`` on the part where it stood: the
thinking is signed on the first part after it, and each function call for its id (``polar.dialects.signatures``).
"""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import msgspec
import orjson

from polar.contract.chat import Image, Message, Part, Text, ToolCall
from polar.dialects.base import CallError
from polar.dialects.signatures import STANDARD_BASE64, read_signature, signature
from polar.dialects.unparsed import object_json, raw_text


class Blob(msgspec.Struct, rename="camel"):
    """Bytes in base64."""

    data: str
    mime_type: str | None = None


class File(msgspec.Struct, rename="camel"):
    """Bytes elsewhere."""

    file_uri: str
    mime_type: str | None = None


class FunctionCall(msgspec.Struct):
    """A call; its id is optional in this API."""

    name: str
    id: str | None = None
    args: dict[str, Any] | None = None


class FunctionResponse(msgspec.Struct):
    """A call's result; media may stand beside it."""

    name: str | None = None
    id: str | None = None
    response: dict[str, Any] | None = None
    parts: list[InPart] | None = None


class InPart(msgspec.Struct, rename="camel"):
    """A part of any kind: the fields that some kind has."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    inline_data: Blob | None = None
    file_data: File | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: dict[str, Any] | None = None
    code_execution_result: dict[str, Any] | None = None
    tool_call: dict[str, Any] | None = None
    tool_response: dict[str, Any] | None = None


class Content(msgspec.Struct):
    """A turn, or a piece of one."""

    parts: list[InPart] | None = None
    role: str | None = None


# ---- contents --------------------------------------------------------------------------------------------


class Reader:
    """Reads the contents of one request, in order, into ``messages``; ``warnings`` gets a line for each part
    that the model can't be given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.warnings: list[str] = []
        self._turn: _Turn | None = None
        self._ids: dict[str, str] = {}  # a client's own call id to the recorded one
        self._numbers = itertools.count()
        self._waiting: list[ToolCall] = []  # calls without a response so far

    def read(self, content: Content, where: str) -> None:
        """Take in the next content.

        Raises:
            CallError: ``bad_request``, with the field at fault.
        """
        role = content.role or "user"
        if role == "model":
            self._turn = self._turn or _Turn()
            for index, part in enumerate(content.parts or ()):
                self._model(part, self._turn, f"{where}.parts[{index}]")
        elif role in ("user", "function", "tool"):
            self._end_turn()
            self._user(content.parts or [], where)
        elif role == "system":
            self._end_turn()
            self.system(content, where)
        else:
            raise CallError("bad_request", f"{where}.role: '{role}' is not 'user', 'model' or 'function'")

    def system(self, content: Content, where: str) -> None:
        """A system instruction; an empty one says nothing."""
        parts = self._parts(content.parts or [], where)
        if parts:
            self.messages.append(Message("system", _joined(parts)))

    def close(self) -> None:
        """The conversation is over."""
        self._end_turn()

    def _model(self, part: InPart, turn: _Turn, where: str) -> None:
        signed = read_signature(part.thought_signature)
        if signed.reasoning is not None:
            turn.signed = signed.reasoning
        if part.function_response is not None:
            raise CallError("bad_request", f"{where}.functionResponse: not in a content of role 'model'")
        if part.function_call is not None:
            turn.calls.append(self._call(part.function_call, signed.call_id))
        elif part.thought:
            turn.thoughts.append(part.text or "")
        else:
            turn.parts += self._parts([part], where)

    def _call(self, call: FunctionCall, recorded: str | None) -> ToolCall:
        ours = recorded or call.id or self._new_id()
        self._ids[call.id or ours] = ours
        self._waiting.append(ToolCall(ours, call.name, _arguments(call.args)))
        return self._waiting[-1]

    def _new_id(self) -> str:
        return f"call_{next(self._numbers)}"

    def _end_turn(self) -> None:
        """Contents of the model in a row are one reply, and their texts one text."""
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None

    def _user(self, parts: list[InPart], where: str) -> None:
        """Function responses are messages of their own, and so are the texts and images between them. A tool
        message holds text only: media beside a response is the user's, right after it."""
        before = len(self.messages)
        other: list[Part] = []
        for index, part in enumerate(parts):
            place = f"{where}.parts[{index}]"
            if part.function_call is not None:
                raise CallError("bad_request", f"{place}.functionCall: only in a content of role 'model'")
            response = part.function_response
            if response is None:
                other += self._parts([part], place)
                continue
            if other:
                self.messages.append(Message("user", _joined(other)))
            self.messages.append(self._result(response))
            other = self._parts(response.parts or [], f"{place}.functionResponse")
        if other or len(self.messages) == before:
            self.messages.append(Message("user", _joined(other)))

    def _result(self, response: FunctionResponse) -> Message:
        wanted = self._ids.get(response.id or "")
        for index, call in enumerate(self._waiting):
            if call.id == wanted or (wanted is None and response.name in (None, call.name)):
                del self._waiting[index]
                wanted = call.id
                break
        call_id = wanted or response.id or self._new_id()
        return Message("tool", _result_text(response.response), tool_call_id=call_id, name=response.name)

    def _parts(self, parts: list[InPart], where: str) -> list[Part]:
        """Texts and images, without empty texts. In place of what is neither, the model is told what it misses."""
        out: list[Part] = []
        for part in parts:
            kind = _kind(part)
            url = _image_url(part, kind) if kind is not None else None
            if part.text:
                out.append(Text(part.text))
            if url is not None:
                out.append(Image(url))
            elif part.inline_data is not None and kind is not None and kind.startswith("text/"):
                out.append(Text(_text(part.inline_data, where)))
            elif kind is not None:
                self.warnings.append(f"{kind} in {where} was left out: it is no text and no image")
                out.append(Text(f"[{kind} left out: only text and images can be read]"))
        return out


class _Turn:
    """A reply of the model, as the client sends it back."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.thoughts: list[str] = []
        self.signed: str | None = None
        self.calls: list[ToolCall] = []

    def message(self) -> Message:
        text = "".join(part.text for part in self.parts if isinstance(part, Text))
        images = any(isinstance(part, Image) for part in self.parts)
        return Message(
            "assistant",
            tuple(self.parts) if images else text,
            reasoning="".join(self.thoughts) or self.signed,
            tool_calls=tuple(self.calls),
        )


_FOREIGN = ("executable_code", "code_execution_result", "tool_call", "tool_response")
"""What the vendor's own tools leave in a history."""


def _joined(parts: list[Part]) -> str | tuple[Part, ...]:
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    return tuple(parts) or ""


def _kind(part: InPart) -> str | None:
    """What a part holds beside text: its MIME type, or its name; ``None`` if nothing."""
    media = part.inline_data or part.file_data
    if media is not None:
        return media.mime_type or "image/png"
    for name in _FOREIGN:
        if getattr(part, name) is not None:
            return _camel_key(name)
    silent = part.text is None and part.thought is None and part.thought_signature is None
    return "a part of no known kind" if silent else None


def _image_url(part: InPart, kind: str) -> str | None:
    if not kind.startswith("image/"):
        return None
    if part.inline_data is not None:
        return f"data:{kind};base64,{part.inline_data.data.translate(STANDARD_BASE64)}"
    return part.file_data.file_uri if part.file_data is not None else None


def _text(blob: Blob, where: str) -> str:
    try:
        return base64.b64decode(blob.data.translate(STANDARD_BASE64), validate=True).decode()
    except ValueError:
        raise CallError("bad_request", f"{where}.inlineData.data: not text in base64") from None


def _result_text(response: dict[str, Any] | None) -> str:
    """``output`` (or ``result``, as the vendor's SDK has it) alone is the result itself; all else is JSON."""
    if response is None:
        return ""
    if len(response) == 1:
        [(key, value)] = response.items()
        if key in ("output", "result"):
            return value if isinstance(value, str) else _dumps(value)
    return _dumps(response)


def encode_parts(message: Message, *, thoughts: bool) -> list[dict[str, Any]]:
    """A reply's parts: the thought if it is wanted, then text, then function calls. There is always one, since
    clients take a content without parts for a failure."""
    parts: list[dict[str, Any]] = []
    if message.reasoning and thoughts:
        parts.append({"text": message.reasoning, "thought": True})
    text = message.content if isinstance(message.content, str) else ""
    if text or not message.tool_calls:
        parts.append(text_part(text, message.reasoning))
        return parts + call_parts(message.tool_calls, None)
    return parts + call_parts(message.tool_calls, message.reasoning)


def text_part(text: str, reasoning: str | None) -> dict[str, Any]:
    """Text, signed for the thinking before it."""
    return {"text": text, "thoughtSignature": signature(None, reasoning)} if reasoning else {"text": text}


def call_parts(calls: tuple[ToolCall, ...], reasoning: str | None) -> list[dict[str, Any]]:
    """Function calls, each signed for its id and the first for the thinking before it."""
    return [
        {
            "functionCall": {"id": call.id, "name": call.name, "args": orjson.Fragment(args_json(call.arguments))},
            "thoughtSignature": signature(call.id, None if index else reasoning),
        }
        for index, call in enumerate(calls)
    ]


# ---- arguments -------------------------------------------------------------------------------------------


def args_json(arguments: str) -> bytes:
    """Sampled arguments as the JSON of an object, in one line."""
    return msgspec.json.format(object_json(arguments), indent=-1)


def _arguments(args: dict[str, Any] | None) -> str:
    raw = raw_text(args or {})
    return _dumps(args or {}) if raw is None else raw


def _dumps(value: Any) -> str:
    """JSON text of whatever a request held (its integers may be longer than 64 bits)."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# ---- keys and schemas ------------------------------------------------------------------------------------

_OPAQUE = frozenset(
    ("args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema")
)
"""Below these the keys are the user's own."""
_LISTS = frozenset(("contents", "parts", "tools", "functionDeclarations", "stopSequences"))
"""The vendor takes a single item for a list of one."""


def camel(value: Any) -> Any:
    """A request with all keys in camel case, which the vendor takes in snake case as well."""
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for key, item in value.items():
        name = _camel_key(key)
        item = item if name in _OPAQUE else camel(item)
        if name == "parts" and isinstance(item, list):
            item = [part for part in item if part != {}]  # an empty text, as the vendor's Go SDK writes it
        out[name] = [item] if name in _LISTS and isinstance(item, dict | str) else item
    return out


def _camel_key(key: str) -> str:
    if "_" not in key:
        return key
    first, *rest = key.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The vendor's dialect of OpenAPI schemas as JSON schema: types in lower case, ``nullable`` as a type,
    counts as numbers."""
    out: dict[str, Any] = {}
    for key, item in schema.items():
        name = _camel_key(key)
        if name == "type":
            item = [str(kind).lower() for kind in item] if isinstance(item, list) else str(item).lower()
        elif name in ("properties", "$defs", "defs", "definitions") and isinstance(item, dict):
            item = {field: json_schema(part) if isinstance(part, dict) else part for field, part in item.items()}
        elif name in ("items", "additionalProperties", "not") and isinstance(item, dict):
            item = json_schema(item)
        elif name in ("anyOf", "allOf", "oneOf", "prefixItems") and isinstance(item, list):
            item = [json_schema(part) if isinstance(part, dict) else part for part in item]
        elif name[:3] in ("min", "max") and isinstance(item, str) and item.isascii() and item.isdigit():
            item = int(item)
        out[name] = item
    out.pop("propertyOrdering", None)
    if out.get("type") == "type_unspecified":
        del out["type"]
    return _nullable(out) if out.pop("nullable", False) is True else out


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return schema
