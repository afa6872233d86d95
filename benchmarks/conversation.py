"""Why: all parts must speak of the same conversation. The client sends it, the engine has its tokens, the
history is captured from it; so it is made here, from a seed, call by call.

An agent's session: a system prompt and a task, then call after call an assistant message with a tool call, and
the tool's output. A *place* (six digits in every message but the replies) makes each session's text its own.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from polar.contract.arrays import Ids, floats, ids
from polar.contract.chat import Message, Tool, ToolCall, Usage
from polar.contract.completion import Completion

PLACE = "@000000"
"""Stands in every text where the session's own place comes."""
REPLY_TOKENS = 64
REPLY_TEXT = "I will read the file first, then write the test and run it. The last run failed in the second case."
COMMAND = '{"command": "sed -n 1,120p src/main.py", "timeout": 10}'
_WORDS = [
    *[
        "the",
        "function",
        "returns",
        "value",
        "error",
        "file",
        "test",
        "path",
        "with",
        "index",
        "and",
        "loop",
        "of",
        "not",
        "found",
    ],
    "\n",
    '"x"',
    "é",
]
_CHARS_A_TOKEN = 4.6


@dataclass(frozen=True)
class Conversation:
    """A session of one kind.

    Args:
        name: of the kind.
        opening: characters of the system prompt.
        output: characters of each tool output.
        tools: functions offered, of half a kilobyte each.
    """

    name: str
    opening: int
    output: int
    tools: int

    def messages(self, call: int) -> list[dict[str, Any]]:
        """What the client sends in its call number ``call`` (from 0): 2 + 2 * call messages."""
        made: list[dict[str, Any]] = [
            {"role": "system", "content": self._text("system", self.opening)},
            {"role": "user", "content": self._text("user", min(self.opening, 600))},
        ]
        for turn in range(call):
            made += [
                reply_message(turn),
                {"role": "tool", "tool_call_id": call_id(turn), "content": self._output(turn)},
            ]
        return made

    def body(self, call: int) -> bytes:
        """The request body, with ``PLACE`` in it."""
        request = {
            "model": "bench",
            "messages": self.messages(call),
            "tools": [{"type": "function", "function": function} for function in self._functions()],
            "temperature": 1.0,
            "max_tokens": 1024,
        }
        return json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode()

    @functools.cache  # noqa: B019 (few conversations, and they live as long as the process)
    def prompt_ids(self, call: int) -> list[int]:
        """The engine's prompt for that call: all of the one before, its reply, and what is new."""
        if call == 0:
            return _some_ids(f"{self.name} opening", int((self.opening + 600 * self.tools) / _CHARS_A_TOKEN) + 8)
        new = _some_ids(f"{self.name} {call}", int(self.output / _CHARS_A_TOKEN) + 8)
        return self.prompt_ids(call - 1) + self.reply_ids(call - 1) + new

    def reply_ids(self, call: int) -> list[int]:
        """The sampled ids of that call."""
        return _some_ids(f"{self.name} reply {call}", REPLY_TOKENS)

    def completion(self, call: int, place: str, session_id: str, parent: Completion | None) -> Completion:
        """That call as Polar records it, after the one before."""
        before = 0 if parent is None else 2 * call + 1
        whole: Ids = ids(self.prompt_ids(call))
        shared = parent.total_len if parent is not None else 0
        return Completion(
            completion_id=f"{session_id}-{call}",
            session_id=session_id,
            attempt=1,
            seq=call,
            parent_id=parent.completion_id if parent else None,
            base_id=parent.completion_id if parent else None,
            shared=shared,
            shared_messages=before,
            created_at=0.0,
            finished_at=0.0,
            dialect="openai_chat",
            mode="chat",
            model_requested="bench",
            model_used="bench",
            messages=tuple(_recorded(message, place) for message in self.messages(call)[before:]),
            reply=_recorded(reply_message(call), place),
            tools=self.tool_list(),
            prompt_delta=whole[shared:],
            response_ids=ids(self.reply_ids(call)),
            logprobs=floats([-0.5] * REPLY_TOKENS),
            finish_reason="tool_calls",
            usage=Usage(len(whole), REPLY_TOKENS),
        )

    @functools.cache  # noqa: B019
    def tool_list(self) -> tuple[Tool, ...]:
        """The tools that the client offers."""
        return tuple(msgspec.convert(function, Tool) for function in self._functions())

    def _functions(self) -> list[dict[str, Any]]:
        text = {"type": "string", "description": "A path below the workspace, or a command, as one line of text."}
        return [
            {
                "name": f"tool_{number}",
                "description": "Does one thing in the workspace and returns what it printed. " * 3,
                "parameters": {"type": "object", "properties": {"command": text, "timeout": {"type": "integer"}}},
            }
            for number in range(self.tools)
        ]

    def _output(self, turn: int) -> str:
        return self._text(f"output {turn}", self.output)

    def _text(self, what: str, length: int) -> str:
        return _some_text(f"{self.name} {what}", length)


def reply_message(call: int) -> dict[str, Any]:
    """The engine's reply to that call."""
    function = {"name": "tool_0", "arguments": COMMAND}
    return {
        "role": "assistant",
        "content": REPLY_TEXT,
        "tool_calls": [{"id": call_id(call), "type": "function", "function": function}],
    }


def call_id(call: int) -> str:
    """The id of the tool call in that reply."""
    return f"call_{call:08d}"


def reply_body(conversation: Conversation, call: int) -> bytes:
    """The engine's answer in vLLM's shape, with ids and logprobs."""
    prompt, reply = conversation.prompt_ids(call), conversation.reply_ids(call)
    entries = [
        {"token": f"tok{number}", "logprob": -0.5, "bytes": [116, 111, 107], "top_logprobs": []}
        for number in range(len(reply))
    ]
    choice = {
        "index": 0,
        "message": reply_message(call),
        "logprobs": {"content": entries},
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": reply,
    }
    usage = {
        "prompt_tokens": len(prompt),
        "total_tokens": len(prompt) + len(reply),
        "completion_tokens": len(reply),
        "prompt_tokens_details": None,
    }
    return orjson.dumps(
        {
            "id": f"chatcmpl-{call}",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "bench",
            "choices": [choice],
            "usage": usage,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt,
        }
    )


def _recorded(message: dict[str, Any], place: str) -> Message:
    calls = tuple(
        ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
    )
    return Message(
        role=message["role"],
        content=message["content"].replace(PLACE, place),
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id"),
    )


@functools.cache
def _some_text(seed: str, length: int) -> str:
    chance = random.Random(seed)
    words = [PLACE]
    size = len(PLACE)
    while size < length:
        words.append(chance.choice(_WORDS))
        size += len(words[-1]) + 1
    return " ".join(words)


def _some_ids(seed: str, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(150_000) for _ in range(count)]


SMALL = Conversation("small", opening=400, output=150, tools=1)
AGENT = Conversation("agent", opening=6000, output=3300, tools=8)
"""About 8,000 tokens in 20 messages at call 9, and 40,000 in 100 at call 49."""
CONVERSATIONS = {conversation.name: conversation for conversation in (SMALL, AGENT)}
