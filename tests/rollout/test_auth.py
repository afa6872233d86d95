"""Who may do what: every route with every credential, and a log of what was done and refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from polar.contract.errors import UsageError
from polar.rollout import auth
from polar.rollout.auth import AuthConfig, Credentials, TokenConfig, load_credentials
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import TOKENS, task

MAY = {
    "admin": {"admin", "submit", "read"},
    "submit": {"submit", "read"},
    "read": {"read"},
    "node": {"node"},
    "nobody": set(),
}


async def test_every_route_takes_the_roles_it_says_and_no_other(world: World) -> None:
    refused = 0
    for route in world.server.routes:
        if route.name == "events":
            continue  # an answer without an end, where it is allowed
        path = re.sub(r"{\w+}", "some-1", route.path)
        for who, roles in MAY.items():
            answer = await world.as_(who).request(route.method, path)
            allowed = route.role is None or route.role in roles
            expected = "allowed" if allowed else 401 if who == "nobody" else 403
            got = answer.status_code if answer.status_code in (401, 403) else "allowed"
            assert got == expected, (who, route.method, path, answer.text)
            if not allowed:
                refused += 1
                assert set(answer.json()) == {"detail"}
                assert not any(token in answer.text for token in TOKENS.values())
    entries = [entry for entry in await world.ledger.audit_log(10_000) if not entry.allowed]
    assert refused - 30 < len(entries) <= refused  # a flood of unknown callers becomes a number
    assert {"admin", "submit", "read", "node", "unknown"} >= {entry.actor for entry in entries}


async def test_events_need_a_credential(world: World) -> None:
    assert (await world.as_("nobody").get("/events")).status_code == 401
    answer = await world.as_("node").get("/events")
    assert answer.status_code == 403
    assert answer.json()["detail"] == "the token node has the role node, and this needs read"


async def test_what_is_no_token_is_401(world: World) -> None:
    shown: list[dict[str, Any]] = [
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKENS["admin"]},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {TOKENS['admin']}"},
        {"Authorization": f"Bearer {TOKENS['admin']}x"},
        {"Authorization": f"Bearer {TOKENS['admin'][:-1]}"},
        {"Authorization": "Bearer \xff".encode("latin-1")},
        {"X-Polar-Control-Token": "wrong"},
    ]
    for headers in shown:
        answer = await world.as_("nobody").get("/tasks", headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_token_may_come_in_the_header_that_other_clients_use(world: World) -> None:
    answer = await world.as_("nobody").get("/tasks", headers={"X-Polar-Control-Token": TOKENS["read"]})
    assert answer.status_code == 200


async def test_callers_without_a_credential_may_what_the_operator_lets_them(make_world: MakeWorld) -> None:
    world = await make_world(anonymous="read")
    assert (await world.as_("nobody").get("/tasks")).status_code == 200
    answer = await world.as_("nobody").post("/rollout/task/submit", json=task())
    assert answer.status_code == 403
    assert answer.json()["detail"] == "a caller without a token has the role read, and this needs submit"
    bad = await world.as_("nobody").get("/tasks", headers={"Authorization": "Bearer wrong"})
    assert bad.status_code == 401


async def test_what_was_read_exported_and_cancelled_is_in_the_log(world: World) -> None:
    await world.join()
    await world.run(task())
    reader = world.as_("read")
    for path in ("/rollout/task/t1", "/rollout/task/t1/traces.jsonl", "/results", "/sessions/t1-0/completions"):
        assert (await reader.get(path)).status_code == 200
    assert (await reader.get("/rollout/task/t1", params={"results": "none"})).status_code == 200
    assert (await reader.delete("/rollout/task/t1")).status_code == 403
    await world.as_("submit").delete("/rollout/task/t1")
    await world.admin.delete("/nodes/n1")
    log = [(e.actor, e.action, e.subject, e.allowed) for e in await world.ledger.audit_log()]
    assert log == [
        ("submit", "task.submit", "t1", True),
        ("read", "task.read", "t1", True),
        ("read", "traces.export_jsonl", "t1", True),
        ("read", "results.read", "", True),
        ("read", "completions.read", "t1-0", True),
        ("read", "task.cancel", "t1", False),
        ("submit", "task.cancel", "t1", True),
        ("admin", "node.drain", "n1", True),
    ]


async def test_a_flood_of_unknown_callers_becomes_a_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth.time, "time", lambda: 1000.0)
    for _ in range(50):
        await world.as_("nobody").get("/tasks")
    monkeypatch.setattr(auth.time, "time", lambda: 1001.0)
    await world.as_("nobody").get("/tasks")
    entries = await world.ledger.audit_log()
    assert len(entries) == auth.REFUSALS_PER_SECOND + 1
    assert "30 more" in entries[-1].detail


# ---- tokens ----------------------------------------------------------------------------------------------


def test_tokens_are_made_once_in_files_of_their_user(tmp_path: Path) -> None:
    made, files = load_credentials(AuthConfig(), tmp_path / "serve", {})
    again, _ = load_credentials(AuthConfig(), tmp_path / "serve", {})
    assert [path.name for path in files] == ["admin.token", "node.token"]
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
        for credentials in (made, again):
            actor = credentials.who(path.read_text().strip())
            assert actor is not None
            assert actor.role == path.name.partition(".")[0]
    assert made.of_node(auth.SHARED_NODE) == again.of_node(auth.SHARED_NODE) == files[1].read_text().strip()


def test_the_environment_comes_first(tmp_path: Path) -> None:
    env = {"POLAR_ADMIN_TOKEN": "a" * 20, "POLAR_NODE_TOKEN": "n" * 20, "T": "t" * 20}
    config = AuthConfig(tokens=(TokenConfig(name="trainer", role="submit", env="T"),))
    credentials, files = load_credentials(config, tmp_path, env)
    assert files == list(tmp_path.iterdir()) == []
    found = {name: credentials.who(token) for name, token in env.items()}
    roles = {name: (actor.name, actor.role) for name, actor in found.items() if actor}
    assert roles == {
        "POLAR_ADMIN_TOKEN": ("admin", "admin"),
        "POLAR_NODE_TOKEN": ("node", "node"),
        "T": ("trainer", "submit"),
    }


@pytest.mark.parametrize(
    "env",
    [
        {"POLAR_ADMIN_TOKEN": "short"},
        {},
        {"T": "x" * 3},
        {"T": "a" * 20, "POLAR_ADMIN_TOKEN": "a" * 20},
    ],
)
def test_tokens_that_are_no_good_are_refused(tmp_path: Path, env: dict[str, str]) -> None:
    config = AuthConfig(tokens=(TokenConfig(name="trainer", role="read", env="T"),))
    with pytest.raises(UsageError) as error:
        load_credentials(config, tmp_path, env)
    assert not any(value in str(error.value) for value in env.values())


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_credentials(AuthConfig(), tmp_path, {})
    os.chmod(tmp_path / "admin.token", 0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        load_credentials(AuthConfig(), tmp_path, {})


def test_without_a_token_nobody_is_somebody() -> None:
    credentials = Credentials([("admin", "admin", "a" * 20)])
    assert credentials.who(None) is None
    assert credentials.who("") is None
    assert credentials.who("\ud800") is None
