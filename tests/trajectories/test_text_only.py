"""Conversations whose calls came without token ids: each once, whole, and never among the traces to train."""

from __future__ import annotations

from typing import Any

from polar.contract.chat import Message, Tool, ToolCall
from polar.contract.completion import Completion
from polar.contract.task import BuilderSpec
from polar.trajectories.assemble import assemble
from polar.trajectories.text_only import text_traces

from .making import completion, following

BASH = Tool("bash")
NO_IDS: dict[str, Any] = {"outcome": "no_token_ids", "tools": (BASH,)}


def silent_after(parent: Completion, **more: Any) -> Completion:
    return following(parent, [], [], **NO_IDS | more)


def words(message: Message) -> str:
    return str(message.content)


def test_a_conversation_is_one_trace_of_messages_alone() -> None:
    first = completion(0, [], [], **NO_IDS)
    calls = [first, silent_after(first), completion(2, [], [], outcome="no_token_ids")]
    main, title = text_traces(calls)
    assert [words(m) for m in main.prompt_messages] == ["question 0"]
    assert [words(m) for m in main.response_messages] == ["answer 0", "question 1", "answer 1"]
    assert (main.role, main.tools, main.metadata["text_only"]) == ("main", (BASH,), True)
    assert title.role == "auxiliary"
    arrays = (main.prompt_ids, main.response_ids, main.loss_mask, main.response_logprobs, main.weight_versions)
    assert not any(len(array) for array in arrays)
    assert not main.completion_ids
    assert assemble(calls, BuilderSpec()).traces == []


def test_each_fork_is_a_conversation() -> None:
    first = completion(0, [], [], **NO_IDS)
    calls = [first, silent_after(first), silent_after(first, seq=2)]
    assert [words(trace.response_messages[-1]) for trace in text_traces(calls)] == ["answer 1", "answer 2"]


def test_what_is_trained_needs_no_text_and_what_is_no_reply_has_none() -> None:
    first = completion(0, [], [], **NO_IDS)
    trained = following(first, [1, 2], [3])
    nothing = completion(2, [], [], **NO_IDS)
    nothing.reply = Message("assistant", "")
    aborted = completion(3, [], [], **NO_IDS | {"outcome": "aborted"})
    assert text_traces([first, trained, nothing, aborted]) == []


def test_a_reply_of_tool_calls_alone_is_one() -> None:
    asked = completion(0, [], [], **NO_IDS)
    asked.reply = Message("assistant", "", tool_calls=(ToolCall("t", "bash", "{}"),))
    [trace] = text_traces([asked])
    assert trace.response_messages == (asked.reply,)
