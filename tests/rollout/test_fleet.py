"""Gateways on other machines: bare sessions and inference, asked of the nodes under the node credential."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from polar.contract.arrays import to_json
from polar.contract.errors import UsageError
from polar.contract.rollout import Delivery
from polar.gateway.inference import InferenceControl
from polar.gateway.server import GatewayServer
from polar.rollout import bare
from polar.rollout.auth import AuthConfig, TokenConfig, node_credentials
from polar.rollout.hosting import LocalInference
from polar.rollout.node_app import node_app
from polar.store.base import StoreFailure
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import TOKENS, Host, completion, result


class RemoteNode:
    """A node's control plane on a port of its own, with a real gate."""

    def __init__(self, node_id: str) -> None:
        self.sessions = Host(f"bare-{node_id}")
        self.gate = InferenceControl()
        self.registry = CollectorRegistry()
        config = AuthConfig(tokens=(TokenConfig(name="watcher", role="read", env="WATCHER"),))
        credentials = node_credentials(config, TOKENS["node"], {"WATCHER": TOKENS["read"]})
        where = {"node_id": node_id, "server": "http://server"}
        self._http = GatewayServer(
            node_app(self.sessions, LocalInference(self.gate), self.registry, credentials, **where)
        )

    @property
    def url(self) -> str:
        return self._http.url


@pytest.fixture
async def nodes(make_world: MakeWorld) -> Any:
    async with AsyncExitStack() as stack:
        world = await make_world()
        made: dict[str, RemoteNode] = {}
        for name in ("n1", "n2"):
            node = made[name] = RemoteNode(name)
            await node._http.start()
            stack.push_async_callback(node._http.close)
            await world.join(name, gateway_url=node.url)
        yield world, made


Nodes = tuple[World, dict[str, RemoteNode]]


async def test_pausing_pauses_every_node(nodes: Nodes) -> None:
    world, made = nodes
    answer = await world.admin.post("/admin/inference/pause", params={"timeout_seconds": 5})
    assert (answer.status_code, answer.json()["paused"]) == (200, True)
    assert all(node.gate.status().paused for node in made.values())
    status = await world.get("/admin/inference/status")
    assert (status["paused"], set(status["nodes"])) == (True, {"n1", "n2"})
    assert (await world.admin.post("/admin/inference/resume")).json()["paused"] is False
    assert not any(node.gate.status().paused for node in made.values())


async def test_a_pause_that_one_node_can_not_make_is_undone_everywhere(nodes: Nodes) -> None:
    world, made = nodes
    async with made["n2"].gate.admitted():
        answer = await world.admin.post("/admin/inference/pause", params={"timeout_seconds": 0.2})
    assert answer.status_code == 504
    assert (answer.json()["paused"], answer.json()["inflight"]) == (False, 1)
    assert not any(node.gate.status().paused for node in made.values())


async def test_every_node_learns_the_version(nodes: Nodes) -> None:
    world, made = nodes
    answer = await world.admin.post("/admin/inference/version", json={"version": 42})
    assert answer.json()["version"] == "42"
    assert {node.gate.version for node in made.values()} == {"42"}
    for bad in ({}, {"version": None}, {"version": ""}, {"version": "x\n"}, {"version": [1]}):
        assert (await world.admin.post("/admin/inference/version", json=bad)).status_code == 422, bad


async def test_without_a_node_there_is_no_inference(world: World) -> None:
    answer = await world.admin.get("/admin/inference/status")
    assert answer.status_code == 503
    assert "node" in answer.json()["detail"]
    assert (await world.admin.post("/sessions")).status_code == 503


async def test_where_every_node_drains_a_bare_session_is_told_so(nodes: Nodes) -> None:
    world, made = nodes
    for name in made:
        await world.admin.delete(f"/nodes/{name}")
    answer = await world.admin.post("/sessions")
    assert (answer.status_code, answer.json()["detail"]) == (
        503, "every gateway node drains: start one, or wait for it"
    )  # fmt: skip


async def test_a_node_that_does_not_answer_is_named(world: World) -> None:
    await world.join("dead", gateway_url="http://127.0.0.1:1")
    answer = await world.admin.get("/admin/inference/status")
    assert answer.status_code == 503
    assert "dead" in answer.json()["detail"]


async def test_a_bare_session_lives_on_a_node_and_its_calls_come_home(nodes: Nodes) -> None:
    world, made = nodes
    opened = (await world.admin.post("/sessions", json={"session_id": "mine"})).json()
    assert opened["session_id"] == "mine"
    (home,) = [name for name, node in made.items() if "mine" in node.sessions.open_now]
    (stranger,) = set(made) - {home}
    assert (await world.admin.post("/sessions", json={"session_id": "mine"})).status_code == 409
    calls = Delivery(session_id="mine", attempt=1, completions=[completion("mine")])
    await world.node(f"/nodes/{home}/deliveries", calls)
    refused = await world.as_("node").post(
        f"/nodes/{stranger}/deliveries", json={"session_id": "mine", "attempt": 1, "completions": []}
    )
    assert refused.status_code == 409
    listed = (await world.get("/sessions/mine/completions"))["completions"]
    assert [each["fate"] for each in listed] == ["trained"]
    closed = (await world.admin.post("/sessions/mine/close")).json()
    assert closed == {"session_id": "mine", "closed": True}
    ended = Delivery(session_id="mine", attempt=1, result=result("mine", task_id="mine", reward=None))
    for _ in range(2):
        await world.node(f"/nodes/{home}/deliveries", ended)
    session = await world.get("/sessions/mine")
    assert (session["status"], session["completion_count"]) == ("COMPLETED", 1)
    again = (await world.admin.post("/sessions/mine/close")).json()
    assert again == {"session_id": "mine", "closed": False}


async def test_a_bare_session_is_forgotten_here_and_on_its_node(nodes: Nodes) -> None:
    world, made = nodes
    await world.admin.post("/sessions", json={"session_id": "mine"})
    (home,) = [name for name, node in made.items() if "mine" in node.sessions.open_now]
    calls = Delivery(session_id="mine", attempt=1, completions=[completion("mine")])
    await world.node(f"/nodes/{home}/deliveries", calls)
    answer = await world.as_("submit").delete("/sessions/mine")
    assert answer.json() == {"session_id": "mine", "deleted": True, "messages_deleted": 1}
    assert made[home].sessions.forgotten == ["mine"]
    for method, path in (("GET", ""), ("GET", "/completions"), ("GET", "/trajectory"), ("DELETE", "")):
        assert (await world.admin.request(method, f"/sessions/mine{path}")).status_code == 404, path
    assert await world.ledger.completions("mine") == []
    # What was on its way does not bring it back.
    for late in (calls, Delivery(session_id="mine", attempt=1, result=result("mine", task_id="mine"))):
        refused = await world.as_("node").post(f"/nodes/{home}/deliveries", content=to_json(late))
        assert refused.status_code == 409
    assert (await world.get("/sessions"))["sessions"] == []
    assert (await world.admin.post("/sessions", json={"session_id": "mine"})).status_code == 200


async def test_a_bare_session_that_is_forgotten_while_its_end_arrives_does_not_come_back(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, made = nodes
    await world.admin.post("/sessions", json={"session_id": "mine"})
    (home,) = [name for name, node in made.items() if "mine" in node.sessions.open_now]
    read = world.ledger.session

    async def read_and_forget(session_id: str) -> Any:
        found = await read(session_id)
        await world.ledger.forget_session(session_id)
        return found

    monkeypatch.setattr(world.ledger, "session", read_and_forget)
    late = Delivery(session_id="mine", attempt=1, result=result("mine", task_id="mine"))
    refused = await world.as_("node").post(f"/nodes/{home}/deliveries", content=to_json(late))
    assert (refused.status_code, "forgotten" in refused.json()["detail"]) == (409, True)
    assert (await world.ledger.sessions(), await world.ledger.results()) == ([], [])


async def test_what_is_forgotten_on_a_node_only_is_counted_too(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    world, made = nodes
    await world.admin.post("/sessions", json={"session_id": "mine"})
    (home,) = [node.sessions for node in made.values() if "mine" in node.sessions.open_now]
    forget = home.forget

    async def forget_three(session_id: str) -> int:
        return await forget(session_id) + 3

    monkeypatch.setattr(home, "forget", forget_three)
    assert (await world.admin.delete("/sessions/mine")).json()["messages_deleted"] == 3


async def test_a_bare_session_can_be_forgotten_without_its_node_once_it_has_ended(nodes: Nodes) -> None:
    world, made = nodes
    await world.admin.post("/sessions", json={"session_id": "mine"})
    (home,) = [name for name, node in made.items() if "mine" in node.sessions.open_now]
    await world.join(home, gateway_url="http://127.0.0.1:1")
    assert (await world.admin.delete("/sessions/mine")).status_code == 503, "it may still be written to"
    ended = Delivery(session_id="mine", attempt=1, result=result("mine", task_id="mine", reward=None))
    await world.node(f"/nodes/{home}/deliveries", ended)
    assert (await world.admin.delete("/sessions/mine")).status_code == 200
    assert (await world.admin.get("/sessions/mine")).status_code == 404


async def deleted_while_its_node_was_away(world: World, made: dict[str, RemoteNode]) -> RemoteNode:
    """A bare session ``mine``; its node, which is back."""
    await world.admin.post("/sessions", json={"session_id": "mine"})
    (home,) = [name for name, node in made.items() if "mine" in node.sessions.open_now]
    ended = Delivery(session_id="mine", attempt=1, result=result("mine", task_id="mine", reward=None))
    await world.node(f"/nodes/{home}/deliveries", ended)
    await world.join(home, gateway_url="http://127.0.0.1:1")
    assert (await world.admin.delete("/sessions/mine")).status_code == 200
    assert await world.ledger.sessions() == []
    await world.server._fleet.forget_what_is_left()
    assert await world.ledger.to_forget() == [("mine", home)], "its node is away"
    await world.join(home, gateway_url=made[home].url)
    return made[home]


async def test_a_node_that_was_away_forgets_when_it_is_back_what_was_deleted_meanwhile(nodes: Nodes) -> None:
    world, made = nodes
    home = await deleted_while_its_node_was_away(world, made)
    for _ in range(2):
        await world.server._fleet.forget_what_is_left()
        assert (home.sessions.forgotten, await world.ledger.to_forget()) == (["mine"], [])


async def test_a_new_session_of_an_id_that_was_deleted_stays(nodes: Nodes) -> None:
    world, made = nodes
    home = await deleted_while_its_node_was_away(world, made)
    home.sessions.open_now.clear()
    for name, node in made.items():
        if node is not home:
            await world.admin.delete(f"/nodes/{name}")
    assert (await world.admin.post("/sessions", json={"session_id": "mine"})).status_code == 200
    await world.server._fleet.forget_what_is_left()
    assert (home.sessions.forgotten, await world.ledger.to_forget()) == ([], [])
    assert (await world.get("/sessions/mine"))["status"] == "RUNNING"


async def test_bare_sessions_go_to_all_nodes_in_turn(nodes: Nodes) -> None:
    world, made = nodes
    for name in "abcdef":
        assert (await world.admin.post("/sessions", json={"session_id": name})).status_code == 200
    assert [len(node.sessions.open_now) for node in made.values()] == [3, 3]


async def test_a_bare_session_that_the_ledger_can_not_keep_is_not_left_on_its_node(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, made = nodes

    async def full(record: Any) -> None:
        raise StoreFailure("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(world.ledger, "put_session", full)
        answer = await world.admin.post("/sessions", json={"session_id": "mine"})
    assert (answer.status_code, answer.json()["detail"]) == (503, "the disk is full")
    assert sorted(name for node in made.values() for name in node.sessions.forgotten) == ["mine"]
    assert (await world.admin.post("/sessions", json={"session_id": "mine"})).status_code == 200


async def test_a_session_is_opened_at_the_server_and_not_at_a_node(nodes: Nodes) -> None:
    _, made = nodes
    node = made["n1"]
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as client:
        for body in ({}, {"session_id": "mine"}, {"metadata": {"capture_node": "n2"}}):
            headers = {"Authorization": f"Bearer {TOKENS['node']}"}
            answer = await client.post("/sessions", json=body, headers=headers)
            assert (answer.status_code, answer.json()["detail"]) == (
                409, "node n1 opens sessions for its rollout server only: POST http://server/sessions"
            )  # fmt: skip
    assert node.sessions.asked == []


async def test_a_bare_session_whose_node_is_lost_has_ended(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    world, made = nodes
    await world.admin.post("/sessions", json={"session_id": "mine"})
    (home,) = [name for name, node in made.items() if "mine" in node.sessions.open_now]
    calls = Delivery(session_id="mine", attempt=1, completions=[completion("mine")])
    await world.node(f"/nodes/{home}/deliveries", calls)
    await bare.end_orphans(world.ledger)
    assert (await world.get("/sessions/mine"))["status"] == "RUNNING"
    monkeypatch.setattr(bare, "GONE_AFTER", 0.0)
    await bare.end_orphans(world.ledger)
    session = await world.get("/sessions/mine")
    assert session["status"] == "ERROR"
    assert home in session["error"]
    fates = session["result"]["trajectory"]["metadata"]["reconstruction"]["completions"]
    assert fates == {"trained": ["mine.1-0"]}


async def test_a_node_answers_its_server_alone(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    _, made = nodes
    async with httpx.AsyncClient(base_url=made["n1"].url, trust_env=False) as client:
        for method, path in (("POST", "/sessions"), ("POST", "/admin/inference/pause"), ("GET", "/metrics")):
            assert (await client.request(method, path)).status_code == 401
            wrong = {"Authorization": f"Bearer {TOKENS['admin']}"}
            assert (await client.request(method, path, headers=wrong)).status_code == 401
        assert (await client.get("/health")).json()["status"] == "ok"
        told = [record.getMessage() for record in caplog.records if record.name == "polar.refused"]
        assert told == ["refused 1 times: unknown token, the last time from 127.0.0.1"]  # the rest a while later
        reader = {"Authorization": f"Bearer {TOKENS['read']}"}
        assert "\npolar_unknown_tokens_total 6.0\n" in (await client.get("/metrics", headers=reader)).text


async def test_the_numbers_of_a_node_are_for_readers_who_may_do_nothing_else_there(nodes: Nodes) -> None:
    _, made = nodes
    async with httpx.AsyncClient(base_url=made["n1"].url, trust_env=False) as client:
        reader = {"Authorization": f"Bearer {TOKENS['read']}"}
        families = (await client.get("/metrics", headers=reader)).text
        assert "polar_sessions" not in families  # what only the ledger knows
        assert "polar_tokens_trained" not in families
        for method, path in (("POST", "/sessions"), ("POST", "/admin/inference/pause")):
            assert (await client.request(method, path, headers=reader)).status_code == 403
        node = {"Authorization": f"Bearer {TOKENS['node']}"}
        assert (await client.get("/metrics", headers=node)).status_code == 403


def test_a_node_knows_the_readers_whose_tokens_it_has() -> None:
    tokens = [("trainer", "submit", "A"), ("elsewhere", "read", "B"), ("another-node", "node", "C")]
    config = AuthConfig(
        tokens=tuple(TokenConfig(name=n, role=r, env=e) for n, r, e in tokens),  # type: ignore[arg-type]
        anonymous="read",
    )
    environ = {"A": "a" * 16, "C": "c" * 16, "POLAR_ADMIN_TOKEN": "d" * 16}
    credentials = node_credentials(config, "n" * 16, environ)
    known = {letter: credentials.who(letter * 16) for letter in "abcdn"}
    assert {letter: actor.role for letter, actor in known.items() if actor} == {
        "a": "submit",
        "d": "admin",
        "n": "node",
    }
    assert credentials.who(None) is None
    with pytest.raises(UsageError, match="16 characters"):
        node_credentials(config, "n" * 16, {"A": "short"})
