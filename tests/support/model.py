"""Why: the invariants of token capture are checked against what the engine really had in context and really
sampled. The scripted model is the one place where a step becomes ids; it writes every generation down.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from polar.contract.chat import FinishReason
from tests.support.oracle import logprobs
from tests.support.script import Conversation, Script, Step

Route = Literal["chat", "generate", "completions", "direct"]


@dataclass(slots=True)
class Generation:
    """One generation, as the engine knows it. ``sampled_ids`` are those it got to before it ended."""

    number: int
    route: Route
    request_id: str
    context_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    weight_versions: list[str]
    finish_reason: str | None = None
    ended: Literal["running", "done", "cancelled", "cut", "error"] = "running"
    request: dict[str, Any] = field(default_factory=dict)
    """The request's body, where there was one."""


class Log:
    """Every generation in order of its start; on disk too, a line each when it ends, if a path is given."""

    def __init__(self, path: Path | None = None) -> None:
        self.generations: list[Generation] = []
        self._path = path
        self._changed = asyncio.Condition()

    def begin(self, route: Route, request_id: str, context: list[int]) -> Generation:
        generation = Generation(len(self.generations), route, request_id, context, [], [], [])
        self.generations.append(generation)
        return generation

    def end(self, generation: Generation, ended: Literal["done", "cancelled", "cut", "error"]) -> None:
        if generation.ended != "running":  # its client went away after its end
            return
        generation.ended = ended
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps(asdict(generation)) + "\n")

    async def wait_for(self, condition: Callable[[list[Generation]], bool], timeout: float = 10.0) -> None:
        """Until ``condition`` holds for the generations.

        Raises:
            TimeoutError: it did not within ``timeout`` seconds.
        """
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(lambda: condition(self.generations))

    async def changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass(slots=True)
class Plan:
    """A reply before it is sent: all its ids, their logprobs, and the text that each one brings."""

    step: Step
    ids: list[int]
    logprobs: list[float]
    pieces: list[str]
    finish_reason: FinishReason
    stop_string: str | None


class ScriptedModel:
    """A tokenizer, a template and a script.

    Args:
        model_dir: a folder with tokenizer and chat template.
        log_path: where the log goes, besides memory.
    """

    def __init__(
        self, model_dir: Path | str, script: Script, *, log_path: Path | None = None, max_model_len: int = 32768
    ) -> None:
        self.model_dir = Path(model_dir)
        self.script = script
        self.log = Log(log_path)
        self.max_model_len = max_model_len
        self.weight_version = "default"
        """Tokens are sampled under the version of the moment."""
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model_dir))  # AutoTokenizer would import torch
        self._holds: dict[str, asyncio.Event] = {}

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, kwargs: dict[str, Any]) -> list[int]:
        """The prompt of a chat, by the model's own template; arguments that are a JSON object go in as one."""
        text = self.tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=False,
            **kwargs,
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def conversation(self, prompt_ids: Sequence[int], messages: list[dict[str, Any]] | None) -> Conversation:
        """What the script looks at: the messages, or where there are only ids their ChatML turns."""
        if messages is None:
            text = str(self.tokenizer.decode(list(prompt_ids)))
            turns = text.split("<|im_start|>")[1:-1]
            messages = [_chatml_message(turn) for turn in turns]
        replies = sum(message["role"] == "assistant" for message in messages)
        last = messages[-1].get("content") if messages else ""
        return Conversation(replies, last if isinstance(last, str) else json.dumps(last), prompt_ids)

    def plan(
        self, step: Step, context: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Plan:
        """The reply of a step after ``context``, within ``max_tokens``, up to the first stop string."""
        ids = list(step.ids) if step.ids is not None else self.tokenizer.encode(step.text, add_special_tokens=False)
        finish: FinishReason = step.finish_reason
        if finish == "stop":
            ids = [*ids, self.tokenizer.eos_token_id]
        room = min(max_tokens or len(ids), self.max_model_len - len(context))
        if len(ids) > room:
            ids, finish = ids[:room], "length"
        pieces, stop_string = _stopped(self._pieces(ids), stop)
        if stop_string is not None:
            ids, finish = ids[: len(pieces)], "stop"
        return Plan(step, ids, logprobs(context, ids), pieces, finish, stop_string)

    async def hold(self, name: str) -> None:
        await self._event(name).wait()

    def release(self, name: str = "hold") -> None:
        """Let every reply go on that waits, or will wait, under this name."""
        self._event(name).set()

    def _event(self, name: str) -> asyncio.Event:
        return self._holds.setdefault(name, asyncio.Event())

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=True)
        return [stream.step(self.tokenizer.backend_tokenizer, token) or "" for token in ids]


def _stopped(pieces: list[str], stop: Sequence[str]) -> tuple[list[str], str | None]:
    """The pieces up to the one that completes a stop string, without the stop string. Text that may be its
    beginning comes late, as from a real engine."""
    if not stop:
        return pieces, None
    longest = max(len(word) for word in stop) - 1
    text, out, sent = "", [], 0
    for piece in pieces:
        text += piece
        found = [(text.index(word), word) for word in stop if word in text]
        end = min(found)[0] if found else max(sent, len(text) - longest)
        out.append(text[sent:end])
        sent = end
        if found:
            return out, min(found)[1]
    if out:
        out[-1] += text[sent:]
    return out, None


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        try:
            parsed = json.loads(function.get("arguments") or "{}")
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _chatml_message(turn: str) -> dict[str, Any]:
    role, _, content = turn.removesuffix("\n").removesuffix("<|im_end|>").partition("\n")
    return {"role": "tool" if "<tool_response>" in content and role == "user" else role, "content": content}
