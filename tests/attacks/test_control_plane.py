"""Who means harm and can reach the control plane: with a session's key, a small token, another node's lease, a web
page, or a task that asks for what it must not have. All of it is refused, and what was tried is in the audit log."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from polar.contract.arrays import to_json
from polar.contract.rollout import Delivery
from polar.rollout.browsers import OwnNames
from polar.settings import HarnessesConfig, RuntimesConfig, ServeConfig, check_allowed
from tests.rollout.conftest import MakeWorld, World, make_world, world
from tests.rollout.making import TOKENS, completion, result, task

__all__ = ["make_world", "world"]

SESSION_KEY = "sk-polar-" + "k" * 43
FORGED = [
    ("POST", "/nodes/n1/deliveries"),
    ("POST", "/nodes/n1/claim"),
    ("POST", "/nodes/n1/heartbeat"),
    ("POST", "/nodes/n1/release"),
    ("POST", "/nodes/register"),
    ("DELETE", "/nodes/n1"),
    ("POST", "/rollout/task/submit"),
    ("GET", "/rollout/task/t1"),
    ("DELETE", "/rollout/task/t1"),
    ("GET", "/rollout/task/t1/traces.jsonl"),
    ("POST", "/admin/inference/pause"),
    ("POST", "/admin/inference/version"),
    ("POST", "/sessions"),
    ("GET", "/sessions/t1-0/completions"),
    ("GET", "/sessions/t1-0/trajectory"),
    ("POST", "/results/ack"),
    ("GET", "/results"),
    ("GET", "/audit"),
    ("GET", "/metrics"),
]


async def entries(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await world.get("/audit"))["entries"]
    return found


async def test_what_is_no_token_of_this_server_is_refused_and_logged(world: World) -> None:
    for method, path in FORGED:
        for headers in ({"Authorization": f"Bearer {SESSION_KEY}"}, {"X-Polar-Control-Token": SESSION_KEY}):
            answer = await world.as_("nobody").request(method, path, headers=headers, json={})
            assert answer.status_code == 401, (method, path)
            assert SESSION_KEY not in answer.text
    other = {"x-api-key": TOKENS["admin"], "x-goog-api-key": TOKENS["admin"], "cookie": f"token={TOKENS['admin']}"}
    answer = await world.as_("nobody").get("/tasks", params={"key": TOKENS["admin"]}, headers=other)
    assert answer.status_code == 401
    log = await entries(world)
    refused = [entry for entry in log if not entry["allowed"]]
    assert {entry["actor"] for entry in refused} == {"unknown"}
    assert len(refused) >= 20  # a flood becomes a number
    assert not [entry for entry in log if SESSION_KEY in str(entry) or TOKENS["admin"] in str(entry)]


@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("POST", "/rollout/task/submit", "task.submit"),
        ("DELETE", "/rollout/task/t1", "task.cancel"),
        ("DELETE", "/nodes/n1", "node.drain"),
        ("POST", "/results/ack", "results.ack"),
        ("POST", "/sessions", "session.open"),
        ("POST", "/sessions/t1-0/close", "session.close"),
        ("DELETE", "/sessions/t1-0", "session.forget"),
        ("POST", "/admin/inference/pause", "inference.pause"),
        ("POST", "/admin/inference/version", "inference.version"),
        ("POST", "/nodes/n1/deliveries", "node.deliver"),
        ("GET", "/audit", "audit.read"),
    ],
)
async def test_who_may_read_may_not_write(world: World, method: str, path: str, action: str) -> None:
    await world.join()
    await world.submit(task())
    answer = await world.as_("read").request(method, path, json={})
    assert answer.status_code == 403
    last = (await entries(world))[-2]  # the last one is this question
    assert (last["actor"], last["action"], last["allowed"]) == ("read", action, False)
    assert (await world.get("/rollout/task/t1"))["status"] == "running"
    assert (await world.get("/nodes"))[0]["draining"] is False


# ---- nodes -----------------------------------------------------------------------------------------------


async def test_a_node_can_not_end_what_another_holds(world: World) -> None:
    await world.join("n1")
    await world.join("n2")
    await world.submit(task())
    (lease,) = await world.claim("n1")
    forged = Delivery(session_id="t1-0", attempt=1, result=result(reward=99.0))
    stolen = Delivery(session_id="t1-0", attempt=1, completions=[completion()])
    for node, delivery in (("n2", forged), ("n2", stolen), ("n3", forged)):
        answer = await world.as_("node").post(f"/nodes/{node}/deliveries", content=to_json(delivery))
        assert answer.status_code == 409, answer.text
    for attempt in (0, 2, 99):
        delivery = Delivery(session_id="t1-0", attempt=attempt, result=result(attempt=attempt))
        answer = await world.as_("node").post("/nodes/n1/deliveries", content=to_json(delivery))
        assert answer.status_code in (409, 422), answer.text
    await world.node("/nodes/n2/release", {"session_id": "t1-0", "attempt": 1})
    beat = {"held": [{"session_id": "t1-0", "attempt": 1, "state": "RUNNING"}]}
    assert (await world.node("/nodes/n2/heartbeat", beat))["lost"] == ["t1-0"]
    await world.finish(lease)
    status = await world.get("/rollout/task/t1")
    assert [each["node_id"] for each in status["results"]] == ["n1"]


async def test_a_lease_that_was_handed_back_is_worth_nothing(world: World) -> None:
    await world.join("n1")
    await world.join("n2")
    await world.submit(task())
    (old,) = await world.claim("n1")
    await world.node("/nodes/n1/release", {"session_id": "t1-0", "attempt": old["attempt"]})
    (new,) = await world.claim("n2")
    assert new["attempt"] > old["attempt"]
    late = Delivery(session_id="t1-0", attempt=old["attempt"], result=result(attempt=old["attempt"], reward=99.0))
    for node in ("n1", "n2"):
        answer = await world.as_("node").post(f"/nodes/{node}/deliveries", content=to_json(late))
        assert answer.status_code == 409, answer.text
    await world.finish(new, node_id="n2", reward=0.5)
    (told,) = (await world.get("/rollout/task/t1"))["results"]
    assert told["trajectory"]["metadata"]["evaluation"]["outcome_reward"] == 0.5


# ---- bodies and paths ------------------------------------------------------------------------------------


async def test_bodies_that_are_too_much_are_refused(world: World) -> None:
    submit = world.as_("submit")
    huge = b'{"task_id": "' + b"x" * (17 << 20)
    assert (await submit.post("/rollout/task/submit", content=huge)).status_code == 413
    for body in (b"[" * 100_000, b'{"a":' * 100_000, b'{"task_id":' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        assert (await submit.post("/rollout/task/submit", content=body)).status_code == 422
    many = msgspec.json.encode(task("t2", metadata={f"k{n}": n for n in range(200_000)}))
    assert (await submit.post("/rollout/task/submit", content=many)).status_code in (200, 413, 422)
    assert (await world.admin.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "%2fetc%2fpasswd",
        "a%00b",
        "%00",
        "a%0ab",
        "-a",
        ".a",
        "a%20b",
        "a" * 129,
    ],
)
async def test_ids_lead_nowhere(world: World, name: str) -> None:
    host, port = world.url.removeprefix("http://").split(":")
    paths = ("/rollout/task/{}", "/sessions/{}/completions", "/tasks/{}/sessions", "/nodes/{}")
    for path in paths:  # as it is: clients tidy paths up
        reader, writer = await asyncio.open_connection(host, int(port))
        line = f"GET {path.format(name)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['admin']}\r\n\r\n"
        writer.write(line.encode())
        status = (await reader.readline()).split()[1]
        writer.close()
        assert status in (b"400", b"404", b"422"), (path, status)
    if "%" not in name:
        answer = await world.as_("submit").post("/rollout/task/submit", json=task(name))
        assert answer.status_code == 422


# ---- tasks that ask for what they must not have ----------------------------------------------------------


OPERATOR = ServeConfig(
    runtimes=RuntimesConfig(allow=("local",)),
    harnesses=HarnessesConfig(allow_import=("good.place:Agent", "mine.*")),
)


@pytest.mark.parametrize(
    "asks",
    [
        {"agent": {"import_path": "os:system"}},
        {"agent": {"import_path": "good.place:Other"}},
        {"agent": {"import_path": "mineral:Agent"}},
        {"agent": {"import_path": "good.place:Agent.x"}},
        {"builder": {"strategy": "subprocess:Popen"}},
        {"evaluator": {"strategy": "subprocess:Popen"}},
        {"runtime": {"allow_internet": True}},
        {"runtime": {"network": "host"}},
        {"runtime": {"backend": "docker", "image": "x"}},
    ],
)
async def test_what_is_not_on_the_operator_s_lists_is_refused_and_logged(
    make_world: MakeWorld, asks: dict[str, Any]
) -> None:
    world = await make_world(check=lambda each: check_allowed(OPERATOR, each), allow_import=True)
    answer = await world.as_("submit").post("/rollout/task/submit", json=task(**asks))
    assert answer.status_code == 422, answer.text
    assert "operator" in answer.json()["detail"]
    (entry,) = [each for each in await entries(world) if each["action"] == "task.submit"]
    assert (entry["actor"], entry["subject"], entry["allowed"]) == ("submit", "t1", False)
    assert (await world.get("/tasks"))["tasks"] == []


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fd00:ec2::254]/",
        "http://0.0.0.0:8080/",
        "http://[::]/",
        "http://2852039166/",
        "http://0xa9fea9fe/",
        "http://0251.0376.0251.0376/",
        "http://10.0.0.1/",
        "http://metadata.google.internal/",
        "http://localhost.evil.example/",
        "http://127.0.0.1.nip.io/",
        "http://127.0.0.1@evil.example/",
        "http://evil.example#@127.0.0.1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "ftp://127.0.0.1/",
        "//127.0.0.1/",
        "http://",
        "http://127.0.0.1:0/",
        "http://127.0.0.1\r\nX: y/",
    ],
)
async def test_a_callback_to_a_place_that_is_not_listed_is_refused_and_logged(world: World, url: str) -> None:
    answer = await world.as_("submit").post("/rollout/task/submit", json=task(callback_url=url))
    assert answer.status_code == 422, answer.text
    (entry,) = [each for each in await entries(world) if each["action"] == "task.submit"]
    assert (entry["subject"], entry["allowed"]) == ("t1", False)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x", "http://localhost:9/x", "http://[::1]:9/x", "http://127.1.2.3/"]
)
async def test_a_server_for_other_machines_does_not_call_its_own(make_world: MakeWorld, url: str) -> None:
    """What listens on loopback there trusts whoever can reach it: a caller from elsewhere must not, through us."""
    world = await make_world(loopback_only=False)
    answer = await world.as_("submit").post("/rollout/task/submit", json=task(callback_url=url))
    assert answer.status_code == 422
    assert "callbacks.allow" in answer.json()["detail"]


# ---- web pages -------------------------------------------------------------------------------------------


async def test_a_page_of_another_site_may_do_nothing_without_a_token(make_world: MakeWorld) -> None:
    """It needs no permission to send a form, and would be anonymous."""
    world = await make_world(anonymous="submit")
    plain = {"Content-Type": "text/plain"}
    pages: list[dict[str, str]] = [
        {"Origin": "https://evil.example", **plain},
        {"Origin": "null", **plain},
        {"Origin": "http://127.0.0.1:1", **plain},
        {"Sec-Fetch-Site": "cross-site", **plain},
        {"Sec-Fetch-Site": "same-site", **plain},
        {"Host": "evil.example", **plain},
        {"Host": "evil.example:8080", **plain},
        {"Host": "127.0.0.1.evil.example", **plain},
        {"Host": "[", **plain},
    ]
    client = world.as_("nobody")
    for headers in pages:
        for method, path in (("POST", "/rollout/task/submit"), ("GET", "/tasks"), ("GET", "/events")):
            answer = await client.request(method, path, json=task(), headers=headers)
            assert answer.status_code in (400, 401), headers
            assert "access-control-allow-origin" not in answer.headers
    refused = [entry for entry in await entries(world) if not entry["allowed"]]
    assert len(refused) >= 20
    assert (await world.get("/tasks"))["tasks"] == []
    own = {"Origin": world.url, "Sec-Fetch-Site": "same-origin"}
    assert (await client.get("/tasks", headers=own)).status_code == 200
    assert (await client.post("/rollout/task/submit", json=task())).status_code == 200


async def test_a_page_gets_no_leave_to_send_a_token(world: World) -> None:
    """A browser asks first; without these headers in the answer it does not send the request at all."""
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "DELETE"}
    for path in ("/rollout/task/submit", "/nodes/n1", "/admin/inference/pause"):
        answer = await world.as_("nobody").options(path, headers=asked)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("localhost", True),
        ("polar-server:8080", True),
        ("polar.lab.example", True),
        ("POLAR.LAB.EXAMPLE:443", True),
        ("other.lab.example", False),
        ("", True),
        ("1.2.3.4.evil.example", False),
    ],
)
def test_the_names_of_a_server(host: str, own: bool) -> None:
    names = OwnNames(["https://polar.lab.example:8443"])
    assert (names.foreign({"host": host}) is None) == own
