"""Guesses at session keys: each is refused and counted, the log hears of them in bounds, and no key is in it."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from polar import guesses
from polar.gateway.metrics import NodeCollector
from polar.gateway.session import new_key
from polar.guesses import Guesses
from tests.gateway.conftest import MakeWorld, World
from tests.support.script import Step


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "polar.refused"]


async def test_guesses_at_keys_are_counted_and_logged_without_the_keys(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world: World = await make_world([Step(text="hi")])  # type: ignore[misc]
    registry = CollectorRegistry()
    registry.register(NodeCollector(world.node))
    caplog.set_level(logging.INFO)
    keys = [new_key() for _ in range(9)]
    async with aiohttp.ClientSession() as client:
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(
                f"{world.node.server.url}/v1/chat/completions", json={}, headers=headers
            ) as answer:
                assert answer.status == 401
    assert registry.get_sample_value("polar_unknown_keys_total") == 9
    assert told(caplog) == ["refused 1 times: unknown session key, the last time from 127.0.0.1"]
    assert not any(key in caplog.text for key in keys)


async def test_a_flood_becomes_a_line_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guesses, "EVERY", 0.05)
    seen = Guesses("token")
    for number in range(100):
        seen.refused(f"10.0.0.{number}")
    async with asyncio.timeout(20):
        while len(told(caplog)) < 2:
            await asyncio.sleep(0.01)
    first, second = told(caplog)
    assert first == "refused 1 times: unknown token, the last time from 10.0.0.0"
    assert second == "refused 99 times: unknown token, the last time from 10.0.0.99"
    assert seen.count == 100
