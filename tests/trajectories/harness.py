"""A harness that does whatever harnesses do, driven by a list of small steps so that Hypothesis can shrink it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from polar.contract.chat import Message, Text, Tool
from polar.contract.completion import Completion

from .toy import BASH, Template, ToyGateway, rewritten, system, tool, user

FAULTS = (None, None, None, "length", "no_ids", "nan", "sentinel", "abort", "abandon")
ECHOES = ("same", "rewritten", "no_thinking", "trimmed_thinking", "empty_block", "own_ids")
ARGUMENTS = ('{"a":1,"b":2}', '{"cd": "ab"}', "{}", '{"ab": [1.0, 2]}')


@dataclass
class Agent:
    """One conversation as the harness holds it."""

    history: list[Message]
    tools: tuple[Tool, ...] = (BASH,)
    last: Completion | None = None


@dataclass
class Harness:
    """Several agents that take turns at one session."""

    gateway: ToyGateway
    agents: list[Agent] = field(default_factory=lambda: [Agent([system(), user("task ab")])])
    said: int = 0

    def step(self, action: str, who: int, how: int) -> None:
        agent = self.agents[who % len(self.agents)]
        getattr(self, f"_{action}")(agent, how)

    def _turn(self, agent: Agent, how: int) -> None:
        """A call; its reply goes into the history in one of the ways that harnesses write it."""
        self._ask(agent)
        fault = FAULTS[how % len(FAULTS)]
        completion = self.gateway.call(agent.history, agent.tools, **self._reply(how), fault=fault)
        self._take(agent, completion, ECHOES[how % len(ECHOES)])

    def _siblings(self, agent: Agent, how: int) -> None:
        """Best of two: both are in flight at once, one is kept."""
        self._ask(agent)
        calls = [self.gateway.begin(agent.history, agent.tools) for _ in range(2)]
        if how % 2:
            calls.reverse()
        replies = [self.gateway.finish(call, **self._reply(how + i)) for i, call in enumerate(calls)]
        self._take(agent, replies[how % 2], "same")

    def _retry(self, agent: Agent, how: int) -> None:
        """The client goes away and asks the same again."""
        self._ask(agent)
        digest = str(self.said).encode()
        self.gateway.call(agent.history, agent.tools, **self._reply(how), fault="abandon", digest=digest)
        self._take(
            agent, self.gateway.call(agent.history, agent.tools, **self._reply(how + 1), digest=digest), "same"
        )

    def _fork(self, agent: Agent, how: int) -> None:
        self.agents.append(Agent(list(agent.history), agent.tools, agent.last))

    def _subagent(self, agent: Agent, how: int) -> None:
        self.agents.append(Agent([system(f"helper {how % 2}"), user("look")], agent.tools))

    def _title(self, agent: Agent, how: int) -> None:
        self.gateway.call([system("write a title"), user("task ab")], ())

    def _summary(self, agent: Agent, how: int) -> None:
        """Compaction: a summary is asked for on top of the history, without tools, and the history starts again."""
        self._ask(agent)
        summary = self.gateway.call([*agent.history, user("sum it up")], ())
        agent.history = [agent.history[0], user(f"so far: {summary.reply.content}")]
        agent.last = None

    def _edit(self, agent: Agent, how: int) -> None:
        """An earlier message changes."""
        at = how % len(agent.history)
        if agent.history[at].role in ("user", "tool"):
            agent.history[at] = msgspec.structs.replace(agent.history[at], content=f"edited {how % 3}")

    def _foreign(self, agent: Agent, how: int) -> None:
        """The harness speaks for the model (A10)."""
        agent.history += [Message("assistant", "I have reached the limit"), user("go on")]
        agent.last = None

    def _ask(self, agent: Agent) -> None:
        """What comes after the last reply: the results of its tools, or the user."""
        if agent.history[-1].role != "assistant":
            return
        self.said += 1
        if agent.last is not None and agent.last.reply.tool_calls:
            agent.history.append(tool(f"result {self.said % 3}", agent.last))
        else:
            agent.history.append(user(f"more {self.said % 3}"))

    @staticmethod
    def _reply(how: int) -> dict[str, object]:
        return {
            "tool_call": ARGUMENTS[how % len(ARGUMENTS)] if how % 3 else None,
            "thinking": "hm ab" if how % 2 else None,
            "spelled": how % 5 == 1,
        }

    @staticmethod
    def _take(agent: Agent, completion: Completion, echo: str) -> None:
        reply = completion.reply
        if echo == "rewritten":
            reply = rewritten(reply)
        elif echo == "no_thinking":
            reply = msgspec.structs.replace(reply, reasoning=None)
        elif echo == "trimmed_thinking" and reply.reasoning:
            reply = msgspec.structs.replace(reply, reasoning=f" {reply.reasoning}\n")
        elif echo == "empty_block" and isinstance(reply.content, str):
            reply = msgspec.structs.replace(reply, content=(Text(reply.content), Text("")))
        elif echo == "own_ids":
            calls = tuple(msgspec.structs.replace(c, id=f"mine-{c.id}") for c in reply.tool_calls)
            reply = msgspec.structs.replace(reply, tool_calls=calls)
        agent.history.append(reply)
        agent.last = completion


ACTIONS = (*["turn"] * 6, "siblings", "retry", "fork", "subagent", "title", "summary", "edit", "foreign")

steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(0, 89)), min_size=1, max_size=18)


@st.composite
def sessions(draw: st.DrawFn, mode: str | None = None) -> ToyGateway:
    """A finished session of a harness and the engine's log of it."""
    gateway = ToyGateway(
        mode=mode or draw(st.sampled_from(("tito", "chat"))),
        template=Template(drops_thinking=draw(st.booleans()), opener_stops=draw(st.booleans())),
        rng=random.Random(draw(st.integers(0, 2**16))),
    )
    harness = Harness(gateway)
    for action, who, how in draw(steps):
        gateway.version = str(gateway.began // 3)
        harness.step(action, who, how)
    return gateway
