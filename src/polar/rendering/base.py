"""The protocol of rendering: messages to token ids and back.

A renderer belongs to one model. It is pure: no I/O once loaded, no session state; what it must remember
of a prompt travels in ``Prompt.state``.

Why a bridge: rendering a sampled reply again from its parsed form seldom gives the ids that were sampled
(JSON is re-serialized, whitespace moves, thinking is dropped). So the next prompt is made of the earlier
ids as they were, plus the ids of what came after: the bridge. A renderer may only return a bridge that it
can prove is what the template itself would have appended; otherwise it declines and says why, and the
caller renders in full and begins a new branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from polar.contract.arrays import Ids
from polar.contract.chat import Chat, Delta, FinishReason, Message

if TYPE_CHECKING:
    from polar.rendering.plain import PlainText


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. ``state`` is the renderer's own and is handed back to ``bridge``; it is small.
    ``opened``: it has opened the model's thinking, so the reply begins inside it."""

    ids: Ids
    state: Any = None
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier call whose messages and reply the new conversation starts with.

    ``messages`` counts them: ``chat.messages[:messages]`` are that call's messages and, last, its reply, in
    the form they were recorded (with the reasoning that was sampled, whatever the client sent back).
    """

    prompt: Prompt
    response_ids: Ids
    messages: int


@dataclass(frozen=True, slots=True)
class Declined:
    """No bridge. ``reason`` is a short word that ends up in the reconstruction report:

    ``template_rewrites_history``: the template drops or changes something that was said before;
    ``reply_not_as_sampled``: the recorded reply is not what the ids say (a stop string cut it);
    ``no_turn_end``: the template does not end the turn with the token that the model ended it with;
    ``tools_changed``, ``template_args_changed``: and the prompt with them;
    ``template_refuses``: the new conversation as a whole; ``no_state``: the prompt is not this renderer's.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply. ``finish_reason`` is ``tool_calls`` where the message has calls and ended by itself."""

    message: Message
    finish_reason: FinishReason
    stop_sequence: str | None
    deltas: tuple[Delta, ...]
    """What had been held back until the end."""


class ReplyReader(Protocol):
    """Reads one reply: token ids in, deltas out. The deltas concatenated are the final message."""

    @property
    def stopped(self) -> bool:
        """A stop string was met: nothing after it is part of the reply, and sampling should end."""
        ...

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """More sampled ids. Text that may yet turn out to be markup or a stop string is held back."""
        ...

    def finish(self, finish_reason: FinishReason) -> Reply:
        """The reply is over, for the engine's reason."""
        ...


class Renderer(Protocol):
    """Messages to ids and back for one model."""

    stop_ids: frozenset[int]
    """Ids that end a reply."""

    def render(self, chat: Chat) -> Prompt:
        """The whole conversation by the model's template, with the generation prompt.

        Raises:
            RenderError: the template refuses the conversation.
        """
        ...

    def bridge(self, turn: Turn, chat: Chat) -> Prompt | Declined:
        """The next prompt: ``turn``'s prompt and response ids exactly, then the ids of what is new."""
        ...

    def reader(self, chat: Chat, prompt: Prompt) -> ReplyReader:
        """A reader for the reply to this prompt."""
        ...

    def tools_lost(self, chat: Chat, prompt: Prompt) -> str | None:
        """One line on why the model can't use the tools that this call offers: its template leaves them out of the
        prompt, or calls of them can't be read. ``None``: it can, or none are offered."""
        ...

    @property
    def plain(self) -> PlainText:
        """For prompts that are no conversation (``Chat.prompt``)."""
        ...


class RenderError(ValueError):
    """The chat template refuses this conversation; the message is the template's own."""
