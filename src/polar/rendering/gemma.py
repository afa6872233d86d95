"""Tool calls as Gemma 4 writes them: ``<|tool_call>call:NAME{key:<|"|>text<|"|>,count:3}<tool_call|>``, an object
notation of its own with bare keys.

The arguments are made: the same object as JSON. Those that can't be read stay as they were sampled, without the
outer braces.
"""

from __future__ import annotations

import json
import re
from typing import Any

from polar.rendering.blocks import Block, BlockParser, Call
from polar.rendering.values import json_or_text

_QUOTE = '<|"|>'
_BEGINNING = "call:"
_CALL = re.compile(r"\s*call:([^\s{}]+)\s*\{")
_KEY = re.compile(rf"\s*(?:{re.escape(_QUOTE)}(.*?){re.escape(_QUOTE)}|([^\s:,{{}}\[\]]+))\s*:", re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]]+")
_SPACE = re.compile(r"\s*")


class GemmaParser(BlockParser):
    """Reads blocks that hold one call."""

    open, close, gap = "<|tool_call>", "<tool_call|>", ""

    def is_text(self, text: str, start: int) -> bool:
        """A call begins with its word."""
        word = text[start : start + 256].lstrip()[: len(_BEGINNING)]
        return not _BEGINNING.startswith(word)

    def ends(self, body: str) -> bool:
        """A closing tag ends the block unless it stands in a string."""
        return body.count(_QUOTE) % 2 == 0

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The name and the arguments as JSON."""
        begin = _CALL.match(body)
        if begin is None:
            return Block(len(body))
        try:
            arguments, end = _object(body, begin.end())
        except (ValueError, RecursionError):
            raw = body[begin.end() :].strip()
            raw = raw.removesuffix("}") if closed else raw
            return Block(len(body), (Call(begin.group(1), raw),) if raw else ())
        length = end if body[end:].strip() else len(body)
        return Block(length, (Call(begin.group(1), json.dumps(arguments, ensure_ascii=False)),))


def _object(text: str, place: int) -> tuple[dict[str, Any], int]:
    """The object whose opening brace stands before ``place``, and where it ends."""
    out: dict[str, Any] = {}
    place = _skip(text, place)
    while not text.startswith("}", place):
        key = _KEY.match(text, place)
        if key is None:
            raise ValueError("no key")
        name = key.group(1) if key.group(1) is not None else key.group(2)
        if name in out:
            raise ValueError("repeated key")
        out[name], place = _value(text, key.end())
        place = _next(text, place, "}")
    return out, place + 1


def _list(text: str, place: int) -> tuple[list[Any], int]:
    out: list[Any] = []
    place = _skip(text, place)
    while not text.startswith("]", place):
        value, place = _value(text, place)
        out.append(value)
        place = _next(text, place, "]")
    return out, place + 1


def _value(text: str, place: int) -> tuple[Any, int]:
    place = _skip(text, place)
    if text.startswith(_QUOTE, place):
        start = place + len(_QUOTE)
        end = text.index(_QUOTE, start)
        return text[start:end], end + len(_QUOTE)
    if text.startswith("{", place):
        return _object(text, place + 1)
    if text.startswith("[", place):
        return _list(text, place + 1)
    bare = _BARE.match(text, place)
    if bare is None:
        raise ValueError("no value")
    return json_or_text(bare.group().strip()), bare.end()


def _next(text: str, place: int, end: str) -> int:
    """Where the next member begins, or where the closing sign stands."""
    place = _skip(text, place)
    if text.startswith(end, place):
        return place
    if not text.startswith(",", place):
        raise ValueError("no comma")
    return _skip(text, place + 1)


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place
