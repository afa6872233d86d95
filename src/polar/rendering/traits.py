"""What a chat template accepts and does, found out by rendering small conversations.

Source text is a poor witness: templates test for the same thing in dozens of ways. A probe sees what
comes out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from polar.rendering.base import RenderError
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import Tokenizer

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_ONE, _TWO, _THREE, _FOUR = "Aqzone", "Bqztwo", "Cqzthree", "Dqzfour"
_CALL_ID = "call0prob"  # nine letters and digits: some templates insist
Dicts = list[dict[str, Any]]


class Traits(msgspec.Struct, frozen=True):
    """What one template does.

    ``text_parts``: content must be a list of parts. ``images``: it takes image parts. ``system``: it takes a
    leading system message; ``late_system``: one in the middle keeps its place. ``neighbours``: two user
    messages may follow each other. ``object_arguments``: arguments that are a string make it fail.
    ``reasoning_fields``: the names under which it reads reasoning; ``inline_reasoning``: it has none, but
    knows ``</think>`` inside the content. ``turn_ends``: the control tokens that it writes right after a reply.
    ``results``: it takes a tool's result.
    """

    text_parts: bool
    images: bool
    system: bool
    late_system: bool
    neighbours: bool
    object_arguments: bool
    reasoning_fields: tuple[str, ...]
    inline_reasoning: bool
    turn_ends: tuple[str, ...]
    results: bool = True
    user_after_result: bool = True
    text_arguments: bool = False
    null_content: bool = False
    reasoning_parts: bool = False
    reasoning_or_text: bool = False
    call_ids: Literal["any", "nine", "functions"] = "any"


def probe(template: ChatTemplate, tokenizer: Tokenizer) -> Traits:
    """Try a template out.

    Raises:
        RenderError: it refuses even one user message.
    """
    user = _user(_ONE)
    plain = _try(template, [user])
    parts = _try(template, [{"role": "user", "content": [{"type": "text", "text": _ONE}]}])
    text_parts = _ONE not in (plain or "") and _ONE in (parts or "") and "'text'" not in (parts or "")
    if not text_parts and plain is None:
        template.text([user])  # raises the template's own refusal
    probe_ = _Probe(template, text_parts)
    fields = tuple(name for name in REASONING_FIELDS if re.search(rf"\.{name}\b|['\"]{name}['\"]", template.source))
    return Traits(
        text_parts=text_parts,
        images=_takes_images(template),
        system=probe_.in_order([_system(_ONE), _user(_TWO)], _ONE, _TWO),
        late_system=probe_.in_order(
            [_user(_ONE), _assistant(_TWO), _system(_THREE), _user(_FOUR)], _ONE, _TWO, _THREE, _FOUR
        ),
        neighbours=probe_.in_order([_user(_ONE), _user(_TWO)], _ONE, _TWO),
        object_arguments=probe_.takes_arguments({"a": _ONE}) and not probe_.takes_arguments('{"a": '),
        reasoning_fields=fields,
        inline_reasoning=not fields and "</think>" in template.source,
        turn_ends=probe_.turn_ends(tokenizer),
        results=any(probe_.in_order(call, _TWO) for call in probe_.called()),
        user_after_result=probe_.takes_user_after_result(),
        text_arguments=not probe_.takes_arguments({"a": _ONE}) and probe_.takes_arguments('{"a": 1}'),
        null_content=probe_.content is None,
        reasoning_parts=probe_.reads_reasoning_parts(),
        reasoning_or_text=bool(fields) and probe_.refuses_text_beside_reasoning(fields),
        call_ids=probe_.call_ids(),
    )


class _Probe:
    def __init__(self, template: ChatTemplate, text_parts: bool) -> None:
        self._template = template
        self._text_parts = text_parts
        self.content: str | None = ""
        self.content = self._content_of_calls()

    def text(self, messages: Dicts) -> str | None:
        if self._text_parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in messages]
        return _try(self._template, messages)

    def call(self, arguments: Any, call_id: str = _CALL_ID, **reply: Any) -> Dicts:
        """A call and its result; ``reply``: more fields of the reply that calls."""
        function = {"name": "f", "arguments": arguments}
        call = {"type": "function", "id": call_id, "function": function}
        return [
            _user(_ONE),
            {"role": "assistant", "content": self.content, "tool_calls": [call], **reply},
            {"role": "tool", "content": _TWO, "tool_call_id": call_id, "name": "f"},
        ]

    def called(self) -> list[Dicts]:
        """A call and its result, with arguments in either form."""
        return [self.call({"a": _ONE}), self.call('{"a": 1}')]

    def takes_arguments(self, arguments: Any) -> bool:
        """A call with such arguments is not refused."""
        return self.text(self.call(arguments)) is not None

    def takes_user_after_result(self) -> bool:
        """Only where a result itself is taken may a template refuse what follows it."""
        for call in self.called():
            if self.in_order(call, _TWO):
                return self.in_order([*call, _user(_FOUR)], _TWO, _FOUR)
        return True

    def _content_of_calls(self) -> str | None:
        """What a reply that only calls must have as its content for its calls to be written."""
        for arguments in ({"a": _THREE}, f'{{"a": "{_THREE}"}}'):
            shown = _THREE in (self.text(self.call(arguments)) or "")
            if not shown and _THREE in (self.text(self.call(arguments, content=None)) or ""):
                return None
        return ""

    def in_order(self, messages: Dicts, *words: str) -> bool:
        """Each word once, in this order: nothing refused, dropped or moved."""
        text = self.text(messages) or ""
        places = [text.find(word) for word in words]
        return min(places) >= 0 and places == sorted(places)

    def reads_reasoning_parts(self) -> bool:
        """A ``thinking`` part of a reply's content is shown."""
        thought = {"type": "thinking", "thinking": _TWO}
        reply = {"role": "assistant", "content": [thought, {"type": "text", "text": _THREE}]}
        text = _try(self._template, [_user(_ONE), reply, _user(_FOUR)]) or ""
        shown = text.find(_TWO) >= 0 and "'thinking'" not in text and '"thinking"' not in text
        return shown and text.find(_TWO) < text.find(_THREE)

    def refuses_text_beside_reasoning(self, fields: Sequence[str]) -> bool:
        """A reply that calls may say something or think, but not both."""
        thought = dict.fromkeys(fields, _THREE)
        both = self.text(self.call({"a": _ONE}, content=_FOUR, **thought))
        return both is None and self.text(self.call({"a": _ONE}, **thought)) is not None

    def call_ids(self) -> Literal["any", "nine", "functions"]:
        """Which ids of calls it takes, or writes in a form of its own."""
        text = self.text(self.call({"a": _ONE}))
        if text is None:
            return "any"
        if "<|tool_call_argument_begin|>" in text:
            return "functions"
        return "any" if self.text(self.call({"a": _ONE}, "call_0123456789")) is not None else "nine"

    def turn_ends(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """The control tokens that stand right behind a reply, whatever comes next."""
        start = [_user(_ONE), _assistant(_TWO)]
        follow_ups: Sequence[Dicts] = (
            [_user(_THREE)],
            [_assistant(_THREE)],
            [{"role": "tool", "content": _THREE, "tool_call_id": _CALL_ID, "name": "f"}],
        )
        ends: dict[str, None] = {}
        for more in follow_ups:
            text = self.text([*start, *more]) or ""
            place = text.find(_TWO)
            match = tokenizer.control_at(text, place) if place >= 0 else None
            if match and match.start() == place + len(_TWO):
                ends[match.group()] = None
        return tuple(ends)


def _takes_images(template: ChatTemplate) -> bool:
    image = {"type": "image", "image": _TWO, "image_url": {"url": _TWO}}
    text = {"type": "text", "text": _ONE}
    both = _try(template, [{"role": "user", "content": [text, image]}])
    alone = _try(template, [{"role": "user", "content": [text]}])
    if both is None or alone is None or _ONE not in both or "'type'" in both or '"type"' in both:
        return False
    return len(both) > len(alone)


def _try(template: ChatTemplate, messages: Dicts) -> str | None:
    try:
        return template.text(messages)
    except RenderError:
        return None


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}
