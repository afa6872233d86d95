"""Why: SGLang takes new weights between two tokens, and what it does with calls under way depends on how it was
paused before. Here the modes of ``weights.update_weights`` become SGLang's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from polar.engines.base import EngineError
from polar.engines.http import Upstream

_PAUSE = {"keep": "retract", "in_place": "in_place", "abort": "abort"}
"""``retract`` computes the keys and values of kept calls afresh under the new weights, ``in_place`` leaves them.
Without a pause SGLang lets calls end by itself, and lets no new one begin."""
_SECONDS = 600.0


class WireDone(msgspec.Struct):
    success: bool = True
    message: str = ""


async def update_sglang(upstream: Upstream, path: str, version: str, mode: str) -> None:
    """Pause, load the weights, go on.

    Raises:
        EngineError: a step failed, and which; the server goes on, where loading failed with the weights it had.
    """
    async with _paused(upstream, _PAUSE.get(mode)):
        body = {"model_path": path, "weight_version": version, "flush_cache": mode != "in_place"}
        await _post(upstream, "/update_weights_from_disk", body)


@asynccontextmanager
async def _paused(upstream: Upstream, mode: str | None) -> AsyncIterator[None]:
    if mode is None:
        yield
        return
    try:
        await _post(upstream, "/pause_generation", {"mode": mode})
        yield
    except BaseException:
        with suppress(EngineError, TimeoutError):  # what failed first is what is told
            await _post(upstream, "/continue_generation", {})
        raise
    await _post(upstream, "/continue_generation", {})


async def _post(upstream: Upstream, path: str, body: Mapping[str, Any]) -> None:
    status, reply = await upstream.ask(path, body, seconds=_SECONDS)
    try:
        done = msgspec.json.decode(reply, type=WireDone)
    except msgspec.DecodeError:
        done = WireDone(message=reply.decode("utf-8", "replace"))
    if status in (401, 403):
        raise EngineError("bad_request", f"{upstream.url}{path} refused the API key: give its --admin-api-key")
    if status != 200 or not done.success:
        words = " ".join(done.message.split())[:600]
        raise EngineError(
            "bad_request" if status < 500 else "unavailable",
            f"{upstream.url}{path} answered {status}: {words}",
            status=status,
        )
