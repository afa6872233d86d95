"""The real programs, in a real sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from polar.contract.chat import Chat
from polar.contract.runtime import ExecResult
from polar.contract.task import AgentSpec, RuntimeSpec
from polar.dialects.base import Call
from polar.dialects.gemini import Gemini, Options
from polar.harnesses import Endpoint, by_name, standard_env
from polar.harnesses.install import install
from polar.runtimes import BubblewrapBackend

pytestmark = [pytest.mark.real, pytest.mark.slow]
INSTRUCTION = "-say 'hello' to @everyone"


async def run(name: str, folder: Path, serve: bytes | None) -> tuple[ExecResult, list[bytes]]:
    """A harness from install to its end; ``serve`` is the reply to every model call, ``None`` no server at all."""
    installed = await asyncio.to_thread(install, name)
    harness, backend = by_name(name), BubblewrapBackend()
    if not (probe := await backend.probe()).ok:
        pytest.skip(f"no bubblewrap here: {probe.detail}")
    runtime = await backend.create(RuntimeSpec(), folder=folder / "runtime", mounts=installed.mounts)
    assert runtime.listener is not None
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        asked.append(head + await reader.readexactly(length))
        writer.write(serve or b"")
        await writer.drain()
        writer.close()

    server = None
    if serve is None:
        runtime.listener.close()
    else:
        server = await asyncio.start_server(answer, sock=runtime.listener)
    try:
        endpoint = Endpoint(runtime.inside_url(""), "sk-real", "some/model", 32768)
        plan = harness.plan(AgentSpec(harness=name), INSTRUCTION, endpoint, installed)
        for path, text in plan.files.items():
            await runtime.write_file(path, text.encode())
        env = standard_env(endpoint, session_id="s", task_id="t", runtime=runtime) | dict(plan.command.env)
        command = type(plan.command)(plan.command.argv, env=env)
        return await runtime.exec(command, timeout=120, logs=folder, name="agent"), asked
    finally:
        if server is not None:
            server.close()
        await runtime.close()


def http(body: str, kind: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n{body}".encode()


def chunk(delta: dict[str, object], finish: str | None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"


STREAM = chunk({"role": "assistant", "content": "hello"}, None) + chunk({}, "stop") + "data: [DONE]\n\n"


async def test_pi_without_a_model_server_is_judged_failed(tmp_path):
    result, _ = await run("pi", tmp_path, None)
    assert (result.exit_code, result.timed_out) == (0, False)
    assert "Connection error" in str(by_name("pi").judge(result))


async def test_pi_asks_the_model_with_the_instruction_and_is_judged_fine(tmp_path):
    result, asked = await run("pi", tmp_path, http(STREAM, "text/event-stream"))
    assert by_name("pi").judge(result) is None
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert b"Bearer sk-real" in head
    assert json.loads(body)["model"] == "some/model"
    assert INSTRUCTION in json.dumps(json.loads(body)["messages"][-1])
    assert "message_update" not in result.stdout.read_text()


async def test_gemini_takes_a_chunk_with_an_empty_text_for_a_sign_of_life(tmp_path):
    """The keep-alive of its dialect, before the reply, in it and before its end."""
    life = Gemini().stream(Call(Chat("m", ()), stream=True, options=Options(thoughts=True, sse=True))).keepalive
    word = {"candidates": [{"content": {"role": "model", "parts": [{"text": "hello"}]}}]}
    end = {"candidates": [{"content": {"role": "model", "parts": [{"text": ""}]}, "finishReason": "STOP"}]}
    word, end = (b"data: " + json.dumps(body).encode() + b"\n\n" for body in (word, end))
    reply = http((life + life + word + life + end).decode(), "text/event-stream")
    result, asked = await run("gemini_cli", tmp_path, reply)
    assert by_name("gemini_cli").judge(result) is None
    assert len(asked) == 1
    assert "hello" in result.stdout.read_text()


async def test_mini_is_judged_by_how_it_ended(tmp_path):
    call = {"name": "bash", "arguments": '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'}
    message = {
        "role": "assistant",
        "content": "done",
        "tool_calls": [{"id": "1", "type": "function", "function": call}],
    }
    reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [
        {"index": 0, "message": message, "finish_reason": "tool_calls"}
    ]}  # fmt: skip
    result, asked = await run("mini_swe_agent", tmp_path, http(json.dumps(reply), "application/json"))
    assert by_name("mini_swe_agent").judge(result) is None
    assert result.exit_code == 0
    assert INSTRUCTION in asked[0].decode()

    refused = http('{"error": {"message": "nope"}}', "application/json", "401 Unauthorized")
    (tmp_path / "again").mkdir()
    result, _ = await run("mini_swe_agent", tmp_path / "again", refused)
    assert "AuthenticationError" in str(by_name("mini_swe_agent").judge(result))
