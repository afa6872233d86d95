"""Whose fault it is, in a kind that decides what the harness is told, with the engine's own words and numbers."""

from __future__ import annotations

import json

import pytest

from polar.engines.base import EngineError, ErrorKind
from polar.engines.openai_errors import error_of_reply
from tests.engines.openai.conftest import Start, call
from tests.engines.openai.wire import Reply, sse, whole, wire_server

URL = "http://engine:8000/v1/chat/completions"


def error(status: int, message: str, **more: object) -> EngineError:
    return error_of_reply(status, json.dumps({"error": {"message": message, "code": status, **more}}).encode(), URL)


@pytest.mark.parametrize(
    ("words", "prompt", "limit"),
    [
        (
            "This model's maximum context length is 16384 tokens. However, you requested 19591 tokens (9591 in the "
            "messages, 10000 in the completion). Please reduce the length of the messages or completion.",
            9591,
            16384,
        ),
        (
            "This model's maximum context length is 2048 tokens. However, your messages resulted in 4619 tokens.",
            4619,
            2048,
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 64000. This model's maximum context length is "
            "20000 tokens and your request has 100 input tokens (64000 > 20000 - 100).",
            100,
            20000,
        ),
        (
            "You passed 98305 input tokens and requested 32768 output tokens. However, the model's context length "
            "is only 131072 tokens, resulting in a maximum input length of 98304 tokens.",
            98305,
            131072,
        ),
        ("The decoder prompt (length 8825) is longer than the maximum model length of 8192.", 8825, 8192),
        ("The input (61709 tokens) is longer than the model's context length (40960 tokens).", 61709, 40960),
        (
            "Requested token count exceeds the model's maximum context length of 1000 tokens. You requested a total "
            "of 1206 tokens: 6 tokens from the input messages and 1200 tokens for the completion.",
            6,
            1000,
        ),
        ("Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens).", 160062, 59862),
        ("the request exceeds the available context size. try increasing the context size", None, None),
    ],
)
def test_a_prompt_over_the_context_is_known_by_its_words_and_keeps_its_numbers(
    words: str, prompt: int | None, limit: int | None
) -> None:
    found = error(400, words)
    assert found.kind == "context_length"
    assert (found.prompt_tokens, found.context_length, found.status) == (prompt, limit, 400)
    assert words in str(found)


def test_a_code_alone_tells_it_too() -> None:
    assert error(400, "too much", code="context_length_exceeded").kind == "context_length"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "bad_request"),
        (401, "bad_request"),
        (403, "bad_request"),
        (404, "bad_request"),
        (422, "bad_request"),
        (408, "unavailable"),
        (429, "overloaded"),
        (503, "overloaded"),
        (500, "unavailable"),
        (502, "unavailable"),
    ],
)
def test_kinds_by_status(status: int, kind: ErrorKind) -> None:
    found = error(status, "so it is")
    assert (found.kind, found.status) == (kind, status)
    assert "so it is" in str(found)
    assert URL in str(found)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"object":"error","message":"not so","type":"BadRequest","code":400}', "not so"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"<html>\n<b>Bad\n Gateway</b></html>", "<html> <b>Bad Gateway</b></html>"),
        (b"", "no words"),
        (b"\xff\xfe", "�"),
    ],
)
def test_words_in_any_body_are_one_line(body: bytes, words: str) -> None:
    told = str(error_of_reply(400, body, URL))
    assert words in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}, "unavailable"),
        ({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, "bad_request"),
        ({"error": {"message": "slow down", "type": "rate_limit_error"}}, "overloaded"),
        ({"error": {"message": "x", "code": "429"}}, "overloaded"),
        ({"error": "engine died"}, "unavailable"),
        (
            {
                "error": {
                    "message": "The input (9 tokens) is longer than the model's context length (8 tokens).",
                    "code": 400,
                }
            },
            "context_length",
        ),
    ],
)
async def test_an_error_inside_a_stream_that_began_well(
    event: dict[str, object], kind: ErrorKind, start: Start
) -> None:
    async with wire_server(Reply([sse({"choices": [{"delta": {"content": "a"}}]}, event)])) as wire:
        with pytest.raises(EngineError) as caught:
            await call(await start(wire.url))
    assert caught.value.kind == kind


async def test_an_error_in_the_body_of_a_whole_reply(start: Start) -> None:
    async with wire_server(whole({"error": {"message": "engine died", "code": 500}})) as wire:
        with pytest.raises(EngineError, match="engine died"):
            await call(await start(wire.url), stream=False)
