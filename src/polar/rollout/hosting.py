"""The gateway as the control plane needs it: bare capture sessions, and inference that stops and goes on.

Where gateway and rollout server are one process the lead hands over its own; where they are apart, the nodes are
asked over HTTP, under the node token that each has shown, on the very routes that ``node_routes`` gives them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import aiohttp
import msgspec

from polar.contract.arrays import from_json, to_json, to_plain
from polar.contract.errors import PolarError
from polar.contract.rollout import BARE_NODE, NodeInfo, OpenedSession, OpenSession
from polar.gateway.captures import Captures
from polar.rollout.auth import SHARED_NODE
from polar.rollout.http import Refused
from polar.store.base import SessionRecord, StoreConflict
from polar.store.ledger import Ledger

log = logging.getLogger("polar.rollout")

_SECONDS = 30.0


class CaptureHost(Protocol):
    """Where bare capture sessions live."""

    async def open(self, request: OpenSession) -> OpenedSession:
        """A new session, whose key is good from now on.

        Raises:
            UsageError, StoreConflict: it can't be opened so; there is one of that id.
        """
        ...

    async def close(self, session_id: str) -> bool:
        """Seal it: its key takes no more calls, its result is stored. Whether it was open here."""
        ...

    async def forget(self, session_id: str) -> int:
        """Seal it if it is open, and drop what its gateway keeps of it: so many calls."""
        ...


class Inference(Protocol):
    """The engines behind the gateways. Every method says how it stands afterwards: ``paused``, ``inflight``,
    ``waiting``, ``version``."""

    async def status(self) -> dict[str, Any]: ...

    async def pause(self, timeout_seconds: float) -> dict[str, Any]:
        """Hold new calls and wait for those in flight; undone (``paused: false``) if they don't end in time."""
        ...

    async def resume(self) -> dict[str, Any]: ...

    async def set_version(self, version: str) -> dict[str, Any]:
        """From here on tokens carry this weight version, where the engine names none."""
        ...


class Gate(Protocol):
    """A gateway's own means of the same, in this process."""

    def status(self) -> Any: ...

    async def pause(self, timeout_seconds: float) -> Any: ...

    def resume(self) -> Any: ...

    def set_version(self, version: str | int) -> Any: ...


class LocalInference:
    """The gateway of this process."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def status(self) -> dict[str, Any]:
        return _plain(self._gate.status())

    async def pause(self, timeout_seconds: float) -> dict[str, Any]:
        return _plain(await self._gate.pause(timeout_seconds))

    async def resume(self) -> dict[str, Any]:
        return _plain(self._gate.resume())

    async def set_version(self, version: str) -> dict[str, Any]:
        return _plain(self._gate.set_version(version))


class HostedCaptures:
    """The bare sessions of a gateway in this process, as the control plane opens and closes them.

    Args:
        refuses: says why none is opened now.
    """

    def __init__(
        self, captures: Captures, url: Callable[[], str], refuses: Callable[[], str | None] = lambda: None
    ) -> None:
        self._captures = captures
        self._url = url
        self._refuses = refuses

    async def open(self, request: OpenSession) -> OpenedSession:
        if (why := self._refuses()) is not None:
            raise Refused(503, why)
        session = await self._captures.open(
            session_id=request.session_id,
            task_id=request.task_id,
            sampling=request.sampling,
            metadata={**request.metadata, **({"model": request.model} if request.model else {})},
        )
        url = self._url()
        return OpenedSession(
            session_id=session.session_id,
            api_key=session.key,
            base_urls={"openai": f"{url}/v1", "anthropic": url, "google": url},
            task_id=session.task_id,
            created_at=time.time(),
        )

    async def close(self, session_id: str) -> bool:
        return await self._captures.close(session_id) is not None

    async def forget(self, session_id: str) -> int:
        return await self._captures.forget(session_id)


class Fleet:
    """The gateways of all nodes, over HTTP: a ``CaptureHost`` and an ``Inference``.

    Args:
        token_of: the node token of a name, if there is one here. A node is shown the one that it has shown itself.
    """

    def __init__(self, ledger: Ledger, token_of: Callable[[str], str | None]) -> None:
        self._ledger = ledger
        self._token_of = token_of
        self._given_at: dict[str, float] = {}
        self._http: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Let go of the connections."""
        if self._http is not None:
            await self._http.close()

    # ---- bare capture sessions ---------------------------------------------------------------------------

    async def open(self, request: OpenSession) -> OpenedSession:
        """Open it on the node that has the least to do."""
        if request.session_id is not None and await self._ledger.session(request.session_id) is not None:
            raise StoreConflict(f"session {request.session_id} exists: take another session_id")
        if request.task_id is not None and await self._ledger.task(request.task_id) is not None:
            raise StoreConflict(f"{request.task_id} is a task, and its sessions are its own: take another task_id")
        healthy = await self._nodes()
        nodes = [node for node in healthy if not node.draining]
        if not nodes:
            how = "every gateway node drains" if healthy else "no gateway node is healthy"
            raise Refused(503, f"{how}: start one, or wait for it")
        # Leases don't count bare sessions: of those that hold as many, the one that was given one longest ago.
        node = min(nodes, key=lambda each: (each.sessions, self._given_at.get(each.node_id, 0.0)))
        self._given_at[node.node_id] = time.monotonic()
        there = msgspec.structs.replace(request, metadata={**request.metadata, BARE_NODE: node.node_id})
        answer = await self._ask(node, "POST", "/sessions", to_json(there))
        opened = from_json(answer, OpenedSession)
        now = time.time()
        record = SessionRecord(
            session_id=opened.session_id,
            task_id=opened.task_id or opened.session_id,
            sample_index=0,
            state="RUNNING",
            created_at=now,
            updated_at=now,
            metadata={**request.metadata, BARE_NODE: node.node_id},
        )
        try:
            await self._ledger.put_session(record)
        except PolarError:  # nobody gets its key, and its id may be asked for again
            with suppress(PolarError):
                await self._ask(node, "DELETE", f"/sessions/{opened.session_id}")
            raise
        return opened

    async def close(self, session_id: str) -> bool:
        node = await self._node_of(session_id)
        if node is None:
            return False
        answer = await self._ask(node, "POST", f"/sessions/{session_id}/close")
        return bool(msgspec.json.decode(answer).get("closed"))

    async def forget(self, session_id: str) -> int:
        node = await self._node_of(session_id)
        if node is None:
            return 0
        answer = await self._ask(node, "DELETE", f"/sessions/{session_id}")
        return int(msgspec.json.decode(answer).get("messages_deleted", 0))

    async def forget_what_is_left(self) -> None:
        """Have nodes that are back forget what was forgotten here while they were away. Called now and then."""
        nodes = {node.node_id: node for node in await self._nodes()}
        for session_id, node_id in await self._ledger.to_forget():
            if node_id not in nodes:
                continue
            again = await self._ledger.session(session_id)
            if again is None or again.metadata.get(BARE_NODE) != node_id:  # else it is gone: there is a new one
                try:
                    await self._ask(nodes[node_id], "DELETE", f"/sessions/{session_id}")
                except Refused as error:
                    log.warning("session %s is still to be forgotten on its node: %s", session_id, error)
                    del nodes[node_id]
                    continue
            await self._ledger.forgotten_there(session_id, node_id)

    async def _node_of(self, session_id: str) -> NodeInfo | None:
        """The node that has a bare session; ``None``: it is on none."""
        record = await self._ledger.session(session_id)
        if record is None or BARE_NODE not in record.metadata:
            return None
        for node in await self._ledger.nodes(time.time()):
            if node.node_id == record.metadata[BARE_NODE]:
                return node
        raise Refused(503, f"the node of session {session_id} is not known any more")

    # ---- inference ---------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        return await self._everywhere(lambda node: self._inference(node, "GET", "status"))

    async def pause(self, timeout_seconds: float) -> dict[str, Any]:
        """All of them, or none: where one can't pause in time, the others go on, too."""
        path = f"pause?timeout_seconds={timeout_seconds:.3f}"
        try:
            found = await self._everywhere(lambda node: self._inference(node, "POST", path, timeout_seconds))
        except PolarError:
            await self._undo()
            raise
        if not found["paused"]:
            await self._undo()
        return found

    async def resume(self) -> dict[str, Any]:
        return await self._everywhere(lambda node: self._inference(node, "POST", "resume"))

    async def set_version(self, version: str) -> dict[str, Any]:
        body = to_json({"version": version})
        return await self._everywhere(lambda node: self._inference(node, "POST", "version", body=body))

    async def _undo(self) -> None:
        with suppress(PolarError):
            await self.resume()

    async def _everywhere(self, ask: Callable[[NodeInfo], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        nodes = await self._nodes()
        if not nodes:
            raise Refused(503, "no gateway node is healthy: start one, or wait for it")
        answers = await asyncio.gather(*(ask(node) for node in nodes), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return _together(nodes, [answer for answer in answers if isinstance(answer, dict)])

    async def _inference(
        self, node: NodeInfo, method: str, path: str, wait: float = 0.0, body: bytes = b""
    ) -> dict[str, Any]:
        answer = await self._ask(node, method, f"/admin/inference/{path}", body, wait=wait, also=504)
        found: dict[str, Any] = msgspec.json.decode(answer)
        return found

    # ---- asking ------------------------------------------------------------------------------------------

    async def _nodes(self) -> list[NodeInfo]:
        return [node for node in await self._ledger.nodes(time.time()) if node.healthy]

    async def _ask(
        self, node: NodeInfo, method: str, path: str, body: bytes = b"", *, wait: float = 0.0, also: int = 200
    ) -> bytes:
        """The body of the answer, if its status is 200 or ``also``."""
        token = self._token_of(node.credential or SHARED_NODE)
        if token is None:
            raise Refused(
                503,
                f"node {node.node_id} came with the token {node.credential}, which this server does not have: give "
                "every server the same auth.tokens, or start that node again",
            )
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        if self._http is None:
            self._http = aiohttp.ClientSession()
        url = node.gateway_url.rstrip("/") + path
        try:
            async with (
                asyncio.timeout(_SECONDS + wait),
                self._http.request(method, url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Refused(503, f"node {node.node_id} does not answer: {type(error).__name__}") from None
        if response.status not in (200, also):
            raise _passed_on(node, response.status, answer)
        return answer


def _passed_on(node: NodeInfo, status: int, answer: bytes) -> Refused:
    """A node's refusal, as this server's; what is between the two of them is no fault of the caller."""
    try:
        detail = str(msgspec.json.decode(answer)["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        detail = f"status {status}"
    return Refused(status if status in (404, 409, 422) else 503, f"node {node.node_id}: {detail}")


def _together(nodes: Sequence[NodeInfo], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    versions = {answer.get("version") for answer in answers}
    return {
        "paused": all(answer.get("paused") for answer in answers),
        "inflight": sum(answer.get("inflight", 0) for answer in answers),
        "waiting": sum(answer.get("waiting", 0) for answer in answers),
        "version": versions.pop() if len(versions) == 1 else None,
        "nodes": {node.node_id: answer for node, answer in zip(nodes, answers, strict=True)},
    }


def _plain(status: Any) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(status)
    return plain
