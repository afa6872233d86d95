"""How many traces a session becomes with the bridge and without, family by family: a table of docs/rendering.md.

``python -m tests.rendering.merge_factor`` prints it. A session's replies are sampled as models sample: JSON in
another notation than the template's, and every few words in tokens that the tokenizer itself would not choose.
Without the bridge each call is rendered in full, and goes on a trace only where its ids begin with all of that
trace's; with it, wherever the bridge is not declined.

Sessions: those that the CLIs really had (``tests/fixtures/cli_sessions/NAME.json.gz``: the chats of a session, call
by call), and one that is made here: twenty calls in three user turns.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from polar.contract.arrays import Ids, ids
from polar.contract.chat import Chat, Message, Tool, ToolCall
from polar.rendering.base import Prompt, RenderError, Turn
from polar.rendering.generic import TemplateRenderer
from tests.rendering import assets
from tests.rendering.models import MODELS, Model, load
from tests.rendering.talk import system, user
from tests.rendering.written import Arguments

SESSIONS = Path(__file__).parents[1] / "fixtures" / "cli_sessions"
BEGIN, END = "<!-- merge factor: begin -->", "<!-- merge factor: end -->"
NONE = "–"


@dataclass(frozen=True)
class Step:
    """A reply and what the client sends after it."""

    reply: Message
    follow: tuple[Message, ...]


@dataclass(frozen=True)
class Session:
    """A conversation call by call."""

    name: str
    tools: tuple[Tool, ...]
    opening: tuple[Message, ...]
    turns: tuple[Step, ...]


@dataclass
class Count:
    """Calls, traces and their tokens, with shared prefixes counted once a trace."""

    calls: int = 0
    traces: int = 0
    tokens: int = 0
    call_tokens: int = 0

    def add(self, prompt: Ids, response: Ids, trace: Ids | None) -> Ids:
        """A call that goes on ``trace``, if its prompt begins with all of it; the trace with it."""
        whole = np.concatenate([prompt, response])
        goes_on = trace is not None and len(trace) <= len(prompt) and np.array_equal(prompt[: len(trace)], trace)
        self.calls += 1
        self.traces += not goes_on
        self.tokens += len(whole) - (len(trace) if goes_on and trace is not None else 0)
        self.call_tokens += len(whole)
        return whole


def measured(model: Model, renderer: TemplateRenderer, session: Session, *, bridge: bool) -> Count:
    """The session sampled by this model.

    Raises:
        RenderError: its template refuses the session.
    """
    dice = random.Random(7)
    count = Count()
    messages = list(session.opening)
    trace: Ids | None = None
    turn: Turn | None = None
    for step in session.turns:
        chat = Chat(model="m", messages=tuple(messages), tools=session.tools, template_args=model.args)
        bridged = renderer.bridge(turn, chat) if bridge and turn else None
        prompt = bridged if isinstance(bridged, Prompt) else renderer.render(chat)
        response = _sampled(model, renderer, prompt, step.reply, dice, sum(len(m.tool_calls) for m in messages))
        reader = renderer.reader(chat, prompt)
        reader.feed(response)
        reply = reader.finish("stop").message
        trace = count.add(prompt.ids, ids(response), trace)
        messages += [reply, *_answering(step.follow, reply)]
        turn = Turn(prompt, ids(response), len(messages) - len(step.follow))
    return count


def _answering(follow: Sequence[Message], reply: Message) -> list[Message]:
    """The client's messages, results under the ids of this reply's calls."""
    calls = iter(reply.tool_calls)
    out = []
    for message in follow:
        call = next(calls, None) if message.role == "tool" else None
        out.append(msgspec.structs.replace(message, tool_call_id=call.id) if call else message)
    return out


def _sampled(
    model: Model, renderer: TemplateRenderer, prompt: Prompt, reply: Message, dice: random.Random, calls_before: int
) -> list[int]:
    """Ids of the reply in the model's form, as a model would sample it. Kimi numbers its calls."""
    calls = [(call.name, _arguments(call)) for call in reply.tool_calls]
    thought = reply.reasoning if model.think else None
    text = model.reply(prompt, thought, str(reply.content), *calls)
    text = text.replace(":0<|tool_call_argument_begin|>", f":{calls_before}<|tool_call_argument_begin|>")
    for _, arguments in calls:
        if dice.random() < 0.3:
            canonical = json.dumps(arguments, ensure_ascii=False)
            text = text.replace(canonical, json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))
    encode, decode = renderer.tokenizer.encode, renderer.tokenizer.decode
    out: list[int] = []
    for token in encode(text):
        word = decode([token])
        pieces = [*encode(word[:1]), *encode(word[1:])] if dice.random() < 0.02 and word.isalpha() else []
        out += pieces if decode(pieces) == word else [token]
    return out


def _arguments(call: ToolCall) -> Arguments:
    value = json.loads(call.arguments or "{}")
    return value if isinstance(value, dict) else {}


def made() -> Session:
    """Twenty calls of an agent that reads, edits and tests, with a new user message after the 7th and the 14th."""
    bash = Tool(
        name="bash",
        description="Run a command.",
        parameters={
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
            "required": ["command"],
        },
    )
    turns: list[Step] = []
    for n in range(1, 21):
        thought = f"Step {n}: what did the last output say? I look at the next file."
        if n in (7, 14, 20):
            reply = Message(role="assistant", content=f"Part {n // 7} is done: the tests pass.", reasoning=thought)
            turns.append(Step(reply, (user(f"Good. Now part {n // 7 + 1}."),)))
            continue
        command = json.dumps({"command": f'sed -n 1,{n * 10}p "src/part {n}.py" | head', "timeout": n})
        call = ToolCall(f"call{n:05}", "bash", command)
        output = Message(role="tool", content=f"def part_{n}():\n    return {n}\n\nexit code 0", tool_call_id=call.id)
        turns.append(Step(Message(role="assistant", reasoning=thought, tool_calls=(call,)), (output,)))
    opening = (system("You are an agent in a repository. Use the tool."), user("Do part 1 of the work."))
    return Session("made", (bash,), opening, tuple(turns))


def recorded(folder: Path = SESSIONS) -> list[Session]:
    """The CLIs' sessions: of each the longest chat of those that go on from one another, cut at its replies."""
    sessions = []
    for path in sorted(folder.glob("*.json.gz")):
        chats = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=list[Chat])
        chat = max(chats, key=lambda chat: len(chat.messages))
        starts = [place for place, message in enumerate(chat.messages) if message.role == "assistant"]
        turns = [
            Step(chat.messages[start], chat.messages[start + 1 : end])
            for start, end in zip(starts, [*starts[1:], len(chat.messages)], strict=True)
        ]
        name = path.name.removesuffix(".json.gz")
        sessions.append(Session(name, chat.tools, chat.messages[: starts[0]], tuple(turns)))
    return sessions


def table(folder: Path) -> str:
    """The table in Markdown: of each session the calls a trace, without and with the bridge, and how many times
    fewer tokens are trained over than without merging at all."""
    sessions = [made()]
    heads = [f"{session.name}, {len(session.turns)} calls" for session in sessions]
    rows = [("Family", "Template", *heads), ("---",) * (2 + len(sessions))]
    for model in MODELS:
        if model.call is None:
            continue
        renderer = load(folder, model)
        rows.append((model.family, model.name, *(_cell(model, renderer, session) for session in sessions)))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _cell(model: Model, renderer: TemplateRenderer, session: Session) -> str:
    try:
        without, with_ = (measured(model, renderer, session, bridge=bridge) for bridge in (False, True))
    except RenderError:
        return "refused by the template"
    calls = f"{without.calls / without.traces:.1f} → {with_.calls / with_.traces:.1f}"
    return f"{calls} ({with_.call_tokens / with_.tokens:.1f}x fewer tokens)"


if __name__ == "__main__":
    sys.stdout.write(table(assets.fetch()) + "\n")
