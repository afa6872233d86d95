"""The gateway in a process of its own, so that its CPU time is only its own. It reads commands, a JSON line
each, from stdin and answers each with a JSON line:

``{"open": NAME, "conversation": KIND, "call": N, "place": P}``: a session whose first N calls are captured;
``{"cpu": 1}``: CPU seconds of the process so far, all threads; ``{"check": NAME}``: how many calls the session
has and how many of them are not exact, and it is forgotten.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvloop
from tests.support.tinymodel import make_tiny_model

from benchmarks.conversation import COMMAND, CONVERSATIONS, REPLY_TEXT
from polar.contract.arrays import Ids
from polar.contract.chat import Sampling
from polar.contract.completion import Completion
from polar.engines.base import Engine, EngineInfo, TokenChunk
from polar.engines.openai import OpenAIEngine
from polar.gateway.node import Node
from polar.gateway.session import LiveSession
from polar.rendering.tokenizer import Tokenizer
from polar.store import open_store
from polar.store.base import SessionRecord


class InstantTokens:
    """A token engine that says the same reply at once, over the tiny tokenizer."""

    def __init__(self, model_folder: Path) -> None:
        make_tiny_model(model_folder)
        text = f'{REPLY_TEXT}\n<tool_call>\n{{"name": "tool_0", "arguments": {COMMAND}}}\n</tool_call><|im_end|>'
        self._reply = Tokenizer.load(model_folder).encode(text)
        self._logprobs = [-0.5] * len(self._reply)
        self.info = EngineInfo("bench", "bench", 1 << 20, str(model_folder))

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, **_: Any) -> AsyncGenerator[TokenChunk, None]:
        """See ``TokenEngine``."""
        yield TokenChunk(self._reply, self._logprobs, "0", "stop")


class Control:
    """Does what the commands say."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._sessions: dict[str, LiveSession] = {}

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        if "open" in command:
            return await self._open(**command)
        if "check" in command:
            return self._check(self._sessions.pop(command["check"]))
        return {"cpu": time.process_time()}

    async def _open(self, open: str, conversation: str, call: int, place: str) -> dict[str, Any]:
        record = SessionRecord(
            session_id=open, task_id="bench", sample_index=0, state="RUNNING", created_at=0.0, updated_at=0.0
        )
        await self._node.store.put_session(record)
        session = LiveSession(session_id=open)
        last: Completion | None = None
        for number in range(call):
            last = CONVERSATIONS[conversation].completion(number, place, open, last)
            await self._node.store.put_completion(last)
            session.graph.add(last)
            next(session.sequence)
        self._node.gateway.open(session)
        self._sessions[open] = session
        return {"key": session.key}

    def _check(self, session: LiveSession) -> dict[str, Any]:
        made = session.graph.completions()
        inexact = [c.completion_id for c in made if c.outcome != "ok" or c.split is not None]
        self._node.gateway.forget(session)
        return {"completions": len(made), "inexact": len(inexact), "prompt_tokens": made[-1].prompt_len}


async def _main(folder: Path, engine_url: str | None) -> None:
    engine: Engine = OpenAIEngine(engine_url) if engine_url else InstantTokens(folder / "model")
    node = Node(engine, open_store(str(folder / "polar.db")), folder)
    await node.start()
    control = Control(node)
    print(json.dumps({"url": node.server.url}), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        print(json.dumps(await control.do(json.loads(line))), flush=True)
    await node.close()


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
