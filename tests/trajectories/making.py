"""Completions, traces and results made by hand, where a test needs exact numbers or a large session."""

from __future__ import annotations

from typing import Any

import numpy as np

from polar.contract.arrays import floats, ids
from polar.contract.chat import Message, Tool, ToolCall
from polar.contract.completion import Completion
from polar.contract.result import SessionResult, Trace, Trajectory


def completion(seq: int, prompt: list[int], reply: list[int], **more: Any) -> Completion:
    """A completion that stands alone: its whole prompt is stored with it."""
    fields: dict[str, Any] = {
        "completion_id": f"c{seq}",
        "session_id": "s",
        "attempt": 1,
        "seq": seq,
        "created_at": 0.0,
        "finished_at": 1.0,
        "dialect": "openai_chat",
        "mode": "tito",
        "model_requested": "asked",
        "model_used": "used",
        "messages": (Message("user", f"question {seq}"),),
        "reply": Message("assistant", f"answer {seq}"),
        "prompt_delta": ids(prompt),
        "response_ids": ids(reply),
        "logprobs": floats(-0.5 for _ in reply),
    }
    return Completion(**{**fields, **more})


def following(
    parent: Completion, bridge: list[int], reply: list[int], seq: int | None = None, **more: Any
) -> Completion:
    """A completion that continues another one exactly."""
    return completion(
        parent.seq + 1 if seq is None else seq,
        bridge,
        reply,
        parent_id=parent.completion_id,
        base_id=parent.completion_id,
        shared=parent.total_len,
        shared_messages=parent.shared_messages + len(parent.messages) + 1,
        **more,
    )


def long_session(turns: int, tokens: int) -> list[Completion]:
    """A linear session of that many turns, whose last context is about that many tokens long."""
    each = tokens // turns // 2
    rng = np.random.default_rng(0)
    made: list[Completion] = []
    for turn in range(turns):
        delta, reply = (rng.integers(0, 150_000, each, dtype=np.int32) for _ in range(2))
        call = ToolCall(f"t{turn + 1}", "bash", '{"cmd": "ls"}')
        added = completion(turn, [], []) if not made else following(made[-1], [], [])
        added.messages = (Message("tool", f"result {turn} " * 40, tool_call_id=f"t{turn}"),)
        added.reply = Message("assistant", "", reasoning="so " * 40, tool_calls=(call,))
        added.tools = (Tool("bash"),)
        added.prompt_delta, added.response_ids = delta, reply
        added.logprobs = -rng.random(each, dtype=np.float32)
        made.append(added)
    return made


def trace(**more: Any) -> Trace:
    """A trace of three response tokens, two of them trained."""
    fields: dict[str, Any] = {
        "prompt_ids": ids([1, 2]),
        "response_ids": ids([3, 4, 5]),
        "loss_mask": ids([1, 0, 1]),
        "response_logprobs": floats([-0.5, 0.0, -0.25]),
        "weight_versions": ids([7, -1, 8]),
        "prompt_messages": (Message("user", "hi"),),
        "response_messages": (Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")),
        "completion_ids": ("c0", "c1"),
        "metadata": {"context_exact": True, "model": "used", "replies": [[0, 0, 1], [2, 2, 3]]},
    }
    return Trace(**{**fields, **more})


def result(*traces: Trace, session_id: str = "s1", **metadata: Any) -> SessionResult:
    return SessionResult(
        session_id=session_id,
        task_id="t1",
        attempt=2,
        status="COMPLETED",
        trajectory=Trajectory(status="COMPLETED", traces=list(traces), metadata={"model_used": "used"}),
        metadata=metadata,
    )
