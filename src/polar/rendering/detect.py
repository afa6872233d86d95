"""Which parsers read a model's replies: found by having its template render a tool call.

A template says how its model writes a call. So each family's parser is given a rendered call to read, and
the one that gets it back is the model's. Nothing is guessed from a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from polar.contract.chat import Message, Tool, ToolCall
from polar.contract.errors import UsageError
from polar.rendering.base import RenderError
from polar.rendering.hermes import HermesParser
from polar.rendering.llama3 import Llama3Parser
from polar.rendering.messages import conversation, tool_objects
from polar.rendering.parsers import END_THINK, THINK, NewId, Parser, PlainParser, ThinkingParser, read, same_reply
from polar.rendering.qwen_xml import QwenXmlParser
from polar.rendering.template import ChatTemplate
from polar.rendering.traits import Traits

CALL_PARSERS: dict[str, Callable[[NewId, Sequence[Tool]], Parser]] = {
    "hermes": lambda new_id, _: HermesParser(new_id),
    "llama3_json": lambda new_id, _: Llama3Parser(new_id),
    "qwen_xml": QwenXmlParser,
}

_CALL = ToolCall(id="call0prob", name="probe_function", arguments='{"probe": "value", "count": 3}')
_TOOL = Tool(
    name=_CALL.name,
    description="Probe.",
    parameters={"type": "object", "properties": {"probe": {"type": "string"}, "count": {"type": "integer"}}},
)


class Family(msgspec.Struct, frozen=True):
    """How a model writes. ``calls``: the parser of its tool calls (``None``: none that is known here);
    ``thinking``: it may think between ``<think>`` and ``</think>``."""

    calls: str | None
    thinking: bool

    def parser(self, new_id: NewId, *, tools: Sequence[Tool], opened: bool) -> Parser:
        """A parser for one reply. ``tools``: what may be called; where there is nothing, markup is text.
        ``opened``: the prompt has begun the thinking."""
        inner = CALL_PARSERS[self.calls](new_id, tools) if tools and self.calls else PlainParser()
        return ThinkingParser(inner, opened=opened) if self.thinking else inner


def family(template: ChatTemplate, traits: Traits, name: str | None = None) -> Family:
    """The family of a template; ``name`` (hermes, llama3_json, qwen_xml, plain) overrides how calls are read.

    Raises:
        UsageError: there is no parser of that name.
    """
    thinking = END_THINK in template.source
    if name is None:
        return Family(_reader_of_calls(template, traits, thinking), thinking)
    if name != "plain" and name not in CALL_PARSERS:
        raise UsageError(f"no reply parser '{name}': there are {', '.join([*CALL_PARSERS, 'plain'])}")
    return Family(None if name == "plain" else name, thinking)


def _reader_of_calls(template: ChatTemplate, traits: Traits, thinking: bool) -> str | None:
    text, opened = _rendered_call(template, traits)
    expected = Message(role="assistant", tool_calls=(_CALL,))
    for name in CALL_PARSERS if text else ():
        parser = Family(name, thinking).parser(lambda: "", tools=[_TOOL], opened=opened and thinking)
        if same_reply(read(parser, text), expected):
            return name
    return None


def _rendered_call(template: ChatTemplate, traits: Traits) -> tuple[str, bool]:
    """What the template writes for a reply that is one tool call (empty if it writes none), and whether it
    begins inside an open thought."""
    user = Message(role="user", content="Probe.")
    reply = Message(role="assistant", tool_calls=(_CALL,))
    result = Message(role="tool", content="Probed.", tool_call_id=_CALL.id, name=_CALL.name)
    tools = tool_objects([_TOOL])
    try:
        prompt = template.text(conversation([user], traits, _as_it_is), tools)
        whole = template.text(conversation([user, reply, result], traits, _as_it_is), tools)
    except RenderError:
        return "", False
    same = zip(prompt, whole, strict=False)
    start = next((place for place, (a, b) in enumerate(same) if a != b), min(len(prompt), len(whole)))
    rest = whole[start:]
    ends = [place for end in traits.turn_ends if (place := rest.find(end)) >= 0]
    return rest[: min(ends, default=len(rest))], whole[:start].rstrip().endswith(THINK)


def _as_it_is(value: object) -> object:
    return value
