"""Structured output and forced tool calls, as each API asks for them: honoured, or dropped with a line on it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar.contract.chat import Chat, Message
from polar.engines.base import EngineInfo
from polar.gateway.constraints import heed
from tests.gateway.conftest import World
from tests.support.script import Step
from tests.support.tinymodel import make_tiny_model

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REPLY = '{"city": "Paris"}'
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
MESSAGES = [{"role": "user", "content": "hi"}]
GEMINI = "/v1beta/models/m:generateContent"
CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    ),
    "anthropic": (
        "/v1/messages",
        {"max_tokens": 99, "messages": MESSAGES, "output_format": {"type": "json_schema", "schema": SCHEMA}},
    ),
    "anthropic_config": (
        "/v1/messages",
        {
            "max_tokens": 99,
            "messages": MESSAGES,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    "gemini": (
        GEMINI,
        {
            "contents": CONTENTS,
            "generationConfig": {
                "responseMimeType": "application/json",
                "responseSchema": {
                    "type": "OBJECT",
                    "properties": {"city": {"type": "STRING"}},
                    "required": ["city"],
                },
            },
        },
    ),
    "gemini_json": (
        GEMINI,
        {
            "contents": CONTENTS,
            "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA},
        },
    ),
}
CHOICES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]},
        {
            "none": {"tool_choice": "none"},
            "required": {"tool_choice": "required"},
            "look": {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **TOOL}]},
        {
            "none": {"tool_choice": "none"},
            "required": {"tool_choice": "required"},
            "look": {"tool_choice": {"type": "function", "name": "look"}},
        },
    ),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 99,
            "messages": MESSAGES,
            "tools": [{"name": "look", "input_schema": TOOL["parameters"]}],
        },
        {
            "none": {"tool_choice": {"type": "none"}},
            "required": {"tool_choice": {"type": "any"}},
            "look": {"tool_choice": {"type": "tool", "name": "look"}},
        },
    ),
    "gemini": (
        GEMINI,
        {"contents": CONTENTS, "tools": [{"functionDeclarations": [TOOL]}]},
        {
            "none": {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
            "required": {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
            "look": {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}}},
        },
    ),
}


async def post(world: World, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(world.node.server.url + path, json={"model": "m", **body}) as response:
            return response.status, await response.json()


def said(world: World) -> Any:
    """What the engine was asked to hold its last reply to."""
    return world.model.log.generations[-1].request.get("response_format")


@pytest.mark.parametrize("api", FORMATS)
async def test_a_schema_reaches_an_engine_that_has_a_grammar_whatever_the_api(make_world, api) -> None:
    world: World = await make_world([Step(text=REPLY)])
    world.node.engine.structured = True
    path, body = FORMATS[api]
    status, reply = await post(world, path, body)
    assert status == 200, reply
    assert said(world)["type"] == "json_schema"
    assert said(world)["json_schema"]["schema"] == SCHEMA
    [completion] = await world.completions()
    assert completion.metadata["logprobs"] == "masked"
    assert "warnings" not in completion.metadata


@pytest.mark.parametrize("api", FORMATS)
async def test_an_engine_without_a_grammar_is_not_asked_and_one_line_says_so(make_world, api, caplog) -> None:
    world: World = await make_world(lambda _: Step(text=REPLY))
    path, body = FORMATS[api]
    with caplog.at_level(logging.WARNING, "polar.gateway"):
        for _ in range(2):
            assert (await post(world, path, body))[0] == 200
    assert said(world) is None
    for completion in await world.completions():
        [warning] = completion.metadata["warnings"]
        assert warning == "response_format was dropped: the engine (scripted) has no grammar where it takes token ids"
        assert completion.metadata["logprobs"] == "sampling"
    assert sum("response_format was dropped" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("api", FORMATS)
async def test_in_chat_mode_a_schema_is_the_engines(make_world, api) -> None:
    world: World = await make_world([Step(text=REPLY)], mode="chat")
    path, body = FORMATS[api]
    assert (await post(world, path, body))[0] == 200
    assert said(world)["json_schema"]["schema"] == SCHEMA
    [completion] = await world.completions()
    assert completion.metadata["logprobs"] == "masked"


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"response_format": {"type": "json_object"}}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("gemini", {"generationConfig": {"responseMimeType": "application/json"}}),
    ],
)
async def test_json_without_a_schema_is_any_object(make_world, api, fields) -> None:
    world: World = await make_world([Step(text=REPLY)])
    world.node.engine.structured = True
    path, body = FORMATS[api]
    assert (await post(world, path, {**body, **fields}))[0] == 200
    assert said(world) == {"type": "json_object"}


async def test_plain_text_as_a_format_is_no_constraint(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    path, body = FORMATS["chat"]
    assert (await post(world, path, {**body, "response_format": {"type": "text"}}))[0] == 200
    [completion] = await world.completions()
    assert "warnings" not in completion.metadata


async def test_a_format_that_nobody_knows_is_dropped_and_one_without_its_schema_refused(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    world.node.engine.structured = True
    path, body = FORMATS["chat"]
    status, reply = await post(world, path, {**body, "response_format": {"type": "json_schema"}})
    assert (status, "response_format.json_schema.schema" in reply["error"]["message"]) == (400, True)
    assert (await post(world, path, {**body, "response_format": {"type": "haiku"}}))[0] == 200
    [completion] = await world.completions()
    assert completion.metadata["warnings"] == ["response_format was dropped: type 'haiku' is not known here"]


async def test_a_grammar_never_keeps_an_agent_from_its_tools(make_world) -> None:
    """Agent frameworks send the schema of their last answer with every call."""
    world: World = await make_world(lambda _: Step(text=REPLY))
    world.node.engine.structured = True
    path, body = FORMATS["chat"]
    tools = [{"type": "function", "function": TOOL}]
    assert (await post(world, path, {**body, "tools": tools}))[0] == 200
    assert said(world) is None
    assert (await post(world, path, {**body, "tools": tools, "tool_choice": "none"}))[0] == 200
    assert said(world) is not None
    one, two = await world.completions()
    assert "tools are offered" in one.metadata["warnings"][0]
    assert "warnings" not in two.metadata


@pytest.mark.parametrize("choice", ["required", "look"])
@pytest.mark.parametrize("api", CHOICES)
async def test_a_forced_call_is_dropped_with_a_line_where_ids_are_sampled(make_world, api, choice) -> None:
    world: World = await make_world([Step(text="No.")])
    path, body, choices = CHOICES[api]
    assert (await post(world, path, {**body, **choices[choice]}))[0] == 200
    [completion] = await world.completions()
    [warning] = completion.metadata["warnings"]
    assert warning.startswith(f"tool_choice '{choice}' was dropped")
    assert completion.metadata["logprobs"] == "sampling"


@pytest.mark.parametrize("api", CHOICES)
async def test_a_forced_call_is_passed_on_where_the_engine_chats(make_world, api) -> None:
    world: World = await make_world(lambda _: Step(text="No."), mode="chat")
    path, body, choices = CHOICES[api]
    for choice in ("required", "look"):
        assert (await post(world, path, {**body, **choices[choice]}))[0] == 200
    asked = [generation.request["tool_choice"] for generation in world.model.log.generations]
    assert asked == ["required", {"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize("mode", ["tito", "chat"])
@pytest.mark.parametrize("api", CHOICES)
async def test_no_call_at_all_is_honoured_everywhere(make_world, api, mode) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    world: World = await make_world([Step(text=call)], mode=mode)
    path, body, choices = CHOICES[api]
    status, reply = await post(world, path, {**body, **choices["none"]})
    assert status == 200
    assert "<tool_call>" in json.dumps(reply)
    [completion] = await world.completions()
    assert completion.reply.tool_calls == ()
    assert "warnings" not in completion.metadata


NO_TOOLS = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('No such role.') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@pytest.fixture
def without_tools(tmp_path: Path) -> Path:
    """A model folder whose template knows no tools."""
    folder = make_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(NO_TOOLS)
    return folder


@pytest.mark.parametrize("api", CHOICES)
async def test_tools_that_the_template_leaves_out_are_warned_of(make_world, without_tools, api, caplog) -> None:
    """Even where the conversation itself names the tool, as system prompts of harnesses do."""
    world: World = await make_world(lambda _: Step(text="No."), model_dir=without_tools)
    path, body, choices = CHOICES[api]
    said = json.loads(json.dumps(body).replace('"hi"', '"look"'))
    with caplog.at_level(logging.WARNING, "polar.gateway"):
        for _ in range(2):
            assert (await post(world, path, said))[0] == 200
        assert (await post(world, path, {**said, **choices["none"]}))[0] == 200
    one, two, unasked = await world.completions()
    for completion in (one, two):
        [warning] = completion.metadata["warnings"]
        assert warning.startswith("tools were dropped: the model's template has no place for them")
    assert "warnings" not in unasked.metadata
    assert sum("tools were dropped" in record.getMessage() for record in caplog.records) == 1


async def test_a_tools_result_that_the_template_has_no_place_for_is_refused_with_the_reason(
    make_world, without_tools
) -> None:
    world: World = await make_world([Step(text="No.")], model_dir=without_tools)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [*MESSAGES, answer, {"role": "tool", "tool_call_id": "a", "content": "dark"}]
    status, reply = await post(world, "/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "No such role. (it has no place for a tool's result: give one that has" in reply["error"]["message"]


async def test_calls_in_a_form_that_is_not_known_are_warned_of(make_world, without_tools) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + NO_TOOLS
    (without_tools / "chat_template.jinja").write_text(template)
    world: World = await make_world([Step(text="No.")], model_dir=without_tools)
    path, body, _ = CHOICES["chat"]
    assert (await post(world, path, body))[0] == 200
    [completion] = await world.completions()
    [warning] = completion.metadata["warnings"]
    assert warning.startswith("tool calls stay text")


def test_a_grammar_never_binds_the_models_thinking() -> None:
    chat = Chat("m", (Message("user", "hi"),), response_format={"type": "json_object"})
    info = EngineInfo("scripted", "m", 100, structured=True)
    assert heed(chat, info) == (chat, ())
    heeded, [warning] = heed(chat, info, thinking=True)
    assert heeded.response_format is None
    assert "turn thinking off" in warning


async def test_a_reply_under_a_grammar_that_the_engine_stops_is_not_pieced_together(make_world) -> None:
    """The grammar would begin again in the middle."""
    world: World = await make_world([Step(text=REPLY, finish_reason="abort")])
    world.node.engine.structured = True
    path, body = FORMATS["chat"]
    status, reply = await post(world, path, body)
    assert (status, reply["error"]["code"]) == (503, "overloaded")
    [completion] = await world.completions()
    assert completion.outcome == "aborted"
    assert len(world.model.log.generations) == 1


async def test_a_server_that_refuses_unknown_fields_gets_no_template_arguments_and_a_line_says_so(make_world) -> None:
    """Claude Code asks for an effort in every call."""
    world: World = await make_world(lambda _: Step(text="No."), mode="chat")
    body = {"messages": MESSAGES, "max_tokens": 9, "output_config": {"effort": "high"}}
    engine = world.node.engine
    for takes in (True, False):
        engine._info = replace(engine.info, template_args=takes)
        assert (await post(world, "/v1/messages", body))[0] == 200
    one, two = [generation.request for generation in world.model.log.generations]
    assert one["chat_template_kwargs"] == {"reasoning_effort": "high"}
    assert "chat_template_kwargs" not in two
    taken, refused = await world.completions()
    assert "warnings" not in taken.metadata
    assert "template arguments (reasoning_effort) were dropped" in refused.metadata["warnings"][0]
