"""Tasks over HTTP: handed in once however often, refused in one clear line, waited for, cancelled, exported."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from polar.rollout import tasks_api
from tests.cli.making import environment, run
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import SHELL, TOKENS, task


async def test_the_same_task_again_has_the_same_answer_and_runs_once(world: World) -> None:
    first = await world.admin.post("/rollout/task/submit", json=task(num_samples=3))
    again = await world.admin.post("/rollout/task/submit", json=task(num_samples=3))
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json() == {"task_id": "t1", "status": "running"}
    assert len(await world.ledger.sessions("t1")) == 3


async def test_another_body_under_the_same_id_is_refused(world: World) -> None:
    await world.submit(task())
    answer = await world.admin.post("/rollout/task/submit", json=task(instruction="something else"))
    assert answer.status_code == 409
    assert "t1" in answer.json()["detail"]
    stored = await world.ledger.task("t1")
    assert stored is not None
    assert stored.instruction == "do it"


async def test_a_null_is_nothing_said(world: World) -> None:
    nulls = dict.fromkeys(("evaluator", "runtime", "callback_url", "early_stop_min_usable_sessions"))
    agent = {**SHELL, "import_path": None, "model_name": None, "skills_path": None}
    await world.submit(task(agent=agent, **nulls))
    await world.submit(task())  # the same task, then


async def test_a_null_in_settings_stays(world: World) -> None:
    await world.submit(task(agent={**SHELL, "settings": {"allow_no_model_call": None}}, metadata={"x": None}))
    stored = await world.ledger.task("t1")
    assert stored is not None
    assert (stored.agent.settings, stored.metadata) == ({"allow_no_model_call": None}, {"x": None})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_sample": 3}, "num_sample"),
    ({"num_samples": 0}, "num_samples"),
    ({"num_samples": 10**6}, "num_samples"),
    ({"instruction": " "}, "instruction"),
    ({"task_id": "../x"}, "task_id"),
    ({"agent": {"harness": "nobody_knows"}}, "nobody_knows"),
    ({"agent": {"import_path": "os:system"}}, "not allowed"),
    ({"agent": {"harness": "shell"}}, "custom_shell.command is empty"),
    ({"agent": {**SHELL, "settings": {"reasoning": "high"}}}, "agent.settings.reasoning is not known to shell"),
    ({"agent": {**SHELL, "skills_path": "skills"}}, "shell takes no skills"),
    ({"agent": {"harness": "codex", "custom_shell": {"command": "true"}}}, "not with codex"),
    ({"agent": {"harness": "pi", "settings": {"api": "soap"}}}, "'soap' is not known to pi"),
    ({"agent": {"harness": "qwen_code", "mcp_servers": [{"name": "x"}]}}, "agent.mcp_servers[0]"),
    ({"runtime": {"workdir": "relative"}}, "runtime.workdir 'relative' must be an absolute path"),
    ({"runtime": {"workdir": "/etc"}}, "/etc, which is read-only"),
    ({"runtime": {"cpus": 0}}, "runtime.cpus"),
    ({"runtime": {"network": "host"}}, "runtime.network is host and allow_internet is false"),
    ({"runtime": {"network": "none", "allow_internet": True}}, "runtime.network is none and allow_internet is true"),
    ({"runtime": {"network": "bridge"}}, "runtime.network 'bridge' is not known"),
    ({"runtime": {"image": "debian:12"}}, "runtime.image needs docker or apptainer"),
    ({"builder": {"strategy": "no_such"}}, "no_such"),
    ({"evaluator": {"strategy": "mod:Class"}}, "not allowed"),
    ({"callback_url": "http://192.0.2.1/x"}, "callbacks.allow"),
    ({"callback_url": "file:///etc/passwd"}, "callback_url"),
    ({"callback_url": "http://user:pw@127.0.0.1/"}, "password"),
]


async def test_a_task_that_can_not_be_is_refused_in_one_line(world: World) -> None:
    for change, said in BAD:
        answer = await world.admin.post("/rollout/task/submit", json=task(**change))
        assert answer.status_code == 422, change
        assert said in answer.json()["detail"]
        assert "\n" not in answer.json()["detail"]
    assert await world.ledger.tasks() == []


async def test_a_body_that_is_no_task_is_refused(world: World) -> None:
    for body in (b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"task_id": 1e999}'):
        answer = await world.admin.post("/rollout/task/submit", content=body)
        assert answer.status_code == 422, body[:20]
        assert set(answer.json()) == {"detail"}


async def test_a_task_reads_running_until_every_session_has_ended(world: World) -> None:
    await world.join()
    await world.submit(task(num_samples=2))
    one, two = await world.claim()
    await world.finish(one)
    status = await world.get("/rollout/task/t1")
    assert (status["status"], status["total_sessions"], status["completed_sessions"]) == ("running", 2, 1)
    assert [each["session_id"] for each in status["results"]] == ["t1-0"]
    await world.finish(two, status="ERROR", error="it broke", reward=None)
    status = await world.get("/rollout/task/t1")
    assert (status["status"], status["completed_sessions"]) == ("completed", 2)
    assert [each["error"] for each in status["results"]] == [None, "it broke"]


async def test_results_come_whole_in_short_or_not_at_all(world: World) -> None:
    await world.join()
    await world.run(task())
    (whole,) = (await world.get("/rollout/task/t1"))["results"]
    (trace,) = whole["trajectory"]["traces"]
    assert trace["prompt_ids"] == list(range(10))
    assert trace["loss_mask"] == [1] * 4 + [0] * 3 + [1] * 4
    assert trace["response_logprobs"] == [-0.5] * 4 + [0.0] * 3 + [-0.5] * 4
    assert trace["weight_versions"] == [7] * 4 + [-1] * 3 + [7] * 4
    assert trace["reward"] == 1.0
    (short,) = (await world.get("/rollout/task/t1", results="summary"))["results"]
    assert short["trajectory"]["traces"] == []
    assert short["status"] == "COMPLETED"
    assert (await world.get("/rollout/task/t1", results="none"))["results"] == []


async def test_waiting_for_the_end_answers_when_it_comes(world: World) -> None:
    await world.join()
    await world.submit(task())
    (lease,) = await world.claim()
    waiting = asyncio.create_task(world.get("/rollout/task/t1", wait=30, results="none"))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await world.finish(lease)
    async with asyncio.timeout(10):
        assert (await waiting)["status"] == "completed"


async def test_waiting_ends_when_its_time_is_up(world: World) -> None:
    await world.submit(task())
    async with asyncio.timeout(10):
        assert (await world.get("/rollout/task/t1", wait=0.1))["status"] == "running"


async def test_a_cancelled_task_ends_as_cancelled_and_keeps_what_it_had(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.join()
    await world.submit(task(num_samples=3))
    (lease,) = await world.claim(room=1)
    (held,) = await world.claim(room=1)
    await world.finish(lease)
    monkeypatch.setattr(tasks_api, "CANCEL_WAIT", 0.1)
    answer = await world.as_("submit").delete("/rollout/task/t1")
    assert answer.status_code == 200
    assert answer.json()["completed_sessions"] == 2  # the finished one and the one that nobody held
    assert answer.json()["status"] == "running"  # the node has not ended the other one
    waiting = asyncio.create_task(world.get("/rollout/task/t1", wait=30))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    beat = await world.node(
        "/nodes/n1/heartbeat", {"held": [{"session_id": held["session_id"], "attempt": 1, "state": "RUNNING"}]}
    )
    assert beat["cancelled"] == {held["session_id"]: "cancelled"}
    await world.finish(held, status="ERROR", error="cancelled", reward=None)
    async with asyncio.timeout(10):
        status = await waiting
    assert status["status"] == "cancelled"
    assert [each["status"] for each in status["results"]] == ["COMPLETED", "ERROR", "ERROR"]
    assert {each["error"] for each in status["results"]} == {None, "cancelled"}


async def test_who_cancels_sees_every_result_if_the_nodes_end_soon(world: World) -> None:
    await world.join()
    await world.submit(task(num_samples=2))
    (held,) = await world.claim(room=1)
    cancelling = asyncio.create_task(world.as_("submit").delete("/rollout/task/t1"))
    beat = {"held": [{"session_id": held["session_id"], "attempt": 1, "state": "RUNNING"}]}
    async with asyncio.timeout(10):
        while not (await world.node("/nodes/n1/heartbeat", beat))["cancelled"]:
            continue
        await world.finish(held, status="ERROR", error="cancelled", reward=None)
        status = (await cancelling).json()
    assert (status["status"], status["completed_sessions"], len(status["results"])) == ("cancelled", 2, 2)


async def test_cancelling_again_changes_nothing(world: World) -> None:
    await world.submit(task())
    first = (await world.admin.delete("/rollout/task/t1")).json()
    again = (await world.admin.delete("/rollout/task/t1")).json()
    assert first == again
    assert first["status"] == "cancelled"


async def test_a_task_that_was_cancelled_before_it_came_is_refused(world: World) -> None:
    assert (await world.admin.delete("/rollout/task/late")).status_code == 404
    answer = await world.admin.delete("/rollout/task/late", params={"register_if_missing": "true"})
    assert answer.json()["total_sessions"] == 0
    late = await world.admin.post("/rollout/task/submit", json=task("late"))
    assert late.status_code == 409
    assert await world.ledger.tasks() == []


async def test_enough_usable_sessions_end_a_task_early(world: World) -> None:
    await world.join()
    await world.submit(task(num_samples=4, early_stop_min_usable_sessions=1))
    (first,) = await world.claim(room=1)
    await world.finish(first)
    status = await world.get("/rollout/task/t1", results="summary")
    assert (status["status"], status["completed_sessions"]) == ("completed", 4)
    assert "early" in status["results"][-1]["error"]


async def test_the_traces_so_far_are_files(world: World) -> None:
    await world.join()
    await world.submit(task(num_samples=2))
    (lease,) = await world.claim(room=1)
    empty = await world.admin.get("/rollout/task/t1/traces.jsonl")
    assert (empty.status_code, empty.content) == (200, b"")
    await world.finish(lease)
    parquet = await world.admin.get("/rollout/task/t1/traces.parquet")
    table = pq.read_table(io.BytesIO(parquet.content)).to_pylist()
    lines = (await world.admin.get("/rollout/task/t1/traces.jsonl")).text.splitlines()
    assert [row["session_id"] for row in table] == [json.loads(line)["session_id"] for line in lines] == ["t1-0"]
    assert table[0]["response_ids"] == json.loads(lines[0])["response_ids"]
    assert table[0]["group_id"] == "g1"


async def test_the_list_of_tasks_says_how_each_stands(world: World) -> None:
    await world.join()
    await world.run(task("done", num_samples=2), reward=0.5)
    await world.submit(task("open", agent={"harness": "codex"}))
    by_id = {each["task_id"]: each for each in (await world.get("/tasks"))["tasks"]}
    assert by_id["done"]["mean_reward"] == 0.5
    assert (by_id["done"]["completed_sessions"], by_id["done"]["status"]) == (2, "completed")
    assert (by_id["open"]["mean_reward"], by_id["open"]["status"]) == (None, "running")

    async def names(**query: Any) -> list[str]:
        return [each["task_id"] for each in (await world.get("/tasks", **query))["tasks"]]

    assert await names(status="running") == ["open"]
    assert await names(harness="codex") == ["open"]
    assert await names(limit=1) == ["open"]
    assert await names(since=by_id["open"]["updated_at"] + 1) == []


async def test_the_sessions_of_a_task_say_where_each_stands(world: World) -> None:
    await world.join()
    await world.submit(task(num_samples=2))
    (lease,) = await world.claim(room=1)
    await world.finish(lease, reward=0.25)
    first, second = (await world.get("/tasks/t1/sessions"))["sessions"]
    assert (first["status"], first["reward"], first["node_id"]) == ("COMPLETED", 0.25, "n1")
    assert (second["status"], second["session_id"]) == ("REGISTERED", "t1-1")


async def test_a_server_that_allows_them_takes_classes_of_a_tasks_own(make_world: MakeWorld) -> None:
    world = await make_world(allow_import=True)
    await world.submit(task(evaluator={"strategy": "some.where:Else"}))


async def test_a_database_that_can_not_be_used_is_503_and_not_the_callers_fault(world: World) -> None:
    await world.ledger.close()
    for path in ("/rollout/task/t1", "/tasks", "/results", "/sessions", "/health"):
        answer = await world.admin.get(path)
        assert answer.status_code == 503, path
        assert "store" in answer.json()["detail"]


async def test_two_who_submit_at_once_make_one_task(world: World) -> None:
    answers = await asyncio.gather(
        *(world.admin.post("/rollout/task/submit", json=task(num_samples=2)) for _ in range(8)),
        *(world.admin.post("/rollout/task/submit", json=task(num_samples=3)) for _ in range(8)),
    )
    assert sorted(answer.status_code for answer in answers) == [200] * 8 + [409] * 8
    assert len(await world.ledger.sessions("t1")) in (2, 3)


@pytest.mark.parametrize(("status", "code"), [("COMPLETED", 0), ("ERROR", 1)])
async def test_who_submits_and_waits_is_told_by_the_exit_code(
    world: World, tmp_path: Path, status: str, code: int
) -> None:
    await world.join()
    (tmp_path / "task.json").write_text(json.dumps(task(num_samples=2)))
    env = environment(POLAR_SERVER=world.url, POLAR_TOKEN=TOKENS["submit"])
    waiting = asyncio.create_task(
        asyncio.to_thread(run, ["submit", "task.json", "--wait", "--json"], tmp_path, env=env, timeout=60)
    )
    leases: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while not leases:  # a claim is cut short where its node sends no heartbeats
            leases = await world.claim(wait=1)
    first, second = leases
    await world.finish(first)
    await world.finish(second, status=status, error=None if status == "COMPLETED" else "it broke")
    done = await waiting
    assert (done.code, done.json[0]["completed_sessions"]) == (code, 2), done
