"""A task's results, brought to the trainer that asked for it: signed, under one id, until they have arrived.

What is due stands in the ledger, so nothing is forgotten over a restart, and a delivery may come twice: the receiver
knows it by its id. Of several servers over one ledger the one that has taken a delivery sends it; what a server that
died had taken is due again soon after.

Headers and signature are those of the Standard Webhooks specification, for which receivers have libraries:
``webhook-id``, ``webhook-timestamp``, and ``webhook-signature`` with the base64 of an HMAC-SHA256 over
``id.timestamp.body``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import IO, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from polar.background import forever
from polar.contract.errors import PolarError, UsageError
from polar.contract.rollout import TaskResult
from polar.rollout.feed import Feed, within
from polar.rollout.hosts import AllowedHosts, CheckedResolver, HostNotAllowed
from polar.rollout.metrics import Metrics
from polar.rollout.views import each_result, ended_sessions, with_results
from polar.rollout.wire import encode
from polar.store.base import SessionRecord
from polar.store.ledger import Ledger, PendingCallback

log = logging.getLogger("polar.callbacks")

LOOK_EVERY = 1.0
AT_ONCE = 64
AT_ONCE_PER_HOST = 8
"""A receiver that hangs holds up its own callbacks and nobody else's."""
IN_MEMORY = 4 * 1024 * 1024
"""Bytes of a body from which it is kept in a file."""
_DUE = 1000
_PIECE = 256 * 1024
_MARGIN = 15.0
"""Seconds beyond those of an exchange for which a delivery is taken; put off further while its body is made."""


class CallbackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``allow``: hosts that may be called; loopback besides, as long as the server itself listens nowhere else. The
    first retry comes after ``backoff_seconds``, each next one after twice as long, ``longest_backoff_seconds`` at
    most, for ``give_up_after_seconds`` from the task's end."""

    allow: tuple[str, ...] = ()
    timeout_seconds: float = 30.0
    backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 300.0
    give_up_after_seconds: float = 24 * 3600.0


class Callbacks:
    """Delivers what is due.

    Args:
        secret: signs; see ``signing_key``.
        loopback: receivers on this machine may be called without being listed.
        allow_import: tasks may name builders of their own.
    """

    def __init__(
        self,
        ledger: Ledger,
        feed: Feed,
        metrics: Metrics,
        config: CallbackConfig,
        *,
        secret: str,
        loopback: bool = True,
        allow_import: bool = False,
    ) -> None:
        self.hosts = AllowedHosts(config.allow, loopback=loopback)
        self._ledger = ledger
        self._feed = feed
        self._metrics = metrics
        self._config = config
        self._key = signing_key(secret)
        self._allow_import = allow_import
        self._tries: dict[str, asyncio.Task[None]] = {}
        self._by_host: Counter[str] = Counter()
        self._loop: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession

    async def start(self) -> None:
        """Begin with what is due already."""
        connector = aiohttp.TCPConnector(resolver=CheckedResolver(self.hosts), use_dns_cache=False, limit=AT_ONCE)
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._config.timeout_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._loop = asyncio.create_task(forever(self._deliver_all, "callbacks can't be read"))

    async def close(self) -> None:
        """Stop. A delivery that is cut off is made again after the next start."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        tasks = [loop, *self._tries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._http.close()

    async def _deliver_all(self) -> None:
        happened = self._feed.any.next()
        more = True
        while more and len(self._tries) < AT_ONCE:
            # Else what is due to a host that is dead would be all that is ever seen.
            busy = [host for host, count in self._by_host.items() if count >= AT_ONCE_PER_HOST]
            found = await self._ledger.callbacks_due(time.time(), _DUE, but_not=busy)
            begun = [self._begin(due) for due in found]
            more = len(found) == _DUE and any(begun)
        await within(happened, LOOK_EVERY)
        await asyncio.sleep(0.05)  # many events make one look

    def _begin(self, due: PendingCallback) -> bool:
        """Try it, if there is room; whether there was."""
        host = urlsplit(due.url).netloc.lower()
        if due.task_id in self._tries or len(self._tries) >= AT_ONCE or self._by_host[host] >= AT_ONCE_PER_HOST:
            return False

        def ended(_: asyncio.Task[None]) -> None:
            del self._tries[due.task_id]
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

        self._by_host[host] += 1
        task = asyncio.create_task(self._try(due))
        self._tries[due.task_id] = task
        task.add_done_callback(ended)
        return True

    async def _try(self, due: PendingCallback) -> None:
        """One try, and what follows from how it went; nothing where another server has taken it."""
        taken = _Taken(self._ledger, due, self._config.timeout_seconds + _MARGIN)
        try:
            if not await taken.hold():
                return
            sessions = await self._ledger.sessions(due.task_id)
            error = await self._send(due, sessions, taken)
            age = max(0.0, time.time() - max((record.updated_at for record in sessions), default=0.0))
            again = None
            if error is None:
                outcome = "arrived"
                self._metrics.callback_age.observe(age)
            elif age >= self._config.give_up_after_seconds:
                outcome = "given_up"
                log.error(
                    "callback of task %s is given up after %d tries: %s (its results stay here: GET /results)",
                    due.task_id,
                    due.tries + 1,
                    error,
                    extra={"task_id": due.task_id},
                )
            else:
                outcome = "failed"
                again = time.time() + self._backoff(due.tries)
                log.warning("callback of task %s: %s", due.task_id, error, extra={"task_id": due.task_id})
            self._metrics.callbacks.labels(outcome).inc()
            await self._ledger.callback_tried(due.task_id, arrived=error is None, retry_at=again, error=error)
        except asyncio.CancelledError:
            await taken.give_back()
            raise
        except PolarError as problem:  # the database's: it is still due
            log.error("callback of task %s: %s", due.task_id, problem)
            await asyncio.sleep(self._config.backoff_seconds)
            await taken.give_back()
        except Exception:
            log.exception("callback of task %s", due.task_id)
            await asyncio.sleep(self._config.longest_backoff_seconds)

    def _backoff(self, tries: int) -> float:
        longest: float = min(
            self._config.backoff_seconds * 2.0 ** min(tries, 32), self._config.longest_backoff_seconds
        )
        return longest * random.uniform(0.5, 1.0)

    async def _send(self, due: PendingCallback, sessions: list[SessionRecord], taken: _Taken) -> str | None:
        """Send it; why it did not arrive, if it did not."""
        try:
            self.hosts.check_url(due.url)
        except HostNotAllowed as error:
            return str(error)
        delivery = delivery_id(due.task_id, sessions)
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as body:
            stamp = str(int(time.time()))
            mac = hmac.new(self._key, f"{delivery}.{stamp}.".encode(), hashlib.sha256)
            async with aclosing(self._body(due.task_id, delivery)) as pieces:
                async for piece in pieces:
                    mac.update(piece)
                    body.write(piece)
                    await taken.hold()
            headers = {
                "content-type": "application/json",
                "content-length": str(body.tell()),
                "webhook-id": delivery,
                "webhook-timestamp": stamp,
                "webhook-signature": "v1," + base64.b64encode(mac.digest()).decode(),
            }
            return await self._post(due.url, _pieces(body), headers)

    async def _post(self, url: str, body: AsyncIterator[bytes], headers: dict[str, str]) -> str | None:
        shown = url.partition("?")[0]  # what follows may be a secret of the receiver's
        try:
            async with self._http.post(url, data=body, headers=headers, allow_redirects=False) as response:
                if 200 <= response.status < 300:
                    return None
                why = "a redirect, which is not followed" if 300 <= response.status < 400 else "not 2xx"
                return f"{shown} answered {response.status}: {why}"
        except TimeoutError:
            return f"{shown} did not answer within {self._config.timeout_seconds:g} s"
        except HostNotAllowed as error:
            return str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"{shown}: {' '.join(str(error).replace(url, shown).split()) or type(error).__name__}"

    async def _body(self, task_id: str, delivery: str) -> AsyncGenerator[bytes, None]:
        progress = (await self._ledger.progress(task_id))[0]
        head = TaskResult(task_id=task_id, status=progress.status, delivery_id=delivery)
        ended = await ended_sessions(self._ledger, task_id)
        results = each_result(self._ledger, ended, "full", allow_import=self._allow_import)
        async for piece in with_results(encode(head), results):
            yield piece


class _Taken:
    """A delivery that this server makes, and no other while ``hold`` is called often enough.

    Args:
        seconds: for which it is taken.
    """

    def __init__(self, ledger: Ledger, due: PendingCallback, seconds: float) -> None:
        self._ledger = ledger
        self._due = due
        self._seconds = seconds
        self._until = 0.0

    async def hold(self) -> bool:
        """Take it, or put it off further where less than the time of an exchange is left; whether it is this
        server's. One that was lost meanwhile is sent all the same: twice is better than never."""
        now = time.time()
        if self._until - now > self._seconds - _MARGIN:
            return True
        taken = await self._ledger.put_off_callback(self._due, now + self._seconds)
        if taken:
            self._until = now + self._seconds
            self._due = self._due._replace(due_at=self._until)
        return taken

    async def give_back(self) -> None:
        """It was not sent: it is due now, whoever sends it."""
        if self._until:
            with suppress(PolarError):
                await self._ledger.put_off_callback(self._due, time.time())


def delivery_id(task_id: str, sessions: list[SessionRecord]) -> str:
    """The id of a task's delivery: the same at every try, another one if the task's id is used again."""
    begun = min((record.created_at for record in sessions), default=0.0)
    return hashlib.sha256(f"{task_id} {begun!r}".encode()).hexdigest()[:32]


def signing_key(secret: str) -> bytes:
    """The key that a secret stands for: base64 after ``whsec_``, as the specification has it, else the text itself.

    Raises:
        UsageError: what follows ``whsec_`` is not base64.
    """
    if not secret.startswith("whsec_"):
        return secret.encode()
    try:
        return base64.b64decode(secret[6:], validate=True)
    except binascii.Error:
        raise UsageError("the callback secret is not valid: what follows whsec_ must be base64") from None


async def _pieces(body: IO[Any]) -> AsyncIterator[bytes]:
    body.seek(0)
    while piece := body.read(_PIECE):
        yield piece
