"""One row per trace: the columns that every export has, in one place, so that all formats agree.

``group_id`` is the task's own (``metadata.group_id``), else the task id: the samples of a task are a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from polar.contract.result import SessionResult, Trace
from polar.trajectories.chatform import chat_messages, chat_tools

PLAIN_COLUMNS: dict[str, type] = {
    "task_id": str,
    "session_id": str,
    "attempt": int,
    "trace_index": int,
    "group_id": str,
    "reward": float,
    "role": str,
    "harness": str,
    "model": str,
    "finish_reason": str,
    "status": str,
}
"""The columns with one value each, and its type. ``reward``, ``harness`` and ``model`` may be ``None``."""

ARRAY_COLUMNS = ("prompt_ids", "response_ids", "loss_mask", "response_logprobs", "weight_versions")
JSON_COLUMNS = ("prompt_messages", "response_messages", "tools", "metadata")
LIST_COLUMNS = ("completion_ids", "images")


def rows(results: Iterable[SessionResult]) -> Iterator[tuple[dict[str, Any], Trace]]:
    """The plain columns of each trace, with the trace they describe."""
    for result in results:
        harness = _harness(result)
        group = result.metadata.get("group_id")
        for index, trace in enumerate(result.trajectory.traces):
            model = trace.metadata.get("model") or result.trajectory.metadata.get("model_used")
            yield (
                {
                    "task_id": result.task_id,
                    "session_id": result.session_id,
                    "attempt": result.attempt,
                    "trace_index": index,
                    "group_id": result.task_id if group is None else str(group),
                    "reward": trace.reward,
                    "role": trace.role,
                    "harness": harness,
                    "model": model,
                    "finish_reason": trace.finish_reason,
                    "status": result.status,
                },
                trace,
            )


def nested(trace: Trace) -> dict[str, Any]:
    """The JSON and list columns of a trace, as plain values; messages and tools in OpenAI's chat form."""
    return {
        "prompt_messages": chat_messages(trace.prompt_messages),
        "response_messages": chat_messages(trace.response_messages),
        "tools": chat_tools(trace.tools),
        "metadata": trace.metadata,
        "completion_ids": list(trace.completion_ids),
        "images": list(trace.images),
    }


def _harness(result: SessionResult) -> str | None:
    """The harness's name: from the result's metadata, else from the trajectory's provenance."""
    found = result.metadata.get("harness")
    if found is None:
        found = result.trajectory.metadata.get("provenance", {}).get("harness")
    if isinstance(found, dict):
        found = found.get("name")
    return None if found is None else str(found)
