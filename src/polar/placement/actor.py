"""Why: an actor of Ray that *is* the gateway, so that its life and the gateway's are one. The service has a thread
with an event loop of its own: Ray calls the actor on other threads, which wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import msgspec
import uvloop

from polar.contract.errors import PolarError
from polar.logs import configure
from polar.rollout.auth import NODE_ENV
from polar.service import serve
from polar.settings import ServeConfig

log = logging.getLogger("polar.placement")


class GatewayActor:
    """A gateway node in this process. It begins at once.

    Ray runs the methods of a class that has any coroutine on one thread, where the first that waits would stop all:
    this class has none.

    Args:
        settings: a ``ServeConfig`` as JSON.
        token: the node token. Ray writes the environment of an actor to its logs, and its arguments not.
    """

    def __init__(self, settings: bytes, token: str) -> None:
        self._config = msgspec.json.decode(settings, type=ServeConfig)
        self._environ = {**os.environ, NODE_ENV: token}
        configure(os.environ.get("POLAR_LOG", "INFO").upper(), self._config.log)
        self._told = threading.Event()
        self._over = threading.Event()
        self._why = ""
        # A sandbox dies with the thread that started it: this one lives as long as the service.
        threading.Thread(target=self._run, name="gateway", daemon=True).start()

    def ended(self) -> str:
        """Wait until it has ended: why, in one line, or nothing where it was drained."""
        self._over.wait()
        return self._why

    def drain(self) -> None:
        """Take no more sessions, and wait until it has handed over or back what it has."""
        self._told.set()
        self._over.wait()

    def _run(self) -> None:
        try:
            uvloop.run(_serve(self._config, self._environ, self._told))
        except PolarError as error:
            self._why = str(error)
        except Exception as error:
            log.exception("the gateway broke")
            self._why = f"{type(error).__name__}: {error}"
        finally:
            self._over.set()


async def _serve(config: ServeConfig, environ: dict[str, str], told: threading.Event) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def pass_on() -> None:
        told.wait()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=pass_on, daemon=True).start()
    await serve(config, environ, stop, log.info)
