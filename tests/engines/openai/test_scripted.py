"""The scripted engine against the client: what it meant is what we read, through every fault it can have."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from polar.contract.chat import Chat, Message, Sampling, TextDelta, Tool
from polar.engines.base import EngineError, TokenEngine
from tests.engines.openai.conftest import HELLO, Start, call, ids, logprobs, prompt
from tests.support import oracle
from tests.support.model import ScriptedModel
from tests.support.script import Conversation, Script, Step
from tests.support.scripted import scripted_engine
from tests.support.tinymodel import make_tiny_model
from tests.support.tokens import ScriptedTokenEngine

WEATHER = Tool("get_weather", "Get weather", {"type": "object", "properties": {"city": {"type": "string"}}})
ASK = Chat(model="any", messages=(Message("user", "Weather in Paris? 🙂"),), tools=(WEATHER,))
CALL = (
    "<think>\nLet me see.\n</think>\n\nLooking.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city":"東京"}}\n</tool_call>'
)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_we_read_is_what_the_engine_meant(
    stream: bool, chunk_tokens: int, start: Start, model_dir: Path
) -> None:
    async with scripted_engine(model_dir, [Step(text=CALL, chunk_tokens=chunk_tokens)]) as engine:
        chunks = await call(await start(engine.url), ASK, stream=stream)
        (meant,) = engine.model.log.generations
    assert prompt(chunks) == meant.context_ids
    assert ids(chunks) == meant.sampled_ids
    assert logprobs(chunks) == meant.logprobs == oracle.logprobs(meant.context_ids, meant.sampled_ids)
    message, usage = chunks[-1].message, chunks[-1].usage
    assert message is not None
    assert usage is not None
    assert (message.reasoning, message.content) == ("Let me see.", "Looking.")
    assert [json.loads(c.arguments) for c in message.tool_calls] == [{"city": "Paris"}, {"city": "東京"}]
    assert chunks[-1].finish_reason == "tool_calls"
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(meant.context_ids), len(meant.sampled_ids))
    text = "".join(d.text for c in chunks for d in c.deltas if isinstance(d, TextDelta))
    assert text == message.content


async def test_the_prompt_is_the_template_of_the_model(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="Paris")]) as engine:
        chunks = await call(await start(engine.url))
    assert PreTrainedTokenizerFast.from_pretrained(str(model_dir)).decode(prompt(chunks)) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_drifting_ids_are_sampled_as_told(start: Start, model_dir: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model_dir))
    letters = tuple(token for letter in "Paris" for token in tokenizer.encode(letter))
    assert list(letters) != tokenizer.encode("Paris")
    async with scripted_engine(model_dir, [Step(ids=letters)]) as engine:
        chunks = await call(await start(engine.url))
    assert ids(chunks) == [*letters, tokenizer.eos_token_id]
    assert chunks[-1].message == Message("assistant", "Paris")


@pytest.mark.parametrize("fault", ["null", "nan", "inf", "bool"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_last_logprob_is_nan(fault: str, stream: bool, start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="Paris", logprobs=fault)]) as engine:  # type: ignore[arg-type]
        values = logprobs(await call(await start(engine.url), stream=stream))
        (meant,) = engine.model.log.generations
    assert math.isnan(values[-1])
    assert values[:-1] == meant.logprobs[:-1]


async def test_logprobs_left_out_are_as_many_as_came(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="Paris", logprobs="omit")]) as engine:
        chunks = await call(await start(engine.url))
    assert len(ids(chunks)) > 0
    assert logprobs(chunks) == []


@pytest.mark.parametrize("stream", [True, False])
async def test_ids_only_in_the_logprobs_are_enough(stream: bool, start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text=CALL, omit_token_ids=True, ids_in_logprobs=True)]) as engine:
        chunks = await call(await start(engine.url), ASK, stream=stream)
        (meant,) = engine.model.log.generations
    assert ids(chunks) == meant.sampled_ids


@pytest.mark.parametrize("step", [Step(text="a", omit_token_ids=True), Step(text="a", omit_prompt_ids=True)])
async def test_left_out_ids_are_an_error(step: Step, start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [step]) as engine:
        with pytest.raises(EngineError) as caught:
            await call(await start(engine.url))
    assert caught.value.kind == "no_token_ids"


async def test_a_parser_that_swallows_chunks_shows_in_the_usage(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text=CALL, drop_empty_deltas=True)]) as engine:
        chunks = await call(await start(engine.url), ASK)
    usage = chunks[-1].usage
    assert usage is not None
    assert 0 < len(ids(chunks)) < usage.completion_tokens


async def test_a_stop_string_cuts_the_text_and_keeps_the_ids(start: Start, model_dir: Path) -> None:
    chat = Chat(model="m", messages=HELLO.messages, sampling=Sampling(stop=("France",)))
    async with scripted_engine(model_dir, [Step(text="The capital of France is Paris.")]) as engine:
        last = (chunks := await call(await start(engine.url), chat))[-1]
        decoded = engine.model.tokenizer.decode(ids(chunks))
    assert last.message == Message("assistant", "The capital of ")
    assert last.stop_sequence == "France"
    assert decoded.startswith("The capital of France")


async def test_max_tokens_end_the_reply(start: Start, model_dir: Path) -> None:
    chat = Chat(model="m", messages=HELLO.messages, sampling=Sampling(max_tokens=2))
    async with scripted_engine(model_dir, [Step(text="The capital of France is Paris.")]) as engine:
        chunks = await call(await start(engine.url), chat)
    assert (chunks[-1].finish_reason, len(ids(chunks))) == ("length", 2)


async def test_a_prompt_over_the_context(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="a")], max_model_len=32) as engine:
        client = await start(engine.url)
        with pytest.raises(EngineError) as caught:
            await call(client, Chat(model="m", messages=(Message("user", "word " * 100),)))
        found = caught.value
        assert (found.kind, found.context_length) == ("context_length", 32)
        assert found.prompt_tokens is not None
        assert found.prompt_tokens > 32
        chat = Chat(model="m", messages=(Message("user", "Hi"),), sampling=Sampling(max_tokens=31))
        assert (await call(client, chat))[-1].finish_reason == "stop"


async def test_steps_follow_turns_and_words_and_successive_attempts(start: Start, model_dir: Path) -> None:
    failing = Step(attempts=(Step(status=500, error="try again"), Step(text="third")))
    steps = [Step(text="first"), Step(text="second"), failing, Step(text="found", when="needle")]
    async with scripted_engine(model_dir, steps) as engine:
        client = await start(engine.url)
        messages = [Message("user", "go")]
        for expected in ("first", "second"):
            reply = (await call(client, Chat(model="m", messages=tuple(messages))))[-1].message
            assert reply == Message("assistant", expected)
            messages += [reply, Message("user", "go on")]
        with pytest.raises(EngineError, match="try again"):
            await call(client, Chat(model="m", messages=tuple(messages)))
        assert (await call(client, Chat(model="m", messages=tuple(messages))))[-1].message == Message(
            "assistant", "third"
        )
        needle = Chat(model="m", messages=(Message("user", "a needle here"),))
        assert (await call(client, needle))[-1].message == Message("assistant", "found")
        messages += [Message("assistant", "third"), Message("user", "go on")]
        with pytest.raises(EngineError, match="no step for turn 3"):
            await call(client, Chat(model="m", messages=tuple(messages)))


async def test_an_error_in_the_middle_of_a_stream(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="The capital", error_after=1, error="out of memory")]) as engine:
        with pytest.raises(EngineError, match="out of memory"):
            await call(await start(engine.url))


async def test_an_aborted_reply(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="The capital", finish_reason="abort")]) as engine:
        assert (await call(await start(engine.url)))[-1].finish_reason == "abort"


async def test_the_generate_route_takes_ids_and_names_the_weights(model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="Paris")]) as engine, aiohttp.ClientSession() as session:
        engine.model.weight_version = "step-7"
        context = engine.model.render([{"role": "user", "content": "Hi"}], None, {})
        sampling = {"max_tokens": 8, "logprobs": 0}
        body = {"token_ids": context, "sampling_params": sampling, "return_token_ids": True, "stream": False}
        async with session.post(f"{engine.url}/inference/v1/generate", json=body) as response:
            reply = await response.json()
        async with session.post(f"{engine.url}/inference/v1/generate", json={**body, "stream": True}) as response:
            lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
    choice = reply["choices"][0]
    assert reply["prompt_token_ids"] == context
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == oracle.logprobs(
        context, choice["token_ids"]
    )
    assert choice["weight_versions"] == [{"version": "step-7", "start": 0, "end": len(choice["token_ids"])}]
    streamed = [t for line in lines for c in json.loads(line)["choices"] for t in c["token_ids"]]
    assert streamed == choice["token_ids"]


async def test_the_token_engine_shares_script_and_log(model_dir: Path) -> None:
    model = ScriptedModel(model_dir, Script([Step(text="Paris", hold_after=1)]))
    engine = ScriptedTokenEngine(model)
    assert isinstance(engine, TokenEngine)
    context = np.array(model.render([{"role": "user", "content": "Hi"}], None, {}), dtype=np.int32)
    asked: dict[str, Any] = {"stop_ids": frozenset({2}), "request_id": "r", "affinity": "s"}
    async with aclosing(engine.generate(context, Sampling(), **asked)) as chunks:
        await anext(chunks)
    model.release()
    whole = [c async for c in engine.generate(context, Sampling(), **asked)]
    left, done = model.log.generations
    assert (left.ended, len(left.sampled_ids)) == ("cancelled", 1)
    assert (done.ended, done.sampled_ids) == ("done", [t for c in whole for t in c.ids])
    assert done.logprobs == oracle.logprobs(done.context_ids, done.sampled_ids)
    assert whole[-1].finish_reason == "stop"


def test_ids_alone_tell_the_turn_and_the_last_message(model_dir: Path) -> None:
    model = ScriptedModel(model_dir, Script([]))
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    seen = model.conversation(model.render(messages, None, {}), None)
    assert seen.turn == 1
    assert "42" in seen.last


def test_a_template_that_rewrites_history_drops_old_reasoning(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        {"role": "user", "content": "c"},
    ]
    kept = ScriptedModel(make_tiny_model(tmp_path / "k"), Script([]))
    rewritten = ScriptedModel(make_tiny_model(tmp_path / "r", rewrites_history=True), Script([]))
    assert "why" in kept.tokenizer.decode(kept.render(messages, None, {}))
    assert "why" not in rewritten.tokenizer.decode(rewritten.render(messages, None, {}))


def test_a_function_may_choose_the_step() -> None:
    script = Script(choose=lambda conversation: Step(text=conversation.last.upper()))
    assert script.step(Conversation(0, "hi", [1])).text == "HI"


@pytest.mark.slow
async def test_it_runs_as_a_program_with_its_log_on_disk(start: Start, model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"text": "Paris", "hold_after": 0}]))
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "tests.support.scripted", "--model-dir", str(model_dir)]
    process = subprocess.Popen(
        [*command, "--script", str(script), "--log", str(log)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = (await asyncio.to_thread(process.stdout.readline)).strip()
        calling = asyncio.create_task(call(await start(url)))
        async with aiohttp.ClientSession() as session:
            await session.post(f"{url}/scripted/release", json={"hold": "hold"})
        chunks = await calling
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["sampled_ids"] == ids(chunks)
