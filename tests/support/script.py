"""Why: a strong model can't be had in a test, so what it would say is written down. A script is a list of
steps; a step is one reply, with everything that may go wrong around it.

A script picks a step by looking at the conversation only, never at who asks, so any number of sessions can
run through one script at a time. Steps with ``when`` win where the last message contains that text. The
others are taken in order: the n-th answers the n-th turn. Of successive ``attempts`` at one and the same
prompt, the n-th call gets the n-th.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

LogprobFault = Literal["omit", "null", "nan", "inf", "sentinel", "bool"]


class Step(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One reply. ``text`` is what the model itself writes, markup and all; the end-of-turn id is added."""

    text: str = ""
    when: str | None = None
    attempts: tuple[Step, ...] = ()
    """If given, the replies to successive calls with the same prompt; the last one stays."""
    ids: tuple[int, ...] | None = None
    """Sampled ids (without the end-of-turn id) instead of the tokenizer's own for ``text``."""
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    status: int | None = None
    """Answer with this HTTP status and ``error`` instead of a reply."""
    error: str = "scripted error"
    error_after: int | None = None
    """After so many tokens of a stream, send ``error`` as an event and end."""
    cut_after: int | None = None
    """After so many tokens, cut the connection."""
    hold_after: int | None = None
    """After so many tokens, wait until ``release(hold)`` is called."""
    hold: str = "hold"
    delay: float = 0.0
    """Seconds before the first byte."""
    token_delay: float = 0.0
    """Seconds before each chunk."""
    chunk_tokens: int = 1
    """Tokens in a chunk of a stream."""
    omit_token_ids: bool = False
    omit_prompt_ids: bool = False
    ids_in_logprobs: bool = False
    """Tokens in the logprobs are called ``token_id:N``."""
    drop_empty_deltas: bool = False
    """Chunks whose delta is empty vanish, ids and all."""
    logprobs: LogprobFault | None = None
    """What is wrong with the logprobs: all missing, or the last one null, NaN, Infinity, -9999 or true."""
    usage_extra: int = 0
    """Added to ``usage.completion_tokens``."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a step is chosen by: the turn (0 for the first reply), the last message's text, the prompt."""

    turn: int
    last: str
    prompt_ids: Sequence[int]


@dataclass(slots=True)
class Script:
    """Steps, or one function of the conversation. An end of the script is an error, said out loud."""

    steps: Sequence[Step] = ()
    choose: Callable[[Conversation], Step] | None = None
    _calls: Counter[bytes] = field(default_factory=Counter)

    def step(self, conversation: Conversation) -> Step:
        """The step for this call.

        Raises:
            LookupError: no step is left for this turn.
        """
        step = self.choose(conversation) if self.choose is not None else self._find(conversation)
        if not step.attempts:
            return step
        prompt = b",".join(b"%d" % token for token in conversation.prompt_ids)
        attempt = self._calls[prompt]
        self._calls[prompt] += 1
        return step.attempts[min(attempt, len(step.attempts) - 1)]

    def _find(self, conversation: Conversation) -> Step:
        for step in self.steps:
            if step.when is not None and step.when in conversation.last:
                return step
        in_order = [step for step in self.steps if step.when is None]
        if conversation.turn >= len(in_order):
            raise LookupError(f"the script has no step for turn {conversation.turn}: {conversation.last[:80]!r}")
        return in_order[conversation.turn]


def load_script(path: str) -> Script:
    """A script from a JSON file: a list of steps."""
    with open(path, "rb") as file:
        return Script(msgspec.json.decode(file.read(), type=list[Step]))
