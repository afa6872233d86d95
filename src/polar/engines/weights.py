"""Why: a trainer's new weights must reach an engine between two tokens, with nothing of the old ones left in its
caches, and every token sampled from then on must say so. The order of the steps is what makes that so.

What happens to calls in flight is the caller's choice (``mode``): ``keep`` freezes them and goes on under the new
weights, ``wait`` lets them end first, ``abort`` ends them (finish reason "abort"; the gateway goes on from there).
``in_place`` is ``keep`` without emptying any cache: the fastest, and calls go on from keys and values of old weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from polar.contract.errors import UsageError
from polar.engines.base import EngineError
from polar.engines.http import Upstream
from polar.engines.openai_errors import error_of_reply
from polar.engines.sglang_weights import update_sglang

log = logging.getLogger("polar.engines")

UpdateMode = Literal["keep", "wait", "abort", "in_place"]

_SECONDS = 600.0
"""A large model's weights take minutes to read, and ``wait`` takes as long as the longest call."""


async def update_weights(
    url: str, kind: str, path: str | Path, version: str, *, mode: UpdateMode = "keep", api_key: str | None = None
) -> None:
    """Load weights into a running server.

    Args:
        kind: ``vllm`` (started with ``VLLM_SERVER_DEV_MODE=1``) or ``sglang``.
        path: a model folder, as the server's machine sees it.
        version: what tokens sampled under them are marked with.
        mode: what becomes of calls in flight; ``in_place`` is SGLang's alone.
        api_key: the server's; from ``POLAR_ENGINE_API_KEY`` by default.

    Raises:
        UsageError: the URL is none, the kind can't be updated, or the server is on this machine, where there is no
            such folder (of which vLLM 0.32 would die).
        EngineError: a step failed, and which. The server is resumed; where loading failed it may have to be started
            again.
    """
    upstream = Upstream(url, api_key=api_key or os.environ.get("POLAR_ENGINE_API_KEY"))
    _check_folder(upstream.url, path)
    upstream.open()
    try:
        if kind == "sglang":
            await update_sglang(upstream, str(path), version, mode)
        elif kind == "vllm" and mode == "in_place":
            raise UsageError("vLLM has no mode in_place: use keep")
        elif kind == "vllm":
            await _update_vllm(upstream, str(path), version, mode)
        else:
            raise UsageError(f"weights of a {kind} engine can't be updated over HTTP: use vllm or sglang")
    finally:
        await upstream.close()


def _check_folder(url: str, path: str | Path) -> None:
    if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") and not Path(path).is_dir():
        raise UsageError(f"{path} is no folder with weights: give a model folder")


async def _update_vllm(upstream: Upstream, path: str, version: str, mode: UpdateMode) -> None:
    async with _paused_vllm(upstream, mode):
        await _post(upstream, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        # Calls that are kept would go on from keys and values of the old weights, and others would find them.
        reset = await _post(upstream, "/reset_prefix_cache?reset_running_requests=true", {})
        if reset.get("success") is False:
            raise EngineError("internal", f"{upstream.url}/reset_prefix_cache failed: old prefixes are still cached")
        await _name_vllm(upstream, version)


async def _name_vllm(upstream: Upstream, version: str) -> None:
    """Tell the server what its weights are called. Older ones (0.22) have no names for them: there the gateway is
    told (``/admin/inference/version``)."""
    path = "/update_weight_version"
    status, body = await upstream.ask(path, {"new_version": version}, seconds=_SECONDS)
    if status == 404:
        log.warning(
            "%s has no names for weights: POST /admin/inference/version tells the gateway instead", upstream.url
        )
    elif status != 200:
        raise error_of_reply(status, body, upstream.url + path)


@asynccontextmanager
async def _paused_vllm(upstream: Upstream, mode: UpdateMode) -> AsyncIterator[None]:
    try:
        await _post(upstream, f"/pause?mode={mode}", {})
        yield
    except BaseException:
        with suppress(EngineError):  # what failed first is what is told
            await _post(upstream, "/resume", {})
        raise
    await _post(upstream, "/resume", {})


async def _post(upstream: Upstream, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object that a step answers, if it does."""
    status, reply = await upstream.ask(path, body, seconds=_SECONDS)
    if status == 404:
        raise EngineError(
            "bad_request", f"{upstream.url}{path} is not there: start vLLM with VLLM_SERVER_DEV_MODE=1", status=status
        )
    if status != 200:
        raise error_of_reply(status, reply, upstream.url + path)
    try:
        told = msgspec.json.decode(reply)
    except msgspec.DecodeError:
        told = None
    return told if isinstance(told, dict) else {}
