"""What each harness asks in a session of twenty turns, for those who measure without it.

``python -m tests.harnesses.record_sessions [HARNESS...]`` runs the sessions, writes
``tests/fixtures/cli_sessions/HARNESS.json.gz`` and prints a line of the README's table for each.

A file has two chats: the last call as its client sent it, and the same conversation with every reply as it was
sampled, the last one too. Every call of the session is the beginning of each, up to one of its replies: that is
checked, and so is that all calls offered the same tools. What is left out is whose machine it was.
"""

from __future__ import annotations

import asyncio
import gzip
import platform
import re
import sys
import tempfile
from pathlib import Path

import msgspec

from polar.contract.chat import Chat
from polar.contract.errors import PolarError
from tests.harnesses.running import Ran, qwen3_folder, run_session
from tests.harnesses.scripts import SHELL_TOOLS, TWENTY, TWENTY_THERE, twenty_turns
from tests.rendering.assets import fetch

FOLDER = Path(__file__).parents[1] / "fixtures" / "cli_sessions"


def read(harness: str) -> tuple[Chat, Chat]:
    """The session as the client sent it last, and with its replies as they were sampled."""
    packed = (FOLDER / f"{harness}.json.gz").read_bytes()
    return msgspec.json.decode(gzip.decompress(packed), type=tuple[Chat, Chat])


def chats(ran: Ran) -> tuple[Chat, Chat]:
    """A session that was run, in the form of a file.

    Raises:
        PolarError: a call is not the beginning of the last one.
    """
    asked = [ran.asked[completion.completion_id] for completion in ran.completions]
    last, sampled = asked[-1], []
    for chat, completion in zip(asked, ran.completions, strict=True):
        if (chat.messages, chat.tools) != (last.messages[: len(chat.messages)], last.tools):
            raise PolarError(f"call {completion.seq} is not the beginning of the last one")
        sampled += [*chat.messages[len(sampled) :], completion.reply]
    return last, msgspec.structs.replace(last, messages=tuple(sampled))


def write(harness: str, made: tuple[Chat, Chat]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.encode(made).decode()
    text = re.sub(rf"(?<!<){re.escape(str(Path.home()))}\b", "/home/user", text)  # and not the end of a tag
    text = text.replace(platform.release(), "6.1.0")
    packed = gzip.compress(text.encode(), mtime=0)
    (FOLDER / f"{harness}.json.gz").write_bytes(packed)


def row(harness: str, ran: Ran) -> str:
    """Harness, version, and of the main agent: trained calls, traces, calls a trace (the merge factor)."""
    calls = [len(trace.completion_ids) for trace in ran.result.trajectory.traces if trace.role == "main"]
    version = ran.result.trajectory.metadata["provenance"]["harness_version"]
    return f"{harness:16} {version:10} {sum(calls):3} calls {len(calls):3} traces {sum(calls) / len(calls):5.1f}"


async def main(names: list[str]) -> None:
    for harness in names:
        with tempfile.TemporaryDirectory() as scratch:
            (model := Path(scratch, "model")).mkdir()
            ran = await run_session(
                qwen3_folder(fetch(), model),
                Path(scratch),
                harness,
                twenty_turns(harness),
                instruction=TWENTY,
                test=TWENTY_THERE,
            )
        if ran.outcome != ("COMPLETED", None):
            raise PolarError(f"{harness}: {ran.result.error}")
        ran.check()
        write(harness, chats(ran))
        print(row(harness, ran), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(SHELL_TOOLS)))
