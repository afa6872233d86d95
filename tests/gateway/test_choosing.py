"""Which way an engine is used, and that a conversation is exact by each of them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from polar.contract.errors import UsageError
from polar.engines.vllm import VLLMEngine
from polar.engines.vllm_wire import GENERATE
from polar.gateway.backends import ChatBackend, TitoBackend
from polar.gateway.node import Node
from polar.gateway.render_route import RenderRouteBackend
from polar.gateway.session import LiveSession
from polar.store import open_store
from polar.store.base import SessionRecord
from tests.gateway.conftest import World
from tests.support.script import Step
from tests.support.scripted import scripted_engine

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STRIPPED = Step(text="ok", omit_token_ids=True, omit_prompt_ids=True, logprobs="omit")

Make = Callable[..., Any]


@pytest.fixture
async def served(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Make]:
    """A node before a scripted vLLM."""
    async with AsyncExitStack() as stack:

        async def make(
            steps: list[Step],
            *,
            off: tuple[str, ...] = (),
            probe: Step | None = None,
            folder: Path = tiny_model,
            **options: Any,
        ) -> World:
            asked = {"probe": probe} if probe else {}
            running = await stack.enter_async_context(scripted_engine(folder, steps, off=off, **asked))
            node = Node(VLLMEngine(running.url, **options), open_store(str(tmp_path / "polar.db")), tmp_path)
            await node.start()
            stack.push_async_callback(node.close)
            await node.store.put_session(
                SessionRecord(
                    session_id="s", task_id="t", sample_index=0, state="RUNNING", created_at=0.0, updated_at=0.0
                )
            )
            session = LiveSession(session_id="s")
            node.gateway.open(session)
            return World(node, running.model, session, tmp_path)

        yield make


async def ask(world: World, *words: str, **options: Any) -> Any:
    """A conversation: each of ``words`` is a user's turn. The last reply."""
    messages: list[Any] = []
    async with world.client() as client:
        for word in words:
            messages.append({"role": "user", "content": word})
            reply = await client.chat.completions.create(model="any", messages=messages, **options)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    return reply


def backend(world: World) -> Any:
    return world.node.gateway.pipeline.backend


@pytest.mark.parametrize("off", [(), (GENERATE,)])
async def test_with_a_tokenizer_at_hand_polar_renders(served: Make, off: tuple[str, ...]) -> None:
    world = await served([Step(text="one"), Step(text="two")], off=off)
    assert isinstance(backend(world), TitoBackend)
    await ask(world, "a", "b")
    first, second = await world.recorded(2)
    assert (first.mode, first.outcome, second.outcome) == ("tito", "ok", "ok")
    assert second.shared == first.total_len
    generations = world.model.log.generations
    assert [g.context_ids for g in generations] == [world.prompt(first), world.prompt(second)]
    assert second.response_ids.tolist() == generations[1].sampled_ids
    assert second.logprobs.tolist() == generations[1].logprobs


async def test_the_weights_that_generate_tells_at_its_end_are_recorded(served: Make) -> None:
    world = await served([Step(text="one")])
    world.model.weight_version = "step-7"
    await ask(world, "a")
    (call,) = await world.recorded(1)
    assert [(s.version, s.start, s.end) for s in call.weight_spans] == [("step-7", 0, len(call.response_ids))]


async def test_a_count_that_is_off_is_not_trained(served: Make) -> None:
    world = await served([Step(text="one", usage_extra=1)])
    await ask(world, "a")
    (call,) = await world.recorded(1)
    assert call.outcome == "token_mismatch"


async def test_a_reply_without_ids_ends_the_session_and_names_the_field(served: Make) -> None:
    world = await served([Step(text="one", omit_token_ids=True, logprobs="omit")])
    with pytest.raises(Exception, match="token_ids"):
        await ask(world, "a")
    (call,) = await world.recorded(1)
    assert call.outcome == "no_token_ids"
    assert world.session.broken is not None
    assert GENERATE in world.session.broken


async def test_without_a_tokenizer_the_engine_renders(
    served: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polar.engines.token_server.tokenizer_folder", lambda _: None)
    with caplog.at_level(logging.WARNING):
        world = await served([Step(text=f"I look.{CALL}"), Step(text="Blue.")])
    assert isinstance(backend(world), RenderRouteBackend)
    assert "--tokenizer" in caplog.text
    messages: list[Any] = [{"role": "user", "content": "What colour?"}]
    async with world.client() as client:
        first = await client.chat.completions.create(model="any", messages=messages, tools=[LOOK])  # type: ignore[list-item]
        said = first.choices[0]
        assert said.finish_reason == "tool_calls"
        assert said.message.content == "I look."
        (call,) = said.message.tool_calls or ()
        messages += [
            said.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "blue"},
        ]
        second = await client.chat.completions.create(model="any", messages=messages, tools=[LOOK])  # type: ignore[list-item]
    assert second.choices[0].message.content == "Blue."
    before, after = await world.recorded(2)
    assert {before.mode, after.mode} == {"tito"}
    for completion, generation in zip((before, after), world.model.log.generations, strict=True):
        assert completion.outcome == "ok"
        assert world.prompt(completion) == generation.context_ids
        assert completion.response_ids.tolist() == generation.sampled_ids
    assert after.parent_id == before.completion_id


async def test_tools_that_the_engines_template_leaves_out_are_warned_of(
    served: Make, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("polar.engines.token_server.tokenizer_folder", lambda _: None)
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{% set tools = none %}" + template)
    world = await served([Step(text="No.")], folder=folder)
    await ask(world, "look", tools=[LOOK])
    (call,) = await world.recorded(1)
    (warning,) = call.metadata["warnings"]
    assert warning.startswith("tools were dropped")


async def test_what_the_engine_renders_ends_at_a_stop_string(served: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.engines.token_server.tokenizer_folder", lambda _: None)
    world = await served([Step(text="one two three")])
    reply = await ask(world, "a", stop=["two"])
    assert reply.choices[0].message.content == "one "
    (call,) = await world.recorded(1)
    assert (call.stop_sequence, call.finish_reason) == ("two", "stop")
    assert call.response_ids.tolist() == world.model.log.generations[0].sampled_ids


async def test_a_prompt_that_the_engine_renders_too_long_is_refused(
    served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.engines.token_server.tokenizer_folder", lambda _: None)
    world = await served([Step(text="one")])
    with pytest.raises(Exception, match="maximum context length is 32768 tokens"):
        await ask(world, "word " * 40000)


async def test_without_ids_it_chats_and_one_line_says_why(served: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        world = await served([Step(text="one")], probe=STRIPPED)
    assert isinstance(backend(world), ChatBackend)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "is used in chat mode" in line
    assert "--enable-scale-out" in line
    await ask(world, "a")
    (call,) = await world.recorded(1)
    assert (call.mode, call.outcome) == ("chat", "ok")


async def test_chat_mode_is_had_for_the_asking_without_a_word(served: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        world = await served([Step(text="one")], mode="chat")
    assert isinstance(backend(world), ChatBackend)
    assert not caplog.records


async def test_a_tokenizer_of_no_use_is_an_error_where_tito_was_asked_for(served: Make, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="--mode tito"):
        await served([], off=("/v1/chat/completions/render",), mode="tito", tokenizer=str(tmp_path / "broken"))
