"""Sessions over HTTP: their calls whole, their traces built afresh, their ids no way to anywhere else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from polar.contract.rollout import Delivery
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import Host, completion, task


async def test_the_calls_of_a_session_are_whole_and_say_what_became_of_them(world: World) -> None:
    await world.join()
    await world.run(task())
    listed = await world.get("/sessions/t1-0/completions")
    assert (listed["session_id"], listed["task_id"]) == ("t1-0", "t1")
    first, second = listed["completions"]
    assert (first["completion_id"], first["parent_id"], first["attempt"]) == ("t1-0.1-0", None, 1)
    assert second["parent_id"] == "t1-0.1-0"
    assert second["prompt_ids"] == [*range(10), *range(1000, 1004), 0, 1, 2]
    assert second["response_ids"] == [1004, 1005, 1006, 1007]
    assert second["logprobs"] == [-0.5] * 4
    assert second["weight_versions"] == [7] * 4
    assert [each["fate"] for each in (first, second)] == ["trained", "trained"]
    roles = [message["role"] for message in second["request"]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert second["response"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "calc"
    assert second["usage"] == {"prompt_tokens": 17, "completion_tokens": 4, "cached_tokens": 0}
    assert (second["finish_reason"], second["dialect"], second["model"]) == ("tool_calls", "openai_chat", "m")


async def test_calls_of_earlier_attempts_can_be_had(world: World) -> None:
    await world.join()
    await world.submit(task())
    (lease,) = await world.claim()
    cut = completion(outcome="abandoned", completion_id="cut")
    await world.node("/nodes/n1/deliveries", Delivery(session_id="t1-0", attempt=1, completions=[cut]))
    await world.node("/nodes/n1/release", {"session_id": "t1-0", "attempt": 1})
    (lease,) = await world.claim()
    await world.finish(lease)

    async def ids(**query: Any) -> list[tuple[str, int, str]]:
        listed = (await world.get("/sessions/t1-0/completions", **query))["completions"]
        return [(each["completion_id"], each["attempt"], each["fate"]) for each in listed]

    own = [(f"t1-0.{lease['attempt']}-{seq}", lease["attempt"], "trained") for seq in range(2)]
    assert await ids() == own
    assert await ids(attempt="all") == [("cut", 1, "abandoned"), *own]
    assert await ids(attempt="1") == [("cut", 1, "abandoned")]
    assert (await world.admin.get("/sessions/t1-0/completions", params={"attempt": "9"})).status_code == 404
    for bad in ("0", "-1", "x", "1.5"):
        assert (await world.admin.get("/sessions/t1-0/completions", params={"attempt": bad})).status_code == 422


async def test_a_trajectory_is_built_afresh_with_any_builder(world: World) -> None:
    await world.join()
    await world.run(task())
    own = await world.get("/sessions/t1-0/trajectory")
    assert [trace["completion_ids"] for trace in own["traces"]] == [["t1-0.1-0", "t1-0.1-1"]]
    assert [trace["reward"] for trace in own["traces"]] == [1.0]
    other = await world.get("/sessions/t1-0/trajectory", builder="per_request")
    assert len(other["traces"]) == 2
    config = json.dumps({"include_roles": ["main"]})
    assert (await world.get("/sessions/t1-0/trajectory", builder="prefix_merging", config=config))["traces"]
    for query in (
        {"builder": "no_such"},
        {"builder": "os:getcwd"},
        {"builder": "prefix_merging", "config": '{"x": 1}'},
        {"builder": "prefix_merging", "config": "[1]"},
    ):
        answer = await world.admin.get("/sessions/t1-0/trajectory", params=query)
        assert answer.status_code == 422, query


async def test_a_reader_can_not_have_a_class_made(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await make_world(allow_import=True)
    await world.join()
    await world.run(task())
    config = json.dumps({"file": str(tmp_path / "made"), "mode": "w"})
    answer = await world.as_("read").get("/sessions/t1-0/trajectory", params={"builder": "io:open", "config": config})
    assert answer.status_code == 422
    assert not (tmp_path / "made").exists()


async def test_a_session_that_runs_has_a_trajectory_so_far(world: World) -> None:
    await world.join()
    await world.submit(task())
    await world.claim()
    await world.node("/nodes/n1/deliveries", Delivery(session_id="t1-0", attempt=1, completions=[completion()]))
    built = await world.get("/sessions/t1-0/trajectory")
    assert len(built["traces"]) == 1
    (session,) = (await world.get("/sessions", task_id="t1"))["sessions"]
    assert built["metadata"]["state"] == session["status"]


async def test_a_session_reads_with_its_result(world: World) -> None:
    await world.join()
    await world.run(task())
    session = await world.get("/sessions/t1-0")
    assert (session["status"], session["completion_count"], session["reward"]) == ("COMPLETED", 2, 1.0)
    assert session["result"]["status"] == "COMPLETED"


async def test_sessions_are_listed_by_task_and_state(world: World) -> None:
    await world.join()
    await world.run(task("a"))
    await world.submit(task("b", num_samples=2))

    async def names(**query: Any) -> list[str]:
        return sorted(each["session_id"] for each in (await world.get("/sessions", **query))["sessions"])

    assert await names() == ["a-0", "b-0", "b-1"]
    assert await names(task_id="b") == ["b-0", "b-1"]
    assert await names(state="COMPLETED") == ["a-0"]
    assert len(await names(limit=2)) == 2


WALKS = ["..", ".", "../../etc/passwd", "a/../b", "%00", "a\x00b", "-a", "a b", "é", "x" * 129, "a\\b", "~", "%2e%2e"]


async def test_an_id_leads_nowhere_else(world: World) -> None:
    paths = [route.path for route in world.server.routes if route.method == "GET" and "{" in route.path]
    for path in paths:
        for name in WALKS:
            answer = await world.admin.get(re.sub(r"{\w+}", quote(name, safe="").replace(".", "%2E"), path))
            assert answer.status_code in (404, 422), (path, name, answer.text)
            assert set(answer.json()) == {"detail"}


async def test_what_is_not_served_says_so(world: World) -> None:
    for method, path, status in (("GET", "/", 404), ("GET", "/rollout", 404), ("PUT", "/nodes", 405)):
        answer = await world.admin.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()) == {"detail"}


async def test_a_bare_session_is_opened_on_the_gateway(make_world: MakeWorld) -> None:
    host = Host("made-up")
    world = await make_world(capture=host)
    client = world.as_("submit")
    opened = (await client.post("/sessions")).json()
    assert (opened["session_id"], opened["api_key"]) == ("made-up", "sk")
    assert set(opened["base_urls"]) == {"openai", "anthropic", "google"}
    body = {"session_id": "mine", "model": "m", "sampling": {"temperature": 0.5}, "metadata": {"a": 1}}
    assert (await client.post("/sessions", json=body)).status_code == 200
    assert host.asked[-1].sampling.temperature == 0.5
    for bad in ({"session_id": "../x"}, {"sessionid": "x"}, {"sampling": {"temprature": 1}}):
        assert (await client.post("/sessions", json=bad)).status_code == 422, bad


async def test_a_session_of_a_task_is_not_closed_by_hand(world: World) -> None:
    await world.submit(task())
    for method, path in (("POST", "/sessions/t1-0/close"), ("DELETE", "/sessions/t1-0")):
        answer = await world.admin.request(method, path)
        assert answer.status_code == 409
        assert "cancel" in answer.json()["detail"]
