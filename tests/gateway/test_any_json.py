"""Whatever JSON is posted to whatever route of the data plane: a reply or a 4xx in the API's own shape, soon.

The requests are valid ones of each API with things put in, taken out and swapped, so that they get far into the
pipeline; the app is called as the server calls it, with everything behind it real but the model.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from polar.gateway.node import Node
from polar.gateway.session import LiveSession
from polar.store import open_store
from polar.store.base import SessionRecord
from tests.support.model import ScriptedModel
from tests.support.script import Script, Step
from tests.support.tokens import ScriptedTokenEngine

TOOL = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": "b"}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
IMAGE = "data:image/png;base64,aGk="

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "b"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "temperature": 0.5,
        "max_tokens": 4,
        "stop": ["END"],
        "logit_bias": {"5": -1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "logprobs": 1,
        "stop": "x",
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": False,
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}]},
        ],
        "tools": [{"type": "function", **TOOL}, {"type": "custom", "name": "patch"}],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 4,
        "metadata": {"a": "b"},
        "stream": True,
    },
    "/v1/messages": {
        "model": "m",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "look", "input": {"a": "b"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]},
        ],
        "tools": [{"name": "look", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 4,
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 99},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "stream": True,
    },
    "/v1beta/models/m:streamGenerateContent?alt=sse": {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {
                "role": "model",
                "parts": [{"functionCall": {"name": "look", "args": {"a": "b"}}, "thoughtSignature": "cw"}],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"output": "b"}}}]},
        ],
        "tools": [{"functionDeclarations": [TOOL]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"maxOutputTokens": 4, "topK": 40, "responseSchema": {"type": "OBJECT"}},
    },
}
VALID["/v1beta/models/m:generateContent"] = VALID["/v1beta/models/m:streamGenerateContent?alt=sse"]
VALID["/v1beta/models/m:streamGenerateContent"] = VALID["/v1beta/models/m:streamGenerateContent?alt=sse"]
VALID["/v1beta/models/m:countTokens"] = VALID["/v1beta/models/m:streamGenerateContent?alt=sse"]
VALID["/v1/messages/count_tokens"] = VALID["/v1/messages"]
VALID["/v1/responses/input_tokens"] = VALID["/v1/responses"]

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 0.0, -0.5, 1e308, 1.5]),
    st.sampled_from(
        ["", " ", "\x00", "\ud800", "<|im_end|>", "\ufdd0", "look", "auto", "text", "json_object", IMAGE]
    ),
    st.sampled_from([[], {}, [[]], [{}], {"type": "text"}, {"type": "image_url"}, [1, 2], ["a"], {"a": {"b": [{}]}}]),
    st.recursive(st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], how: str, new: Any) -> Any:
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if how == "drop":
        del holder[path[-1]]
    elif how == "twice" and isinstance(holder, list):
        holder.append(holder[path[-1]])
    else:
        holder[path[-1]] = new
    return value


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """A valid request of some API, changed in some places."""
    route = draw(st.sampled_from(sorted(VALID)))
    body = copy.deepcopy(VALID[route])
    for _ in range(draw(st.integers(0, 3))):
        found = list(places(body))
        if found:
            how = draw(st.sampled_from(["put", "put", "drop", "twice"]))
            body = changed(body, draw(st.sampled_from(found)), how, draw(ODD))
    return route, body


@dataclass
class App:
    """The ASGI app with everything behind it, on a loop of its own."""

    node: Node
    session: LiveSession
    loop: asyncio.AbstractEventLoop

    def post(self, route: str, body: bytes) -> tuple[int, bytes]:
        return self.loop.run_until_complete(asyncio.wait_for(self._post(route, body), 30))

    async def _post(self, route: str, body: bytes) -> tuple[int, bytes]:
        path, _, query = route.partition("?")
        headers = [(b"authorization", f"Bearer {self.session.key}".encode())]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode(), "headers": headers}
        asked = asyncio.Queue[dict[str, Any]]()
        asked.put_nowait({"type": "http.request", "body": body, "more_body": False})
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.node.gateway(scope, asked.get, send)
        assert not sent[-1].get("more_body"), "the response has no end"
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[App]:
    loop = asyncio.new_event_loop()
    folder = tmp_path_factory.mktemp("any")
    engine = ScriptedTokenEngine(ScriptedModel(tiny_model, Script(choose=lambda _: Step(text="Fine, thank you."))))
    engine.structured = True
    node = Node(engine, open_store(str(folder / "polar.db")), folder)  # type: ignore[arg-type]
    loop.run_until_complete(node.start())
    record = SessionRecord(
        session_id="s", task_id="t", sample_index=0, state="RUNNING", created_at=0.0, updated_at=0.0
    )
    loop.run_until_complete(node.store.put_session(record))
    session = LiveSession(session_id="s")
    node.gateway.open(session)
    yield App(node, session, loop)
    loop.run_until_complete(node.close())
    loop.close()


def check(route: str, status: int, data: bytes) -> None:
    assert 200 <= status < 500, (status, data)
    if status == 200:
        return
    error = json.loads(data)["error"]
    assert error["message"]
    assert "Traceback" not in error["message"]
    if route.startswith("/v1beta"):
        assert (error["code"], error["status"]) == (status, "INVALID_ARGUMENT")
    else:
        assert error["type"] == "invalid_request_error"


def called(arguments: bytes) -> bytes:
    """A chat whose history has a call with these arguments."""
    call = b'{"id": "c", "type": "function", "function": {"name": "f", "arguments": ' + arguments + b"}}"
    reply = b'{"role": "assistant", "content": null, "tool_calls": [' + call + b"]}"
    return b'{"model": "m", "messages": [{"role": "user", "content": "x"}, ' + reply + b"]}"


LIVELY = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("route", sorted(VALID))
def test_the_requests_that_the_others_are_made_of_are_served(app: App, route: str) -> None:
    status, data = app.post(route, json.dumps(VALID[route]).encode())
    assert status == 200, data


@LIVELY
@given(requests())
def test_a_changed_request_is_served_or_refused_in_shape(app: App, request: tuple[str, Any]) -> None:
    route, body = request
    check(route, *app.post(route, json.dumps(body).encode()))


@LIVELY
@given(
    st.sampled_from(sorted(VALID)),
    st.binary(max_size=40) | st.recursive(ODD, st.lists).map(lambda v: json.dumps(v).encode()),
)
@example("/v1/chat/completions", b"[" * 5000 + b"]" * 5000)
@example(
    "/v1/messages", b'{"model": "m", "messages": [{"role": "user", "content": ' + b"[" * 3000 + b"]" * 3000 + b"}]}"
)
@example("/v1/responses", b'{"model": "m", "input": "x", "metadata": {"a": 1e999}}')
@example(
    "/v1/chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
)
@example("/v1/chat/completions", called(b'{"n": ' + b"9" * 30 + b"}"))
@example("/v1/chat/completions", called(b'{"a": ' * 300 + b"1" + b"}" * 300))
@example("/v1/chat/completions", called(json.dumps('{"a": ' * 600 + "1" + "}" * 600).encode()))
def test_any_bytes_are_refused_in_shape(app: App, route: str, body: bytes) -> None:
    check(route, *app.post(route, body))
