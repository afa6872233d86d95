"""Requests as Claude Code and the SDKs write them, and what the model is given."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.contract.chat import Image, Message, Sampling, Text, Tool, ToolCall
from polar.dialects.anthropic import AnthropicMessages
from polar.dialects.base import Call, CallError
from tests.dialects.anthropic.conftest import BASH, parse, user

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.01c; cc_entrypoint=sdk-cli;"
CACHE = {"cache_control": {"type": "ephemeral"}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def text(words: str, **more: object) -> dict:
    return {"type": "text", "text": words, **more}


def result(content: object, tool_use_id: str = "t1", **more: object) -> dict:
    return {"type": "tool_result", "tool_use_id": tool_use_id, "content": content, **more}


def assistant(*blocks: dict) -> dict:
    return {"role": "assistant", "content": list(blocks)}


def messages(*given: dict, **fields: object) -> tuple[Message, ...]:
    return parse(*given, **fields).chat.messages


# ---- system ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system",
    [
        "You are an agent.",
        [text("You are an agent.", **CACHE)],
        [text(BILLING), text("You are an agent.")],
        [text(BILLING + " cch=36ee5;"), text(""), text("You are an agent.", **CACHE)],
        f"{BILLING}\nYou are an agent.",
        f"{BILLING}\n\nYou are an agent.",
        [text(f"{BILLING}\nYou are an agent.")],
    ],
)
def test_the_system_prompt_is_the_same_in_every_form_and_without_the_billing_line(system) -> None:
    """B5: the line has a hash that differs between conversations."""
    assert messages(system=system)[0] == Message("system", "You are an agent.")


@pytest.mark.parametrize("system", [None, "", [], [text(BILLING)], BILLING])
def test_no_system_prompt_is_no_message(system) -> None:
    assert [message.role for message in messages(system=system)] == ["user"]


def test_several_system_blocks_stay_parts() -> None:
    [system, _] = messages(system=[text("one", **CACHE), text("two")])
    assert system == Message("system", (Text("one"), Text("two")))


def test_the_billing_line_stays_where_it_is_not_the_top_level_system() -> None:
    given = [user(BILLING), {"role": "system", "content": BILLING}, user([text(BILLING)])]
    assert [message.content for message in messages(*given)] == [BILLING] * 3


def test_a_system_message_inside_the_conversation_keeps_its_place() -> None:
    given = [user("go"), {"role": "system", "content": [text("date: today", **CACHE)]}, user("on")]
    assert [(m.role, m.content) for m in messages(*given, system="You are an agent.")] == [
        ("system", "You are an agent."),
        ("user", "go"),
        ("system", "date: today"),
        ("user", "on"),
    ]


def test_tools_that_come_and_go_in_a_conversation_are_said_and_offered() -> None:
    """As the SDK's tool runner adds them, and as Claude Code loads those that it held back."""

    def change(kind: str, tool: dict) -> dict:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    call = parse(
        user("go"),
        change("tool_addition", {"type": "tool_definition", "definition": {**BASH, "name": "late"}}),
        change("tool_addition", {"type": "tool_reference", "name": "bash"}),
        change("tool_removal", {"type": "tool_reference", "name": "late"}),
        change("tool_addition", {"type": "tool_definition", "definition": {**BASH, "name": "late"}}),
        user("on"),
        tools=[BASH],
    )
    assert [tool.name for tool in call.chat.tools] == ["bash", "late"]
    assert [message.content for message in call.chat.messages if message.role == "system"] == [
        "The tool late can be called now.",
        "The tool bash can be called now.",
        "The tool late can't be called any more.",
        "The tool late can be called now.",
    ]
    assert call.warnings == ()


# ---- user content ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["go", [text("go")], [text("go", **CACHE)], [text(""), text("go", citations=None)]]
)
def test_one_text_is_the_same_in_every_form(content) -> None:
    assert messages(user(content)) == (Message("user", "go"),)


def test_tool_results_and_the_texts_around_them_are_messages_in_order() -> None:
    """B13."""
    content = [text("A"), result("one", "t1"), result([text("two")], "t2"), text("B"), text("C", **CACHE)]
    assert messages(user(content)) == (
        Message("user", "A"),
        Message("tool", "one", tool_call_id="t1"),
        Message("tool", "two", tool_call_id="t2"),
        Message("user", (Text("B"), Text("C"))),
    )


@pytest.mark.parametrize(
    ("source", "url"),
    [
        (PNG["source"], "data:image/png;base64,AAAA"),
        ({"type": "url", "url": "https://example.org/a.png"}, "https://example.org/a.png"),
    ],
)
def test_an_image_in_a_tool_result_is_the_users_right_after_it(source, url) -> None:
    """D15."""
    content = [
        result([text("a screenshot"), {"type": "image", "source": source}], "t1"),
        result("plain", "t2"),
        text("B"),
    ]
    assert messages(user(content)) == (
        Message("tool", "a screenshot", tool_call_id="t1"),
        Message("user", (Image(url),)),
        Message("tool", "plain", tool_call_id="t2"),
        Message("user", "B"),
    )


def test_images_and_texts_of_a_user_keep_their_order() -> None:
    content = [text("left"), PNG, text("right")]
    image = Image("data:image/png;base64,AAAA")
    assert messages(user(content)) == (Message("user", (Text("left"), image, Text("right"))),)


@pytest.mark.parametrize(
    ("content", "more", "expected"),
    [
        ("no such file", {"is_error": True}, "no such file"),
        ("", {"is_error": True}, "Error"),
        (None, {}, ""),
        ([], {}, ""),
        ([text("a"), text("b")], {}, (Text("a"), Text("b"))),
        ([{"type": "tool_reference", "tool_name": "Grep"}], {}, "The tool Grep can be called now."),
    ],
)
def test_a_tool_result_of_any_form_is_a_tool_message(content, more, expected) -> None:
    assert messages(user([result(content, **more)])) == (Message("tool", expected, tool_call_id="t1"),)


def test_text_documents_are_read_and_what_can_not_be_read_is_said() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "the words"}}
    found = {"type": "search_result", "source": "https://example.org", "title": "t", "content": [text("found")]}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    call = parse(user([plain, found, pdf]))
    [message] = call.chat.messages
    assert [part.text for part in message.content] == [
        "the words",
        "Title: t\nSource: https://example.org\n",
        "found",
        "[document left out: only text and images can be read]",
    ]
    assert len(call.warnings) == 1
    assert "'document' in messages.0" in call.warnings[0]


def test_what_a_document_says_of_itself_is_read_and_citations_are_no_reply() -> None:
    source = {"type": "content", "content": [text("the words")]}
    document = {"type": "document", "source": source, "title": "A", "context": "old", "citations": {"enabled": True}}
    call = parse(user([document, {**document, "citations": {"enabled": False}}, {**document, "title": None}]))
    [message] = call.chat.messages
    assert [part.text for part in message.content] == [
        *("Title: A\nContext: old\n", "the words") * 2,
        *("Context: old\n", "the words"),
    ]
    assert call.warnings == ("citations were asked for and are not in the reply",)


# ---- assistant content -----------------------------------------------------------------------------------


def tool_use(arguments: object, **more: object) -> dict:
    return {"type": "tool_use", "id": "t1", "name": "bash", "input": arguments, **more}


def test_an_assistants_blocks_are_one_message() -> None:
    [message] = messages(
        assistant(
            {"type": "thinking", "thinking": "I should look.", "signature": "foreign"},
            {"type": "redacted_thinking", "data": "opaque"},
            text("Let me "),
            text("look.", **CACHE),
            tool_use({"command": "ls"}),
            tool_use({}, id="t2"),
        )
    )
    assert message == Message(
        "assistant",
        "Let me look.",
        reasoning="I should look.",
        tool_calls=(ToolCall("t1", "bash", '{"command": "ls"}'), ToolCall("t2", "bash", "{}")),
    )


@pytest.mark.parametrize(
    "thinking", [{"type": "thinking", "thinking": ""}, {"type": "redacted_thinking", "data": "x"}]
)
def test_thinking_without_words_is_accepted_and_says_nothing(thinking) -> None:
    """D19."""
    assert messages(assistant(thinking, text("ok"))) == (Message("assistant", "ok"),)


def test_empty_text_beside_a_call_changes_nothing() -> None:
    """B12."""
    call = tool_use({"a": 1})
    assert messages(assistant(text(""), call)) == messages(assistant(call)) == messages(assistant(call, text("")))


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"__unparsedToolInput": {"raw": '{"value": ', "len": 10}}, '{"value": '),
        ({"__unparsedToolInput": {"raw": "[1]"}}, "[1]"),
        ({"__unparsedToolInput": 1}, '{"__unparsedToolInput": 1}'),
        ({"__unparsedToolInput": {"raw": "x"}, "b": 1}, '{"__unparsedToolInput": {"raw": "x"}, "b": 1}'),
        ({"text": "see __unparsedToolInput"}, '{"text": "see __unparsedToolInput"}'),
    ],
)
def test_input_that_wraps_raw_text_is_that_text(given, arguments) -> None:
    """D12, in our form and in Claude Code's."""
    [message] = messages(assistant(tool_use(given)))
    assert message.tool_calls[0].arguments == arguments


def test_a_block_of_a_servers_own_tool_is_dropped_and_named() -> None:
    call = parse(
        user("search"),
        assistant({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, text("ok")),
    )
    assert call.chat.messages[1] == Message("assistant", "ok")
    assert any("server_tool_use" in warning for warning in call.warnings)


# ---- tools, sampling and the rest ------------------------------------------------------------------------


def test_tools_keep_their_schema_and_server_tools_are_dropped_by_name() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    loaded = {**BASH, "type": "custom", "name": "later", "defer_loading": True, **CACHE}
    call = parse(tools=[BASH, search, loaded])
    assert call.chat.tools == (
        Tool("bash", "Run a command.", BASH["input_schema"]),
        Tool("later", "Run a command.", BASH["input_schema"]),
    )
    one, two = call.warnings
    assert "web_search_20250305" in one
    assert "defer_loading" in two


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "bash"}, "bash"),
        ({"type": "tool", "name": "gone"}, None),
    ],
)
def test_tool_choice(choice, expected) -> None:
    assert parse(tools=[BASH], tool_choice=choice).chat.tool_choice == expected
    # D23: there is nothing to choose from.
    assert parse(tools=[], tool_choice=choice).chat.tool_choice is None
    assert parse(tool_choice=choice).chat.tool_choice is None


def test_what_can_not_be_honoured_is_said() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    [one, two] = parse(tools=[BASH], tool_choice=choice, mcp_servers=[{"type": "url", "url": "x"}]).warnings
    assert "mcp_servers" in one
    assert "disable_parallel_tool_use" in two


def test_sampling() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 7, "stop_sequences": ["END", ""]}
    expected = Sampling(temperature=0.5, top_p=0.9, top_k=40, max_tokens=7, stop=("END",))
    assert parse(**fields).chat.sampling == expected


@pytest.mark.parametrize(
    ("thinking", "args", "reaches"),
    [
        (None, {}, "hidden"),
        ({"type": "disabled"}, {"enable_thinking": False}, "hidden"),
        ({"type": "enabled", "budget_tokens": 31999}, {"enable_thinking": True}, "shown"),
        ({"type": "adaptive", "display": "updates"}, {}, "shown"),
        ({"type": "adaptive", "display": "omitted"}, {}, "omitted"),
    ],
)
def test_thinking_reaches_template_and_reply(thinking, args, reaches) -> None:
    call = parse(thinking=thinking)
    assert call.chat.template_args == args
    assert call.options == reaches


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_structured_output(field) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    call = parse(**{field: {"effort": "high", "format": wanted} if field == "output_config" else wanted})
    assert call.chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }
    assert parse(output_config={"effort": "high"}).chat.response_format is None


def test_a_sub_agent_says_so_in_a_header_or_in_the_billing_line() -> None:
    assert parse(system="x").role_hint is None
    assert parse(system=[text(BILLING)]).role_hint is None
    assert parse(headers={"x-claude-code-agent-id": "a1"}).role_hint == "subagent"
    assert parse(system=[text(f"{BILLING} cc_is_subagent=true;")]).role_hint == "subagent"
    assert parse(user("cc_is_subagent=true;"), system="x").role_hint is None


def test_fields_that_change_no_reply_are_passed_over() -> None:
    fields = {
        "metadata": {"user_id": '{"session_id": "x"}'},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        "speed": "fast",
        "cache_control": {"type": "ephemeral"},
        "container": None,
        "next_week": [],
    }
    assert parse(**fields) == parse()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"container": "c"}, "container"),
        ({"next_week": [1]}, "next_week"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget_tokens"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "task_budget"),
        ({"output_config": {"effort": "heroic"}}, "'heroic'"),
        ({"tools": [{**BASH, "input_examples": [{}]}]}, "input_examples"),
        ({"tools": [{**BASH, "allowed_callers": ["code_execution_20250825"]}]}, "allowed_callers"),
        ({"system": [text("s"), PNG]}, "'image' in system"),
        ({"messages": [user("json"), assistant(text("{"))]}, "does not go on from it"),
        (
            {"messages": [user([{"type": "image", "source": {"type": "file", "file_id": "f"}}])]},
            "an image in messages.0",
        ),
        (
            {"messages": [user("hi"), *[{"role": "system", "content": "s", "clear_at": "next_user_message"}] * 2]},
            "clear_at",
        ),
        (
            {"messages": [{"role": "system", "output_config": {"effort": "low"}}, user("hi")]},
            "output_config of a message",
        ),
    ],
)
def test_what_a_reply_will_lack_is_named_once(fields, named) -> None:
    [warning] = parse(**fields).warnings
    assert named in warning


@pytest.mark.parametrize("content", [{}, {"content": []}, {"content": None}], ids=str)
def test_a_message_that_only_sets_an_effort_says_nothing(content) -> None:
    """Claude Code sends it with an empty list."""
    call = parse(user("hi"), {"role": "system", "output_config": {"effort": "low"}, **content})
    assert [message.content for message in call.chat.messages] == ["hi"]


@pytest.mark.parametrize(
    ("fields", "args"),
    [
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        (
            {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_an_effort_reaches_the_template(fields, args) -> None:
    call = parse(**fields)
    assert (call.chat.template_args, call.warnings) == (args, ())


# ---- what makes no sense ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "$.messages[0].role"),
        ({"messages": [user(7)]}, "$.messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [user([{"type": "tool_addition", "tool": {"definition": 7}}])]}, "tool_addition"),
        ({"messages": [user([{"type": "tool_result"}])]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [user("x"), assistant({"type": "tool_use", "id": "t"})]}, "messages.1.content.0.name"),
        ({"messages": [assistant({"type": "tool_use", "name": "t"})]}, "messages.0.content.0.id"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"max_tokens": "many"}, "$.max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_x"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"messages": [user([result({"type": "error"})])]}, "messages.0.content.0.content"),
        ({"tools": [BASH], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_format": {"type": "json_schema"}}, "output_config.format"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
        ({"tool_choice": {"type": "maybe"}}, "$.tool_choice.type"),
    ],
)
def test_a_body_that_makes_no_sense_names_the_field(fields, words) -> None:
    with pytest.raises(CallError) as caught:
        parse(**fields)
    assert caught.value.kind == "bad_request"
    assert words in caught.value.message


def read(body: bytes) -> Call | None:
    """A call, or ``None`` if it was refused as a bad request. Nothing else may come out."""
    refused: CallError
    try:
        return AnthropicMessages().parse(body, {}, {})
    except CallError as error:
        refused = error
    assert refused.kind == "bad_request"
    assert refused.message
    return None


@pytest.mark.parametrize("depth", [100, 400, 20_000])
@pytest.mark.parametrize("nest", ["input", "content", "value"])
def test_deep_nesting_is_read_or_refused(nest, depth) -> None:
    opening = {"input": '{"a":', "content": '[{"type":"search_result","content":', "value": "["}[nest]
    closing = {"input": "}", "content": "}]", "value": "]"}[nest]
    inner = opening * depth + '""' + closing * depth
    block = {"input": f'{{"type":"tool_use","id":"t","name":"n","input":{inner}}}'}.get(nest)
    content = f"[{block}]" if block else inner
    call = read(f'{{"model":"m","messages":[{{"role":"assistant","content":{content}}}]}}'.encode())
    assert call is None or call.chat.messages


@pytest.mark.parametrize("body", [b"", b"\xff", b'{"model": "m", "messages": [{"role": "u\xff"}]}', b"[]", b"null"])
def test_bytes_that_are_no_request_are_refused(body) -> None:
    assert read(body) is None


def test_input_that_is_no_utf8_is_refused() -> None:
    block = b'{"type":"tool_use","id":"t","name":"n","input":{"a":"\xff"}}'
    assert read(b'{"model":"m","messages":[{"role":"assistant","content":[' + block + b"]}]}") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TYPES = st.sampled_from(
    [
        "text",
        "image",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "document",
        "search_result",
        "tool_addition",
        "tool_removal",
        "other",
    ]
)
NAMES = st.sampled_from(
    "text source tool_use_id content id name input thinking is_error signature title citations tool".split()  # noqa: SIM905
)


def blocks(inner: st.SearchStrategy) -> st.SearchStrategy:
    block = st.builds(lambda kind, fields: {"type": kind, **fields}, TYPES, st.dictionaries(NAMES, inner, max_size=4))
    return st.lists(block, max_size=3)


CONTENT = st.recursive(st.text() | JSON, blocks, max_leaves=6)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text() | blocks(CONTENT)}
)
FIELDS = st.sampled_from(
    """system tools tool_choice thinking max_tokens stop_sequences output_config stream context_management thread
    container mcp_servers next_week""".split()  # noqa: SIM905
)
REQUEST = st.builds(
    lambda given, fields: {"model": "m", "messages": given, **fields},
    st.lists(MESSAGE, min_size=1, max_size=3),
    st.dictionaries(FIELDS, JSON | CONTENT, max_size=2),
)


@given(JSON | REQUEST)
@settings(max_examples=300, deadline=None)
def test_any_json_is_a_call_or_a_bad_request(value) -> None:
    call = read(json.dumps(value).encode())
    assert call is None or call.chat.model == value["model"]
