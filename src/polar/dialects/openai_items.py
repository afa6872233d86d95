"""The items and tools of OpenAI's Responses API as messages and functions.

Why apart from the dialect: this API tells a conversation as a flat list of items, where one reply is several of
them (its thinking, its text, each of its calls) and tools come in kinds that no chat template knows. Everything
here that changes the shape can be undone (``openai_output``): what the client sends back is the message that was
sampled.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from polar.contract.chat import Image, Message, Part, Text, Tool, ToolCall
from polar.dialects.base import CallError

T = TypeVar("T")


def read(value: Any, kind: type[T], where: str) -> T:
    """A plain JSON value as ``kind``.

    Raises:
        CallError: ``bad_request``, naming ``where`` and the field in it.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CallError("bad_request", f"'{where}' is not valid: {error}") from None


# ---- reasoning -------------------------------------------------------------------------------------------

_SEAL = "polar.reasoning.1."


def seal(reasoning: str) -> str:
    """Thinking as ``encrypted_content``: opaque to the client, which sends it back as it is."""
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str) -> str | None:
    """The thinking that ``seal`` put there; ``None`` for what another provider encrypted."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        data = base64.b64decode(sealed[len(_SEAL) :], altchars=b"-_", validate=True)
        return data.decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return None


# ---- tools -----------------------------------------------------------------------------------------------


class Origin(msgspec.Struct, frozen=True):
    """What a function that the model sees is to the client."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ToolNames:
    """Functions by the name that the model knows them by, and back.

    A tool of a namespace becomes ``namespace__tool``, also where the request no longer offers it (a compaction
    has the calls in its history and no tools), so that history reads the same in every call. Names that would
    meet are kept apart by an underscore.
    """

    def __init__(self) -> None:
        self._origins: dict[str, Origin] = {}
        self._flat: dict[tuple[str | None, str], str] = {}

    def add(self, origin: Origin) -> str:
        """Take in a tool; its name for the model, which no other tool has."""
        flat = self.flat(origin.namespace, origin.name)
        while flat in self._origins:
            flat += "_"
        self._origins[flat] = origin
        self._flat.setdefault((origin.namespace, origin.name), flat)
        return flat

    def flat(self, namespace: str | None, name: str) -> str:
        """The model's name for a tool of the client."""
        known = self._flat.get((namespace, name))
        if known is not None:
            return known
        return name if namespace is None else f"{namespace}__{name}"

    def origin(self, flat: str) -> Origin:
        """The client's tool behind a name that the model used (a made-up one stands for itself)."""
        return self._origins.get(flat) or Origin(flat)


class _FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Grammar(msgspec.Struct):
    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class _CustomTool(msgspec.Struct):
    name: str
    description: str | None = None
    format: _Grammar | None = None


class _NamespaceTool(msgspec.Struct):
    name: str
    tools: list[dict[str, Any]] = []


def tools(listed: Sequence[dict[str, Any]], names: ToolNames) -> tuple[tuple[Tool, ...], list[str]]:
    """The functions that the model gets, and warnings of what it does not get.

    A custom tool becomes a function with one string argument, ``input``; its grammar goes into the description
    and is not enforced.

    Args:
        names: takes in every tool.
    """
    out: list[Tool] = []
    dropped: list[str] = []
    for index, tool in enumerate(listed):
        where = f"tools[{index}]"
        if tool.get("type") == "namespace":
            space = read(tool, _NamespaceTool, where)
            for inner_index, inner in enumerate(space.tools):
                _tool(inner, f"{where}.tools[{inner_index}]", space.name, names, out, dropped)
        else:
            _tool(tool, where, None, names, out, dropped)
    warnings = [f"tools of type {_listed(dropped)} were dropped: only functions reach the model"] if dropped else []
    return tuple(out), warnings


def _tool(
    tool: dict[str, Any], where: str, namespace: str | None, names: ToolNames, out: list[Tool], dropped: list[str]
) -> None:
    kind = tool.get("type", "function")
    if kind == "function":
        function = read(tool, _FunctionTool, where)
        name = names.add(Origin(function.name, namespace))
        out.append(Tool(name, function.description, function.parameters, function.strict))
    elif kind == "custom":
        custom = read(tool, _CustomTool, where)
        name = names.add(Origin(custom.name, namespace, custom=True))
        schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        out.append(Tool(name, _custom_description(custom), schema))
    else:
        dropped.append(str(kind))


def _custom_description(custom: _CustomTool) -> str | None:
    grammar = custom.format
    if grammar is None or grammar.definition is None:
        return custom.description
    rule = f"`input` must follow this {grammar.syntax or 'formal'} grammar:\n{grammar.definition}"
    return f"{custom.description}\n\n{rule}" if custom.description else rule


def custom_arguments(text: str) -> str:
    """The input of a custom tool as the arguments of the function that stands for it."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments that the model wrote; all of them if they are not as asked."""
    try:
        return msgspec.json.decode(arguments, type=_Input).input
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments


class _Input(msgspec.Struct):
    input: str


# ---- items -----------------------------------------------------------------------------------------------


class _ImageURL(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageURL | str | None = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part] | None = None


class _Reasoning(msgspec.Struct):
    content: list[_Part] | None = None
    encrypted_content: str | None = None


class _Call(msgspec.Struct):
    name: str
    call_id: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None


class _Output(msgspec.Struct):
    call_id: str
    output: str | list[_Part] | None = None


def messages(items: Sequence[dict[str, Any]], names: ToolNames) -> tuple[list[Message], list[str]]:
    """The conversation that items tell, and warnings of what was dropped.

    Items of one reply become one assistant message; where they have the ids that were given to them, these tell one
    reply from the next (Codex keeps the items of a stream that broke, and what it then gets follows them), and calls
    that have their results between them are those of one reply. Images in tool results follow as a user message once
    all results of a turn are told, because templates have no place for them in a result.

    Raises:
        CallError: ``bad_request``, naming the item.
    """
    reader = _ItemReader(names)
    for index, item in enumerate(items):
        reader.item(item, f"input[{index}]")
    return reader.finish()


_OURS = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]+)_\d+")
"""An item's id as ``openai_output`` gives it: the reply that it is of."""
_OF_A_REPLY = ("message", "reasoning", "function_call", "custom_tool_call")


class _ItemReader:
    """Folds items into messages. What is being collected is a reply, or the images of tool results."""

    def __init__(self, names: ToolNames) -> None:
        self._names = names
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._after_text = False
        self._reply: str | None = None
        self._told: tuple[str, int] | None = None  # the last reply and its place, until somebody else speaks
        self._images: list[Image] = []
        self._dropped: list[str] = []
        self._foreign = False

    def item(self, item: dict[str, Any], where: str) -> None:
        """The next item."""
        kind = item.get("type") or "message"
        if kind in _OF_A_REPLY:
            self._begin_of(item.get("id"))
        if kind == "message":
            self._message(read(item, _Message, where), where)
        elif kind == "reasoning":
            self._thought(read(item, _Reasoning, where))
        elif kind in ("function_call", "custom_tool_call"):
            self._call(read(item, _Call, where), custom=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(read(item, _Output, where), where)
        elif kind == "item_reference":
            raise CallError("bad_request", f"'{where}' refers to a stored item: send the item itself (store: false)")
        elif kind == "compaction":
            raise CallError(
                "bad_request", f"'{where}' is a conversation that only its vendor can read: send its items"
            )
        else:
            self._dropped.append(str(kind))

    def finish(self) -> tuple[list[Message], list[str]]:
        """The messages and the warnings."""
        self._end_reply()
        self._end_outputs()
        warnings = [f"input items of type {_listed(self._dropped)} were dropped"] if self._dropped else []
        if self._foreign:
            warnings.append("reasoning that this server did not give was dropped")
        return self._messages, warnings

    def _begin_of(self, item_id: object) -> None:
        """End the reply that is being collected where this item is known to be of another one."""
        ours = _OURS.fullmatch(item_id) if isinstance(item_id, str) else None
        if ours is None:
            return
        if self._reply not in (None, ours[1]):
            self._end_reply()
        self._reply = ours[1]

    def _message(self, message: _Message, where: str) -> None:
        self._end_outputs()
        if message.role == "assistant":
            if self._after_text:
                self._end_reply()
            self._texts.append(
                "".join(part.text for part in _parts(message.content, where) if isinstance(part, Text))
            )
            self._after_text = True
            return
        self._end_reply()
        self._told = None
        role: Literal["user", "system"] = "user" if message.role == "user" else "system"
        self._messages.append(Message(role, content_of(_parts(message.content, where))))

    def _thought(self, item: _Reasoning) -> None:
        self._end_outputs()
        text = unseal(item.encrypted_content) if item.encrypted_content else None
        if text is None:
            text = "".join(part.text or "" for part in item.content or ())
            self._foreign = self._foreign or not text
        if text:
            self._reasoning.append(text)
            self._after_text = False

    def _call(self, item: _Call, *, custom: bool) -> None:
        arguments = custom_arguments(item.input or "") if custom else arguments_text(item.arguments)
        call = ToolCall(item.call_id, self._names.flat(item.namespace, item.name), arguments)
        if self._told is not None and self._reply == self._told[0]:  # each call with its own result behind it
            message = self._messages[self._told[1]]
            calls = (*message.tool_calls, call)
            self._messages[self._told[1]] = msgspec.structs.replace(message, tool_calls=calls)
            return
        self._end_outputs()
        self._calls.append(call)
        self._after_text = False

    def _output(self, item: _Output, where: str) -> None:
        self._end_reply()
        parts = _parts(item.output, where)
        texts = [part for part in parts if isinstance(part, Text)]
        self._images += [part for part in parts if isinstance(part, Image)]
        self._messages.append(Message("tool", content_of(texts), tool_call_id=item.call_id))

    def _end_reply(self) -> None:
        if self._reasoning or self._texts or self._calls:
            thought = "".join(self._reasoning) or None
            text = "".join(self._texts)
            self._told = (self._reply, len(self._messages)) if self._reply is not None else None
            self._messages.append(Message("assistant", text, reasoning=thought, tool_calls=tuple(self._calls)))
        self._reasoning, self._texts, self._calls = [], [], []
        self._after_text, self._reply = False, None

    def _end_outputs(self) -> None:
        if self._images:
            self._messages.append(Message("user", tuple(self._images)))
            self._images = []


def _parts(content: str | list[_Part] | None, where: str) -> list[Part]:
    if content is None or isinstance(content, str):
        return [Text(content)] if content else []
    parts: list[Part] = []
    for part in content:
        if part.image_url is not None:
            parts.append(Image(part.image_url if isinstance(part.image_url, str) else part.image_url.url))
        elif part.text is not None or part.refusal is not None:
            if part.text or part.refusal:
                parts.append(Text(part.text or part.refusal or ""))
        elif part.type == "input_image":
            raise CallError("bad_request", f"'{where}': no files are kept here: send an image as 'image_url'")
        else:
            raise CallError("bad_request", f"'{where}': a part of type '{part.type}' is not supported here")
    return parts


def content_of(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """A message's content: one text is a string."""
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    return tuple(parts) or ""


def arguments_text(arguments: str | dict[str, Any] | None) -> str:
    """A call's arguments as they are recorded: the text as it was sent."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return msgspec.json.encode(arguments).decode()


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(f"'{kind}'" for kind in dict.fromkeys(kinds))
