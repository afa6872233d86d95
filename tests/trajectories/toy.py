"""A toy model, its chat template and a gateway around them, with a log of what the engine really had in context.

The tests' oracle is ``ToyGateway.log``: the ids handed to the engine and the ids it sampled, written down by the
engine itself. Nothing in it goes through the code under test.

The toy vocabulary writes text by letter, and has one token for each pair in ``PAIRS``: the template always uses
it, a sampled reply may spell the pair out. So text sampled and encoded again may give other ids, as with a real
tokenizer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from polar.capture.graph import Attachment, SessionGraph
from polar.capture.verify import judge
from polar.contract.arrays import NO_FLOATS, NO_IDS, Floats, Ids, ids
from polar.contract.chat import FinishReason, Message, Sampling, Text, Tool, ToolCall, Usage
from polar.contract.completion import Completion, WeightSpan

BOS, SYSTEM, USER, ASSISTANT, TOOL, END, THINK, END_THINK, CALL, TOOLS = range(1, 11)
OPENERS = {"system": SYSTEM, "user": USER, "tool": TOOL}
LETTERS = 100
PAIRS = {"ab": 50, "cd": 51, '":': 52, " b": 53}
BASH = Tool("bash")


def encode(text: str) -> list[int]:
    """The tokenizer: pairs first, left to right."""
    out: list[int] = []
    at = 0
    while at < len(text):
        pair = text[at : at + 2]
        out.append(PAIRS[pair] if pair in PAIRS else LETTERS + ord(text[at]))
        at += 2 if pair in PAIRS else 1
    return out


def decode(tokens: Sequence[int]) -> str:
    pairs = {token: pair for pair, token in PAIRS.items()}
    return "".join(pairs[t] if t in pairs else chr(t - LETTERS) for t in tokens)


@dataclass(frozen=True)
class Template:
    """``drops_thinking``: a new user message removes the thinking before it. ``opener_stops``: a reply has no end
    token, the model stops by sampling the next turn's opener."""

    drops_thinking: bool = False
    opener_stops: bool = False

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        out = [BOS]
        if tools:
            out += [TOOLS, *encode(" ".join(tool.name for tool in tools)), END]
        last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
        for index, message in enumerate(messages):
            out += self.turn(message, keep_thinking=not self.drops_thinking or index > last_user)
        return [*out, ASSISTANT]

    def turn(self, message: Message, keep_thinking: bool = True) -> list[int]:
        content = message.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content if isinstance(part, Text))
        if message.role != "assistant":
            return [OPENERS[message.role], *encode(content), END]
        out = [ASSISTANT]
        if message.reasoning and keep_thinking:
            out += [THINK, *encode(message.reasoning), END_THINK]
        out += encode(content)
        for call in message.tool_calls:
            out += [CALL, *encode(call.name + " " + call.arguments)]
        return out if self.opener_stops else [*out, END]

    def bridge(self, sampled: Ids, messages: Sequence[Message], known: int) -> list[int] | str:
        """The ids of ``messages[known:]`` after a sampled reply, or why there is no such bridge."""
        new = messages[known:]
        if not len(sampled):
            return "reply_not_rendered"
        thought = any(m.role == "assistant" and m.reasoning for m in messages[:known])
        if self.drops_thinking and thought and any(m.role == "user" for m in new):
            return "template_rewrites_history"
        rendered = [token for message in new for token in self.turn(message)] + [ASSISTANT]
        last = int(sampled[-1])
        if not self.opener_stops:
            return rendered if last == END else "no_turn_end"
        return rendered[1:] if last == rendered[0] else "no_turn_end"


@dataclass(frozen=True)
class Generation:
    """What the engine knows of one generation."""

    context: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    conversation: tuple[Message, ...]


@dataclass
class Call:
    """A call in flight."""

    seq: int
    messages: list[Message]
    tools: tuple[Tool, ...]
    attachment: Attachment
    prompt: Ids
    declined: str | None


@dataclass
class ToyGateway:
    """Drives the session graph as the gateway does, in ``tito`` or ``chat`` mode."""

    mode: str = "tito"
    template: Template = field(default_factory=Template)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    version: str = "7"
    graph: SessionGraph = field(default_factory=SessionGraph)
    log: dict[str, Generation] = field(default_factory=dict)
    began: int = 0
    calls_named: int = 0

    def completions(self) -> list[Completion]:
        return self.graph.completions()

    def call(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (BASH,),
        reply: str | None = None,
        **how: object,
    ) -> Completion:
        """One call from beginning to end. See ``finish`` for ``how``."""
        return self.finish(self.begin(messages, tools), reply, **how)  # type: ignore[arg-type]

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool] = (BASH,)) -> Call:
        attachment = self.graph.attach(messages)
        parent, declined = attachment.parent, None
        prompt = self.template.render(attachment.messages, tools)
        if self.mode == "tito" and parent is not None:
            bridge = self.template.bridge(parent.response_ids, attachment.messages, attachment.parent_messages)
            if tuple(tools) != parent.tools:
                bridge = "tools_changed"
            if isinstance(bridge, str):
                declined = bridge
            else:
                prompt = [*self.graph.ids(parent.completion_id).tolist(), *bridge]
        self.began += 1
        return Call(self.began - 1, list(messages), tuple(tools), attachment, ids(prompt), declined)

    def finish(
        self,
        call: Call,
        reply: str | None = None,
        *,
        tool_call: str | None = None,
        thinking: str | None = None,
        spelled: bool = False,
        stop: int | None = None,
        fault: str | None = None,
        role_hint: str | None = None,
        digest: bytes = b"",
        temperature: float | None = 1.0,
    ) -> Completion:
        """Sample and record.

        Args:
            spelled: the model spells the pairs out, so that its reply is encoded otherwise on the way back.
            stop: the token that ends the reply; by default what the template wants.
            fault: ``no_ids``, ``nan``, ``sentinel``, ``abort``, ``abandon``, ``length`` (no stop token).
        """
        sampled, message = self._sample(reply, tool_call, thinking, spelled)
        finish: FinishReason = "tool_calls" if message.tool_calls else "stop"
        if fault == "length":
            finish = "length"
        else:
            by_default = (TOOL if message.tool_calls else USER) if self.template.opener_stops else END
            sampled.append(by_default if stop is None else stop)
        logprobs = np.asarray([-self.rng.random() for _ in sampled], dtype=np.float32)
        name = f"c{call.seq}"
        self.log[name] = Generation(
            tuple(call.prompt.tolist()),
            tuple(sampled),
            tuple(logprobs.tolist()),
            self.version,
            (*call.attachment.messages, message),
        )
        got, got_logprobs, finish = self._break(fault, ids(sampled), logprobs, finish)
        outcome, detail = judge(
            message=message,
            prompt_ids=call.prompt,
            response_ids=got,
            logprobs=got_logprobs,
            finish_reason=finish,
            usage=Usage(len(call.prompt), len(got)),
        )
        placement = self.graph.place(call.attachment, call.prompt, call.declined)
        completion = Completion(
            completion_id=name,
            session_id="s",
            attempt=1,
            seq=call.seq,
            parent_id=placement.parent_id,
            base_id=placement.base_id,
            shared=placement.shared,
            shared_messages=placement.shared_messages,
            split=placement.split,
            created_at=float(call.seq),
            finished_at=float(call.seq) + 0.5,
            dialect="openai_chat",
            mode="tito" if self.mode == "tito" else "chat",
            model_requested="toy",
            model_used="toy-1",
            messages=call.attachment.messages[placement.shared_messages :],
            reply=message,
            tools=call.tools,
            sampling=Sampling(temperature=temperature),
            request_digest=digest,
            prompt_delta=call.prompt[placement.shared :].copy(),
            response_ids=got,
            logprobs=got_logprobs,
            weight_spans=(WeightSpan(self.version, 0, len(got)),) if len(got) else (),
            finish_reason=finish,
            usage=Usage(len(call.prompt), len(got)),
            outcome="abandoned" if fault == "abandon" else outcome,
            detail=detail,
            role_hint=role_hint,
        )
        self.graph.add(completion)
        return completion

    def _sample(
        self, reply: str | None, tool_call: str | None, thinking: str | None, spelled: bool
    ) -> tuple[list[int], Message]:
        """Sampled ids without the stop token, and the message that a parser makes of them."""
        write = (lambda text: [LETTERS + ord(c) for c in text]) if spelled else encode
        content = "".join(self.rng.choices("abcdxyz ", k=6)) if reply is None else reply
        out: list[int] = []
        if thinking:
            out += [THINK, *write(thinking), END_THINK]
        out += write(content)
        calls: tuple[ToolCall, ...] = ()
        if tool_call is not None:
            self.calls_named += 1
            calls = (ToolCall(f"call_{self.calls_named}", "bash", tool_call),)
            out += [CALL, *write("bash " + tool_call)]
        assert decode([t for t in out if t >= 50]) == (thinking or "") + content + (
            f"bash {tool_call}" if tool_call is not None else ""
        )
        return out, Message("assistant", content, reasoning=thinking or None, tool_calls=calls)

    @staticmethod
    def _break(
        fault: str | None, sampled: Ids, logprobs: Floats, finish: FinishReason
    ) -> tuple[Ids, Floats, FinishReason]:
        if fault == "no_ids":
            return NO_IDS, NO_FLOATS, finish
        if fault in ("nan", "sentinel"):
            logprobs = logprobs.copy()
            logprobs[len(logprobs) // 2] = np.nan if fault == "nan" else -9999.0
        if fault == "abort":
            return sampled[:-1], logprobs[:-1], "abort"
        return sampled, logprobs, finish


def system(text: str = "agent") -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def tool(text: str, completion: Completion | None = None) -> Message:
    call_id = completion.reply.tool_calls[0].id if completion else None
    return Message("tool", text, tool_call_id=call_id)


def rewritten(message: Message) -> Message:
    """The reply as a harness sends it back that parses tool arguments and writes them its own way."""
    calls = tuple(
        ToolCall(call.id, call.name, json.dumps(dict(reversed(json.loads(call.arguments).items()))))
        for call in message.tool_calls
    )
    return Message(message.role, message.content, reasoning=message.reasoning, tool_calls=calls, name=message.name)
