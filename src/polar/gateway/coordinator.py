"""Who gives out sessions and takes what has come of them: the rollout server, as a gateway node sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from polar.contract.arrays import from_json, to_json
from polar.contract.errors import PolarError, UsageError
from polar.contract.rollout import (
    LARGEST_DELIVERY,
    Claim,
    Delivery,
    Heartbeat,
    HeartbeatReply,
    Lease,
    NodeSpec,
    Release,
)
from polar.store.base import StoreConflict, StoreFailure
from polar.store.codec import dumps
from polar.surrogates import mend_surrogates

T = TypeVar("T")

_SECONDS = 30.0
"""For one exchange, beyond what it is asked to wait."""
_DELIVERY_SECONDS = 600.0
"""For captured calls, which may be hundreds of MB where they have screenshots in them."""
_BEAT_SECONDS = 5.0
"""For a heartbeat: where the network swallows it, the next one must come before the lease has lapsed."""


class Unreachable(PolarError):
    """The server did not answer, or not now: what was asked may be asked again."""


class Unwelcome(UsageError):
    """The server does not know this node's credential, or as another node's: nothing that it refuses so is refused
    for good."""


class Refused(UsageError):
    """The server will never take this, however often it is asked."""


class Coordinator(Protocol):
    """The rollout server's side of a node. Every method may be repeated without harm.

    Any of these raises Unreachable where the server can't be had now.
    """

    async def register(self, spec: NodeSpec) -> None:
        """This node is here.

        Raises:
            UsageError: the server does not take it.
        """
        ...

    async def claim(self, claim: Claim) -> list[Lease]:
        """Sessions to run, each under a lease."""
        ...

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Renew the leases that are held; what else has happened to them."""
        ...

    async def deliver(self, delivery: Delivery) -> None:
        """Hand over captured calls and a result.

        Raises:
            StoreConflict: refused for good: the attempt is over.
            Refused: refused for good, by the server itself: it is not valid, or too large.
        """
        ...

    async def release(self, release: Release) -> None:
        """Hand a session back."""
        ...


class Dispatcher(Protocol):
    """A rollout server in this process."""

    async def register(self, spec: NodeSpec) -> object: ...

    async def claim(self, node_id: str, claim: Claim) -> list[Lease]: ...

    async def heartbeat(self, node_id: str, beat: Heartbeat) -> HeartbeatReply: ...

    async def deliver(self, node_id: str, delivery: Delivery) -> None: ...

    async def release(self, node_id: str, release: Release) -> None: ...


class LocalCoordinator:
    """The rollout server of this process."""

    def __init__(self, dispatch: Dispatcher, node_id: str) -> None:
        self._dispatch = dispatch
        self._node_id = node_id

    async def register(self, spec: NodeSpec) -> None:
        await _now(self._dispatch.register(spec))

    async def claim(self, claim: Claim) -> list[Lease]:
        return await _now(self._dispatch.claim(self._node_id, claim))

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        return await _now(self._dispatch.heartbeat(self._node_id, beat))

    async def deliver(self, delivery: Delivery) -> None:
        await _now(self._dispatch.deliver(self._node_id, delivery))

    async def release(self, release: Release) -> None:
        await _now(self._dispatch.release(self._node_id, release))


async def _now(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except StoreFailure as error:  # a full disk, a database that is away: it may be asked again
        raise Unreachable(str(error)) from error


class HttpCoordinator:
    """A rollout server behind a URL.

    Args:
        url: the server's root, such as ``http://10.0.0.1:8080``.
        token: the node credential.
    """

    def __init__(self, url: str, node_id: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._node = f"{self.url}/nodes/{node_id}"
        self._token = token
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Let go of the connections."""
        if self._http is not None:
            await self._http.close()

    async def check_token(self) -> None:
        """Ask the server, before this node has made anything ready, whether its token is good for it.

        Raises:
            Unwelcome: it is not. Whatever else it answers, or where it is away, ``register`` will show.
        """
        try:
            await self.heartbeat(Heartbeat())
        except Unwelcome:
            raise
        except PolarError:
            return

    async def register(self, spec: NodeSpec) -> None:
        await self._post(f"{self.url}/nodes/register", spec, Any)

    async def claim(self, claim: Claim) -> list[Lease]:
        return await self._post(f"{self._node}/claim", claim, list[Lease], seconds=_SECONDS + claim.wait)

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        return await self._post(f"{self._node}/heartbeat", beat, HeartbeatReply, seconds=_BEAT_SECONDS)

    async def deliver(self, delivery: Delivery) -> None:
        body = await asyncio.to_thread(_encoded, delivery) if delivery.completions else _encoded(delivery)
        if len(body) > LARGEST_DELIVERY:  # to send it would be cut off in the middle, and look like a network's fault
            raise Refused(f"{len(body)} bytes are more than a rollout server takes ({LARGEST_DELIVERY})")
        await self._post(f"{self._node}/deliveries", body, Any, seconds=_DELIVERY_SECONDS)

    async def release(self, release: Release) -> None:
        await self._post(f"{self._node}/release", release, Any)

    async def _post(self, url: str, body: Any, kind: type[T], *, seconds: float = _SECONDS) -> T:
        if self._http is None:
            self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"})
        data = body if isinstance(body, bytes) else to_json(body)
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.post(url, data=data, headers={"Content-Type": "application/json"}) as response,
            ):
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{url}: {' '.join(str(error).split()) or type(error).__name__}") from None
        if response.status >= 400:
            raise _refused(url, response.status, answer)
        try:
            return from_json(answer, kind)
        except msgspec.DecodeError as error:
            raise Unreachable(f"{url} answered what is no answer of a rollout server ({error})") from None


def _encoded(delivery: Delivery) -> bytes:
    try:
        return to_json(delivery)
    except UnicodeEncodeError:  # half a character in some text: its ids are what counts
        return mend_surrogates(dumps(delivery))


def _refused(url: str, status: int, answer: bytes) -> PolarError:
    try:
        detail = msgspec.json.decode(answer)["detail"]
    except (msgspec.DecodeError, KeyError, TypeError):  # not this server's word: a proxy's, or another program's
        line = f"{url} answered {status}: {' '.join(answer[:200].decode('utf-8', 'replace').split())}"
        if status in (400, 409, 413, 422):
            most = LARGEST_DELIVERY >> 20
            return Unreachable(f"{line}: a proxy before the rollout server must pass bodies of up to {most} MiB")
    else:
        line = f"{url} answered {status}: {detail}"
    if status == 409:
        return StoreConflict(line)
    if status == 401:
        return Unwelcome(f"{line}: set POLAR_NODE_TOKEN to the server's node token")
    if status == 403:
        return Unwelcome(f"{line} (POLAR_NODE_TOKEN has to be a token of this server that is good for this node)")
    if status in (400, 413, 422):
        return Refused(line)
    if status in (404, 405):
        return UsageError(line)
    return Unreachable(line)
