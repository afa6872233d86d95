"""Why: a process of Python uses one core. ``workers: N`` runs N gateway nodes of one machine behind one port: each
has its own name, folder, journal and sessions, and passes on what is a sibling's (``polar.gateway.siblings``).

This is what starts them. A worker that dies is started again, and its sessions are run again elsewhere, as those of
any node that was lost; the workers die with this process. SIGTERM drains them all, a second one ends them at once.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import uvloop

from polar.contract.errors import PolarError, UsageError
from polar.gateway.siblings import Place
from polar.logs import configure
from polar.service import Say, serve_until_told
from polar.settings import ServeConfig

log = logging.getLogger("polar.workers")

_PAUSES = (0.2, 1.0, 5.0, 15.0)
"""Seconds before a worker is started again: the next one each time that it dies soon."""
_SOON = 60.0
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Workers:
    """The gateway workers of a machine.

    Args:
        config: the settings of one gateway; ``workers`` says how many.
        say: told, in one line each, what a person must know.
    """

    def __init__(self, config: ServeConfig, say: Say) -> None:
        self._config = config
        self._say = say
        self._stopping = asyncio.Event()
        self._failed: str | None = None
        self._running: dict[int, BaseProcess] = {}

    async def run(self) -> None:
        """Until they have ended, which they do when this process is told to.

        Raises:
            UsageError: the port can't be had, or a worker can't begin.
        """
        for number in _STOPS:
            asyncio.get_running_loop().add_signal_handler(number, self._told)
        with ExitStack() as stack:
            places = _places(self._config, stack)
            self._say(f"{len(places)} workers at {places[0].url}")
            await asyncio.gather(*(self._keep(place) for place in places))
        if self._failed is not None:
            raise UsageError(self._failed)

    def _told(self) -> None:
        self._stopping.set()
        for process in self._running.values():
            process.terminate()

    async def _keep(self, place: Place) -> None:
        """One worker, again and again."""
        name = f"{self._config.name}-{place.index}"
        config = msgspec.structs.replace(
            self._config, node_id=name, out=str(Path(self._config.out) / f"worker-{place.index}")
        )
        deaths = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._once(place, config)
            if self._stopping.is_set():
                return
            if code == UsageError.exit_code and not deaths:
                self._failed = f"worker {name} can't begin: see above"
                self._told()
                return
            deaths = deaths + 1 if time.monotonic() - began < _SOON else 1
            pause = _PAUSES[min(deaths, len(_PAUSES)) - 1]
            log.error("worker %s has ended (%s); started again in %g s", name, code, pause)
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                pass

    async def _once(self, place: Place, config: ServeConfig) -> int | None:
        """One run of a worker; its exit code."""
        process = multiprocessing.get_context("spawn").Process(target=_work, args=(place, config), name=config.name)
        process.start()
        self._running[place.index] = process
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
            del self._running[place.index]
        process.join()
        return process.exitcode


def _places(config: ServeConfig, stack: ExitStack) -> list[Place]:
    """The sockets of all workers, open as long as the stack.

    One listening socket each on the shared port, among which the kernel distributes connections: they belong to this
    process too, so none that waits is lost with a worker.

    Raises:
        UsageError: the address can't be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    address = (config.host, config.port)
    try:
        # Without SO_REUSEPORT: with it, another one's workers would share their connections with ours.
        with socket.create_server(address, family=family) as probe:
            address = probe.getsockname()[:2]
        shared = [
            stack.enter_context(socket.create_server(address, family=family, backlog=2048, reuse_port=True))
            for _ in range(config.workers)
        ]
        own = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048)) for _ in shared]
    except OSError as error:
        raise UsageError(
            f"Can't listen on {config.host}:{config.port} ({error.strerror}): another program has that address"
        ) from None
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{'https' if config.tls else 'http'}://{host}:{address[1]}"
    ports = tuple(listener.getsockname()[1] for listener in own)
    return [Place(index, shared[index], own[index], ports, url) for index in range(config.workers)]


def _work(place: Place, config: ServeConfig) -> None:
    """A worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one tells us
    configure(os.environ.get("POLAR_LOG", "INFO").upper(), config.log)
    sys.path.insert(0, str(Path.cwd()))
    try:
        uvloop.run(_serve(place, config))
    except PolarError as error:
        _print(f"polar: {config.name}: {error}")
        sys.exit(error.exit_code)
    except asyncio.CancelledError:
        sys.exit(1)


async def _serve(place: Place, config: ServeConfig) -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    # A supervisor that was killed is started again with workers of its own: there must be one of each.
    asyncio.get_running_loop().add_reader(first.sentinel, os._exit, 1)
    await serve_until_told(config, dict(os.environ), _print, signals=(signal.SIGTERM,), place=place)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
