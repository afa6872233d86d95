"""The context graph of one session attempt: which completion a new call continues.

Harnesses interleave agents, fork, retry, compact and edit their history; nothing in a request says which
earlier call it follows. The conversation itself does: it starts with the messages and the reply of the
completion it continues. The graph is a tree of messages in which every sampled reply is a node of its own;
walking a new conversation down this tree finds the deepest completion it continues (its *parent*) and, where
there is none, the earlier conversation with which it shares most (its *base*, so that shared tokens are kept
once).

All state is the completions themselves: a graph is rebuilt from them at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from polar.capture.match import Key, message_key, reasoning_agrees, repaired_agrees, says_nothing
from polar.contract.arrays import NO_IDS, Ids, common_prefix
from polar.contract.chat import Message
from polar.contract.completion import Completion


class _Node:
    """A message in its place. ``reply_of`` is the completion that sampled it; ``last`` is the newest
    completion whose conversation passes here."""

    __slots__ = ("children", "last", "message", "reply_of")

    def __init__(self, message: Message | None, reply_of: Completion | None = None) -> None:
        self.message = message
        self.reply_of = reply_of
        self.children: dict[Key, list[_Node]] = {}
        self.last: Completion | None = reply_of


class _Trail(NamedTuple):
    """A way down the tree: a node, and the way that led to it (not a list each: branches share their start)."""

    node: _Node
    depth: int
    before: _Trail | None

    def nodes(self) -> list[_Node]:
        """The nodes of this way below the root, from the top."""
        path: list[_Node] = []
        trail: _Trail | None = self
        while trail is not None and trail.before is not None:
            path.append(trail.node)
            trail = trail.before
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a new conversation hangs in the graph.

    ``messages`` is the conversation with every recorded message in its recorded form (a reply with the thinking
    that was sampled). ``parent`` is the completion it continues: its messages and reply are the first
    ``parent_messages`` of them. ``base`` shares the first ``base_messages`` messages (``parent``, if there is
    one), and ``base_ids`` are all its ids, prompt and reply (int32), laid end to end once for the whole call.
    """

    messages: tuple[Message, ...]
    parent: Completion | None = None
    parent_messages: int = 0
    base: Completion | None = None
    base_messages: int = 0
    base_ids: Ids = field(default_factory=lambda: NO_IDS, compare=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a completion is stored: the fields of that name in ``Completion``."""

    parent_id: str | None
    base_id: str | None
    shared: int
    shared_messages: int
    split: str | None


class SessionGraph:
    """The completions of one session attempt and the tree of their messages."""

    def __init__(self, completions: Iterable[Completion] = ()) -> None:
        self._root = _Node(None)
        self._by_id: dict[str, Completion] = {}
        self._reply_nodes: dict[str, _Node] = {}
        self._way: tuple[tuple[Message, ...], list[_Node]] = ((), [])
        """The newest conversation as far as there was one way for it, and that way: it comes again, and longer. Good
        as long as no message gets a second successor."""
        for completion in completions:
            self.add(completion)

    def __len__(self) -> int:
        return len(self._by_id)

    def completions(self) -> list[Completion]:
        """All of them, in the order they were added."""
        return list(self._by_id.values())

    def get(self, completion_id: str) -> Completion | None:
        """The completion of that id, if it is in the graph."""
        return self._by_id.get(completion_id)

    def attach(self, messages: Sequence[Message]) -> Attachment:
        """Find what a conversation continues. A reply that says nothing and was never given is left out: it is what
        some harnesses keep of a stream that was cut. Results that came in another order before get that order."""
        path = self._walk(messages)
        while len(path) < len(messages):
            found = self._mended(messages, path)
            if found is None:
                break
            messages = found
            path = self._walk(messages)
        recorded = tuple(node.message for node in path if node.message is not None)
        canonical = recorded + tuple(messages[len(path) :])
        for depth in range(len(path), 0, -1):
            parent = path[depth - 1].reply_of
            if parent is not None:
                return Attachment(canonical, parent, depth, parent, depth, self.ids(parent.completion_id))
        base = path[-1].last if path else None
        if base is None:
            return Attachment(canonical)
        return Attachment(canonical, None, 0, base, len(path), self.ids(base.completion_id))

    def place(self, attachment: Attachment, prompt_ids: Ids, declined: str | None = None) -> Placement:
        """How a call with these prompt ids is stored, and why a trace splits here, if it does.

        Args:
            attachment: what ``attach`` said of its conversation.
            prompt_ids: the whole prompt, as the engine had it.
            declined: why the parent's tokens are not extended, or why there is no parent, where that is known.
        """
        base, parent = attachment.base, attachment.parent
        shared = common_prefix(attachment.base_ids, prompt_ids)
        if parent is not None:
            split = None if shared == parent.total_len else declined or "retokenized"
            if not parent.total_len:
                split = "parent_without_ids"
        else:
            split = declined or self._why_root(attachment)
        return Placement(
            parent_id=parent.completion_id if parent else None,
            base_id=base.completion_id if base else None,
            shared=shared,
            shared_messages=attachment.base_messages,
            split=split,
        )

    def add(self, completion: Completion) -> None:
        """Take in a finished completion (again: no effect)."""
        if completion.completion_id in self._by_id:
            return
        if completion.plain:
            self._by_id[completion.completion_id] = completion  # it has no messages that another could start with
            return
        base = completion.base_id
        if base is not None and completion.shared_messages == self._length(self._by_id[base]):
            node, rest = self._reply_nodes[base], completion.messages
        else:
            node, rest = self._root, tuple(self.conversation(completion)[:-1])
        for message in rest:
            node = self._step(node, message, completion)
        reply = _Node(completion.reply, completion)
        if len(completion.response_ids) or completion.reply != Message("assistant"):
            self._append(node, message_key(completion.reply), reply)
        self._by_id[completion.completion_id] = completion
        self._reply_nodes[completion.completion_id] = reply

    def conversation(self, completion: Completion) -> list[Message]:
        """All messages of a completion, its reply last. Its base must be in the graph."""
        parts: list[tuple[Message, ...]] = [(*completion.messages, completion.reply)]
        keep, base_id = completion.shared_messages, completion.base_id
        while base_id is not None and keep:
            base = self._by_id[base_id]
            own = keep - base.shared_messages
            if own > 0:
                parts.append((*base.messages, base.reply)[:own])
                keep = base.shared_messages
            base_id = base.base_id
        return [message for part in reversed(parts) for message in part]

    def prompt_ids(self, completion: Completion) -> Ids:
        """All prompt ids of a completion (int32). Its base must be in the graph."""
        return np.concatenate([*self._pieces(completion.base_id, completion.shared), completion.prompt_delta])

    def ids(self, completion_id: str) -> Ids:
        """All ids of a completion in the graph, prompt and then reply (int32)."""
        return np.concatenate(self._pieces(completion_id, self._by_id[completion_id].total_len))

    def _pieces(self, completion_id: str | None, keep: int) -> list[Ids]:
        """The first ``keep`` ids of a completion's tokens, as stored arrays in order."""
        parts: list[Ids] = []
        while completion_id is not None and keep > 0:
            completion = self._by_id[completion_id]
            own = keep - completion.shared
            if own > 0:
                from_reply = own - len(completion.prompt_delta)
                if from_reply > 0:
                    parts.append(completion.response_ids[:from_reply])
                parts.append(completion.prompt_delta[:own])
                keep = completion.shared
            completion_id = completion.base_id
        parts.append(NO_IDS)  # a call without any ids has no pieces, and numpy joins nothing of nothing
        parts.reverse()
        return parts

    def _length(self, completion: Completion) -> int:
        """How many messages its conversation has, with its reply."""
        return completion.shared_messages + len(completion.messages) + 1

    def _step(self, node: _Node, message: Message, completion: Completion) -> _Node:
        """The child that is this message, made if it is not there."""
        key = message_key(message)
        child = next((child for child in node.children.get(key, ()) if child.message == message), None)
        if child is None:
            child = _Node(message)
            self._append(node, key, child)
        child.last = completion
        return child

    def _append(self, node: _Node, key: Key, child: _Node) -> None:
        if node.children:
            self._way = ((), [])
        node.children.setdefault(key, []).append(child)

    def _walk(self, messages: Sequence[Message]) -> list[_Node]:
        """The longest path from the root that says the start of these messages; of two, the likelier."""
        said, way = self._way
        path = [*way] if tuple(messages[: len(said)]) == said else []
        node = path[-1] if path else self._root
        for message in messages[len(path) :]:  # straight down, as long as there is one way: nearly always all of it
            found = self._matches(node, message)
            if len(found) != 1:
                break
            node = found[0]
            path.append(node)
        self._way = (tuple(messages[: len(path)]), path)
        return path + self._search(node, messages[len(path) :]) if len(path) < len(messages) else path

    def _search(self, start: _Node, messages: Sequence[Message]) -> list[_Node]:
        """The longest path below ``start`` that says the start of these messages."""
        best = trail = _Trail(start, 0, None)
        waiting = [trail]
        while waiting and best.depth < len(messages):
            trail = waiting.pop()
            if trail.depth > best.depth:
                best = trail
            if trail.depth < len(messages):
                found = self._matches(trail.node, messages[trail.depth])
                waiting += [_Trail(node, trail.depth + 1, trail) for node in reversed(found)]
        return best.nodes()

    def _mended(self, messages: Sequence[Message], path: Sequence[_Node]) -> list[Message] | None:
        """The conversation without what a harness did to it behind the part that is known; ``None``: nothing."""
        start = end = len(path)
        if says_nothing(messages[start]):
            return [*messages[:start], *messages[start + 1 :]]
        if messages[start].role != "tool":
            return None
        while start and messages[start - 1].role == "tool":
            start -= 1
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        order = _as_recorded(path[start - 1] if start else self._root, messages[start:end])
        return None if order is None else [*messages[:start], *order, *messages[end:]]

    def _matches(self, node: _Node, message: Message) -> list[_Node]:
        """The children that are this message, the likeliest first."""
        found = node.children.get(message_key(message), [])
        if message.role != "assistant":
            return sorted(found, key=lambda child: child.message != message) if len(found) > 1 else found
        found = [n for n in found if n.message and reasoning_agrees(n.message.reasoning, message.reasoning)]
        if len(found) == 1:
            return found
        if not found and message.tool_calls:
            found = [
                child
                for children in node.children.values()
                for child in children
                if child.reply_of and repaired_agrees(child.reply_of.reply, message)
            ]
        ids = [call.id for call in message.tool_calls]
        same_ids = [n for n in found if n.message and ids and [c.id for c in n.message.tool_calls] == ids]
        return same_ids or found[::-1]

    def _why_root(self, attachment: Attachment) -> str | None:
        """Why a conversation that continues no reply stands alone."""
        if not self._by_id:
            return None
        base, shared = attachment.base, attachment.base_messages
        if base is None or all(message.role == "system" for message in attachment.messages[:shared]):
            return "new_conversation"
        if shared == len(attachment.messages):
            return "resampled"
        if attachment.messages[shared].role == "assistant":
            return "reply_not_recorded"
        return "history_edited"


def _as_recorded(node: _Node, results: Sequence[Message]) -> list[Message] | None:
    """These results, which say whose they are, in another order, in which all of them stand below a node."""
    ours = {result.tool_call_id: result for result in results if result.tool_call_id}
    if len(ours) < max(2, len(results)):
        return None
    order: dict[str, Message] = {}
    waiting = [_recorded_results(node, ours)]
    while waiting:
        name, child = next(waiting[-1], ("", None))
        if child is None:
            waiting.pop()
            if order:
                order.popitem()
        elif name not in order:
            order[name] = ours[name]
            if len(order) == len(results):
                return list(order.values())
            waiting.append(_recorded_results(child, ours))
    return None


def _recorded_results(node: _Node, ours: Mapping[str, Message]) -> Iterator[tuple[str, _Node]]:
    """The children that are one of these results, and the id of the call that it is of."""
    for key, children in node.children.items():
        for child in children:
            name = (child.message and child.message.tool_call_id) or ""
            if name in ours and message_key(ours[name]) == key:
                yield name, child
