"""Which calls asked for a summary, where the request does not show it.

When its context is full, a harness asks for a summary and begins a new conversation with it. Some ask with all of the
agent's own system text and tools, so that only what happens to the reply tells it apart from the agent's work: it is
never answered, and its words stand in a user or system message at the start of the next conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polar.capture.graph import SessionGraph
from polar.contract.chat import Message, Text
from polar.contract.completion import Completion

A_LINE = 24
"""Characters of a line that is not in two places by chance."""


def find_summaries(graph: SessionGraph, completions: Sequence[Completion], agents: Mapping[str, str]) -> set[str]:
    """The ids of the calls whose replies became the start of a new conversation of the same agent, and of earlier
    tries at the same: summaries that the harness did not like.

    Args:
        completions: of one session attempt, in order of ``seq``; all are in ``graph``.
        agents: what tells one agent from another (its system text), by completion id.
    """
    answered = {completion.parent_id for completion in completions}
    ends: dict[str, list[Completion]] = {}
    found: set[str] = set()
    for completion in completions:
        here = ends.setdefault(agents[completion.completion_id], [])
        if completion.parent_id is None:
            said = _said_to_it(graph.conversation(completion)) if here else ""
            origins = {end.parent_id for end in here if _is_in(end.reply, said)}
            found.update(end.completion_id for end in here if end.parent_id in origins)
            here.clear()
        elif completion.completion_id not in answered and not completion.reply.tool_calls:
            here.append(completion)
    return found


def _said_to_it(messages: Sequence[Message]) -> str:
    return "\n".join(text_of(message) for message in messages if message.role in ("system", "user"))


def _is_in(reply: Message, text: str) -> bool:
    """Whether some of a reply's words are in a text: harnesses cut out what was only thinking aloud."""
    return any(line in text for line in map(str.strip, text_of(reply).splitlines()) if len(line) >= A_LINE)


def text_of(message: Message) -> str:
    """The text of a message, without its images."""
    content = message.content
    return content if isinstance(content, str) else "".join(part.text for part in content if isinstance(part, Text))
