"""Reply parsers: the text a model sampled, as it streams, to thinking, visible text and tool calls.

Laws, whatever the text and however it is cut:
the deltas, concatenated, are the message; the message does not depend on the cuts; and nothing sampled is
lost but markup and the whitespace next to it. Arguments are the raw text as sampled. A call whose name and
arguments can be told apart is a call even if its JSON is broken; other markup stays visible text. A parser
holds back only text that may still turn out to be markup.

One file a family; which family a template belongs to is found by having it render a call and trying who
can read it (``detect``).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from polar.contract.chat import Delta, Message, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta
from polar.rendering.messages import RAW_ARGUMENTS, join_text, parse_arguments

NewId = Callable[[], str]


class Tags(NamedTuple):
    """What stands before and after a model's thinking."""

    open: str
    close: str


THINK = Tags("<think>", "</think>")
THINKING = (THINK, Tags("[THINK]", "[/THINK]"), Tags("<|channel>thought\n", "<channel|>"))
"""The tags of the families: most of them, Mistral, Gemma 4."""


class Parser(Protocol):
    """Reads one reply's text."""

    def feed(self, text: str) -> list[Delta]:
        """More text; what can be told for sure."""
        ...

    def finish(self) -> list[Delta]:
        """The text is over: what was held back."""
        ...


class PlainParser:
    """No markup: all text is visible."""

    def feed(self, text: str) -> list[Delta]:
        """The text itself."""
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing was held back."""
        return []


class ThinkingParser:
    """Reasoning between ``tags``, then what ``inner`` reads.

    Thinking begins at the opening tag as the first word of the reply, or is already open (``opened``) because the
    prompt ended with it. Line ends just inside the tags and after the closing one belong to the markup. What
    is never closed is all thinking.
    """

    def __init__(self, inner: Parser, tags: Tags, *, opened: bool) -> None:
        self._inner = inner
        self._open, self._close = tags
        self._state = "thought" if opened else "start"
        self._said = False  # some thought was given out
        self._buffer = ""

    def feed(self, text: str) -> list[Delta]:
        """More text."""
        if self._state == "inner":
            return self._inner.feed(text)
        self._buffer += text
        if self._state == "start" and not self._begin():
            return []
        out: list[Delta] = []
        if self._state == "thought":
            out += self._think()
        if self._state == "gap":
            self._buffer = self._buffer.lstrip("\n")
            self._state = "inner" if self._buffer else "gap"
        if self._state == "inner":
            rest, self._buffer = self._buffer, ""
            out += self._inner.feed(rest)
        return out

    def finish(self) -> list[Delta]:
        """The end of the text."""
        out: list[Delta] = []
        if self._state == "thought":
            out = self._thought(self._buffer.rstrip("\n"))
        elif self._buffer:
            out = self._inner.feed(self._buffer)
        return [*out, *self._inner.finish()]

    def _begin(self) -> bool:
        """Whether it is known if the reply begins with a thought."""
        word = self._buffer.lstrip()
        if word.startswith(self._open):
            self._state, self._buffer = "thought", word[len(self._open) :]
        elif not self._open.startswith(word):
            self._state = "inner"
        return self._state != "start"

    def _think(self) -> list[Delta]:
        end = self._buffer.find(self._close)
        if end >= 0:
            thought, self._buffer = self._buffer[:end].rstrip("\n"), self._buffer[end + len(self._close) :]
            self._state = "gap"
            return self._thought(thought)
        safe = len(self._buffer[: len(self._buffer) - held(self._buffer, self._close)].rstrip("\n"))
        thought, self._buffer = self._buffer[:safe], self._buffer[safe:]
        return self._thought(thought)

    def _thought(self, text: str) -> list[Delta]:
        if not self._said:
            text = text.lstrip("\n")
        if not text:
            return []
        self._said = True
        return [ReasoningDelta(text)]


def held(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    for n in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-n:]):
            return n
    return 0


def random_id() -> str:
    """An id for a tool call."""
    return "call_" + secrets.token_hex(12)


def call_deltas(index: int, name: str, arguments: str, call_id: str) -> list[Delta]:
    """A whole call: its beginning, then its arguments."""
    begin = ToolCallDelta(index=index, id=call_id, name=name)
    return [begin, ToolCallDelta(index=index, arguments=arguments)] if arguments else [begin]


def read(parser: Parser, text: str) -> Message:
    """The message in a whole reply."""
    return fold([*parser.feed(text), *parser.finish()])


def fold(deltas: Iterable[Delta]) -> Message:
    """The message that deltas make up."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for delta in deltas:
        if isinstance(delta, TextDelta):
            content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        else:
            _, _, arguments = calls.setdefault(delta.index, (delta.id or "", delta.name or "", []))
            arguments.append(delta.arguments)
    return Message(
        role="assistant",
        content="".join(content),
        reasoning="".join(reasoning) if reasoning else None,
        tool_calls=tuple(ToolCall(id_, name, "".join(arguments)) for id_, name, arguments in calls.values()),
    )


def same_reply(one: Message, other: Message, *, rendered: bool = False) -> bool:
    """Whether two assistant messages say the same: text and thinking up to whitespace around them, calls in
    order with equal names and arguments that are equal as JSON (or as text, where they are none). Ids don't
    count.

    ``rendered``: ``one`` is what a template made of ``other``. Arguments that are no JSON object then equal the
    wrapping in which the template got them (``RAW_ARGUMENTS``), and the JSON string that it wrote them as.
    """
    if _words(one) != _words(other) or len(one.tool_calls) != len(other.tool_calls):
        return False
    pairs = zip(one.tool_calls, other.tool_calls, strict=True)
    return all(
        a.name == b.name
        and (_same_arguments(a.arguments, b.arguments) or (rendered and _wraps(a.arguments, b.arguments)))
        for a, b in pairs
    )


def _words(message: Message) -> tuple[str, str]:
    return join_text(message).strip(), (message.reasoning or "").strip()


def _same_arguments(one: str, other: str) -> bool:
    if one.strip() == other.strip():
        return True
    a, b = parse_arguments(one), parse_arguments(other)
    # As text: == alone would take 1 for true.
    return isinstance(a, dict) and isinstance(b, dict) and _canonical(a) == _canonical(b)


def _wraps(one: str, other: str) -> bool:
    """Whether ``one`` is how a template wrote the arguments ``other``, which are no object."""
    if isinstance(parse_arguments(other), dict):
        return False
    try:
        value = json.loads(one)
    except (ValueError, RecursionError):
        return False
    return other in (value, value.get(RAW_ARGUMENTS) if isinstance(value, dict) else None)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)
