"""Why: the scripted engine's chat replies need tool calls and reasoning taken out of the raw text by something
that is not our own parser. A small reader of ``<think>`` and ``<tool_call>`` markup, fed piece by piece.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class HermesReader:
    """Text in, OpenAI deltas out (dicts with ``content``, ``reasoning`` or ``tool_calls``). Newlines around
    markup belong to it."""

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._text = ""
        self._inside: str | None = None
        self._after_mark = False
        self._calls = 0

    def feed(self, piece: str) -> list[dict[str, Any]]:
        """More text. What may yet become a mark, or newlines before one, is held back."""
        self._text += piece
        out: list[dict[str, Any]] = []
        while (mark := self._next_mark()) is not None:
            before, _, self._text = self._text.partition(mark)
            if mark == "</tool_call>":
                out += self._call(before)
            else:
                out += self._plain(before.rstrip("\n"))
            self._inside = None if mark == self._inside else f"</{mark[1:]}"
            self._after_mark = True
        if self._inside != "</tool_call>":
            held = max((n for m in _MARKS for n in range(1, len(m)) if self._text.endswith(m[:n])), default=0)
            cut = len(self._text[: len(self._text) - held].rstrip("\n"))
            out += self._plain(self._text[:cut])
            self._text = self._text[cut:]
        return out

    def finish(self) -> list[dict[str, Any]]:
        """The text is over: a call that never closed is text."""
        rest = "<tool_call>" + self._text if self._inside == "</tool_call>" else self._text
        self._text = ""
        return self._plain(rest)

    def _next_mark(self) -> str | None:
        if self._inside is not None:
            return self._inside if self._inside in self._text else None
        opening = ["<think>", "<tool_call>"] if self._tools else ["<think>"]
        found = [mark for mark in opening if mark in self._text]
        return min(found, key=self._text.index) if found else None

    def _plain(self, text: str) -> list[dict[str, Any]]:
        if self._after_mark:
            text = text.lstrip("\n")
        if not text:
            return []
        self._after_mark = False
        return [{"reasoning" if self._inside == "</think>" else "content": text}]

    def _call(self, inner: str) -> list[dict[str, Any]]:
        try:
            call = json.loads(inner)
            name, arguments = call["name"], json.dumps(call["arguments"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            return [{"content": f"<tool_call>{inner}</tool_call>"}]
        index, self._calls = self._calls, self._calls + 1
        begin = {"index": index, "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function"}
        return [
            {"tool_calls": [{**begin, "function": {"name": name}}]},
            {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]},
        ]


def whole_message(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas add up to, as a reply that is not streamed has it."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"], arguments="")})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return {
        "role": "assistant",
        "content": content or (None if calls else ""),
        "reasoning": reasoning or None,
        "tool_calls": calls,
    }
