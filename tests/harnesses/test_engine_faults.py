"""An engine that fails once in the middle of a session: the harness asks again, by its own rules, and goes on; the
call that failed is kept with its reason, and nothing is trained twice.

Qwen Code asks the model to resume the half of a reply that it got, and then joins both halves into one reply that the
model never gave: its next call is the beginning of another trace.
"""

from __future__ import annotations

import pytest

from tests.harnesses.conftest import Run
from tests.harnesses.scripts import SHELL_TOOLS, in_order, last_words, shell
from tests.support.script import Step

pytestmark = [pytest.mark.real, pytest.mark.slow]

CLIS = [name for name in SHELL_TOOLS if name != "openhands_sdk"]


def with_fault(harness: str, fault: Step) -> list[Step]:
    """A turn, the fault, then what the harness asks again, until the file is there."""
    return [
        Step(text=f"I make it.\n{shell(harness, 'echo hello > greeting.txt')}"),
        fault,
        Step(text=f"I look at it.\n{shell(harness, 'cat greeting.txt')}"),
        *[Step(text=last_words(harness, "It is there."))] * 3,
    ]


@pytest.mark.parametrize("harness", CLIS)
async def test_an_engine_that_refuses_once(session: Run, harness: str):
    script = in_order(with_fault(harness, Step(status=500, error="out of memory")))
    ran = await session(harness, script, test="grep -qx hello greeting.txt")
    assert ran.outcome == ("COMPLETED", None)
    assert ran.fates == {"trained": 3, "engine_error": 1}
    assert ran.traces == [("main", 3, 1.0)]
    ran.check()


@pytest.mark.parametrize("harness", CLIS)
async def test_a_stream_that_is_cut_in_the_middle_of_a_reply(session: Run, harness: str):
    script = in_order(
        with_fault(harness, Step(text="I shall now look whether it is there.", cut_after=6, token_delay=0.02))
    )
    ran = await session(harness, script, test="grep -qx hello greeting.txt")
    assert ran.outcome == ("COMPLETED", None)
    assert ran.fates == {"trained": 3, "engine_error": 1}
    assert ran.traces == ([("main", 2, 1.0), ("main", 1, 1.0)] if harness == "qwen_code" else [("main", 3, 1.0)])
    ran.check()
