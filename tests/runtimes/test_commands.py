"""Commands behave the same with walls and without."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from pathlib import Path

import pytest

from polar.contract.runtime import Command, RuntimeFailure
from polar.contract.task import RuntimeSpec
from polar.harnesses import Endpoint, standard_env
from polar.runtimes import BubblewrapBackend, ProcessBackend
from polar.runtimes.supervised import Limits
from tests.runtimes.making import Box, processes_with, until


async def test_exit_codes_output_and_signals_arrive(make_any, walls):
    box = await make_any(walls)
    ran = await box.sh("echo out; echo err >&2; exit 7")
    assert (ran.exit_code, ran.timed_out, ran.out, ran.err) == (7, False, "out\n", "err\n")
    assert (await box.sh("kill -TERM $$")).exit_code == -15


async def test_a_pipe_cannot_hide_a_failure(make_any, walls):
    box = await make_any(walls)
    assert (await box.sh("false | cat")).exit_code == 1
    assert (await box.sh("true | cat")).exit_code == 0


async def test_an_argument_list_is_not_read_by_a_shell(make_any, walls, tmp_path):
    box = await make_any(walls)
    said = "$(id) 'quoted' * \n second line \udcff"
    result = await box.runtime.exec(Command(["printf", "%s", said]), timeout=20, logs=tmp_path, name="x")
    assert result.stdout.read_bytes() == os.fsencode(said)


async def test_a_program_that_is_not_there_is_named(make_any, walls, tmp_path):
    box = await make_any(walls)
    result = await box.runtime.exec(Command(["no-such-program"]), timeout=20, logs=tmp_path, name="x")
    assert result.exit_code == 127
    assert "no-such-program" in result.stderr.read_text()


async def test_a_cwd_that_is_not_there_is_named(make_any, walls, tmp_path):
    box = await make_any(walls)
    result = await box.runtime.exec(Command(["true"], cwd="no/such/folder"), timeout=20, logs=tmp_path, name="x")
    assert result.exit_code != 0
    assert "no/such/folder" in result.stderr.read_text()


async def test_stdin_is_empty_and_not_a_terminal(make_any, walls):
    box = await make_any(walls)
    ran = await box.sh("cat; test -t 0 || echo no terminal")
    assert ran.out == "no terminal\n"


async def test_only_the_given_environment_is_there(make_any, walls, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    box = await make_any(walls, RuntimeSpec(env={"FROM_SPEC": "spec", "NO_PROXY": "example.org"}))
    ran = await box.sh("env", FROM_COMMAND="command")
    env = dict(line.split("=", 1) for line in ran.out.splitlines())
    assert (env["FROM_SPEC"], env["FROM_COMMAND"]) == ("spec", "command")
    assert "SECRET_OF_THE_HOST" not in env
    assert env["HOME"] == box.runtime.home
    assert env["NO_PROXY"].split(",") == ["example.org", "127.0.0.1", "localhost", "::1"]
    assert "127.0.0.1" in env["no_proxy"].split(",")


async def test_a_tool_that_was_installed_into_home_is_found_first_and_only_there(make_any, walls, tmp_path):
    box = await make_any(walls)
    tool = "mkdir -p ~/.local/bin && printf '#!/bin/sh\\necho mine' > ~/.local/bin/python3 && chmod +x ~/.local/bin/*"
    assert (await box.sh(tool)).exit_code == 0
    assert (await box.sh("python3 --version")).out == "mine\n"
    fresh = Box(await box.runtime.fork(), tmp_path / "fresh")
    assert (await fresh.sh("python3 --version")).out.startswith("Python 3")
    assert (await fresh.sh(tool)).exit_code == 0
    assert (await fresh.sh("python3 --version")).out == "mine\n"


async def test_what_a_task_sets_wins_and_is_taken_literally(make_any, walls):
    box = await make_any(walls, RuntimeSpec(env={"PATH": "/usr/bin:/bin", "WHERE": "$HOME/x"}))
    assert (await box.sh('echo "$PATH $WHERE"')).out == "/usr/bin:/bin $HOME/x\n"


async def test_commands_start_in_the_workspace_and_share_it(make_any, walls):
    box = await make_any(walls)
    await box.sh("mkdir -p a; echo 1 > a/file")
    ran = await box.sh("pwd; cat a/file; test -w . && test -w $HOME && test -w $TMPDIR && echo writable")
    assert ran.out == f"{box.runtime.workdir}\n1\nwritable\n"


async def test_a_timeout_kills_children_that_left_their_session(make_any, walls):
    mark = f"polar-test-{uuid.uuid4().hex}"
    box = await make_any(walls)
    child = f"sh -c 'sleep 300; : {mark}'"
    ran = await box.sh(
        f"echo before; setsid {child} & (setsid setsid {child} &) ; trap '' TERM; {child}", timeout=1.0
    )
    assert ran.timed_out
    assert ran.exit_code < 0
    assert ran.out == "before\n"
    await until(lambda: not processes_with(mark))
    assert (await box.sh("echo still here")).out == "still here\n"


async def test_a_cancelled_command_is_killed(make_any, walls):
    mark = f"polar-test-{uuid.uuid4().hex}"
    box = await make_any(walls)
    task = asyncio.create_task(box.sh(f"setsid sh -c 'sleep 300; : {mark}' & sleep 300"))
    await until(lambda: bool(processes_with(mark)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not processes_with(mark)


async def test_kill_ends_everything_and_leaves_the_files(make_any, walls):
    mark = f"polar-test-{uuid.uuid4().hex}"
    box = await make_any(walls)
    await box.sh(f"echo kept > kept; setsid sh -c 'sleep 300; : {mark}' >/dev/null 2>&1 &")
    assert processes_with(mark)
    await box.runtime.kill()
    assert not processes_with(mark)
    assert await box.runtime.read_file("kept") == b"kept\n"
    with pytest.raises(RuntimeFailure, match="the sandbox is gone"):
        await box.sh("true")


async def test_close_removes_the_files_and_may_come_twice(make_any, walls, tmp_path):
    box = await make_any(walls)
    await box.sh("touch x")
    await box.runtime.close()
    await box.runtime.close()
    assert not list(tmp_path.glob("sandbox-*"))


async def test_output_is_cut_at_its_cap_and_says_so(make_any, walls):
    box = await make_any(walls, limits=Limits(output=1 << 20))
    ran = await box.sh("head -c 3000000 /dev/zero | tr '\\0' x; echo done >&2")
    assert ran.exit_code == 0
    assert len(ran.out) < (1 << 20) + 100
    assert ran.out.endswith("[polar: output over 1 MiB was cut here]\n")
    assert ran.err == "done\n"


async def test_a_background_process_does_not_hold_a_command_up(make_any, walls):
    box = await make_any(walls)
    ran = await box.sh("sleep 300 & yes > /dev/stderr & echo started", timeout=20)
    assert (ran.timed_out, ran.exit_code, ran.out) == (False, 0, "started\n")


async def test_commands_of_one_sandbox_run_side_by_side(make_any, walls, tmp_path):
    box = await make_any(walls)
    lines = {
        "a": "until test -e b; do sleep 0.02; done; touch a",
        "b": "touch b; until test -e a; do sleep 0.02; done",
    }
    results = await asyncio.gather(
        *(box.runtime.exec(Command(line), timeout=20, logs=tmp_path, name=name) for name, line in lines.items())
    )
    assert [result.exit_code for result in results] == [0, 0]


async def test_memory_over_the_limit_ends_the_command_with_a_reason(make_any, walls):
    box = await make_any(walls, RuntimeSpec(memory_mb=200))
    ran = await box.sh("head -c 600000000 /dev/zero | (tail -c 500000000; sleep 20) | sleep 30")
    assert ran.exit_code != 0
    assert "over the limit of 200 MiB" in ran.err
    assert (await box.sh("echo alive")).out == "alive\n"


async def test_too_many_processes_end_the_command_with_a_reason(make_any, walls):
    box = await make_any(walls, limits=Limits(processes=40))
    ran = await box.sh("for i in $(seq 60); do sleep 30 & done; wait")
    assert ran.exit_code != 0
    assert "processes, over the limit of 40" in ran.err or "Resource temporarily unavailable" in ran.err


async def test_cpus_bound_the_cores_a_command_sees(make_any, walls):
    box = await make_any(walls, RuntimeSpec(cpus=0.5))
    assert (await box.sh("nproc")).out == "1\n"


async def test_twenty_sandboxes_start_at_once(tmp_path, walls, make_any):
    backend = BubblewrapBackend() if walls == "bubblewrap" else ProcessBackend()
    runtimes = await asyncio.gather(
        *(backend.create(RuntimeSpec(), folder=tmp_path / f"many-{index}") for index in range(20))
    )
    try:
        for index, runtime in enumerate(runtimes):
            await runtime.write_file("number", str(index).encode())
        results = await asyncio.gather(
            *(
                runtime.exec(Command("cat number"), timeout=60, logs=tmp_path / "many", name=str(index))
                for index, runtime in enumerate(runtimes)
            )
        )
    finally:
        await asyncio.gather(*(runtime.close() for runtime in runtimes))
    assert [result.stdout.read_text() for result in results] == [str(index) for index in range(20)]
    assert not list(Path(tmp_path).glob("many-*"))


async def test_a_folder_in_use_is_refused(make_any, walls, tmp_path):
    await make_any(walls)
    backend = BubblewrapBackend() if walls == "bubblewrap" else ProcessBackend()
    with pytest.raises(RuntimeFailure, match="use an empty one"):
        await backend.create(RuntimeSpec(), folder=tmp_path / "sandbox-0")
    assert (tmp_path / "sandbox-0" / "workspace").is_dir()


async def test_the_folders_of_the_standard_environment_are_there(make_any, walls):
    box = await make_any(walls)
    env = standard_env(Endpoint("http://127.0.0.1:1", "k", "m", 1), session_id="s", task_id="t", runtime=box.runtime)
    ran = await box.sh("for d in $SESSION_DIR $ARTIFACTS_DIR $AGENT_LOG_DIR; do touch $d/x && echo ok; done", **env)
    assert ran.out.split() == ["ok", "ok", "ok"]


async def test_a_sandbox_outlives_the_thread_that_asked_for_it(walls, tmp_path):
    backend = BubblewrapBackend() if walls == "bubblewrap" else ProcessBackend()
    made = []
    thread = threading.Thread(
        target=lambda: made.append(asyncio.run(backend.create(RuntimeSpec(), folder=tmp_path / "box")))
    )
    thread.start()
    await asyncio.to_thread(thread.join)
    try:
        result = await made[0].exec(Command("echo alive"), timeout=20, logs=tmp_path, name="x")
        assert result.stdout.read_text() == "alive\n"
    finally:
        await made[0].close()


async def test_a_sandbox_killed_from_outside_is_a_failure_and_no_exit_code(make_box, tmp_path):
    box = await make_box()
    waiting = asyncio.create_task(box.sh("touch started; sleep 300", timeout=300))
    while not (tmp_path / "sandbox-0/workspace/started").exists():
        await asyncio.sleep(0.01)
    await box.runtime.kill()
    with pytest.raises(RuntimeFailure, match="the sandbox was killed"):
        await asyncio.wait_for(waiting, 20)
