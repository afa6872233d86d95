"""Why: what a server is (SGLang or not, which model, how long a context, a router in front of others) should be
found at the start and said in one line, not at the first call of the hundredth session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from polar.contract.errors import UsageError
from polar.engines.base import EngineError
from polar.engines.http import Upstream

T = TypeVar("T")


class KeyRefused(UsageError):
    """A route that the server has, or hides, is not for our key."""


class WireModelInfo(msgspec.Struct):
    """GET /model_info. ``model_path`` changes with the weights, ``tokenizer_path`` stays."""

    tokenizer_path: str | None = None
    model_path: str | None = None
    served_model_name: str | None = None
    has_image_understanding: bool | None = None


class WireServerInfo(msgspec.Struct):
    """GET /server_info: the version, and the flags that the server was started with."""

    version: str | None = None
    incremental_streaming_output: bool = False
    disable_radix_cache: bool | None = None


class WireWorker(msgspec.Struct):
    """An entry of a router's GET /workers."""

    url: str
    worker_type: str | None = None
    is_healthy: bool = True


class WireWorkers(msgspec.Struct):
    workers: list[WireWorker]


class WireWorkerUrls(msgspec.Struct):
    """What older routers answer to GET /list_workers."""

    urls: list[str]


@dataclass(frozen=True, slots=True)
class Server:
    """What an SGLang server says of itself.

    ``incremental``: an event of its stream has only what is new. ``adapter``: the model asked for is not the one
    that ``/generate`` samples from.
    """

    version: str
    tokenizer_path: str | None
    incremental: bool
    prefix_caching: bool | None
    images: bool | None
    adapter: bool


async def ask_server(upstream: Upstream, model: str) -> Server:
    """Ask it.

    Raises:
        UsageError: it is no SGLang server, or a router before some; or it refuses the key.
    """
    try:
        told = await _first(upstream, WireModelInfo, "/model_info", "/get_model_info")
        flags = await _first(upstream, WireServerInfo, "/server_info", "/get_server_info")
        whole = told is not None and flags is not None and flags.version is not None
        workers = None if whole else await _workers(upstream)
    except EngineError as error:
        raise _nothing(upstream.url, error) from None
    if workers is not None:
        raise UsageError(
            f"{upstream.url} is a router, which strips token ids: name what is behind it, "
            f"--engine-url {','.join(workers) or '(none is up now)'}"
        )
    if told is None or flags is None or flags.version is None:
        raise UsageError(f"{upstream.url} is no SGLang server (no /model_info): name --engine openai for it")
    return Server(
        version=flags.version,
        tokenizer_path=told.tokenizer_path or told.model_path,
        incremental=flags.incremental_streaming_output,
        prefix_caching=None if flags.disable_radix_cache is None else not flags.disable_radix_cache,
        images=told.has_image_understanding,
        adapter=told.served_model_name not in (None, model),
    )


async def workers_behind(url: str, *, api_key: str | None = None) -> list[str]:
    """The SGLang servers to talk to at ``url``: those behind it, where it is a router; else itself. (A router
    strips ids and weight versions from replies, and knows no sessions.)

    Raises:
        UsageError: nothing answers there, or the servers behind it can't be talked to one by one.
    """
    upstream = Upstream(url, api_key=api_key)
    upstream.open()
    try:
        found = await _workers(upstream)
    except EngineError as error:
        raise UsageError(
            f"no engine answers at {url}: start it, or give its address with --engine-url ({error})"
        ) from None
    finally:
        await upstream.close()
    if found is None:
        return [upstream.url]
    if not found:
        raise UsageError(f"the router at {url} has no healthy worker: start one, or wait until it is up")
    return found


async def _workers(upstream: Upstream) -> list[str] | None:
    """The healthy workers of a router; ``None``: it is none."""
    listed = await _first(upstream, WireWorkers, "/workers")
    if listed is None:
        older = await _first(upstream, WireWorkerUrls, "/list_workers")
        if older is None:
            return None
        listed = WireWorkers([WireWorker(url) for url in older.urls])
    for worker in listed.workers:
        if worker.worker_type not in (None, "regular") or not worker.url.startswith(("http://", "https://")):
            kind = worker.worker_type or "worker"
            raise UsageError(
                f"the router at {upstream.url} splits a call over several servers ({kind} {worker.url}), which can't "
                "be called one by one: name servers that do whole calls with --engine-url, or the router with "
                "--engine openai (it chats; token ids come only if the router passes them on)"
            )
    # A server with several data-parallel ranks is listed once for each: http://host:port@0, @1, ...
    healthy = [worker.url.partition("@")[0].rstrip("/") for worker in listed.workers if worker.is_healthy]
    return list(dict.fromkeys(healthy))


async def _first(upstream: Upstream, kind: type[T], *paths: str) -> T | None:
    """The answer at the first of ``paths`` that the server knows (older servers know older names)."""
    for path in paths:
        status, body = await upstream.ask(path)
        if status in (401, 403):
            raise KeyRefused(f"{upstream.url}{path} refused the API key ({status}): set POLAR_ENGINE_API_KEY")
        if status == 200:
            try:
                return msgspec.json.decode(body, type=kind)
            except msgspec.DecodeError:
                return None
    return None


def _nothing(url: str, error: Exception) -> UsageError:
    what = str(error) or "it took too long"
    return UsageError(f"no engine answers at {url}: start it, or give its address with --engine-url ({what})")
