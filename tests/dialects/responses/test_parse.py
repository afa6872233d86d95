"""What a Responses request means: items to messages, tools to functions, and everything a client may send."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.contract.chat import Image, Message, Text, ToolCall
from polar.dialects.base import Call, CallError
from polar.dialects.openai_items import seal, unseal
from polar.dialects.openai_responses import OpenAIResponses
from tests.dialects.responses.conftest import AGENTS, BASH, PATCH, parse, user


def reasoning(text: str) -> dict:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal(text)}


def said(text: str) -> dict:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(call_id: str, arguments: str = "{}", **fields: str) -> dict:
    return {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": arguments, **fields}


def result(call_id: str, output: object) -> dict:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_a_string_is_one_user_message() -> None:
    assert OpenAIResponses().parse(b'{"model": "m", "input": "hi"}', {}, {}).chat.messages == (Message("user", "hi"),)


def test_instructions_come_first_and_system_messages_keep_their_place() -> None:
    late = {"role": "developer", "content": "late"}
    messages = parse(late, user("go"), late, instructions="Be brief.").chat.messages
    assert [(m.role, m.content) for m in messages] == [
        ("system", "Be brief."),
        ("system", "late"),
        ("user", "go"),
        ("system", "late"),
    ]


def test_the_items_of_one_reply_are_one_message() -> None:
    items = [user("go"), reasoning("hm"), said("I look."), call("a", '{"command": "ls"}'), call("b")]
    messages = parse(*items, result("a", "x"), result("b", "y"), said("Done.")).chat.messages
    assert messages[1] == Message(
        "assistant",
        "I look.",
        reasoning="hm",
        tool_calls=(ToolCall("a", "bash", '{"command": "ls"}'), ToolCall("b", "bash", "{}")),
    )
    assert [m.role for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[2] == Message("tool", "x", tool_call_id="a")


def test_a_message_that_the_harness_adds_to_a_reply_stays_its_own() -> None:
    messages = parse(user("go"), said("Half"), said("I have reached the limit.")).chat.messages
    assert [m.content for m in messages] == ["go", "Half", "I have reached the limit."]


@pytest.mark.parametrize(
    "foreign",
    [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "polar.reasoning.1.%%%"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I thought."}]},
    ],
    ids=["another provider's", "broken", "a summary alone"],
)
def test_foreign_reasoning_is_dropped_with_a_word_and_leaves_no_empty_message(foreign) -> None:
    parsed = parse(user("one"), foreign, user("two"))
    assert [m.content for m in parsed.chat.messages] == ["one", "two"]
    assert any("reasoning" in warning for warning in parsed.warnings)


def told(reply: str, *items: dict) -> list[dict]:
    """Items with the ids that a reply gave them."""
    prefixes = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
    return [{**item, "id": f"{prefixes[item['type']]}_{reply}_{at}"} for at, item in enumerate(items)]


def test_what_codex_keeps_of_a_stream_that_broke_is_no_part_of_the_reply_after_it() -> None:
    broken = told("0a", reasoning("one"), said("I look."))
    after = told("0b", reasoning("two"), said("Now."), call("a"))
    messages = parse(user("go"), *broken, *after, result("a", "x")).chat.messages
    assert [(m.reasoning, m.content, len(m.tool_calls)) for m in messages[1:3]] == [
        ("one", "I look.", 0),
        ("two", "Now.", 1),
    ]


def test_calls_of_one_reply_with_their_results_between_them_are_one_message() -> None:
    """As programs of the SDK write history that take one call after the other."""
    seen = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    thought, *calls = told("0a", reasoning("one"), call("a"), call("b"))
    [third] = told("0b", call("c"))
    results = [result("a", [seen]), result("b", "y"), result("c", "z")]
    items = [thought, calls[0], results[0], calls[1], results[1], third, results[2]]
    messages = parse(user("go"), *items).chat.messages
    assert messages == parse(user("go"), thought, *calls, *results[:2], third, results[2]).chat.messages
    assert [(m.role, [c.id for c in m.tool_calls]) for m in messages[1:]] == [
        ("assistant", ["a", "b"]),
        ("tool", []),
        ("tool", []),
        ("user", []),
        ("assistant", ["c"]),
        ("tool", []),
    ]


def test_thinking_between_texts_and_calls_of_one_reply_is_one_message() -> None:
    items = told("0a", reasoning("one"), said("I look."), reasoning("two"), call("a"))
    messages = parse(user("go"), *items, result("a", "x")).chat.messages
    assert messages[1] == Message(
        "assistant", "I look.", reasoning="onetwo", tool_calls=(ToolCall("a", "bash", "{}"),)
    )


def test_reasoning_in_the_open_is_taken_where_none_is_sealed() -> None:
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert parse(user("one"), item, said("ok")).chat.messages[1].reasoning == "hm"


@given(st.text(st.characters()))
def test_sealed_reasoning_comes_back_to_the_letter(text) -> None:
    assert unseal(seal(text)) == text


def test_a_result_of_several_parts_is_text_and_its_images_follow_the_results() -> None:
    parts = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    items = [user("look"), call("a"), call("b"), result("a", parts), result("b", "y"), user("and?")]
    messages = parse(*items).chat.messages
    assert [(m.role, m.content) for m in messages[2:]] == [
        ("tool", "seen"),
        ("tool", "y"),
        ("user", (Image("data:image/png;base64,AA"),)),
        ("user", "and?"),
    ]


def test_images_keep_their_place_between_texts() -> None:
    content = [
        {"type": "input_text", "text": "<image>"},
        {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "auto"},
        {"type": "input_text", "text": "</image>"},
    ]
    [message] = parse({"role": "user", "content": content}).chat.messages
    assert message.content == (Text("<image>"), Image("https://example.com/a.png"), Text("</image>"))


def test_namespaces_are_flattened_the_same_way_with_and_without_their_tools() -> None:
    history = [user("go"), call("a", name="spawn", namespace="agents"), result("a", "ok")]
    offered, compacting = parse(*history, tools=[BASH, AGENTS]), parse(*history, tools=[])
    assert [tool.name for tool in offered.chat.tools] == ["bash", "agents__spawn"]
    assert offered.chat.messages == compacting.chat.messages
    assert offered.chat.messages[1].tool_calls[0].name == "agents__spawn"


def test_names_that_meet_are_kept_apart() -> None:
    clash = {**BASH, "name": "agents__spawn"}
    names = [tool.name for tool in parse(tools=[clash, AGENTS]).chat.tools]
    assert len(set(names)) == 2


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    item = {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": 'say "x"'}
    output = {"type": "custom_tool_call_output", "call_id": "a", "output": "done"}
    parsed = parse(user("go"), item, output, tools=[PATCH])
    [tool] = parsed.chat.tools
    assert tool.parameters["required"] == ["input"]
    assert "lark grammar" in tool.description
    [sent] = parsed.chat.messages[1].tool_calls
    assert json.loads(sent.arguments) == {"input": 'say "x"'}
    assert parsed.chat.messages[2] == Message("tool", "done", tool_call_id="a")


def test_what_no_model_can_use_is_dropped_and_named() -> None:
    hosted = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "tool_search", "parameters": 7}]
    unknown = {"type": "web_search_call", "id": "ws_1", "output": {"a": 1}}
    parsed = parse(user("go"), unknown, tools=[BASH, *hosted])
    assert [tool.name for tool in parsed.chat.tools] == ["bash"]
    words = "\n".join(parsed.warnings)
    assert all(kind in words for kind in ("web_search", "local_shell", "tool_search", "web_search_call"))


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ("required", "required"),
        ({"type": "function", "name": "bash"}, "bash"),
        ({"type": "function", "namespace": "agents", "name": "spawn"}, "agents__spawn"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "auto"),
        ({"type": "web_search_preview"}, None),
    ],
)
def test_tool_choice(choice, meant) -> None:
    assert parse(tools=[BASH, AGENTS], tool_choice=choice).chat.tool_choice == meant
    assert parse(tools=[], tool_choice=choice).chat.tool_choice is None


def test_sampling_format_and_effort() -> None:
    schema = {"type": "object", "properties": {}}
    parsed = parse(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "xhigh", "summary": "auto"},
    )
    sampling = parsed.chat.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert parsed.chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, "strict": True},
    }
    assert parsed.chat.template_args == {"reasoning_effort": "high"}
    assert parse(reasoning={"effort": "none"}).chat.template_args == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("headers", "role"),
    [
        ({}, None),
        ({"x-openai-subagent": "collab_spawn"}, "subagent"),
        ({"x-parent-session-id": "ses_1"}, "subagent"),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, "auxiliary"),
        ({"x-codex-turn-metadata": '{"request_kind": "turn"}'}, None),
        ({"x-codex-turn-metadata": "[broken"}, None),
    ],
)
def test_what_the_harness_says_of_a_call(headers, role) -> None:
    assert parse(headers=headers).role_hint == role


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "hi"}, "'model'"),
        ({"model": "m"}, "'input'"),
        ({"model": "m", "input": [{"type": "web_search_call"}]}, "'input'"),
        ({"model": "m", "input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        (
            {"model": "m", "input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input_file",
        ),
        (
            {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "image_url",
        ),
        ({"model": "m", "input": [{"type": "item_reference", "id": "msg_1"}]}, "stored item"),
        ({"model": "m", "input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "only its vendor can read"),
        ({"model": "m", "input": "x", "tools": [BASH], "tool_choice": "any"}, "'any'"),
        ({"model": "m", "input": "x", "max_output_tokens": 0}, "'max_output_tokens'"),
        ({"model": "m", "input": "x", "tools": [{"type": "function"}]}, "tools[0]"),
        ({"model": "m", "input": "x", "conversation": "conv_1"}, "'conversation'"),
        ({"model": "m", "input": "x", "background": True}, "'background'"),
        ({"model": "m", "input": "x", "prompt": {"id": "p"}}, "'prompt'"),
    ],
)
def test_what_makes_no_sense_or_would_lose_context_is_an_error_that_names_it(body, words) -> None:
    with pytest.raises(CallError) as caught:
        OpenAIResponses().parse(json.dumps(body).encode(), {}, {})
    assert caught.value.kind == "bad_request"
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [BASH], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [user("hi"), said("Well")]}, "last message"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, "logprobs"),
        ({"tools": [BASH, {"type": "web_search"}, {"type": "mcp"}]}, "'web_search', 'mcp'"),
    ],
    ids=str,
)
def test_what_can_not_be_honoured_is_named_in_one_warning(fields, named) -> None:
    [warning] = parse(**fields).warnings
    assert named in warning


def test_what_changes_no_reply_is_no_warning() -> None:
    quiet = {"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "user": "u"}
    quiet |= {"reasoning": {"effort": "high", "summary": "auto"}, "truncation": "disabled", "background": False}
    quiet |= {"client_metadata": {"a": "b"}, "stream_options": {"include_obfuscation": False}, "max_tool_calls": 3}
    assert parse(**quiet).warnings == ()


KEYS = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "image_url",
        "call_id",
        "name",
        "namespace",
        "arguments",
        "input",
        "output",
        "tools",
        "tool_choice",
        "format",
        "schema",
        "summary",
        "encrypted_content",
        "model",
        "instructions",
        "reasoning",
        "effort",
        "metadata",
        "include",
        "stream",
    ]
)
WORDS = st.sampled_from(
    [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "item_reference",
        "function",
        "custom",
        "namespace",
        "user",
        "assistant",
        "developer",
        "input_text",
        "input_image",
        "json_schema",
        "auto",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
REQUEST = st.fixed_dictionaries(
    {"model": st.just("m"), "input": st.lists(JSON, max_size=3) | JSON}, optional={"tools": JSON}
)


@settings(max_examples=300, deadline=None)
@given(JSON | REQUEST | st.builds(lambda a, b: {**a, **b}, REQUEST, st.dictionaries(KEYS, JSON, max_size=3)))
def test_any_json_is_a_call_or_a_bad_request(body) -> None:
    try:
        parsed = OpenAIResponses().parse(json.dumps(body).encode(), {}, {})
    except CallError as refused:
        parsed = refused
    assert isinstance(parsed, Call) or parsed.kind == "bad_request"


@pytest.mark.parametrize("body", [b"", b"[", b'{"model": "\xff"}', b"[" * 100_000, b'{"input": "\\ud800"}'])
def test_any_bytes_are_a_bad_request(body) -> None:
    with pytest.raises(CallError) as caught:
        OpenAIResponses().parse(body, {}, {})
    assert caught.value.kind == "bad_request"
