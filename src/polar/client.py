"""A client of the rollout service, for trainers and for the command line: submit tasks, wait, take results.

async with RolloutClient("http://127.0.0.1:8080", token) as polar:
    await polar.submit(task)
    async for result in polar.results("my-trainer"):
        ...                                   # a SessionResult with its traces
        # asking for the next one acknowledges this one
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from polar.contract.arrays import from_json, to_json
from polar.contract.errors import PolarError, UsageError
from polar.contract.rollout import NodeInfo
from polar.contract.task import TaskRequest
from polar.rollout.wire import WireResult, WireTaskStatus

T = TypeVar("T")

DEFAULT_SERVER = "http://127.0.0.1:8080"
_SECONDS = 30.0
_PATIENCE = 60.0
"""Seconds for which a server that can't be reached is asked again, before that is an error."""


class ServiceError(PolarError):
    """The service refused, in its own words. ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RolloutClient:
    """The service at a URL. Every call may be repeated without harm, and is, while the server is away for a while.

    Args:
        server: its root; by default ``POLAR_SERVER``, else http://127.0.0.1:8080.
        token: by default ``POLAR_TOKEN``, else ``POLAR_ADMIN_TOKEN``, else the one that ``polar serve`` keeps on this
            machine for this address.
        patience: seconds for which a server that can't be reached is asked again.

    Raises:
        UsageError: that is no address of a server.
    """

    def __init__(self, server: str | None = None, token: str | None = None, *, patience: float = _PATIENCE) -> None:
        self.server = (server or os.environ.get("POLAR_SERVER") or DEFAULT_SERVER).rstrip("/")
        if not self.server.startswith(("http://", "https://")):
            raise UsageError(
                f"{self.server} is no address of a server: write http://HOST:PORT (--server, POLAR_SERVER)"
            )
        self._token = token or os.environ.get("POLAR_TOKEN") or os.environ.get("POLAR_ADMIN_TOKEN") or ""
        self._token = self._token or kept_token(self.server) or ""
        self._patience = patience
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def submit(self, task: TaskRequest) -> str:
        """Post a task; its id. The same task again is the same task.

        Raises:
            ServiceError: 409, the id exists with another body; 422, it can't be run there.
        """
        body = to_json(_said(task))
        return str((await self._ask("POST", "/rollout/task/submit", dict[str, Any], body=body))["task_id"])

    async def status(self, task_id: str, *, results: str = "summary", wait: float = 0.0) -> WireTaskStatus:
        """How a task stands; with ``wait``, not before it has ended or that many seconds have passed."""
        query = {"results": results, "wait": str(wait)} if wait else {"results": results}
        return await self._ask("GET", f"/rollout/task/{quote(task_id)}", WireTaskStatus, query=query, wait=wait)

    async def wait(self, task_id: str) -> WireTaskStatus:
        """A task once it has ended, with its results and their traces."""
        while (await self.status(task_id, results="none", wait=20.0)).status == "running":
            continue
        return await self.status(task_id, results="full")

    async def cancel(self, task_id: str) -> WireTaskStatus:
        """End a task now; traces of what it had captured are kept. It is ``running`` as long as a node has not ended
        what it held: ``wait`` for it to have all results."""
        return await self._ask("DELETE", f"/rollout/task/{quote(task_id)}", WireTaskStatus)

    async def results(self, consumer: str, *, follow: bool = True) -> AsyncIterator[WireResult]:
        """Results with their traces, in the order in which sessions ended, from where this consumer was. A result
        counts as dealt with when the next one is asked for; after a crash the last one comes again, under the same
        ``session_id`` and ``attempt``.

        Args:
            follow: wait for more; if not, end after what is there.
        """
        while True:
            query = {"consumer": consumer, "limit": "16", "wait": "20" if follow else "0"}
            page = await self._ask("GET", "/results", _Page, query=query, wait=20.0)
            for entry in page.results:
                yield entry.result
                body = to_json({"consumer": consumer, "cursor": entry.cursor})
                await self._ask("POST", "/results/ack", Any, body=body)
            if not page.results and not follow:
                return

    async def traces(self, task_id: str, to: Literal["parquet", "jsonl"], path: Path) -> int:
        """A task's finished traces so far into a file, which is there whole or not at all; its size in bytes. Folders
        that are missing are made.

        Raises:
            PolarError: the file can't be written, or the download broke off.
        """
        part = path.with_name(f".{path.name}.{os.getpid()}.partial")
        url = f"{self.server}/rollout/task/{quote(task_id)}/traces.{to}"
        size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            async with self._session().get(url) as response:
                if response.status != 200:
                    raise self._refused(response.status, await response.read())
                with part.open("wb") as file:
                    async for piece in response.content.iter_chunked(1 << 20):
                        size += await asyncio.to_thread(file.write, piece)
            part.replace(path)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PolarError(f"{url}: the download broke off ({error}): try again") from None
        except OSError as error:
            raise PolarError(f"{path} can't be written ({error.strerror}): name another file, or make room") from None
        finally:
            with suppress(OSError):
                part.unlink()
        return size

    async def nodes(self) -> list[NodeInfo]:
        """The gateway nodes."""
        return await self._ask("GET", "/nodes", list[NodeInfo])

    async def drain(self, node_id: str) -> NodeInfo:
        """The node shall take no more sessions."""
        return await self._ask("DELETE", f"/nodes/{quote(node_id)}", NodeInfo)

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Any other GET of the control plane, as plain data."""
        return await self._ask("GET", path, Any, query=query)

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> T:
        loop = asyncio.get_running_loop()
        patient_until, pause = loop.time() + self._patience, 0.2
        while True:
            try:
                status, answer = await self._exchange(method, path, body, query, wait)
                problem = f"answered {status}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                status, answer = 0, b""
                problem = " ".join(str(error).split()) or type(error).__name__
            if 200 <= status < 300:
                return _decoded(self.server + path, answer, kind)
            if status == 401 and await self._token_has_come():
                continue
            if status and status not in (429, 502, 503, 504):
                raise self._refused(status, answer)
            if loop.time() + pause > patient_until:
                if status and (why := _detail(answer)):  # its own word: it is there, and can't do this now
                    raise ServiceError(f"{self.server}: {why}", status)
                raise PolarError(f"no rollout server at {self.server} ({problem}): start one with polar serve")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def _exchange(
        self, method: str, path: str, body: bytes | None, query: Mapping[str, str] | None, wait: float
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        async with (
            asyncio.timeout(_SECONDS + wait),
            self._session().request(method, self.server + path, data=body, params=query, headers=headers) as response,
        ):
            return response.status, await response.read()

    async def _token_has_come(self) -> bool:
        """A server that starts only now makes its token after this client looked for it."""
        if self._token or not (kept := kept_token(self.server)):
            return False
        self._token = kept
        if self._http is not None:
            await self._http.close()
            self._http = None
        return True

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            self._http = aiohttp.ClientSession(headers=headers)
        return self._http

    def _refused(self, status: int, answer: bytes) -> ServiceError:
        said = " ".join(answer[:200].decode("utf-8", "replace").split())
        detail = _detail(answer) or f"{self.server} is no rollout server (it answered {status}: {said})"
        if status == 401:
            why = "does not know this token" if self._token else "wants a token"
            detail = f"{self.server} {why}: set POLAR_TOKEN to one of its own, such as that in its admin.token"
        return ServiceError(detail, status)


def _detail(answer: bytes) -> str | None:
    """What a rollout server says of an error; ``None``: this is another program's answer."""
    try:
        return str(msgspec.json.decode(answer)["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


class _Entry(msgspec.Struct):
    cursor: int
    result: WireResult


class _Page(msgspec.Struct):
    results: list[_Entry]


def _said(value: Any) -> Any:
    """A task without the fields that have their default: a server older than one of them would refuse it."""
    if not isinstance(value, msgspec.Struct):
        return value
    said = {}
    for field in msgspec.structs.fields(value):
        one = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if one != default:
            said[field.encode_name] = _said(one)
    return said


def _decoded(url: str, answer: bytes, kind: type[T]) -> T:
    try:
        return from_json(answer, kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"{url} is no rollout server of this version ({error})") from None


def token_file(server: str) -> Path:
    """Where ``polar serve`` keeps the admin token that it made for an address of this machine."""
    home = Path(os.environ.get("POLAR_HOME") or Path.home() / ".cache" / "polar")
    address = urlsplit(server)
    return home / "tokens" / re.sub(r"[^A-Za-z0-9.-]", "_", f"{address.hostname}-{address.port or 80}")


def kept_token(server: str) -> str | None:
    """The token in ``token_file``, if there is one."""
    try:
        return token_file(server).read_text().strip()
    except OSError:
        return None
