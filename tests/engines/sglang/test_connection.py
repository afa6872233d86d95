"""What breaks below the replies: which calls go out again, and on what they travel."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polar.engines.base import EngineError, EngineInfo
from polar.engines.sglang import SGLangEngine
from tests.engines.openai.wire import Reply, sse, whole, wire_server
from tests.engines.sglang.conftest import PROMPT, call, logprobs, sampled


def event(ids: list[int], count: int, reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    pairs = [[-0.5, token, None] for token in ids]
    info = {"finish_reason": reason, "prompt_tokens": len(PROMPT), "completion_tokens": count}
    return {"output_ids": ids, "meta_info": info | {"output_token_logprobs": pairs} | meta}


END = {"type": "stop", "matched": 2}
GOOD = Reply([sse(event([5], 1), event([5, 2], 2, END))])
DEAD = Reply(raw=b"")


class Started(SGLangEngine):
    """An engine that asked its questions already: the server of bytes would have to answer them all."""

    async def start(self) -> None:
        self._upstream.open()
        self._info = EngineInfo("sglang", "m", 2048)


async def started(url: str, **options: Any) -> Started:
    engine = Started(url, **options)
    await engine.start()
    return engine


async def test_the_key_the_request_id_and_the_session_travel_as_headers() -> None:
    async with wire_server(GOOD) as wire:
        engine = await started(wire.url, api_key="secret")
        await call(engine)
        await engine.close()
        sent = wire.headers[0]
    assert sent["authorization"] == "Bearer secret"
    assert (sent["x-request-id"], sent["x-session-id"]) == ("req-1", "session-1")


async def test_a_kept_connection_that_dies_before_the_first_byte_is_tried_once_more() -> None:
    async with wire_server(GOOD, DEAD, GOOD) as wire:
        engine = await started(wire.url)
        await call(engine)
        assert sampled(await call(engine)) == [5, 2]
        await engine.close()
        assert wire.bodies[1] == wire.bodies[2]
        assert wire.connections == 2


async def test_a_fresh_connection_that_dies_is_not_tried_again_and_the_call_is_aborted() -> None:
    async with wire_server(DEAD, whole({})) as wire:
        engine = await started(wire.url)
        with pytest.raises(EngineError) as caught:
            await call(engine)
        await engine.close()
        assert caught.value.kind == "unavailable"
        assert wire.bodies[1] == {"rid": wire.bodies[0]["rid"]}


async def test_a_stream_that_ends_early_is_no_reply() -> None:
    async with wire_server(Reply([sse(event([5], 1))]), whole({})) as wire:
        engine = await started(wire.url)
        with pytest.raises(EngineError, match="ended without a finish reason"):
            await call(engine)
        await engine.close()


async def test_a_prompt_that_was_cut_is_an_error() -> None:
    async with wire_server(Reply([sse(event([5], 1, END, prompt_tokens=2))]), whole({})) as wire:
        engine = await started(wire.url)
        with pytest.raises(EngineError, match=r"sent 4 prompt ids and used 2.*--allow-auto-truncate"):
            await call(engine)
        await engine.close()


async def test_a_prompt_that_the_scheduler_finds_too_long_is_told_as_such() -> None:
    words = "Input length (2044 tokens) exceeds the maximum allowed length (2042 tokens). Use a shorter input."
    reason = {"type": "abort", "message": words, "status_code": 400, "err_type": "BadRequestError"}
    async with wire_server(Reply([sse(event([506], 1, reason, prompt_tokens=1))]), whole({})) as wire:
        engine = await started(wire.url)
        with pytest.raises(EngineError) as caught:
            await call(engine)
        await engine.close()
    assert (caught.value.kind, caught.value.prompt_tokens, caught.value.context_length) == (
        "context_length",
        2044,
        2042,
    )


async def test_an_abort_that_repeats_the_last_id_adds_none() -> None:
    """So an incremental stream ends where the call is aborted in the queue it went back to."""
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    last = {
        "output_ids": [6],
        "meta_info": {
            "finish_reason": reason,
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 5, None], [-0.5, 6, None]],
        },
    }
    async with wire_server(Reply([sse(event([5], 1), event([6], 2), last)])) as wire:
        engine = await started(wire.url)
        chunks = await call(engine)
        await engine.close()
    assert (sampled(chunks), logprobs(chunks)) == ([5, 6], [-0.5, -0.5])
    assert chunks[-1].finish_reason == "abort"


async def test_a_logprob_of_another_token_is_none() -> None:
    wrong = event([5, 2], 2, END)
    wrong["meta_info"]["output_token_logprobs"][0][1] = 9
    async with wire_server(Reply([sse(wrong)])) as wire:
        engine = await started(wire.url)
        first, second = logprobs(await call(engine))
        await engine.close()
    assert math.isnan(first)
    assert second == -0.5
