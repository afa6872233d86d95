"""Callbacks: signed, under one id, until they have arrived; never to a host that the operator did not list."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import time
from typing import Any

import msgspec
import pytest

from polar.contract.errors import UsageError
from polar.contract.task import TaskRequest
from polar.rollout import callbacks, hosts
from polar.rollout.callbacks import CallbackConfig, signing_key
from polar.rollout.hosts import AllowedHosts, HostNotAllowed
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import task
from tests.rollout.receiver import HANG, Receiver


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "LOOK_EVERY", 0.02)


def convert(body: dict[str, Any]) -> TaskRequest:
    return msgspec.convert(body, TaskRequest)


QUICK = CallbackConfig(backoff_seconds=0.01, longest_backoff_seconds=0.05, timeout_seconds=5)


async def settled(world: World, task_id: str = "t1") -> None:
    """Until nothing is owed any more."""
    async with asyncio.timeout(20):
        while any(due.task_id == task_id for due in await world.ledger.callbacks_due(1e12)):
            await asyncio.sleep(0.02)


async def test_a_callback_has_whole_results_and_a_signature(make_world: MakeWorld) -> None:
    async with Receiver() as trainer:
        world = await make_world(callbacks=QUICK)
        await world.join()
        await world.run(task(num_samples=2, callback_url=f"{trainer.url}/done"))
        ((path, headers, body),) = await trainer.wait(1)
        await settled(world)
        assert path == "/done"
        told = json.loads(body)
        assert (told["task_id"], told["status"], len(told["results"])) == ("t1", "completed", 2)
        assert told["results"][0]["trajectory"]["traces"][0]["response_ids"]
        assert told["delivery_id"] == headers["webhook-id"]
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        mac = hmac.new(b"a secret of callbacks", signed, hashlib.sha256).digest()
        assert headers["webhook-signature"] == "v1," + base64.b64encode(mac).decode()
        assert len(trainer.got) == 1


async def test_a_callback_that_fails_is_tried_again_under_the_same_id(make_world: MakeWorld) -> None:
    async with Receiver(lambda call: 200 if call == 3 else 500) as trainer:
        world = await make_world(callbacks=QUICK)
        await world.join()
        await world.run(task(callback_url=trainer.url))
        got = await trainer.wait(4)
        await settled(world)
        assert len({headers["webhook-id"] for _, headers, _ in got}) == 1
        assert len({json.dumps(json.loads(body)) for _, _, body in got}) == 1
        text = (await world.admin.get("/metrics")).text
        assert 'polar_callback_tries_total{outcome="failed"} 3.0' in text
        assert 'polar_callback_tries_total{outcome="arrived"} 1.0' in text


async def test_one_that_hangs_holds_up_nobody_else(make_world: MakeWorld) -> None:
    async with Receiver(lambda _: HANG) as hung, Receiver() as trainer:
        world = await make_world(callbacks=CallbackConfig(timeout_seconds=60))
        await world.join()
        for number in range(12):  # more than one host may have at a time
            await world.run(task(f"h{number}", callback_url=hung.url))
        await hung.wait(1)
        await world.run(task("t1", callback_url=trainer.url))
        assert len(await trainer.wait(1)) == 1


async def test_a_dead_host_with_more_due_than_is_read_at_once_holds_up_nobody_else(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_DUE", 10)
    async with Receiver(lambda _: HANG) as hung, Receiver() as trainer:
        world = await make_world(callbacks=CallbackConfig(timeout_seconds=60))
        await world.join()
        for number in range(24):  # due before the one that can arrive
            await world.run(task(f"h{number}", callback_url=f"{hung.url}?n={number}"), calls=1)
        await world.run(task("t1", callback_url=trainer.url), calls=1)
        assert len(await trainer.wait(1)) == 1
        await settled(world)


async def test_hosts_that_were_called_are_not_kept(make_world: MakeWorld) -> None:
    async with Receiver() as trainer:
        world = await make_world(callbacks=QUICK)
        await world.join()
        await world.run(task(callback_url=trainer.url))
        await settled(world)
        async with asyncio.timeout(20):
            while world.server._callbacks._tries:
                await asyncio.sleep(0.01)
        assert dict(world.server._callbacks._by_host) == {}


async def test_a_hanging_receiver_is_left_after_its_time_and_tried_again(make_world: MakeWorld) -> None:
    config = CallbackConfig(backoff_seconds=0.01, timeout_seconds=0.2)
    async with Receiver(lambda call: 200 if call else HANG) as trainer:
        world = await make_world(callbacks=config)
        await world.join()
        await world.run(task(callback_url=trainer.url))
        await trainer.wait(2)
        await settled(world)


async def test_a_callback_to_localhost_by_name_arrives(make_world: MakeWorld) -> None:
    async with Receiver() as trainer:
        world = await make_world(callbacks=QUICK)
        await world.join()
        await world.run(task(callback_url=trainer.url.replace("127.0.0.1", "localhost")))
        assert len(await trainer.wait(1)) == 1


async def test_a_name_that_means_another_place_is_refused_when_it_is_called(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def elsewhere(*args: Any, **kwargs: Any) -> Any:
        return [{"host": "169.254.169.254", "hostname": "trainer.example", "port": 80, "family": socket.AF_INET}]

    monkeypatch.setattr(hosts.DefaultResolver, "resolve", elsewhere)
    world = await make_world(callbacks=CallbackConfig(allow=("trainer.example",), give_up_after_seconds=0.0))
    await world.join()
    await world.run(task(callback_url="http://trainer.example/done?token=secret"))
    await settled(world)
    (failed,) = (await world.get("/rollout/status"))["pipeline"]["callbacks_failed"]
    assert "169.254.169.254" in failed["error"]
    assert "secret" not in failed["error"]


async def test_a_redirect_is_not_followed(make_world: MakeWorld) -> None:
    async with Receiver(lambda call: 200 if call else 307) as trainer:
        world = await make_world(callbacks=QUICK)
        await world.join()
        await world.run(task(callback_url=f"{trainer.url}/done"))
        await trainer.wait(2, "/done")
        await settled(world)
        assert {path for path, _, _ in trainer.got} == {"/done"}


async def test_one_that_never_arrives_is_given_up_and_shown(make_world: MakeWorld) -> None:
    config = CallbackConfig(give_up_after_seconds=0.0)
    async with Receiver(lambda _: 503) as trainer:
        world = await make_world(callbacks=config)
        await world.join()
        await world.run(task(callback_url=trainer.url))
        await trainer.wait(1)
        await settled(world)
        (failed,) = (await world.get("/rollout/status"))["pipeline"]["callbacks_failed"]
        assert failed["task_id"] == "t1"
        assert "503" in failed["error"]
        assert (await world.get("/rollout/task/t1"))["status"] == "completed"


async def test_a_callback_survives_the_server(make_world: MakeWorld) -> None:
    async with Receiver(lambda call: 200 if call else HANG) as trainer:
        world = await make_world(callbacks=CallbackConfig(timeout_seconds=60))
        await world.join()
        await world.run(task(callback_url=trainer.url))
        await trainer.wait(1)
        await world.server.close()  # in the middle of the delivery
        after = await make_world(ledger=world.ledger, callbacks=QUICK)
        first, second = await trainer.wait(2)
        await settled(after)
        assert first[1]["webhook-id"] == second[1]["webhook-id"]


async def test_of_two_servers_over_one_ledger_one_sends(make_world: MakeWorld) -> None:
    async with Receiver() as trainer:
        world = await make_world(callbacks=QUICK)
        await make_world(ledger=world.ledger, callbacks=QUICK)
        await world.join()
        for number in range(20):
            await world.run(task(f"t{number}", callback_url=f"{trainer.url}/{number}"), calls=1)
        await trainer.wait(20)
        for number in range(20):
            await settled(world, f"t{number}")
        assert sorted(path for path, _, _ in trainer.got) == sorted(f"/{number}" for number in range(20))


async def test_what_a_server_that_died_had_taken_is_sent_by_another(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_MARGIN", 0.1)
    config = CallbackConfig(timeout_seconds=0.4)
    async with Receiver() as trainer:
        world = await make_world(callbacks=config)
        await world.server.close()
        ledger = world.ledger
        await ledger.submit(convert(task(callback_url=trainer.url)), 1.0)
        await ledger.cancel("t1", 2.0)
        (due,) = await ledger.callbacks_due(3.0)
        soon = time.time() + 0.5
        assert await ledger.put_off_callback(due, soon)  # and then it died
        await make_world(ledger=ledger, callbacks=config)
        await trainer.wait(1)
        assert time.time() >= soon
        await settled(world)
        assert len(trainer.got) == 1


async def test_a_cancelled_task_calls_back_as_failed(make_world: MakeWorld) -> None:
    async with Receiver() as trainer:
        world = await make_world(callbacks=QUICK)
        await world.submit(task(callback_url=trainer.url))
        await world.admin.delete("/rollout/task/t1")
        ((_, _, body),) = await trainer.wait(1)
        assert json.loads(body)["status"] == "cancelled"


# ---- where it may go -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/x",
        "https://[::1]:9/x",
        "http://localhost/x",
        "http://trainer.example:80/x",
        "http://a.lab.example/x",
        "http://10.1.2.3/x",
    ],
)
def test_listed_hosts_and_loopback_may_be_called(url: str) -> None:
    AllowedHosts(["trainer.example", "*.lab.example", "10.0.0.0/8"]).check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/x",
        "http://lab.example/x",
        "http://xlab.example/x",
        "http://trainer.example.evil.example/x",
        "http://169.254.169.254/latest",
        "http://11.0.0.1/x",
        "http://2130706433/x",
        "http://0x7f.1/x",
        "http://0.0.0.0/x",
        "http://[::ffff:169.254.169.254]/x",
        "ftp://127.0.0.1/x",
        "http:///x",
        "http://127.0.0.1:99999/x",
        "http://[::1/x",
        "http://u@127.0.0.1/x",
        "http://127.0.0.1\n/x",
        "",
    ],
)
def test_no_other_host_may(url: str) -> None:
    with pytest.raises(HostNotAllowed):
        AllowedHosts(["trainer.example", "*.lab.example", "10.0.0.0/8"]).check_url(url)


@pytest.mark.parametrize(
    ("host", "address", "allowed"),
    [
        ("localhost", "127.0.0.1", True),
        ("localhost", "10.0.0.1", False),
        ("trainer.example", "10.0.0.1", True),
        ("trainer.example", "127.0.0.1", True),
        ("trainer.example", "169.254.169.254", False),
        ("trainer.example", "::ffff:169.254.169.254", False),
        ("trainer.example", "fe80::1%eth0", False),
        ("trainer.example", "224.0.0.1", False),
        ("trainer.example", "0.0.0.0", False),
    ],
)
def test_what_a_name_resolves_to_is_checked(host: str, address: str, allowed: bool) -> None:
    hosts = AllowedHosts(["trainer.example"])
    if allowed:
        hosts.check_address(host, address)
    else:
        with pytest.raises(HostNotAllowed):
            hosts.check_address(host, address)


@pytest.mark.parametrize("entry", ["", "*", "10.0.0.0/99", "http://x"])
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(UsageError):
        AllowedHosts([entry])


def test_a_secret_is_text_or_base64() -> None:
    assert signing_key("plain") == b"plain"
    assert signing_key("whsec_" + base64.b64encode(b"\x00\xffkey").decode()) == b"\x00\xffkey"
    with pytest.raises(UsageError):
        signing_key("whsec_*")
