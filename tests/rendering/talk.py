"""A conversation as the gateway holds it: each call bridged from the one before, or rendered in full."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from polar.contract.arrays import Ids, ids
from polar.contract.chat import Chat, FinishReason, Message, Sampling, Tool
from polar.rendering.base import Declined, Prompt, Renderer, Reply, Turn

WEATHER = Tool(
    name="get_weather",
    description="The weather in a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


class Talk:
    """Says things to a renderer and keeps what was recorded."""

    def __init__(self, renderer: Renderer, tools: Sequence[Tool] = (WEATHER,), **options: Any) -> None:
        self.renderer = renderer
        self.tools = tuple(tools)
        self.options = options
        self.messages: list[Message] = []
        self.prompt: Prompt | None = None
        self.response: Ids = ids([])
        self.known = 0

    def chat(self) -> Chat:
        return Chat(model="m", messages=tuple(self.messages), tools=self.tools, **self.options)

    def ask(self, *messages: Message) -> Prompt:
        """A first or fresh call: rendered in full."""
        self.messages += messages
        self.prompt = self.renderer.render(self.chat())
        return self.prompt

    def sample(self, sampled: str | Sequence[int], finish: FinishReason = "stop", stop: Sequence[str] = ()) -> Reply:
        """The model's reply, as text or ids. It is recorded."""
        assert self.prompt is not None
        tokens = self.renderer.tokenizer.encode(sampled) if isinstance(sampled, str) else list(sampled)  # type: ignore[attr-defined]
        chat = Chat(model="m", messages=(), tools=self.tools, sampling=Sampling(stop=tuple(stop)), **self.options)
        reader = self.renderer.reader(chat, self.prompt)
        for token in tokens:
            reader.feed([token])
        reply = reader.finish(finish)
        self.response = ids(tokens)
        self.messages.append(reply.message)
        self.known = len(self.messages)
        return reply

    def go_on(self, *messages: Message) -> Prompt | Declined:
        """The next call, bridged. A bridge becomes the prompt of the next reply."""
        assert self.prompt is not None
        self.messages += messages
        before = self.prompt
        result = self.renderer.bridge(Turn(before, self.response, self.known), self.chat())
        if isinstance(result, Prompt):
            exact = [*before.ids.tolist(), *self.response.tolist()]
            assert result.ids[: len(exact)].tolist() == exact
            self.prompt = result
        return result

    def full(self) -> list[int]:
        """The ids of the whole conversation, rendered afresh."""
        return self.renderer.render(self.chat()).ids.tolist()


def user(text: str) -> Message:
    return Message(role="user", content=text)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def result(text: str, call: Message, index: int = 0) -> Message:
    """The result of one of a message's calls."""
    return Message(role="tool", content=text, tool_call_id=call.tool_calls[index].id)


def counted_ids() -> Callable[[], str]:
    """call_0, call_1, ..."""
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
