"""Why: where token ids were not required, the calls that came without any are in no trace, for there is no token to
train. Their conversations are text all the same, and text is what supervised fine-tuning takes: here they become
traces of messages alone, for the ``sft`` export and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar.contract.arrays import NO_FLOATS, NO_IDS
from polar.contract.completion import Completion
from polar.contract.result import Trace
from polar.trajectories.session import Session, is_trainable, read_session


def text_traces(completions: Sequence[Completion]) -> list[Trace]:
    """A trace for each conversation of a session attempt that ends with a reply without token ids. All of its arrays
    are empty, it trains no completion, and its ``metadata["text_only"]`` is true.

    Raises:
        PolarError: a completion builds on one that is not there.
    """
    session = read_session(completions)
    told = [c for c in session.completions if is_trainable(c) or _is_text(c)]
    continued = {completion.parent_id for completion in told}
    return [_trace(session, c) for c in told if _is_text(c) and c.completion_id not in continued]


def _is_text(completion: Completion) -> bool:
    reply = completion.reply
    return completion.outcome == "no_token_ids" and bool(reply.content or reply.tool_calls)


def _trace(session: Session, last: Completion) -> Trace:
    first = last
    while first.parent_id is not None and (parent := session.graph.get(first.parent_id)) is not None:
        first = parent
    conversation = session.graph.conversation(last)
    replied = first.shared_messages + len(first.messages)
    return Trace(
        prompt_ids=NO_IDS,
        response_ids=NO_IDS,
        loss_mask=NO_IDS,
        response_logprobs=NO_FLOATS,
        weight_versions=NO_IDS,
        prompt_messages=tuple(conversation[:replied]),
        response_messages=tuple(conversation[replied:]),
        tools=last.tools,
        finish_reason=last.finish_reason,
        role=session.role(last),
        metadata={"text_only": True, "model": last.model_used, "dialect": last.dialect},
    )
