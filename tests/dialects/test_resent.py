"""A conversation that is sent again is not read again, and nobody can tell."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.dialects import openai_chat
from polar.dialects.base import Call, CallError
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.resent import Resent

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"messages": [{"role": "user"}]}}}
SAID = ["", "a", 'é"\\', "]}", '{"role": "user", "content": "a"}', "messages", "\ud83d"]
MESSAGE = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, st.sampled_from(SAID)),
    st.builds(lambda text: {"role": "assistant", "content": text, "reasoning": "a"}, st.sampled_from(SAID)),
    st.just({"role": "user", "content": [{"type": "text", "text": "a"}]}),
    st.just({"role": "nobody"}),
    st.just("a"),
)
OTHER = st.sampled_from(
    [
        ("model", '"m"'),
        ("tools", json.dumps([TOOL])),
        ("messages", '[{"role": "user", "content": "a"}]'),
        ("mess\\u0061ges", '[{"role": "user", "content": "b"}]'),
        ("temperature", "0.5"),
        ("temperature", '"hot"'),
        ("metadata", '{"messages": [{"role": "user", "content": "a"}]}'),
        ("unheard_of", "1"),
    ]
)


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """Bodies of one client: mostly each with the messages of the one before, and more."""
    said: list[object] = []
    comma, before, after = draw(st.sampled_from([",", " , ", ",\n "])), draw(st.lists(OTHER, max_size=2)), []
    made = []
    for _ in range(draw(st.integers(1, 5))):
        said = said + draw(st.lists(MESSAGE, max_size=2))
        if draw(st.integers(0, 5)) == 0:
            said = said[: draw(st.integers(0, len(said)))]
        if draw(st.integers(0, 3)) == 0:
            after = draw(st.lists(OTHER, max_size=2))
        listed = comma.join(json.dumps(message) for message in said)
        fields = [("model", '"m"'), *before, ("messages", f"[{listed}]"), *after]
        body = "{" + comma.join(f'"{name}":{value}' for name, value in fields) + "}"
        made.append(body[: draw(st.sampled_from([len(body)] * 9 + [len(body) // 2]))].encode())
    return made


def parsed(dialect: OpenAIChat, body: bytes, key: str) -> Call | str:
    try:
        return dialect.parse(body, {"authorization": key} if key else {}, {})
    except CallError as error:
        return str(error)


@pytest.fixture(autouse=True)
def small_bodies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_chat, "_resent", Resent(smallest=0))


@given(bodies(), st.lists(st.sampled_from(["one", "two"]), min_size=5, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_sent_again_is_read_as_if_it_was_new(sent: list[bytes], keys: list[str]) -> None:
    dialect = OpenAIChat()
    for body, key in zip(sent, keys, strict=False):
        assert parsed(dialect, body, key) == parsed(dialect, body, "")


def body_of(*texts: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_messages_that_came_before_are_the_same_objects_and_are_cut_out() -> None:
    resent, body = Resent(smallest=0), body_of("a", "b")
    raws = json_list(body)
    first = OpenAIChat().parse(body, {}, {}).chat.messages
    resent.keep("key", body, resent.shorten("key", body), raws, first)
    longer = body_of("a", "b", "c", temperature=1.0)
    short = resent.shorten("key", longer)
    assert short.known is first
    assert b'"b"' not in short.body
    assert len(short.new(json_list(short.body)) or ()) == 1
    assert resent.shorten("other", longer).body is longer
    assert not resent.shorten("key", body_of("a", "x", "c")).known


@pytest.mark.parametrize("limit", [0, 75])
def test_no_more_than_the_limit_is_kept(limit: int) -> None:
    resent = Resent(limit, smallest=0)
    for key in ("one", "two"):
        body = body_of(key)
        messages = OpenAIChat().parse(body, {}, {}).chat.messages
        resent.keep(key, body, resent.shorten(key, body), json_list(body), messages)
    assert not resent.shorten("one", body_of("one", "more")).known
    assert bool(resent.shorten("two", body_of("two", "more")).known) == bool(limit)


class Listed(msgspec.Struct):
    messages: list[msgspec.Raw]


def json_list(body: bytes) -> list[msgspec.Raw]:
    return msgspec.json.decode(body, type=Listed).messages
