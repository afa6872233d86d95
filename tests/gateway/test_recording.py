"""What is told and what is on disk are the same, at the edges of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from polar.contract.arrays import ids
from polar.contract.chat import Chat, Message, TextDelta, Tool, ToolCallDelta, Usage
from polar.dialects.base import Call
from polar.engines.base import ChatChunk, EngineInfo
from polar.gateway.backends import ChatBackend
from polar.gateway.call import ModelCall
from polar.gateway.pipeline import Request
from tests.gateway.conftest import World
from tests.support.script import Step

CHAT = Chat("m", (Message("user", "hi"),))


def start(world: World, chat: Chat = CHAT) -> ModelCall:
    call = ModelCall("c1", grace=2.0)
    call.join()
    world.node.gateway.pipeline.start(
        world.session, call, Call(chat, stream=False), Request(dialect="t", digest=b"d")
    )
    return call


class IdsAtTheEnd:
    """A chat engine that streams text and logprobs, and tells all ids in the last chunk (as SGLang does)."""

    info = EngineInfo(kind="late", model="late", context_length=0)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def chat(self, chat: Chat, **_: Any) -> AsyncGenerator[ChatChunk, None]:
        yield ChatChunk(deltas=[TextDelta("Par")], logprobs=[-0.5])
        yield ChatChunk(deltas=[TextDelta("is")], logprobs=[-0.25])
        yield ChatChunk(
            ids=[7, 8],
            prompt_ids=ids([1, 2, 3]),
            message=Message("assistant", "Paris"),
            finish_reason="stop",
            usage=Usage(3, 2),
        )


async def test_ids_that_come_at_the_end_pair_up_with_the_logprobs_before_them(make_world) -> None:
    world: World = await make_world([])
    world.node.gateway.pipeline.backend = ChatBackend(IdsAtTheEnd())  # type: ignore[arg-type]
    call = start(world)
    await call.settled()
    [completion] = await world.completions()
    assert completion.outcome == "ok"
    assert completion.response_ids.tolist() == [7, 8]
    assert completion.logprobs.tolist() == [-0.5, -0.25]


async def test_a_session_that_closes_during_a_commit_tells_what_it_committed(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    store = world.node.store
    committing, let_go = asyncio.Event(), asyncio.Event()
    put = store.put_completion

    async def slow(completion: Any) -> None:
        committing.set()
        await let_go.wait()
        await put(completion)

    world.node.gateway.pipeline._store = _With(store, put_completion=slow)
    call = start(world)
    await committing.wait()
    closing = asyncio.create_task(world.session.close())
    await asyncio.sleep(0)
    let_go.set()
    await closing
    [completion] = await world.completions()
    assert completion.outcome == "ok"
    assert call.answer is not None
    assert call.answer.message.content == "Fine."


async def test_a_call_that_is_given_up_before_it_began_has_an_end(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    call = start(world)
    await world.session.close()
    assert call.error is not None
    assert call.error.kind == "gone"


async def test_a_fault_of_our_own_in_the_middle_of_a_reply_keeps_what_was_sampled(make_world, monkeypatch) -> None:
    world: World = await make_world([Step(text="one two three four")])
    feed = "polar.rendering.reader.TemplateReader.feed"

    def broken(self: Any, new: Any) -> list[Any]:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(feed, broken)
        call = start(world)
        await call.settled()
    assert call.error is not None
    assert call.error.kind == "internal"
    [completion] = await world.completions()
    assert completion.outcome == "engine_error"
    assert "a bug" in (completion.detail or "")


async def test_a_cut_off_reply_is_recorded_with_the_calls_it_had(make_world) -> None:
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\nand then some more words'
    world: World = await make_world([Step(text=text, hold_after=35)])
    call = start(world, Chat("m", CHAT.messages, tools=(Tool("bash"),)))
    async with asyncio.timeout(10):
        while not any(isinstance(delta, ToolCallDelta) for delta in call.deltas):
            await call.changed()
    await world.session.close()
    [completion] = await world.completions()
    assert completion.outcome == "abandoned"
    assert [c.name for c in completion.reply.tool_calls] == ["bash"]


@pytest.mark.parametrize("mode", ["chat"])
async def test_a_session_without_token_ids_takes_no_more_calls(make_world, mode) -> None:
    """The harness would try again until its time is up, and nothing of it could be trained."""
    world: World = await make_world(lambda _: Step(text="Fine.", omit_token_ids=True), mode=mode)
    call = start(world)
    await call.settled()
    assert world.session.closed
    assert "token_ids" in (world.session.broken or "")


class _With:
    """An object with some of its methods replaced."""

    def __init__(self, inner: Any, **methods: Any) -> None:
        self._inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
