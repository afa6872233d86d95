"""The evaluation's own sandbox: made as the agent's was, while that one runs, and gone whatever becomes of either."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polar.contract.result import SessionResult
from polar.contract.task import AgentSpec, CustomShell, EvaluatorSpec, RuntimeSpec, TaskRequest
from polar.evaluators import Evaluation, FinishedSession
from polar.gateway import evaluation
from polar.gateway.lifecycle import Pools, Stages
from polar.gateway.session_run import SessionRun
from polar.gateway.tasks import make_parts, run_tasks
from polar.redaction import Redaction
from polar.runtimes import BubblewrapBackend
from polar.store.base import SessionRecord
from tests.gateway.conftest import MakeWorld, World
from tests.runtimes.making import processes_with, until
from tests.support.script import Step


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    made: World = await make_world([Step(text="hi")])  # type: ignore[misc]
    return made


@pytest.fixture
async def walls() -> str:
    if not (probe := await BubblewrapBackend().probe()).ok:
        pytest.skip(f"no bubblewrap here: {probe.detail}")
    return "bubblewrap"


def a_task(
    *prepare: str,
    agent: str = "true",
    test: str = "true",
    refresh: bool = True,
    strategy: str = "",
    task_id: str = "t",
    **more: Any,
) -> TaskRequest:
    return TaskRequest(
        task_id=task_id,
        instruction="i",
        runtime=RuntimeSpec(prepare=prepare),
        agent=AgentSpec(
            harness="shell", custom_shell=CustomShell(command=agent), settings={"allow_no_model_call": True}
        ),
        evaluator=EvaluatorSpec(
            strategy=f"{__name__}:{strategy}" if strategy else "test_on_output",
            config={} if strategy else {"test_command": test},
            refresh_runtime=refresh,
        ),
        **more,
    )


async def run(world: World, task: TaskRequest, sandbox: str = "none") -> SessionResult:
    parts = await make_parts(task, sandbox=sandbox, allow_import=True)
    async with asyncio.timeout(60):
        await run_tasks(world.node, [(task, parts)], pools=Pools())
    (result,) = await world.node.store.results(task.task_id)
    return result


def reward(result: SessionResult) -> float | None:
    value: float | None = result.trajectory.metadata["evaluation"]["outcome_reward"]
    return value


def attempt(world: World) -> Path:
    return world.folder / "sessions" / "t-0" / "attempt-1"


class Counted:
    """A prepare line that knows, by a file outside, which time it is: 1 for the agent's, then the evaluation's."""

    def __init__(self, folder: Path, then: str) -> None:
        self._file = folder / "times"
        self.line = f"echo x >> {self._file}; n=$(wc -l < {self._file}); {then}"

    @property
    def times(self) -> int:
        return len(self._file.read_text().splitlines()) if self._file.exists() else 0

    def reached(self, times: int) -> str:
        """A command that waits until it has run so often."""
        return f"until [ $(wc -l < {self._file}) -ge {times} ]; do sleep 0.02; done"


# ---- what is in it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", [True, False])
async def test_tests_use_what_prepare_installed_in_home_where_they_ask_for_it(
    world: World, walls: str, refresh: bool
) -> None:
    install = "mkdir ~/bin; printf '#!/bin/sh\\ngrep -q \"$1\" answer\\n' > ~/bin/checker; chmod +x ~/bin/checker"
    task = a_task(
        install,
        "echo none > answer; mkdir data; touch data/stale",
        agent="echo 42 > answer; rm -r data; echo theirs > ~/left",
        test="test ! -e data && test ! -e ~/left && ~/bin/checker 42",
        refresh=refresh,
    )
    result = await run(world, task, walls)
    assert (result.status, result.error) == ("COMPLETED", None)
    assert reward(result) == (1.0 if refresh else 0.0)
    assert ("warm" in result.timing) is refresh
    assert (attempt(world) / "eval-runtime-prepare-1.stdout").exists() is refresh
    assert not list(world.folder.rglob(".polar-sandbox"))


async def test_it_is_ready_before_the_agent_has_ended(world: World, walls: str) -> None:
    """The agent goes on only when its evaluation's sandbox has been prepared."""
    task = a_task("echo made", agent="until [ -e go ]; do sleep 0.02; done", test="test -e go")
    running = asyncio.create_task(run(world, task, walls))
    made = attempt(world) / "eval-runtime-prepare-0.stdout"
    await until(lambda: made.exists() and made.read_text() == "made\n")
    states = {record.session_id: record.state for record in await world.node.store.sessions("t")}
    assert states["t-0"] == "RUNNING"
    (attempt(world) / "runtime" / "workspace" / "go").touch()
    assert reward(await running) == 1.0


async def test_the_agent_neither_sees_nor_touches_it_and_it_has_no_way_to_the_model(world: World, walls: str) -> None:
    find = r"find / \( -path /proc -o -path /sys -o -path /usr \) -prune -o -name an-id -print 2> /dev/null"
    services = "grep -l 42[4]2 /proc/[0-9]*/cmdline 2> /dev/null | wc -l"
    task = a_task(
        "cat /proc/sys/kernel/random/uuid | tee ~/an-id > /tmp/an-id; sleep 4242 > /dev/null 2>&1 &",
        "until [ -s /tmp/an-id ]; do sleep 0.02; done; echo made",
        agent=f"""
            until [ -e go ]; do sleep 0.02; done
            cp ~/an-id agents-id
            {services} > services
            for file in $({find}); do echo $file >> found; echo forged > $file; done
        """,
        test=f"""
            sort found | tr '\\n' ' '; cat services; {services}; cmp ~/an-id /tmp/an-id && echo same
            cmp -s ~/an-id agents-id || echo others; grep -c forged ~/an-id
            (exec 3<>/dev/tcp/127.0.0.1/8080) 2> /dev/null || echo no way
        """,
    )
    running = asyncio.create_task(run(world, task, walls))
    made = attempt(world) / "eval-runtime-prepare-1.stdout"
    await until(lambda: made.exists() and made.read_text() == "made\n")
    (attempt(world) / "runtime" / "workspace" / "go").touch()
    said = (await running).trajectory.metadata["evaluation"]["log_tail"].split("\n")
    assert said == ["/home/agent/an-id /tmp/an-id 1", "1", "same", "others", "0", "no way"]


# ---- who gets one ----------------------------------------------------------------------------------------


async def test_nothing_is_made_for_an_evaluator_that_runs_nothing_nor_where_nothing_is_prepared(
    world: World, tmp_path: Path
) -> None:
    prepare = Counted(tmp_path, "true")
    scored = EvaluatorSpec(strategy="session_completed", refresh_runtime=True)
    result = await run(world, msgspec.structs.replace(a_task(prepare.line), evaluator=scored))
    assert (reward(result), prepare.times, "warm" in result.timing) == (1.0, 1, False)
    again = await run(world, a_task(task_id="u"))
    assert (reward(again), "warm" in again.timing) == (1.0, False)


class Asks:
    """An evaluator of one's own that does not say what it needs, asks for two at a time, and closes none."""

    name = "asks"

    def __init__(self, spec: EvaluatorSpec) -> None: ...

    async def evaluate(self, session: FinishedSession) -> Evaluation:
        before = (session.logs / "eval-runtime-prepare-0.stdout").exists()
        first, second = await asyncio.gather(session.sandbox(), session.sandbox())
        await first.write_file("mine", b"")
        tools = [(await each.read_file("~/tool")).decode() for each in (first, second)]
        apart = first.workdir != second.workdir
        return Evaluation(
            1.0, metadata={"before": before, "seconds": session.timeout, "tools": tools, "apart": apart}
        )


class Says(Asks):
    """One that does say it."""

    uses_sandbox = True
    seconds = 100.0


@pytest.mark.parametrize(("strategy", "before", "seconds"), [("Asks", False, 570.0), ("Says", True, 670.0)])
async def test_an_evaluator_of_ones_own_gets_it_too(
    world: World, tmp_path: Path, strategy: str, before: bool, seconds: float
) -> None:
    prepare = Counted(tmp_path, "echo $n > ~/tool")
    task = a_task(prepare.line, agent=prepare.reached(2) if before else "true", strategy=strategy)
    result = await run(world, task)
    told = result.trajectory.metadata["evaluation"]
    assert (told["before"], told["seconds"], told["apart"]) == (before, seconds, True), result
    assert told["tools"] == ["2\n", "3\n"]
    assert not list(world.folder.rglob(".polar-sandbox"))


# ---- when it can't be made -------------------------------------------------------------------------------


async def test_one_that_could_not_be_made_while_the_agent_ran_is_made_once_more(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare = Counted(tmp_path, "touch ~/$n; echo a secret >&2; [ $n != 2 ]")
    result = await run(world, a_task(prepare.line, agent=prepare.reached(2), test="ls ~ | grep -x 3"))
    assert (result.status, reward(result), prepare.times) == ("COMPLETED", 1.0, 3)
    (line,) = [each.getMessage() for each in caplog.records if "could not be made" in each.getMessage()]
    assert "t-0" in line
    assert "secret" not in line


async def test_one_that_can_not_be_made_at_all_is_an_error_that_names_the_line_and_no_zero(
    world: World, tmp_path: Path
) -> None:
    prepare = Counted(tmp_path, "[ $n = 1 ] || { echo no such mirror >&2; exit 4; }")
    result = await run(world, a_task("true", prepare.line, agent=prepare.reached(2)))
    assert (result.status, reward(result), prepare.times) == ("ERROR", None, 3)
    assert result.error == "the evaluation's sandbox failed: prepare[1] failed with exit code 4: no such mirror"


@pytest.mark.slow
async def test_what_prepare_takes_is_not_taken_from_the_tests(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "POST_RUN_SECONDS", 3.0)
    monkeypatch.setattr(evaluation, "EVALUATION_MARGIN", 0.5)
    prepare = Counted(tmp_path, "touch ~/tool; [ $n = 1 ] || sleep 4")
    for strategy in ("", "Asks"):  # made while the agent runs, and made when it is asked for
        result = await run(world, a_task(prepare.line, strategy=strategy, task_id=f"t{strategy}"))
        assert (result.error, reward(result)) == (None, 1.0)


@pytest.mark.slow
async def test_one_that_takes_longer_than_a_session_may_is_an_error_and_not_tried_again(
    world: World, tmp_path: Path
) -> None:
    prepare = Counted(tmp_path, "[ $n = 1 ] || sleep 300")
    result = await run(world, a_task(prepare.line, timeout_seconds=3.0))
    assert (result.status, reward(result), prepare.times) == ("ERROR", None, 2)
    assert result.error in (
        "the evaluation's sandbox failed: runtime.prepare took longer than its 3 s",
        "the evaluation's sandbox failed: prepare[0] timed out: it said nothing",
    )


# ---- when the session ends before it ---------------------------------------------------------------------


async def test_an_agent_that_ran_out_of_time_is_still_scored_in_it(world: World, tmp_path: Path) -> None:
    prepare = Counted(tmp_path, "echo $n > ~/times")
    task = a_task(
        prepare.line, agent=f"{prepare.reached(2)}; sleep 300", test="grep 2 ~/times", agent_timeout_seconds=1
    )
    result = await run(world, task)
    assert (result.status, reward(result), prepare.times) == ("TIMEOUT", 1.0, 2)


@pytest.mark.parametrize("how", ["agent fails", "cancelled", "cancelled while it waits", "handed back"])
async def test_nothing_of_it_is_left_where_nothing_is_evaluated(world: World, tmp_path: Path, how: str) -> None:
    mark = f"polar-test-{uuid.uuid4().hex}"
    prepare = Counted(tmp_path, f"[ $n = 1 ] || {{ echo a secret; setsid sh -c 'sleep 300; : {mark}' & sleep 300; }}")
    ends = {"agent fails": "exit 3", "cancelled while it waits": "true"}.get(how, "sleep 300")
    task = a_task(prepare.line, agent=f"{prepare.reached(2)}; {ends}")
    world.node.redaction = Redaction([("hide", hide)])
    run = await a_run(world, task)
    stages = Stages(Pools(post_run=1))
    await stages.places["post_run"].take()
    living = asyncio.create_task(stages.live(run))
    await until(lambda: prepare.times == 2)
    if how == "handed back":
        living.cancel()
        await asyncio.wait({living})
        assert await world.node.store.results("t") == []
    else:
        if how == "cancelled while it waits":
            await until(lambda: stages.places["post_run"].waiting == 1)
        if how != "agent fails":
            run.stop("cancelled")
        await until(lambda: stages.places["post_run"].waiting == 1)
        await until(lambda: not processes_with(mark))
        stages.places["post_run"].give()
        async with asyncio.timeout(30):
            await living
        (result,) = await world.node.store.results("t")
        assert (result.status, reward(result)) == ("ERROR", None)
    assert not processes_with(mark)
    assert not list(world.folder.rglob(".polar-sandbox"))
    assert not (attempt(world) / "runtime").exists()
    assert "secret" not in (attempt(world) / "eval-runtime-prepare-0.stdout").read_text()


class Ignores(Says):
    """One that asks for it to be made, and then does not want it."""

    async def evaluate(self, session: FinishedSession) -> Evaluation:
        return Evaluation(1.0)


async def test_one_that_is_not_wanted_in_the_end_says_nothing_after_it_was_redacted(
    world: World, tmp_path: Path
) -> None:
    """Its next line would begin while what was said so far is redacted."""
    redacting, said = tmp_path / "redacting", attempt(world) / "eval-runtime-prepare-1.stdout"

    def hide_slowly(text: str) -> str:
        redacting.touch()
        while any((attempt(world) / "runtime" / "forks").iterdir()) and not said.exists():
            time.sleep(0.01)
        return hide(text)

    prepare = Counted(tmp_path, f"[ $n = 1 ] || until [ -e {redacting} ]; do sleep 0.02; done")
    world.node.redaction = Redaction([("hide", hide_slowly)])
    task = a_task(prepare.line, "echo a secret", agent=f"{prepare.reached(2)}; echo a secret", strategy="Ignores")
    result = await run(world, task)
    assert (result.status, reward(result)) == ("COMPLETED", 1.0)
    assert "secret" not in "".join(path.read_text() for path in attempt(world).glob("*.std*"))


def hide(text: str) -> str:
    return text.replace("secret", "[gone]")


async def a_run(world: World, task: TaskRequest) -> SessionRun:
    record = SessionRecord(session_id="t-0", task_id="t", sample_index=0, created_at=0.0, updated_at=0.0)
    await world.node.store.put_task(task)
    await world.node.store.put_session(record)
    return SessionRun(world.node, task, record, await make_parts(task, sandbox="none"), lambda _: None)
