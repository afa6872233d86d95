"""Text taken out of what is stored of a session, before it is: secrets, names, whatever an operator may not keep.

Token ids say the same as the text. So a call from which text was taken out is stored without its ids and logprobs,
as ``redacted``, and is not trained; and so is every call whose context goes back to it, since its ids contain those
of that call. With ``keep_ids`` the ids stay and the calls are trained: then only the text is gone, and whoever has
the tokenizer can read it from the ids. The harness always gets its whole answer: only what is kept is changed.

Images are not looked into, nor are ids and names (of models, tools, calls).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from polar.contract.arrays import NO_FLOATS, NO_IDS
from polar.contract.chat import Message, Text, Tool, ToolCall
from polar.contract.completion import Completion
from polar.contract.errors import PolarError, UsageError
from polar.contract.loading import load_named

Hook = Callable[[str], str]
"""A piece of text, and what may be kept of it. The same text always gives the same."""

PIECE = 4 * 1024 * 1024
"""Characters of a file that are looked at together: up to the end of a line, unless that one is as long again."""


class RedactionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``hooks`` are ``module:function``, applied in this order to every text of a call."""

    hooks: tuple[str, ...] = ()
    keep_ids: bool = False


class Redaction:
    """Hooks, ready to be applied.

    Args:
        hooks: by the name under which they are told of.
    """

    def __init__(self, hooks: Sequence[tuple[str, Hook]], *, keep_ids: bool = False) -> None:
        self._hooks = tuple(hooks)
        self._keep_ids = keep_ids

    def session(self) -> SessionRedaction:
        """For the calls of one session attempt, in the order in which they are stored."""
        return SessionRedaction(self, self._keep_ids)

    def error(self, text: str) -> str:
        """An error as it may be kept: where a hook fails, that is all that is kept of it."""
        try:
            return self.text(text)
        except PolarError as failed:
            return str(failed)

    def file(self, path: Path) -> None:
        """A text file as it may be kept, in its own place; none where a hook fails.

        Raises:
            PolarError: a hook failed.
            OSError: it can't be read or written.
        """
        kept = path.with_name(path.name + ".kept")
        options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "newline": ""}
        try:
            with path.open(**options) as file, kept.open("w", **options) as out:
                while piece := file.read(PIECE):
                    out.write(self.text(piece + file.readline(PIECE)))
            os.replace(kept, path)
        except PolarError:
            path.unlink()
            raise
        finally:
            kept.unlink(missing_ok=True)

    def value(self, value: Any) -> Any:
        """A JSON value with every text in it as it may be kept. Names of an object that become alike are numbered.

        Raises:
            PolarError: a hook failed.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return self._object(value)
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def _object(self, value: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, each in value.items():
            told = self.value(name)
            names = itertools.chain([told], (f"{told} ({number})" for number in itertools.count(2)))
            kept[next(free for free in names if free not in kept)] = self.value(each)
        return kept

    def text(self, text: str) -> str:
        """A piece of text as it may be kept.

        Raises:
            PolarError: a hook failed.
        """
        for name, hook in self._hooks:
            try:
                text = hook(text)
            except Exception as error:
                # What could not be redacted must not be stored, and a call that is not stored is not answered.
                raise PolarError(f"redaction: {name} failed: {type(error).__name__}: {error}") from error
            if not isinstance(text, str):
                raise PolarError(f"redaction: {name} returned {type(text).__name__}: it must return text")
        return text


class SessionRedaction:
    """Knows which calls of a session were stored without their ids."""

    def __init__(self, redaction: Redaction, keep_ids: bool) -> None:
        self._redaction = redaction
        self._redact = redaction.text
        self._keep_ids = keep_ids
        self._without_ids: set[str] = set()

    def apply(self, completion: Completion) -> Completion:
        """The call as it may be stored.

        Raises:
            PolarError: a hook failed.
        """
        messages = tuple(self._message(message) for message in completion.messages)
        reply = self._message(completion.reply)
        tools = tuple(self._tool(tool) for tool in completion.tools)
        changed = (messages, reply, tools) != (completion.messages, completion.reply, completion.tools)
        completion = msgspec.structs.replace(
            completion,
            messages=messages,
            reply=reply,
            tools=tools,
            sampling=msgspec.structs.replace(
                completion.sampling, stop=tuple(self._redact(stop) for stop in completion.sampling.stop)
            ),
            stop_sequence=None if completion.stop_sequence is None else self._redact(completion.stop_sequence),
            detail=None if completion.detail is None else self._redact(completion.detail),
        )
        if self._keep_ids or not (changed or (completion.shared and completion.base_id in self._without_ids)):
            return completion
        self._without_ids.add(completion.completion_id)
        return msgspec.structs.replace(
            completion,
            outcome="redacted" if completion.outcome == "ok" else completion.outcome,
            detail=completion.detail or "text was taken out before it was stored, here or in its context",
            shared=0,
            prompt_delta=NO_IDS,
            response_ids=NO_IDS,
            logprobs=NO_FLOATS,
            weight_spans=(),
        )

    def _tool(self, tool: Tool) -> Tool:
        """Its description, and every description in its parameters."""
        return msgspec.structs.replace(
            tool,
            description=None if tool.description is None else self._redact(tool.description),
            parameters=None if tool.parameters is None else self._redaction.value(tool.parameters),
        )

    def _message(self, message: Message) -> Message:
        if isinstance(message.content, str):
            content: str | tuple[object, ...] = self._redact(message.content)
        else:
            content = tuple(
                Text(self._redact(part.text)) if isinstance(part, Text) else part for part in message.content
            )
        return msgspec.structs.replace(
            message,
            content=content,
            reasoning=None if message.reasoning is None else self._redact(message.reasoning),
            tool_calls=tuple(
                ToolCall(call.id, call.name, self._redact(call.arguments)) for call in message.tool_calls
            ),
        )


def load_redaction(config: RedactionConfig) -> Redaction | None:
    """The hooks of an operator's configuration; ``None``: there are none.

    Raises:
        UsageError: one can't be imported, or is not callable.
    """
    hooks: list[tuple[str, Hook]] = []
    for name in config.hooks:
        hook = load_named(name, "redaction.hooks:")
        if not callable(hook):
            raise UsageError(f"redaction.hooks: {name!r} is no function: write module:function")
        hooks.append((name, hook))
    return Redaction(hooks, keep_ids=config.keep_ids) if hooks else None
