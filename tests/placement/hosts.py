"""Two machines in one: network namespaces with a wire between them that can be cut."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.missing import missing

_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A network namespace, its end of the wire, and its address."""

    name: str
    device: str
    address: str

    def run(self, *line: str) -> None:
        subprocess.run(["ip", "-n", self.name, *line], check=True, capture_output=True)

    def inside(self, line: Sequence[str]) -> list[str]:
        """This command line, run on this host."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *line]

    def plug(self, there: bool) -> None:
        """Put the wire in, or pull it out."""
        self.run("link", "set", self.device, "up" if there else "down")
        if there:
            self._route()

    def _route(self) -> None:
        # A way out, which leads nowhere: by it programs find out their own address.
        self.run("route", "replace", "default", "dev", self.device)

    def processes(self) -> list[psutil.Process]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        processes = []
        for pid in map(int, found.stdout.split()):
            with suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        return [each for each in processes if each.pid != os.getpid()]

    def running(self, word: str) -> list[psutil.Process]:
        """The processes that have this in their command line."""
        return [each for each in self.processes() if word in _command(each)]

    def kill(self, but: str | None = None) -> None:
        """The machine loses its power: nothing that ran on it is left, ``but`` what has this in its command line."""
        while left := [each for each in self.processes() if but is None or but not in _command(each)]:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(left, timeout=20)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it ends just now
        return ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts. This thread, and what it starts, is on the first one until the block ends."""
    word = secrets.token_hex(3)
    hosts = [Host(f"polar-{word}-{end}", f"p{word}{end}", f"10.77.0.{end}") for end in (1, 2)]
    first, second = hosts
    try:
        for host in hosts:
            subprocess.run(["ip", "netns", "add", host.name], check=True, capture_output=True)
        wire = ["type", "veth", "peer", "name", second.device, "netns", second.name]
        subprocess.run(
            ["ip", "link", "add", first.device, "netns", first.name, *wire], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(hosts)
        missing(f"no network namespaces can be made here: {error}")
    try:
        for host in hosts:
            host.run("link", "set", "lo", "up")
            host.run("addr", "add", f"{host.address}/24", "dev", host.device)
            host.plug(True)
        with _moved(first):
            yield first, second
    finally:
        for host in hosts:
            host.kill()
        _remove(hosts)


@contextmanager
def _moved(host: Host) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{host.name}", os.O_RDONLY)
    try:
        assert libc.setns(there, _NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(home, _NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(home)
        os.close(there)


def _remove(hosts: Sequence[Host]) -> None:
    for host in hosts:
        if Path(f"/run/netns/{host.name}").exists():
            subprocess.run(["ip", "netns", "del", host.name], check=True, capture_output=True)
