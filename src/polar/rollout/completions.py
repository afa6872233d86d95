"""Captured calls as somebody reads them: each with its whole conversation in OpenAI's chat form, its tokens, and what
became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from polar.contract.arrays import Floats, Ids
from polar.contract.completion import Completion
from polar.contract.errors import PolarError
from polar.contract.task import BuilderSpec
from polar.rollout.wire import encode
from polar.trajectories.assemble import assemble
from polar.trajectories.chatform import chat_messages, chat_tools
from polar.trajectories.session import Session, read_session


class CompletionView(msgspec.Struct, kw_only=True):
    """One captured call. ``response_ids``, ``logprobs`` and ``weight_versions`` are of the same length; ``fate`` is
    where its tokens went (``trained``, ``auxiliary``), or why they are not trained."""

    completion_id: str
    attempt: int
    parent_id: str | None
    created_at: float
    finished_at: float
    dialect: str
    model: str
    request: dict[str, Any]
    response: dict[str, Any]
    prompt_ids: Ids
    response_ids: Ids
    logprobs: Floats
    weight_versions: Ids
    finish_reason: str
    usage: dict[str, int]
    fate: str
    detail: str | None


def completion_views(
    completions: Sequence[Completion], builder: BuilderSpec, *, allow_import: bool = False
) -> Iterator[bytes]:
    """The calls of one attempt, in order, each as JSON."""
    session = read_session(completions)
    fates = _fates(completions, builder, allow_import)
    for completion in session.completions:
        yield encode(_view(session, completion, fates.get(completion.completion_id, "not_built")))


def _fates(completions: Sequence[Completion], builder: BuilderSpec, allow_import: bool) -> dict[str, str]:
    try:
        built = assemble(completions, builder, allow_import=allow_import)
    except PolarError:  # a builder that is not here or can't do it: then nothing is built
        return {}
    found: dict[str, list[str]] = built.metadata["reconstruction"]["completions"]
    return {name: fate for fate, names in found.items() for name in names}


def _view(session: Session, completion: Completion, fate: str) -> CompletionView:
    *context, answer = session.graph.conversation(completion)
    usage = {
        "prompt_tokens": completion.usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "cached_tokens": completion.usage.cached_tokens,
    }
    sampling = {
        name: value
        for name in completion.sampling.__struct_fields__
        if (value := getattr(completion.sampling, name)) not in (None, ())
    }
    return CompletionView(
        completion_id=completion.completion_id,
        attempt=completion.attempt,
        parent_id=completion.parent_id,
        created_at=completion.created_at,
        finished_at=completion.finished_at,
        dialect=completion.dialect,
        model=completion.model_requested,
        request={
            "model": completion.model_requested,
            "messages": chat_messages(context),
            "tools": chat_tools(completion.tools),
            **sampling,
        },
        response={
            "id": completion.completion_id,
            "object": "chat.completion",
            "created": int(completion.created_at),
            "model": completion.model_used,
            "choices": [
                {"index": 0, "message": chat_messages([answer])[0], "finish_reason": completion.finish_reason}
            ],
            "usage": usage,
        },
        prompt_ids=session.graph.prompt_ids(completion),
        response_ids=completion.response_ids,
        logprobs=completion.logprobs,
        weight_versions=session.weight_versions(completion),
        finish_reason=completion.finish_reason,
        usage=usage,
        fate=fate,
        detail=completion.detail,
    )
