"""Files go in and out, and a workspace is copied, whatever the agent has put in the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest

from polar.contract.runtime import RuntimeFailure
from polar.runtimes import tree


async def test_files_go_in_and_out(make_any, walls):
    box = await make_any(walls)
    await box.runtime.write_file("a/b/script", b"#!/bin/sh\necho ran\n", mode=0o755)
    await box.runtime.write_file("~/.config/x", b"home")
    await box.runtime.write_file(f"{box.runtime.workdir}/absolute", b"\x00\xff")
    ran = await box.sh("a/b/script; cat ~/.config/x; echo back > out; stat -c %a a/b/script")
    assert ran.out == "ran\nhome755\n"
    assert await box.runtime.read_file("out") == b"back\n"
    assert await box.runtime.read_file("absolute") == b"\x00\xff"


async def test_a_file_is_replaced_whole(make_any, walls):
    box = await make_any(walls)
    await box.sh("mkfifo pipe; ln -s /etc/passwd link; echo long old text > file")
    for name in ("pipe", "link", "file"):
        await box.runtime.write_file(name, b"new")
        assert await box.runtime.read_file(name) == b"new"
    assert "root" in Path("/etc/passwd").read_text()


@pytest.mark.parametrize(
    ("trap", "path"),
    [
        ("ln -s /etc/shadow trap", "trap"),
        ("ln -s /etc trap", "trap/shadow"),
        ("ln -s / trap", "trap/etc/shadow"),
        ("ln -s /proc/self/root trap", "trap/etc/shadow"),
        ("mkfifo trap", "trap"),
        ("mkdir trap", "trap"),
        ("ln -s trap trap", "trap"),
        ("python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('trap')\"", "trap"),
        ("true", "trap"),
        ("true", "../../../../../etc/shadow"),
        ("true", "/etc/shadow"),
    ],
)
async def test_reading_never_leaves_the_sandbox_or_waits(make_box, trap, path):
    box = await make_box()
    assert (await box.sh(trap)).exit_code == 0
    with pytest.raises(FileNotFoundError):
        await asyncio.wait_for(box.runtime.read_file(path), 10)


async def test_writing_through_a_link_is_refused(make_any, walls, tmp_path):
    box = await make_any(walls)
    victim = tmp_path / "victim"
    victim.mkdir()
    await box.sh(f"ln -s {victim} out; echo x > file")
    for path in ("out/x", "out/deep/x", "file/x"):
        with pytest.raises(RuntimeFailure, match="in its way"):
            await box.runtime.write_file(path, b"1")
    assert not list(victim.iterdir())


async def test_what_is_read_only_inside_is_not_written_from_outside(make_box):
    box = await make_box()
    with pytest.raises(RuntimeFailure, match="read-only"):
        await box.runtime.write_file("/usr/bin/ls", b"1")
    await box.runtime.write_file("/tests/test.sh", b"echo placed")
    assert (await box.sh("sh /tests/test.sh; echo 1 > /tests/test.sh")).out == "placed\n"


async def test_an_unreadable_file_is_read_all_the_same(make_any, walls):
    box = await make_any(walls)
    await box.sh("mkdir d; echo 1 > d/f; chmod 0 d/f d")
    assert await box.runtime.read_file("d/f") == b"1\n"


async def test_a_huge_file_is_refused_unread(make_any, walls):
    box = await make_any(walls)
    await box.sh("truncate -s 1T huge")
    with pytest.raises(RuntimeFailure, match="larger than"):
        await box.runtime.read_file("huge")


async def test_a_fork_has_the_workspace_and_nothing_else(make_any, walls):
    box = await make_any(walls)
    await box.sh(
        "echo 1 > a; mkdir -p d/e; echo 2 > d/e/f; chmod 750 d/e/f; ln -s d/e/f link; ln a twin;"
        "touch -d @1000000000 a; truncate -s 1G holes; echo h > ~/h; echo t > $TMPDIR/t; sleep 300 >/dev/null 2>&1 &"
    )
    fork = await box.runtime.fork()
    twin = type(box)(fork, box.logs)
    ran = await twin.sh(
        "cat a link twin; stat -c %a d/e/f; stat -c %Y a; du -m holes | cut -f1; test a -ef twin && echo linked"
    )
    assert ran.out.split() == ["1", "2", "1", "750", "1000000000", "0", "linked"]
    assert (await twin.sh("ls ~/h $TMPDIR/t")).out == ""
    assert fork.listener is None
    await twin.sh("echo changed > a; rm -r d")
    assert (await box.sh("cat a d/e/f")).out == "1\n2\n"
    await fork.close()
    assert (await box.sh("cat a")).out == "1\n"


async def test_a_fork_of_a_killed_sandbox_works(make_any, walls):
    box = await make_any(walls)
    await box.sh("echo kept > a")
    await box.runtime.kill()
    fork = type(box)(await box.runtime.fork(), box.logs)
    assert (await fork.sh("cat a")).out == "kept\n"


async def test_a_fork_has_no_way_to_the_model(make_box):
    box = await make_box()
    fork = type(box)(await box.runtime.fork(), box.logs)
    assert (await fork.sh("exec 3<>/dev/tcp/127.0.0.1/8080")).exit_code != 0


async def test_a_workspace_takes_the_place_of_another_ones_and_leaves_the_rest(make_any, walls):
    """Also of one with folders that can't be written, and while something runs in it."""
    box = await make_any(walls)
    await box.sh("echo 1 > a; mkdir d; echo 2 > d/f; echo h > ~/h")
    fresh = type(box)(await box.runtime.fresh(), box.logs)
    assert fresh.runtime.listener is None
    await fresh.sh(
        "echo theirs > a; mkdir -p d/e gone/deeper; echo 3 > d/e/f; ln -s ~ link; chmod -R a-w .; echo own > ~/own;"
        "sh -c 'until [ -e d/f ]; do sleep 0.02; done; cat d/f > ~/saw' >/dev/null 2>&1 &"
    )
    await box.runtime.copy_workspace(fresh.runtime)
    assert (await fresh.sh("find . | sort; cat a d/f ~/own")).out.split() == [
        ".",
        "./a",
        "./d",
        "./d/f",
        "1",
        "2",
        "own",
    ]
    assert (await fresh.sh("until [ -s ~/saw ]; do sleep 0.02; done; cat ~/saw; ls ~/h")).out == "2\n"
    assert (await box.sh("find . | sort")).out.split() == [".", "./a", "./d", "./d/f"]


async def test_a_workspace_that_somebody_goes_on_writing_in_can_not_be_replaced(make_any, walls):
    box = await make_any(walls)
    await box.sh("mkdir d; touch d/f")
    fresh = type(box)(await box.runtime.fresh(), box.logs)
    await fresh.sh("sh -c 'while :; do mkdir -p d; touch d/f; done' >/dev/null 2>&1 &")
    with pytest.raises(RuntimeFailure, match="the workspace can't be"):
        async with asyncio.timeout(30):
            while True:  # once is a matter of luck
                await box.runtime.copy_workspace(fresh.runtime)


@pytest.mark.parametrize(("call", "name"), [("mkdir", "d"), ("symlink", "l"), ("open", "f")])
def test_what_is_written_in_the_target_while_it_is_copied_to_is_told_with_a_hint(call, name, tmp_path, monkeypatch):
    """By what runs there, just before the step that makes the same."""
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source / "d", target):
        folder.mkdir(parents=True)
    (source / "l").symlink_to("d")
    (source / "f").touch()
    step = getattr(os, call)

    def write_and_step(*args, **options):
        if name in args and options.get("dir_fd") is not None and (call != "open" or args[1] & os.O_CREAT):
            (target / name).touch()
        return step(*args, **options)

    monkeypatch.setattr(os, call, write_and_step)
    with pytest.raises(tree.TreeError, match=f"can't be copied, is something that prepare started .* '{name}'"):
        tree.replace(source, target)


@pytest.mark.parametrize("call", ["rmdir", "link"])
def test_a_link_that_is_put_in_the_way_of_a_copy_leads_nowhere(call, tmp_path, monkeypatch):
    """By what runs where the copy goes, just before the step that would follow it."""
    host, source, target = tmp_path / "host", tmp_path / "source", tmp_path / "target"
    for folder in (host, source / "a", source / "b", target / "full"):
        folder.mkdir(parents=True)
    (host / "key").write_text("secret")
    host.chmod(0o500)
    (source / "a" / "key").write_text("own")
    (source / "b" / "key").hardlink_to(source / "a" / "key")
    (target / "full" / "key").touch()
    step, swapped = getattr(os, call), []

    def swap_and_step(*args, **options):
        for folder in [each for each in target.iterdir() if not each.is_symlink()]:
            folder.rename(tmp_path / f"{folder.name}-swapped")
            folder.symlink_to(host)
            swapped.append(folder.name)
        return step(*args, **options)

    monkeypatch.setattr(os, call, swap_and_step)
    with contextlib.suppress(tree.TreeError):
        tree.replace(source, target)
    assert swapped
    assert (host.stat().st_mode & 0o777, (host / "key").stat().st_nlink) == (0o500, 1)


async def test_a_copy_that_is_cut_off_leaves_nothing_behind(make_any, walls, tmp_path, monkeypatch):
    box = await make_any(walls)
    began, go_on = threading.Event(), threading.Event()
    copy = tree.copy

    def slowly(source: Path, target: Path) -> None:
        began.set()
        assert go_on.wait(20)
        copy(source, target)

    await box.sh("touch a")
    monkeypatch.setattr(tree, "copy", slowly)
    forking = asyncio.create_task(box.runtime.fork())
    assert await asyncio.to_thread(began.wait, 20)
    forking.cancel()
    await asyncio.sleep(0)  # it hears of it
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert not list((tmp_path / "sandbox-0" / "forks").iterdir())


async def test_closing_a_sandbox_closes_its_forks(make_any, walls, tmp_path):
    box = await make_any(walls)
    fork = await box.runtime.fork()
    await (await fork.fork()).write_file("x", b"")
    await box.runtime.close()
    assert not list(tmp_path.glob("sandbox-*"))


async def test_special_files_and_links_are_copied_without_being_followed(make_box):
    box = await make_box()
    await box.sh(
        "mkfifo fifo; ln -s /etc/shadow shadow; ln -s . loop; ln -s /dev/zero zero;mkdir -p closed/in; chmod 0 closed"
    )
    fork = type(box)(await asyncio.wait_for(box.runtime.fork(), 20), box.logs)
    ran = await fork.sh("find . -mindepth 1 | sort; readlink shadow; stat -c %a closed")
    assert [line.removeprefix("./") for line in ran.out.split()][-2:] == ["/etc/shadow", "0"]
    assert "fifo" not in ran.out
    assert "./loop/" not in ran.out


DEEP = "python3 -c \"import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\nopen('end','w')\""


async def test_a_workspace_too_deep_to_copy_is_named_and_still_removed(make_box, tmp_path):
    box = await make_box()
    assert (await box.sh(DEEP)).exit_code == 0
    with pytest.raises(RuntimeFailure, match="folders deep"):
        await box.runtime.fork()
    await box.runtime.close()
    assert not list(tmp_path.glob("sandbox-*"))


async def test_a_workspace_turned_into_something_else_is_not_followed(make_box):
    box = await make_box()
    ran = await box.sh("cd /; rm -rf /workspace; mv /workspace /w2; ln -sfT /etc /workspace")
    assert ran.exit_code != 0
    fork = type(box)(await box.runtime.fork(), box.logs)
    assert (await fork.sh("ls -A")).out == ""


def test_removing_does_not_follow_links(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("1")
    gone = tmp_path / "gone"
    (gone / "in").mkdir(parents=True)
    (gone / "link").symlink_to(kept)
    (gone / "in" / "link").symlink_to(kept)
    os.mkfifo(gone / "in" / "fifo")
    (gone / "in").chmod(0)
    tree.remove(gone)
    assert not gone.exists()
    assert (kept / "file").read_text() == "1"


def test_removing_what_is_not_there_is_nothing(tmp_path):
    tree.remove(tmp_path / "never")
    assert not list(tmp_path.iterdir())
