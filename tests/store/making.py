"""Completions, sessions and results for the store's tests, and what it means that two of them are the same."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from polar.contract.chat import Image, Message, Sampling, Text, Tool, ToolCall, Usage
from polar.contract.completion import Completion, WeightSpan
from polar.contract.result import SessionResult, Trace, Trajectory
from polar.contract.rollout import Delivery, Held, Lease, NodeSpec
from polar.contract.task import AgentSpec, TaskRequest
from polar.store import SessionRecord


def task(task_id: str = "task", **fields: Any) -> TaskRequest:
    return TaskRequest(task_id=task_id, instruction="do it", agent=AgentSpec(harness="codex"), **fields)


def session(session_id: str = "s", **fields: Any) -> SessionRecord:
    defaults = {"task_id": "task", "sample_index": 0, "state": "RUNNING", "created_at": 1.5, "updated_at": 2.5}
    return SessionRecord(session_id=session_id, **{**defaults, **fields})


def completion(session_id: str = "s", seq: int = 0, *, tokens: int = 20, **fields: Any) -> Completion:
    """The same arguments make the same completion, in any process."""
    dice = np.random.default_rng([seq, *session_id.encode()])
    defaults: dict[str, Any] = {
        "completion_id": f"{session_id}-{seq}",
        "attempt": 1,
        "parent_id": f"{session_id}-{seq - 1}" if seq else None,
        "created_at": seq + 0.25,
        "finished_at": seq + 0.75,
        "dialect": "openai_chat",
        "mode": "tito",
        "model_requested": "m",
        "model_used": "m",
        "messages": (Message(role="user", content=f"call {seq}: naïve ✓"),),
        "reply": Message(role="assistant", content="x" * int(dice.integers(400))),
        "prompt_delta": dice.integers(0, 150_000, tokens, dtype=np.int32),
        "response_ids": dice.integers(0, 150_000, tokens, dtype=np.int32),
        "logprobs": -dice.random(tokens, dtype=np.float32),
        "weight_spans": (WeightSpan("v1", 0, tokens),),
        "usage": Usage(tokens, tokens),
    }
    return Completion(session_id=session_id, seq=seq, **{**defaults, **fields})


def result(session_id: str = "s", *, traces: int = 0, **fields: Any) -> SessionResult:
    ids = np.arange(3, dtype=np.int32)
    trace = Trace(
        prompt_ids=ids,
        response_ids=ids,
        loss_mask=ids,
        response_logprobs=ids.astype(np.float32),
        weight_versions=ids,
    )
    trajectory = Trajectory(status="COMPLETED", traces=[trace] * traces, metadata={"evaluation": {"reward": 1.0}})
    defaults = {"task_id": "task", "attempt": 1, "status": "COMPLETED", "timing": {"run": 3.25}}
    return SessionResult(session_id=session_id, trajectory=trajectory, **{**defaults, **fields})


def node(node_id: str = "n", **fields: Any) -> NodeSpec:
    defaults = {"gateway_url": "http://n:1", "max_init_workers": 2, "max_run_workers": 2, "max_postrun_workers": 2}
    return NodeSpec(node_id=node_id, **{**defaults, **fields})


def delivery(lease: Lease, *, calls: int = 0, trained: int = 0, **fields: Any) -> Delivery:
    """What a node hands over at the end of an attempt: its calls, and a result with so many trained tokens."""
    name, attempt = lease.session_id, lease.attempt
    status = fields.get("status", "COMPLETED")
    made = result(name, task_id=lease.task_id, attempt=attempt, **fields)
    made.trajectory = Trajectory(status=status, metadata={"reconstruction": {"tokens_trained": trained}})
    completions = [
        completion(name, seq, attempt=attempt, completion_id=f"{name}-{attempt}-{seq}") for seq in range(calls)
    ]
    return Delivery(session_id=name, attempt=attempt, completions=completions, result=made)


def held(lease: Lease, state: Any = "RUNNING") -> Held:
    return Held(session_id=lease.session_id, attempt=lease.attempt, state=state)


def large_tools(count: int = 30) -> tuple[Tool, ...]:
    """About 1 kB a tool."""
    return tuple(Tool(name=f"tool_{i}", description="d" * 900, parameters={"type": "object"}) for i in range(count))


def same(a: Completion, b: Completion) -> bool:
    """Equal in every field; arrays in type and in every bit (a NaN equals itself)."""

    def key(value: object) -> object:
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return all(key(x) == key(y) for x, y in zip(msgspec.structs.astuple(a), msgspec.structs.astuple(b), strict=True))


# Hypothesis: any completion.


def _whole(text: str) -> bool:
    # Two halves of one character side by side are that character in JSON; Python alone tells them apart.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") == text


texts = st.text(st.characters(), max_size=30).filter(_whole) | st.sampled_from(["cut \ud83d", "\0", "x" * 5000])
names = st.text("abcXYZ012_.-", min_size=1, max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)
optional = st.none() | texts


def tuples(of: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=most).map(tuple)


def arrays(of: st.SearchStrategy[Any], dtype: type, most: int = 20) -> st.SearchStrategy[np.ndarray]:
    return st.lists(of, max_size=most).map(lambda items: np.array(items, dtype=dtype))


messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts | tuples(st.builds(Text, texts) | st.builds(Image, texts)),
    reasoning=optional,
    tool_calls=tuples(st.builds(ToolCall, texts, texts, texts)),
    tool_call_id=optional,
    name=optional,
)
tools = st.builds(
    Tool, name=texts, description=optional, parameters=st.none() | objects, strict=st.none() | st.booleans()
)
samplings = st.builds(
    Sampling,
    temperature=st.none() | finite,
    top_k=st.none() | st.integers(0, 100),
    stop=tuples(texts),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 10**6), finite, max_size=3),
)
int32s = st.integers(-(2**31), 2**31 - 1)
counts = st.integers(0, 10**6)
completions = st.builds(
    Completion,
    completion_id=names,
    session_id=names,
    attempt=st.integers(1, 9),
    seq=counts,
    parent_id=optional,
    base_id=optional,
    shared=counts,
    shared_messages=counts,
    split=optional,
    created_at=finite,
    finished_at=finite,
    dialect=texts,
    mode=st.sampled_from(["tito", "chat"]),
    model_requested=texts,
    model_used=texts,
    messages=tuples(messages),
    reply=messages,
    tools=tuples(tools),
    sampling=samplings,
    request_digest=st.binary(max_size=40),
    idempotency_key=optional,
    prompt_delta=arrays(int32s, np.int32) | st.just(np.arange(2000, dtype=np.int32)),
    response_ids=arrays(int32s, np.int32),
    logprobs=arrays(st.floats(width=32), np.float32),
    weight_spans=tuples(st.builds(WeightSpan, texts, counts, counts)),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls", "abort"]),
    stop_sequence=optional,
    usage=st.builds(Usage, counts, counts, counts),
    outcome=st.sampled_from(["ok", "abandoned", "aborted", "engine_error", "no_token_ids", "empty"]),
    detail=optional,
    role_hint=optional,
    metadata=objects,
)
