"""The gateway's end of a sandbox's first process (``supervisor.py``): start it, have it run commands, end it.

Both local backends are this, with different walls around it, so that commands, their output, time limits and
endings behave the same with walls and without.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from polar.contract.runtime import RuntimeFailure
from polar.contract.task import RuntimeSpec
from polar.runtimes import supervisor

SCRIPT = Path(__file__).with_name("supervisor.py")
START_SECONDS = 30.0
END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use. ``cpus`` and ``memory`` (bytes) are ``None`` where there is no limit."""

    processes: int = 4096
    output: int = 64 << 20
    cpus: float | None = None
    memory: int | None = None

    def of(self, spec: RuntimeSpec) -> Limits:
        """These limits with what a task says."""
        return replace(self, cpus=spec.cpus, memory=None if spec.memory_mb is None else spec.memory_mb << 20)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; ``reason`` says which limit ended it, if one did."""

    exit_code: int
    timed_out: bool
    reason: str | None = None


@functools.cache
def interpreter() -> Path:
    """The bare Python that runs the supervisor: the one behind this process, outside any venv."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


class Warm:
    """The process that supervisors are forked from: started for the first sandbox, and again should it have died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def fork(self, want: dict[str, Any], control: socket.socket, log: Path) -> None:
        """Start a supervisor.

        Raises:
            OSError: it can't be started.
        """
        with log.open("wb") as out, _in_memory(want) as request, self._lock:
            fds = [request.fileno(), control.fileno(), out.fileno()]
            if self._requests is not None:
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(self._requests, [b"f"], fds)
                    return
            self._requests = self._start()
            socket.send_fds(self._requests, [b"f"], fds)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [str(interpreter()), "-I", "-S", "-B", "-X", "utf8", str(SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return ours


def _in_memory(request: dict[str, Any]) -> IO[bytes]:
    file = open(os.memfd_create("request", os.MFD_CLOEXEC), "wb+", buffering=0)  # noqa: SIM115 (the caller closes it)
    file.write(marshal.dumps(request))
    file.seek(0)
    return file


_warm = Warm()


def _forked(want: dict[str, Any], log: Path) -> socket.socket:
    """Our end of the socket of a new supervisor.

    Raises:
        RuntimeFailure: there can't be one.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        with theirs:
            _warm.fork(want, theirs, log)
    except OSError as error:
        ours.close()
        raise RuntimeFailure(f"the sandbox can't be started: {error}") from error
    return ours


class _WithoutAWord(RuntimeFailure):
    """A supervisor went before it had said anything: what it was to be forked from has died, most likely."""


class Supervised:
    """A running supervisor."""

    def __init__(self, control: socket.socket, limits: Limits, port: int | None) -> None:
        self._control, self._limits, self.port = control, limits, port
        self._first: int | None = None
        self._ending: asyncio.Future[None] | None = None
        self.listener: socket.socket | None = None

    @classmethod
    async def start(cls, walls: Sequence[str], *, limits: Limits, port: int | None, log: Path) -> Supervised:
        """Start the supervisor behind ``walls`` (a command line that runs what follows it inside), if there are any.

        Args:
            port: loopback port of the listener to make inside; ``None`` for none.
            log: gets what the walls say when they can't be built.

        Raises:
            RuntimeFailure: it did not come up; the message has the last words.
        """
        want = {
            "walls": list(walls),
            "port": port,
            "cpus": choose_cpus(limits.cpus),
            "limits": {"processes": limits.processes, "memory": limits.memory or 0},
        }
        try:
            return await cls._started(want, limits, port, log)
        except _WithoutAWord:
            return await cls._started(want, limits, port, log)

    @classmethod
    async def _started(cls, want: dict[str, Any], limits: Limits, port: int | None, log: Path) -> Supervised:
        new = cls(_forked(want, log), limits, port)
        try:
            await new._ready()
        except BaseException as error:
            await new.kill()
            if isinstance(error, ConnectionError) and not last_words(log):
                raise _WithoutAWord("the sandbox did not start: no message") from error
            if isinstance(error, (ConnectionError, TimeoutError)):
                raise RuntimeFailure(f"the sandbox did not start: {last_words(log) or 'no message'}") from error
            raise
        return new

    async def _ready(self) -> None:
        readable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, _settle, readable)
        try:
            await asyncio.wait_for(readable, START_SECONDS)
        finally:
            loop.remove_reader(self._control)
        word, fds, _, _ = socket.recv_fds(self._control, 16, 2)
        if word != b"ready":
            raise ConnectionError
        for fd in fds:
            os.set_inheritable(fd, False)
        self._first = fds[0]
        if len(fds) > 1:
            self.listener = socket.socket(fileno=fds[1])
            self.listener.setblocking(False)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        timeout: float,
        stdout: Path,
        stderr: Path,
    ) -> Ended:
        """Run one command. At the timeout, and when this call is cancelled, everything inside is ended.

        Raises:
            RuntimeFailure: the sandbox is gone, or has no process to give, or was killed from outside meanwhile: how
                the command would have ended, nobody knows.
        """
        request = {"argv": list(argv), "env": dict(env), "cwd": cwd, "cap": self._limits.output}
        with self._order(request, stdout, stderr) as answer:
            try:
                async with asyncio.timeout(timeout):
                    reply = await _reply(answer)
            except TimeoutError:
                await self.end_commands()
                return Ended(-signal.SIGKILL, timed_out=True)
            except BaseException:
                await asyncio.shield(self.end_commands())
                raise
        how, why = reply or ("", supervisor.KILLED)
        if why == supervisor.KILLED:
            raise RuntimeFailure(f"{supervisor.KILLED} while a command ran in it")
        if how == "error":
            raise RuntimeFailure(f"the sandbox can't run {argv[0]}: {why}")
        return Ended(int(how.removeprefix("exit ")), timed_out=False, reason=why or None)

    def _order(self, request: dict[str, Any], stdout: Path, stderr: Path) -> socket.socket:
        with _in_memory(request) as file, stdout.open("wb") as out, stderr.open("wb") as err:
            return self._send(b"x", [file.fileno()], [out.fileno(), err.fileno()])

    async def end_commands(self) -> None:
        """End every command inside; the sandbox itself stays, unless it does not do as told."""
        with contextlib.suppress(TimeoutError, RuntimeFailure), self._send(b"k", [], []) as answer:
            async with asyncio.timeout(END_SECONDS):
                if await _reply(answer) is not None:
                    return
        await self.kill()

    async def kill(self) -> None:
        """End the sandbox and every process in it. When this returns, they are gone; cancelled, it goes on."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        try:
            if not await self._ended_when_told():
                await self._end_from_outside()
        finally:
            self._control.close()
            if self._first is not None:
                os.close(self._first)
                self._first = None

    async def _ended_when_told(self) -> bool:
        """It ends all it has when this end closes, and then itself."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while await _received(self._control):
                    pass
                return True
        return False

    async def _end_from_outside(self) -> None:
        """End every process below it. It can't do so itself, but as long as it lives orphans come back to it; what a
        fork made in between is met in the next round."""
        if self._first is None:
            return
        known: set[int] = set()
        while new := set(supervisor.below(_pid_of(self._first))) - known:
            known |= new
            for pid in new:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        await asyncio.to_thread(select.select, [self._first], [], [])

    def _send(self, word: bytes, before: list[int], after: list[int]) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._control, [word], [*before, theirs.fileno(), *after])
        except OSError as error:
            ours.close()
            raise RuntimeFailure("the sandbox is gone: it was killed or closed before this command") from error
        return ours


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _received(source: socket.socket) -> bytes:
    """The next message; empty once the other end is closed."""
    try:
        return await asyncio.get_running_loop().sock_recv(source, 1 << 16)
    except ConnectionError:
        return b""


async def _reply(answer: socket.socket) -> tuple[str, str] | None:
    """The supervisor's answer, how it ended and why; ``None`` when it died without one."""
    how, newline, why = (await _received(answer)).decode("utf-8", "replace").partition("\n")
    return (how, why) if newline else None


def _pid_of(pidfd: int) -> int:
    """The process id, 0 or less once it has ended."""
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return int(text.partition("Pid:")[2].split()[0])


_next_cpu = 0


def choose_cpus(cpus: float | None) -> list[int]:
    """Cores for one sandbox, rounded up, taken in turn so that sandboxes spread over the machine."""
    global _next_cpu
    if cpus is None:
        return []
    mine = sorted(os.sched_getaffinity(0))
    count = min(len(mine), max(1, int(-(-cpus // 1))))
    chosen = [mine[(_next_cpu + i) % len(mine)] for i in range(count)]
    _next_cpu += count
    return chosen


def last_words(log: Path, limit: int = 400) -> str:
    """The last line or so of a log, as one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-limit:]
