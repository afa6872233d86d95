"""What a harness or an operator is warned of: once in the log, and with every call in its record."""

from __future__ import annotations

import logging

from polar.gateway import session as sessions
from polar.gateway.session import LiveSession
from polar.store.base import SessionRecord
from tests.gateway.conftest import World
from tests.support.script import Step

MESSAGES = [{"role": "user", "content": "hi"}]


async def ask(world: World, session: LiveSession, **fields: object) -> None:
    client = world.client(api_key=session.key)
    await client.chat.completions.create(model="m", messages=MESSAGES, extra_body=fields)  # type: ignore[arg-type]


async def another(world: World, name: str) -> LiveSession:
    record = SessionRecord(
        session_id=name, task_id="t", sample_index=1, state="RUNNING", created_at=0.0, updated_at=0.0
    )
    await world.node.store.put_session(record)
    session = LiveSession(session_id=name)
    world.node.gateway.open(session)
    return session


async def test_what_concerns_every_session_is_logged_once_and_recorded_with_each(make_world, caplog) -> None:
    caplog.set_level(logging.DEBUG, "polar.gateway")
    world: World = await make_world(lambda _: Step(text="Fine."), mode="chat")
    second = await another(world, "s2")
    for session in (world.session, second, second):
        await ask(world, session, verbosity="low")
    lines = [record for record in caplog.records if record.name == "polar.gateway" and "session s" in record.message]
    told = [(record.levelname, record.message.split(": ")[0]) for record in lines]
    assert told == [("WARNING", "session s")] * 2 + [("DEBUG", "session s2")] * 2, "the field, and the defaults"
    for name, count in (("s", 1), ("s2", 2)):
        kept = await world.node.store.completions(name)
        assert len(kept) == count
        for completion in kept:
            assert "verbosity" in completion.metadata["warnings"][0]
            assert "left to the engine" in completion.metadata["logprobs_warning"]


async def test_lines_without_end_do_not_fill_the_memory(make_world, monkeypatch) -> None:
    monkeypatch.setattr(sessions, "MOST_TOLD", 3)
    world: World = await make_world([])
    for index in range(10):
        world.session.warn(f"field{index} was passed over")
    assert len(world.session.told) <= 3
