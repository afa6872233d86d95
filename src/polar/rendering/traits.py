"""What a chat template accepts and does, found out by rendering small conversations.

Source text is a poor witness: templates test for the same thing in dozens of ways. A probe sees what
comes out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

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
        object_arguments=probe_.text(_call({"a": _ONE})) is not None and probe_.text(_call('{"a": ')) is None,
        reasoning_fields=fields,
        inline_reasoning=not fields and "</think>" in template.source,
        turn_ends=probe_.turn_ends(tokenizer),
    )


class _Probe:
    def __init__(self, template: ChatTemplate, text_parts: bool) -> None:
        self._template = template
        self._text_parts = text_parts

    def text(self, messages: Dicts) -> str | None:
        if self._text_parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return _try(self._template, messages)

    def in_order(self, messages: Dicts, *words: str) -> bool:
        """Each word once, in this order: nothing refused, dropped or moved."""
        text = self.text(messages) or ""
        places = [text.find(word) for word in words]
        return min(places) >= 0 and places == sorted(places)

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


def _reads(source: str, field: str) -> bool:
    return re.search(rf"\.{field}\b|['\"]{field}['\"]", source) is not None


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


def _call(arguments: Any) -> Dicts:
    function = {"name": "f", "arguments": arguments}
    call = {"type": "function", "id": _CALL_ID, "function": function}
    return [
        _user(_ONE),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _TWO, "tool_call_id": _CALL_ID, "name": "f"},
    ]
