"""What the scripted model says to real harnesses. A chain of turns is told from others by its mark: the task's
instruction holds the first link, and the output of every command the next one."""

from __future__ import annotations

from tests.cli.making import bash
from tests.support.script import Step

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def link(chain: str, turn: int) -> str:
    return f"[{chain}:{turn}]"


def chain(name: str, commands: list[str], last: str) -> list[Step]:
    """One turn for each command, with a word before it, and then ``last``."""
    turns = [
        f"Step {turn}.\n{bash(f'{command}; echo {link(name, turn + 1)!r}')}" for turn, command in enumerate(commands)
    ]
    return [Step(text=text, when=link(name, turn)) for turn, text in enumerate([*turns, last])]


def both(name: str, commands: list[str]) -> list[Step]:
    """The chain for pi, which ends with a text, and for mini, which ends with a call."""
    return [
        *chain(f"pi-{name}", commands, "All of it is done."),
        *chain(f"mini_swe_agent-{name}", commands, f"Done.\n{bash(SUBMIT)}"),
    ]


MAKE = ["echo 'polar bear' > animal.txt", "cat animal.txt"]
LONG = [f"""echo 'line {turn} of "many", naïve' >> out.txt""" for turn in range(19)]
DIE = ["echo half > half.txt; kill -9 $PPID"]

BROKEN = [
    Step(text="no ids behind this", when="[no ids]", omit_token_ids=True),
    Step(text="a logprob is missing", when="[no logprob]", logprobs="null"),
    Step(when="[refused]", status=400, error="the engine does not like it"),
]

STEPS = [
    *BROKEN,
    *both("make", MAKE),
    *both("long", LONG),
    *both("die", DIE),
    *(Step(text=f"reply {n}", chunk_tokens=2) for n in range(40)),
]
