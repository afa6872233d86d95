"""Where every captured completion went: nothing vanishes, so each id stands under exactly one fate.

``trained`` and ``auxiliary`` completions have their sampled tokens in a trace. The others carry the reason
why not: how the call ended (the ``Outcome``), ``retried`` where the client gave up on a call and asked the
same again, or ``excluded_role`` where the builder was told to leave that role out.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar.contract.completion import Completion
from polar.contract.result import Reconstruction, Split, Trace
from polar.trajectories.session import Session


def reconstruct(session: Session, traces: Sequence[Trace], splits: Sequence[Split]) -> Reconstruction:
    """The report on a session: fates in order of ``seq``, tokens trained, and where traces begin."""
    roles = {name: trace.role for trace in traces for name in trace.completion_ids}
    newest = {c.request_digest: c.seq for c in session.completions if c.request_digest}
    fates: dict[str, list[str]] = {}
    for completion in session.completions:
        role = roles.get(completion.completion_id)
        if role is not None:
            fate = "auxiliary" if role == "auxiliary" else "trained"
        else:
            fate = _why_not(completion, newest)
        fates.setdefault(fate, []).append(completion.completion_id)
    tokens = sum(int(trace.loss_mask.sum()) for trace in traces)
    return Reconstruction(completions=fates, tokens_trained=tokens, splits=list(splits))


def _why_not(completion: Completion, newest: dict[bytes, int]) -> str:
    """Why a completion is in no trace. ``newest`` has the last ``seq`` of each request digest."""
    if completion.outcome == "abandoned":
        asked_again = newest.get(completion.request_digest, -1) > completion.seq
        return "retried" if asked_again else "abandoned"
    if completion.outcome == "ok":
        return "excluded_role" if len(completion.response_ids) else "empty"
    return completion.outcome
