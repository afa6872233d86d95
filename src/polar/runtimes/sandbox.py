"""One sandbox on this machine, with walls or without: its folder, its commands, its files, its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
import posixpath
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from polar.contract.errors import UsageError
from polar.contract.runtime import Command, ExecResult, Runtime, RuntimeFailure
from polar.contract.task import RuntimeSpec
from polar.runtimes import bubblewrap, leftovers, tree
from polar.runtimes.supervised import Supervised

LOOPBACK = "127.0.0.1,localhost,::1"
OWN_PROGRAMS = ".local/bin"
"""Under HOME, where installers put programs without root, and first on PATH: what ``prepare`` installs is found."""


def refuse_unsupported(spec: RuntimeSpec) -> None:
    """Raise UsageError for what needs another backend, contradicts itself or is impossible."""
    if spec.backend != "local":
        raise UsageError(f"runtime backend {spec.backend!r} is not in this version: use local")
    if spec.image is not None:
        raise UsageError("runtime.image needs docker or apptainer: the local sandbox shows this machine's programs")
    if spec.network not in (None, "none", "host"):
        raise UsageError(f"runtime.network {spec.network!r} is not known here: leave it out or say none or host")
    if spec.network == "host" and not spec.allow_internet:
        raise UsageError("runtime.network is host and allow_internet is false: take one of them out")
    if spec.network == "none" and spec.allow_internet:
        raise UsageError("runtime.network is none and allow_internet is true: take one of them out")
    refuse_impossible(spec)


def refuse_impossible(spec: RuntimeSpec) -> None:
    """Raise UsageError for what no machine could give, whatever its operator allows."""
    if spec.cpus is not None and not 0 < spec.cpus < math.inf:
        raise UsageError("runtime.cpus must be above 0")
    if spec.memory_mb is not None and spec.memory_mb <= 0:
        raise UsageError("runtime.memory_mb must be above 0")
    if spec.workdir is not None:
        bubblewrap.check_place(spec.workdir)


def absolute(folder: Path) -> Path:
    """The folder as an absolute path, its links as they are."""
    return Path(os.path.abspath(folder))


async def prepare_folder(folder: Path) -> int:
    """Make and own a sandbox's folder. HOME has the folders that a harness is told to leave things in.

    Raises:
        RuntimeFailure: something of a sandbox is already in it, or there is no room.
    """
    making = asyncio.ensure_future(asyncio.to_thread(_make_folder, folder))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeFailure):
            lock = await making
            await asyncio.to_thread(_give_up, folder, lock)
        raise


def _make_folder(folder: Path) -> int:
    lock: int | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # the modes inside are the agent's to choose: other users of this host stay out
        lock = leftovers.claim(folder)
        session = ("home/session", "home/session/artifacts", "home/session/logs")
        for part in ("root", "workspace", "home", "tmp", *session):
            os.mkdir(f"{folder}/{part}", 0o755)
    except OSError as error:
        if lock is not None:
            _give_up(folder, lock)
        raise RuntimeFailure(f"the sandbox's folder {folder} can't be made, use an empty one: {error}") from error
    return lock


def _give_up(folder: Path, lock: int) -> None:
    try:
        leftovers.remove(folder)
    finally:
        os.close(lock)


@dataclass(slots=True)
class Place:
    """Where a sandbox is on disk, and how paths inside are folders outside."""

    folder: Path
    lock: int | None
    workdir: str
    home: str
    writable: Mapping[str, Path]
    read_only: Sequence[str] = ()

    def locate(self, path: str) -> tuple[Path, list[str]]:
        """The host folder that holds a path inside, and the names from there on. ``~/`` is HOME."""
        if path.startswith("~/"):
            path = posixpath.join(self.home, path[2:])
        inside = PurePosixPath(posixpath.normpath(posixpath.join(self.workdir, path)))
        places = {"/": self.folder / "root", **self.writable}
        best = max((p for p in places if inside.is_relative_to(p)), key=lambda p: len(PurePosixPath(p).parts))
        return places[best], list(inside.relative_to(best).parts)

    def hides(self, path: str) -> bool:
        """Whether something read-only is shown where this path would be."""
        root, parts = self.locate(path)
        inside = PurePosixPath("/", *parts)
        return root == self.folder / "root" and any(inside.is_relative_to(shown) for shown in self.read_only)

    async def remove(self) -> None:
        """Remove the sandbox's files and give the folder up."""
        if self.lock is not None:
            lock, self.lock = self.lock, None
            await asyncio.to_thread(_give_up, self.folder, lock)


class LocalRuntime:
    """A sandbox (see the ``Runtime`` protocol). A timeout ends every process inside, not the sandbox itself."""

    def __init__(
        self,
        place: Place,
        inner: Supervised,
        *,
        env: Mapping[str, str],
        another: Callable[[Path], Awaitable[LocalRuntime]],
    ) -> None:
        self._place, self._inner, self._make_another = place, inner, another
        self._env = {"HOME": place.home, "LANG": "C.UTF-8", **env}
        self._forks: list[LocalRuntime] = []
        self._fork_numbers = itertools.count(1)
        self.workdir, self.home = place.workdir, place.home
        self.listener: socket.socket | None = inner.listener

    def inside_url(self, gateway_url: str) -> str:
        """Where the listener is, or the gateway's own address where the network is the host's."""
        if self._inner.port is None:
            return gateway_url
        return f"http://127.0.0.1:{self._inner.port}"

    async def exec(self, command: Command, *, timeout: float, logs: Path, name: str) -> ExecResult:
        """Run a command. A limit that ended it is the last line of its stderr.

        Raises:
            RuntimeFailure: the sandbox is gone or can't start it.
        """
        env = with_loopback({**self._env, **command.env})
        argv = shell(command.argv) if isinstance(command.argv, str) else list(command.argv)
        cwd = posixpath.join(self.workdir, command.cwd or ".")
        os.makedirs(logs, exist_ok=True)
        stdout, stderr = logs / f"{name}.stdout", logs / f"{name}.stderr"
        ended = await self._inner.run(argv, env=env, cwd=cwd, timeout=timeout, stdout=stdout, stderr=stderr)
        if ended.reason:
            with stderr.open("a") as file:
                file.write(f"\n[polar: ended by a limit: {ended.reason}]\n")
        return ExecResult(ended.exit_code, ended.timed_out, stdout, stderr)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Put a file inside; ``~/`` is HOME. What is read-only inside can't be written.

        Raises:
            RuntimeFailure: it can't be put there.
        """
        if self._place.hides(path):
            raise RuntimeFailure(f"{path} is read-only in the sandbox")
        root, parts = self._place.locate(path)
        try:
            await asyncio.to_thread(tree.write, root, parts, data, mode)
        except tree.TreeError as error:
            raise RuntimeFailure(f"{path}: {error}") from error

    async def read_file(self, path: str) -> bytes:
        """A regular file of the sandbox's own; no link is followed on the way."""
        root, parts = self._place.locate(path)
        try:
            return await asyncio.to_thread(tree.read, root, parts)
        except tree.TreeError as error:
            raise RuntimeFailure(str(error)) from error

    async def fresh(self) -> LocalRuntime:
        """Another one of the same kind, empty, and without a way to the model."""
        new = await self._make_another(self._place.folder / "forks" / str(next(self._fork_numbers)))
        self._forks.append(new)
        return new

    async def copy_workspace(self, target: Runtime) -> None:
        """Put a copy of the workspace in place of the target's. Cancelled, it is still done before this returns: the
        target may be removed next, where nobody may be writing then."""
        assert isinstance(target, LocalRuntime)
        source, place = self._place.writable[self.workdir], target._place.writable[target.workdir]
        copying = asyncio.ensure_future(asyncio.to_thread(tree.replace, source, place))
        try:
            await asyncio.shield(copying)
        except tree.TreeError as error:
            raise RuntimeFailure(str(error)) from error
        except asyncio.CancelledError:
            await asyncio.wait({copying})
            raise

    async def fork(self) -> LocalRuntime:
        """A fresh sandbox with a copy of the workspace, and no way to the model."""
        new = await self.fresh()
        try:
            await self.copy_workspace(new)
        except BaseException:
            await new.close()
            raise
        return new

    async def kill(self) -> None:
        """End every process inside; the sandbox runs nothing from here on. The listener is closed by ``close``,
        after whoever serves it has let go."""
        await self._inner.kill()

    async def close(self) -> None:
        """Kill and remove, forks included."""
        for fork in self._forks:
            await fork.close()
        await self.kill()
        if self.listener is not None:
            self.listener.close()
        await self._place.remove()


def with_loopback(env: dict[str, str]) -> dict[str, str]:
    """The environment with loopback exempt from any proxy, in both spellings that programs read."""
    for name in ("NO_PROXY", "no_proxy"):
        given = env.get(name)
        env[name] = f"{given},{LOOPBACK}" if given else LOOPBACK
    return env


@functools.cache
def _shell() -> tuple[str, ...]:
    if bash := shutil.which("bash", path="/usr/local/bin:/usr/bin:/bin"):
        return (bash, "--noprofile", "--norc", "-o", "pipefail", "-c")
    line = ("/bin/sh", "-o", "pipefail", "-c")
    if subprocess.run([*line, "true"], capture_output=True, check=False).returncode == 0:
        return line
    raise RuntimeFailure("no shell here can tell of a failure inside a pipe: apt-get install bash")


def shell(text: str) -> list[str]:
    """The command line that runs a shell string so that a pipe can't hide a failure."""
    return [*_shell(), text]
