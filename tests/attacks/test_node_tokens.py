"""The token of one node, in the hands of somebody who would be another: it speaks for the nodes that it is bound to,
and a server shows it to nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar.contract.arrays import to_json
from polar.contract.errors import UsageError
from polar.contract.rollout import Delivery
from polar.gateway.server import GatewayServer
from polar.rollout.auth import AuthConfig, TokenConfig, load_credentials
from polar.service import Service
from polar.settings import load_settings
from tests.rollout.conftest import MakeWorld, World, make_world
from tests.rollout.making import SHELL, TOKENS, completion, result, task, token_of
from tests.support.script import Step
from tests.support.scripted import scripted_engine
from tests.support.tinymodel import make_tiny_model

__all__ = ["make_world"]

SPEC = {
    "gateway_url": "http://127.0.0.1:1",
    "instance": "stolen",
    **{f"max_{stage}_workers": 1 for stage in ("init", "run", "postrun")},
}


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    """Two nodes with a token each; ``gpu`` is good for gpu-1, gpu-2 and so on."""
    world = await make_world(bound={"gpu": ("gpu-*",), "seven": ("n7",)})
    for name, token in (("gpu-1", "gpu"), ("n7", "seven")):
        answer = await world.as_(token).post("/nodes/register", json={"node_id": name, **SPEC})
        assert (answer.status_code, answer.json()["credential"]) == (200, token)
    return world


async def refusals(world: World) -> list[tuple[str, str, str]]:
    return [(e.actor, e.action, e.subject) for e in await world.ledger.audit_log() if not e.allowed]


async def claimed(world: World, token: str, node: str) -> dict[str, Any]:
    answer = await world.as_(token).post(f"/nodes/{node}/claim", json={"room": 1})
    assert answer.status_code == 200, answer.text
    (lease,) = answer.json()
    return dict(lease)


async def test_a_node_s_token_does_all_that_its_node_does(world: World) -> None:
    await world.submit(task())
    lease = await claimed(world, "gpu", "gpu-1")
    of = {"session_id": lease["session_id"], "attempt": lease["attempt"]}
    node = world.as_("gpu")
    beat = {"held": [{**of, "state": "RUNNING"}]}
    assert (await node.post("/nodes/gpu-1/heartbeat", json=beat)).json()["lost"] == []
    for part in ({"completions": [completion(seq=0), completion(seq=1)]}, {"result": result()}):
        answer = await node.post("/nodes/gpu-1/deliveries", content=to_json(Delivery(**of, **part)))
        assert answer.status_code == 200, answer.text
    assert (await world.get("/sessions/t1-0"))["status"] == "COMPLETED"
    assert await refusals(world) == []


@pytest.mark.parametrize("path", ["heartbeat", "claim", "deliveries", "release"])
async def test_a_node_s_token_is_refused_at_every_route_of_another_node(world: World, path: str) -> None:
    await world.submit(task())
    lease = await claimed(world, "seven", "n7")
    of = {"session_id": lease["session_id"], "attempt": lease["attempt"]}
    bodies = {
        "heartbeat": {"held": [{**of, "state": "POST_RUN"}], "draining": True},
        "claim": {"room": 5},
        "deliveries": Delivery(**of, result=result(reward=1000.0)),
        "release": of,
    }
    answer = await world.as_("gpu").post(f"/nodes/n7/{path}", content=to_json(bodies[path]))
    assert answer.status_code == 403
    said = answer.json()["detail"]
    assert said.startswith("the token gpu is good for the nodes gpu-*, and not for n7: ")
    assert token_of("gpu") not in said
    route = [route for route in world.server.routes if route.path.endswith(path) and route.role == "node"]
    assert await refusals(world) == [("gpu", route[0].name, "n7")]
    session = await world.get("/sessions/t1-0")
    assert (session["status"], session["attempt"]) == ("REGISTERED", 1), "nothing has come of it"
    assert [node["draining"] for node in await world.get("/nodes")] == [False, False]


async def test_every_route_of_nodes_asks_whose_token_it_is(world: World) -> None:
    asked = [route for route in world.server.routes if route.role == "node"]
    assert {route.name for route in asked} == {
        *("node.register", "node.heartbeat", "node.claim", "node.deliver", "node.release")
    }
    for route in asked:
        path = route.path.format(node_id="n7")
        answer = await world.as_("gpu").request(route.method, path, json={"node_id": "n7", **SPEC})
        assert answer.status_code == 403, path


async def test_a_node_can_not_end_what_another_holds_not_even_under_the_right_attempt(world: World) -> None:
    await world.submit(task())
    lease = await claimed(world, "seven", "n7")
    forged = Delivery(session_id=lease["session_id"], attempt=lease["attempt"], result=result(reward=1000.0))
    calls = Delivery(session_id=lease["session_id"], attempt=lease["attempt"], completions=[completion()])
    for delivery in (calls, forged):
        answer = await world.as_("gpu").post("/nodes/gpu-1/deliveries", content=to_json(delivery))
        assert answer.status_code == 409
        assert "node gpu-1 does not hold session t1-0 attempt 1" in answer.json()["detail"]
    assert await refusals(world) == [("gpu", "node.deliver", "gpu-1")] * 2
    assert await world.ledger.completions("t1-0") == []
    answer = await world.as_("gpu").post("/nodes/gpu-1/release", json={"session_id": "t1-0", "attempt": 1})
    assert (await world.get("/sessions/t1-0"))["attempt"] == 1
    await world.finish(lease, node_id="n7")
    assert (await world.get("/sessions/t1-0"))["reward"] == 1.0


@pytest.mark.parametrize("spec", [{"node_id": "n7"}, {"node_id": "gpu-3", "worker_of": "n7"}, {"node_id": "GPU-1"}])
async def test_a_node_can_not_come_again_as_another(world: World, spec: dict[str, str]) -> None:
    await world.submit(task())
    lease = await claimed(world, "seven", "n7")
    answer = await world.as_("gpu").post("/nodes/register", json={**SPEC, **spec, "credential": "seven"})
    assert answer.status_code == 403
    assert await refusals(world) == [("gpu", "node.register", spec["node_id"])]
    assert [node["node_id"] for node in await world.get("/nodes")] == ["gpu-1", "n7"]
    await world.finish(lease, node_id="n7")  # under the lease that it has had all the while


async def test_what_a_node_says_of_its_token_is_not_believed(world: World) -> None:
    said = {"node_id": "gpu-1", **SPEC, "credential": "seven"}
    answer = await world.as_("gpu").post("/nodes/register", json=said)
    assert answer.json()["credential"] == "gpu"


@pytest.fixture
async def ear() -> AsyncIterator[tuple[str, list[str]]]:
    """A place where a node says that it is, and what was shown there."""
    shown: list[str] = []

    async def listen(scope: Any, receive: Any, send: Any) -> None:
        shown.extend(value.decode() for name, value in scope["headers"] if name == b"authorization")
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    http = GatewayServer(listen)
    await http.start()
    yield http.url, shown
    await http.close()


async def test_a_server_shows_a_node_that_node_s_token_and_no_other(world: World, ear: tuple[str, list[str]]) -> None:
    url, shown = ear
    for name, token in (("gpu-1", "gpu"), ("n7", "seven"), ("shared", "node")):
        answer = await world.as_(token).post("/nodes/register", json={"node_id": name, **SPEC, "gateway_url": url})
        assert answer.status_code == 200
    assert (await world.admin.get("/admin/inference/status")).status_code == 503
    assert sorted(shown) == sorted(f"Bearer {token_of(name)}" for name in ("gpu", "seven", "node"))


async def test_a_server_without_a_node_s_token_shows_it_none(
    world: World, make_world: MakeWorld, ear: tuple[str, list[str]]
) -> None:
    url, shown = ear
    for name, token in (("gpu-1", "gpu"), ("n7", "seven")):
        await world.as_(token).post("/nodes/register", json={"node_id": name, **SPEC, "gateway_url": url})
    other = await make_world(ledger=world.ledger)  # a second server, whose settings lack them
    answer = await other.admin.get("/admin/inference/status")
    assert answer.status_code == 503
    assert "came with the token" in answer.json()["detail"]
    assert shown == []


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"role": "read", "nodes": ("n1",)}, "role node"),
        ({"role": "node", "nodes": ()}, "empty"),
        ({"role": "node", "nodes": ("n 1",)}, "'n 1' is no name of a node"),
        ({"role": "node", "nodes": ("n1", "[z-a]*")}, r"'\[z-a\]\*' is no name of a node"),
        ({"role": "node", "nodes": ("[!]",)}, "no name of a node"),
        ({"role": "node", "nodes": ("[abc",)}, "no name of a node"),
        ({"role": "node", "nodes": ("-*",)}, "no name of a node"),
        ({"role": "node", "nodes": ("n1\n",)}, "no name of a node"),
        ({"role": "node", "nodes": ("",)}, "no name of a node"),
        ({"role": "node", "nodes": ("a" * 5000,)}, "no name of a node"),
    ],
)
def test_nodes_of_a_token_that_make_no_sense_are_refused(tmp_path: Path, said: Any, expected: str) -> None:
    config = AuthConfig(tokens=(TokenConfig(name="t", env="T", **said),))
    with pytest.raises(UsageError, match=expected) as refused:
        load_credentials(config, tmp_path, {"T": "t" * 20})
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


@pytest.mark.slow
async def test_a_gateway_with_a_token_of_its_own_works_and_its_server_is_known_by_it(tmp_path: Path) -> None:
    environ = {"POLAR_ADMIN_TOKEN": TOKENS["admin"], "POLAR_NODE_TOKEN": TOKENS["node"], "GPU": token_of("gpu")}
    own = {"POLAR_NODE_TOKEN": token_of("gpu")}
    tokens = {"tokens": [{"name": "gpu", "role": "node", "env": "GPU", "nodes": ["gpu-*"]}]}
    async with (
        scripted_engine(make_tiny_model(tmp_path / "model"), [Step(text="one")]) as engine,
        AsyncExitStack() as stack,
    ):
        said = {"port": 0, "role": "rollout", "out": str(tmp_path / "server"), "auth": tokens}
        server = Service(load_settings(None, said), environ)
        await server.start()
        stack.push_async_callback(server.close)

        def gateway(name: str) -> Service:
            given = {"role": "gateway", "server": server.url, "port": 0, "node_id": name, "auth": tokens}
            engines = [{"kind": "openai", "url": engine.url}]
            more = {"out": str(tmp_path / name), "engines": engines, "runtimes": {"sandbox": "none"}}
            return Service(load_settings(None, {**given, **more}), own)

        wrong = gateway("n7")
        with pytest.raises(UsageError, match="403: the token gpu is good for the nodes gpu-\\*, and not for n7"):
            await wrong.start()
        assert list((tmp_path / "n7").iterdir()) == [], "no model is loaded, nothing is served"

        node = gateway("gpu-1")
        await node.start()
        stack.push_async_callback(node.close)
        headers = {"Authorization": f"Bearer {TOKENS['admin']}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
            quick = {**SHELL, "settings": {"allow_no_model_call": True}}
            await client.post("/rollout/task/submit", json=task(agent=quick))
            status = (await client.get("/rollout/task/t1", params={"wait": 50})).json()
            assert [each["node_id"] for each in status["results"]] == ["gpu-1"]
            assert (await client.post("/admin/inference/pause")).json()["paused"] is True
            await client.post("/admin/inference/resume")
            opened = (await client.post("/sessions", json={"session_id": "bare"})).json()
            assert (await client.post("/sessions/bare/close")).json() == {"session_id": "bare", "closed": True}
        assert opened["base_urls"]["anthropic"] == node.url
        assert (opened["task_id"], opened["created_at"] > 0) == ("bare", True)
        async with httpx.AsyncClient(base_url=node.url, trust_env=False) as client:
            shared = {"Authorization": f"Bearer {TOKENS['node']}"}
            assert (await client.post("/admin/inference/pause", headers=shared)).status_code == 401
