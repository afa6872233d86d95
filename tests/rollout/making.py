"""Tasks, calls and results for the tests of the rollout server."""

from __future__ import annotations

from typing import Any

import numpy as np

from polar.contract.chat import Message, Tool, ToolCall, Usage
from polar.contract.completion import Completion, WeightSpan
from polar.contract.result import SessionResult, Trajectory
from polar.contract.rollout import OpenedSession, OpenSession


def token_of(name: str) -> str:
    """The token of a role, or of a further name."""
    return f"{name}-token-of-the-tests"


TOKENS = {role: token_of(role) for role in ("admin", "submit", "read", "node")}
TOOL = Tool("calc", "Calculates.", {"type": "object", "properties": {"x": {"type": "number"}}})

SHELL = {"harness": "shell", "custom_shell": {"command": "true"}}


def task(task_id: str = "t1", **fields: Any) -> dict[str, Any]:
    """A task's body."""
    return {"task_id": task_id, "instruction": "do it", "agent": SHELL, **fields}


def completion(session_id: str = "t1-0", seq: int = 0, *, attempt: int = 1, **fields: Any) -> Completion:
    """A call that continues the one before it exactly. Each samples 4 ids; the first prompt has 10."""
    first = seq == 0
    name = f"{session_id}.{attempt}"
    defaults: dict[str, Any] = {
        "completion_id": f"{name}-{seq}",
        "parent_id": None if first else f"{name}-{seq - 1}",
        "base_id": None if first else f"{name}-{seq - 1}",
        "shared": 0 if first else 10 + 4 * seq + 3 * (seq - 1),
        "shared_messages": 0 if first else 2 * seq,
        "created_at": 100.0 + seq,
        "finished_at": 100.5 + seq,
        "dialect": "openai_chat",
        "mode": "tito",
        "model_requested": "m",
        "model_used": "m-real",
        "messages": (
            (Message("user", "what is 1+1?"),) if first else (Message("tool", "2", tool_call_id=f"c{seq - 1}"),)
        ),
        "reply": Message("assistant", "", tool_calls=(ToolCall(f"c{seq}", "calc", '{"x": 1}'),)),
        "tools": (TOOL,),
        "prompt_delta": np.arange(10 if first else 3, dtype=np.int32),
        "response_ids": np.arange(seq * 4, seq * 4 + 4, dtype=np.int32) + 1000,
        "logprobs": np.full(4, -0.5, dtype=np.float32),
        "weight_spans": (WeightSpan("7", 0, 4),),
        "finish_reason": "tool_calls",
        "usage": Usage(10 if first else 10 + 7 * seq, 4),
    }
    return Completion(session_id=session_id, seq=seq, attempt=attempt, **{**defaults, **fields})


def result(
    session_id: str = "t1-0", *, task_id: str = "t1", attempt: int = 1, reward: float | None = 1.0, **fields: Any
) -> SessionResult:
    """A result as a node sends it: without traces, with what it knows of them."""
    defaults: dict[str, Any] = {
        "status": "COMPLETED",
        "timing": {"init": 1.5, "run": 2.0, "build": 0.25, "evaluate": 0.5},
        "metadata": {"group_id": "g1"},
    }
    values = {**defaults, **fields}
    trajectory = Trajectory(
        status=values["status"],
        error=values.get("error"),
        metadata={
            "trace_count": 1,
            "record_count": 2,
            "merge_factor": 2.0,
            "evaluation": {"outcome_reward": reward},
            "reconstruction": {
                "completions": {"trained": ["a", "b"]},
                "tokens_trained": 8,
                "splits": [{"completion_id": "b", "reason": "retokenized"}],
            },
            "provenance": {"harness": "shell", "started_at": 0.0},
        },
    )
    return SessionResult(session_id=session_id, task_id=task_id, attempt=attempt, trajectory=trajectory, **values)


class Host:
    """Stands for a gateway, which is not here: bare sessions whose keys go nowhere.

    Args:
        name: the id of sessions that are given none.
    """

    def __init__(self, name: str) -> None:
        self.open_now: set[str] = set()
        self.asked: list[OpenSession] = []
        self.forgotten: list[str] = []
        self._name = name

    async def open(self, request: OpenSession) -> OpenedSession:
        name = request.session_id or self._name
        self.asked.append(request)
        self.open_now.add(name)
        urls = {"openai": "http://x/v1", "anthropic": "http://x", "google": "http://x"}
        return OpenedSession(session_id=name, api_key="sk", base_urls=urls, task_id=request.task_id)

    async def close(self, session_id: str) -> bool:
        was = session_id in self.open_now
        self.open_now.discard(session_id)
        return was

    async def forget(self, session_id: str) -> int:
        self.forgotten.append(session_id)
        await self.close(session_id)
        return 0
