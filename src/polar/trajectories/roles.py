"""Which calls are the agent's own work, which a sub-agent's, and which are made on the side.

Rewards go to those who did the task. Harnesses also ask the model for titles, summaries and loop checks, and
send sub-agents; few of them say so. What they can't hide is the system text and whether tools are offered, and
those two decide here:

1. ``role_hint``, where the harness said it, wins.
2. The session's first call that offers tools (the very first, if none does) defines ``main``.
3. A call without tools, in a session whose main offers tools, is ``auxiliary``; so is one whose reply was taken as
   a summary (see ``summaries.py``).
4. A call whose leading system text is main's is ``main``: also a fork, or a restart after compaction.
5. Any other is a ``subagent``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from polar.capture.graph import SessionGraph
from polar.contract.chat import Message
from polar.contract.completion import Completion
from polar.contract.result import TraceRole
from polar.trajectories.summaries import find_summaries, text_of

ROLES: tuple[TraceRole, ...] = ("main", "subagent", "auxiliary")
"""All roles, the first claims to a shared prefix first."""


def assign_roles(graph: SessionGraph, completions: Sequence[Completion]) -> dict[str, TraceRole]:
    """The role of each completion by its id.

    Args:
        completions: of one session attempt, in order of ``seq``; all are in ``graph``.
    """
    hints = {c.completion_id: role for c in completions for role in ROLES if c.role_hint == role}
    system = _system_texts(graph, completions)
    candidates = [c for c in completions if hints.get(c.completion_id, "main") == "main"] or completions
    main = next((c for c in candidates if c.tools), candidates[0] if candidates else None)
    summaries = find_summaries(graph, completions, system)
    roles: dict[str, TraceRole] = {}
    for completion in completions:
        name = completion.completion_id
        if name in hints:
            roles[name] = hints[name]
        elif name in summaries or (main is not None and main.tools and not completion.tools):
            roles[name] = "auxiliary"
        else:
            same = main is not None and system[name] == system[main.completion_id]
            roles[name] = "main" if same else "subagent"
    return roles


def _system_texts(graph: SessionGraph, completions: Sequence[Completion]) -> dict[str, str]:
    """The leading system text of each completion; one that continues another has the other's."""
    texts: dict[str, str] = {}
    for completion in completions:
        inherited = texts.get(completion.parent_id) if completion.parent_id else None
        texts[completion.completion_id] = (
            inherited if inherited is not None else _leading_system(graph.conversation(completion))
        )
    return texts


def _leading_system(messages: Sequence[Message]) -> str:
    leading = itertools.takewhile(lambda message: message.role == "system", messages)
    return "\n\n".join(map(text_of, leading))
