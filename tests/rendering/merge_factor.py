"""How many traces a session becomes with the bridge and without, family by family: two tables of docs/rendering.md.

``python -m tests.rendering.merge_factor`` works them out (minutes) and writes them into the page. A session's replies
are sampled as models sample: JSON in another notation than the template's, and every few words in tokens that the
tokenizer itself would not choose. Without the bridge each call is rendered in full, and goes on a trace only where
its ids begin with all of that trace's; with it, wherever the bridge is not declined.

Sessions: one that is made here, of twenty calls in three user turns, and one that each CLI really had, of 21 calls in
one user turn (``tests/fixtures/cli_sessions/NAME.json.gz``; ``tests/harnesses/record_sessions.py`` records them).
"""

from __future__ import annotations

import functools
import gzip
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from polar.contract.arrays import Ids, ids
from polar.contract.chat import Chat, Message, Tool, ToolCall
from polar.rendering.base import Declined, Prompt, RenderError, Turn
from polar.rendering.generic import TemplateRenderer
from tests.rendering import assets
from tests.rendering.conformance import PAGE, replaced
from tests.rendering.models import MODELS, Model, load
from tests.rendering.talk import system, user
from tests.rendering.written import Arguments

SESSIONS = Path(__file__).parents[1] / "fixtures" / "cli_sessions"
MADE = ("<!-- merge factor: begin -->", "<!-- merge factor: end -->")
RECORDED = ("<!-- merge factor of the CLIs: begin -->", "<!-- merge factor of the CLIs: end -->")
REFUSED = "refused by the template"
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
    """Calls, traces and their tokens, with shared prefixes counted once a trace; why bridges were declined."""

    calls: int = 0
    traces: int = 0
    tokens: int = 0
    call_tokens: int = 0
    declined: Counter[str] = field(default_factory=Counter)

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
        if isinstance(bridged, Declined):
            count.declined[bridged.reason] += 1
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


def made_table(folder: Path) -> str:
    """The made session in Markdown: calls a trace, without and with the bridge, and how many times fewer tokens are
    trained over than without merging at all."""
    session = made()
    rows = [("Family", "Template", f"{session.name}, {len(session.turns)} calls")]
    for model in _callers():
        counts = _counts(model, load(folder, model), session)
        rows.append((model.family, model.name, _in_words(*counts) if counts else REFUSED))
    return "\n".join([_line(rows[0]), _line(["---"] * 3), *map(_line, rows[1:])])


def recorded_table(folder: Path) -> str:
    """The CLIs' sessions in Markdown: a row a model. They are worked out on all cores."""
    sessions = recorded()
    heads = ["Family", "Template", *(session.name for session in sessions), "Not bridged, of how many calls"]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(functools.partial(recorded_row, folder, sessions), _callers()))
    return "\n".join([_line(heads), _line(["---"] * len(heads)), *rows])


def recorded_row(folder: Path, sessions: Sequence[Session], model: Model) -> str:
    """Of each session the traces, without and with the bridge, then calls a trace with it and how many times fewer
    tokens are trained over; at last why calls were not bridged."""
    renderer = load(folder, model)
    cells, declined, gone_on = [], Counter[str](), 0
    for session in sessions:
        counts = _counts(model, renderer, session)
        if counts is None:
            cells.append(REFUSED)
            continue
        without, with_ = counts
        cells.append(f"{without.traces} → {with_.traces} ({_factor(with_):.1f}, {_fewer(with_):.1f}x)")
        declined += with_.declined
        gone_on += with_.calls - 1
    why = [f"{reason} {times}/{gone_on}" for reason, times in declined.most_common()]
    return _line([model.family, model.name, *cells, ", ".join(why) or NONE])


def _callers() -> list[Model]:
    return [model for model in MODELS if model.call is not None]


def _counts(model: Model, renderer: TemplateRenderer, session: Session) -> tuple[Count, Count] | None:
    """Without the bridge and with it."""
    try:
        return measured(model, renderer, session, bridge=False), measured(model, renderer, session, bridge=True)
    except RenderError:
        return None


def _factor(count: Count) -> float:
    return count.calls / count.traces


def _fewer(count: Count) -> float:
    return count.call_tokens / count.tokens


def _in_words(without: Count, with_: Count) -> str:
    return f"{_factor(without):.1f} → {_factor(with_):.1f} ({_fewer(with_):.1f}x fewer tokens)"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Write the page."""
    page, folder = PAGE.read_text(encoding="utf-8"), assets.fetch()
    page = replaced(page, *MADE, made_table(folder))
    PAGE.write_text(replaced(page, *RECORDED, recorded_table(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
