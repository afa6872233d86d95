"""Twenty turns of thinking and tools: in whatever way a harness writes its history back, it stays one trace.

OpenHands SDK does it too (``python -m tests.harnesses.record_sessions openhands_sdk``), in a minute of its own.
"""

from __future__ import annotations

import pytest

from tests.harnesses.conftest import Run
from tests.harnesses.scripts import DIALECTS, SHELL_TOOLS, TWENTY, TWENTY_THERE, twenty_turns

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.parametrize("harness", [name for name in SHELL_TOOLS if name != "openhands_sdk"])
async def test_twenty_turns_are_one_trace(session: Run, harness: str):
    ran = await session(harness, twenty_turns(harness), instruction=TWENTY, test=TWENTY_THERE)
    assert (ran.outcome, ran.fates) == (("COMPLETED", None), {"trained": 21})
    assert ran.traces == [("main", 21, 1.0)]
    assert {completion.dialect for completion in ran.completions} == {DIALECTS.get(harness, "openai_chat")}
    ran.check()
