"""Requests in Gemini's shape become the chat that they mean."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar.contract.chat import Image, Message, Sampling, Text, Tool, ToolCall
from polar.dialects.base import Call, CallError
from polar.dialects.gemini import Gemini
from polar.dialects.signatures import signature
from tests.dialects.gemini.conftest import BASH, STREAM, model, parse, user

PNG = "iVBORw0KGgo="


def call(name: str, args: Any, **fields: Any) -> dict[str, Any]:
    extra = {"thoughtSignature": fields.pop("signature")} if "signature" in fields else {}
    return {"functionCall": {"name": name, "args": args, **fields}, **extra}


def result(name: str, response: Any, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **fields}}


def messages(*contents: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return parse(*contents, **fields).chat.messages


# ---- contents --------------------------------------------------------------------------------------------


def test_a_conversation_keeps_its_order_and_its_words() -> None:
    found = messages(
        user("hi"), model("hello"), user("one", "two"), systemInstruction={"parts": [{"text": "Be kind."}]}
    )
    assert found == (
        Message("system", "Be kind."),
        Message("user", "hi"),
        Message("assistant", "hello"),
        Message("user", (Text("one"), Text("two"))),
    )


def test_an_empty_part_says_nothing() -> None:
    """The Go SDK leaves out what is empty, so a chunk with an empty text comes back as a part with nothing in it."""
    parsed = parse(user("hi"), {"role": "model", "parts": [{"text": "hello"}, {}]}, {"role": "user", "parts": [{}]})
    assert [message.content for message in parsed.chat.messages] == ["hi", "hello", ""]
    assert parsed.warnings == ()


@pytest.mark.parametrize(
    "system",
    [
        "Be kind.",
        {"parts": {"text": "Be kind."}},
        [{"text": "Be kind."}],
        {"role": "user", "parts": [{"text": "Be kind."}]},
    ],
    ids=["a string", "a single part", "parts", "a content"],
)
def test_a_system_instruction_may_have_any_form(system: Any) -> None:
    assert messages(systemInstruction=system)[0] == Message("system", "Be kind.")


def test_an_empty_system_instruction_says_nothing() -> None:
    assert messages(systemInstruction={"parts": []}) == (Message("user", "hi"),)


def test_contents_of_the_model_in_a_row_are_one_reply() -> None:
    """The vendor's SDK keeps each chunk of a stream as a content of its own, the last one with an empty text."""
    chunks = [model({"text": "Let me", "thought": True}), model({"text": " see", "thought": True})]
    chunks += [model("I wi"), model("ll look."), model(call("bash", {}, id="a")), model("")]
    assert messages(user("hi"), *chunks)[1] == Message(
        "assistant", "I will look.", reasoning="Let me see", tool_calls=(ToolCall("a", "bash", "{}"),)
    )


def test_responses_go_to_their_calls_by_id_whatever_their_order() -> None:
    turn = model(call("bash", {"c": 1}, id="a"), call("bash", {"c": 2}, id="b"))
    found = messages(turn, user(result("bash", {"output": "2"}, id="b"), result("bash", {"output": "1"}, id="a")))
    assert found[1:] == (
        Message("tool", "2", tool_call_id="b", name="bash"),
        Message("tool", "1", tool_call_id="a", name="bash"),
    )


def test_responses_without_ids_go_to_their_calls_by_name_and_order() -> None:
    turn = model(call("bash", {"c": 1}), call("read", {}), call("bash", {"c": 2}))
    results = [result(name, {"output": name}) for name in ("read", "bash", "bash")]
    contents = [turn, {"role": "function", "parts": results}, model(call("read", {})), user(results[0])]
    found = messages(user("go"), *contents)
    first, second, third = (one.id for one in found[1].tool_calls)
    assert [message.tool_call_id for message in found[2:5]] == [second, first, third]
    assert found[6].tool_call_id == found[5].tool_calls[0].id
    assert len({first, second, third, found[6].tool_call_id}) == 4
    assert messages(user("go"), *contents[:2]) == found[:5], "ids are the same in every request"


def test_a_signed_call_has_its_recorded_id_whatever_the_client_calls_it() -> None:
    turn = model(call("bash", {}, id="bash__x", signature=signature("x", None)))
    found = messages(turn, user(result("bash", {"output": "ok"}, id="bash__x")))
    assert found[0].tool_calls[0].id == found[1].tool_call_id == "x"


def test_a_response_to_no_call_is_still_read() -> None:
    [message] = messages(user(result("bash", {"output": "ok"}, id="z")))
    assert message == Message("tool", "ok", tool_call_id="z", name="bash")


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"result": {"n": 2}}, '{"n":2}'),
        ({"error": "no such file"}, '{"error":"no such file"}'),
        ({"output": "x", "exit_code": 1}, '{"output":"x","exit_code":1}'),
        ({"n": 10**30}, '{"n":1' + "0" * 30 + "}"),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_a_response_is_its_output_or_its_json(response: Any, text: str) -> None:
    assert messages(user(result("bash", response)))[0].content == text


def test_a_picture_beside_a_response_follows_it_as_the_users() -> None:
    """D15: a screenshot in a tool's result reaches the model, in its place."""
    picture = {"inlineData": {"mimeType": "image/png", "data": PNG}}
    found = messages(
        model(call("shot", {}, id="a"), call("bash", {}, id="b")),
        user(
            result("shot", {"output": "taken"}, id="a", parts=[picture]),
            result("bash", {"output": "ok"}, id="b"),
            "go on",
        ),
    )
    assert [message.role for message in found] == ["assistant", "tool", "user", "tool", "user"]
    assert found[2].content == (Image(f"data:image/png;base64,{PNG}"),)


@pytest.mark.parametrize(
    ("part", "url"),
    [
        ({"inlineData": {"mimeType": "image/jpeg", "data": "-_8="}}, "data:image/jpeg;base64,+/8="),
        ({"inline_data": {"mime_type": "image/png", "data": PNG}}, f"data:image/png;base64,{PNG}"),
        (
            {"fileData": {"fileUri": "https://example.org/a.png", "mimeType": "image/png"}},
            "https://example.org/a.png",
        ),
        ({"fileData": {"fileUri": "https://example.org/a.png"}}, "https://example.org/a.png"),
    ],
)
def test_pictures_are_data_urls_or_urls(part: Any, url: str) -> None:
    assert messages(user("look", part))[0].content == (Text("look"), Image(url))


def test_text_in_base64_is_text() -> None:
    data = base64.urlsafe_b64encode("naïve ?>~".encode()).decode()
    assert messages(user({"inlineData": {"mimeType": "text/plain", "data": data}}))[0].content == "naïve ?>~"


def test_media_that_the_model_cant_be_given_is_said_to_be_left_out() -> None:
    parsed = parse(user("read", {"inlineData": {"mimeType": "application/pdf", "data": "AA=="}}))
    assert parsed.chat.messages[0].content == (
        Text("read"),
        Text("[application/pdf left out: only text and images can be read]"),
    )
    assert "contents[0].parts[1]" in parsed.warnings[0]


# ---- thinking and signatures -----------------------------------------------------------------------------


def test_a_thought_is_the_replys_reasoning() -> None:
    assert messages(model({"text": "hm", "thought": True}, "yes"))[0] == Message("assistant", "yes", reasoning="hm")


def test_a_signature_of_ours_brings_back_a_thought_that_the_client_dropped() -> None:
    signed = {"text": "yes", "thoughtSignature": signature(None, "hm 🙂")}
    assert messages(model(signed))[0] == Message("assistant", "yes", reasoning="hm 🙂")
    urlsafe = {**signed, "thoughtSignature": signed["thoughtSignature"].replace("+", "-").replace("/", "_")}
    assert messages(model(urlsafe))[0].reasoning == "hm 🙂"
    assert messages(model({"text": "said", "thought": True}, signed))[0].reasoning == "said"


@pytest.mark.parametrize(
    "text", ["skip_thought_signature_validator", "", "AAAA", "Cg==", "CnBvbGFy", signature("x", "y")[:-8], "ä"]
)
def test_a_signature_of_another_is_passed_over(text: str) -> None:
    found = messages(model({"functionCall": {"name": "bash", "id": "a"}, "thoughtSignature": text}))
    assert found[0] == Message("assistant", tool_calls=(ToolCall("a", "bash", "{}"),))


# ---- tools -----------------------------------------------------------------------------------------------


def test_schemas_of_the_vendor_are_json_schemas() -> None:
    schema = {
        "type": "OBJECT",
        "propertyOrdering": ["b", "a"],
        "properties": {
            "type": {"type": "STRING", "nullable": True, "enum": ["x"]},
            "min_items": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "1"},
            "any": {"any_of": [{"type": "NUMBER"}, {"type": "BOOLEAN"}], "nullable": True},
        },
        "required": ["type"],
    }
    declared = [{"functionDeclarations": [{"name": "f", "description": "d", "parameters": schema}]}]
    assert parse(tools=declared).chat.tools == (
        Tool(
            "f",
            "d",
            {
                "type": "object",
                "properties": {
                    "type": {"type": ["string", "null"], "enum": ["x", None]},
                    "min_items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    "any": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}]},
                },
                "required": ["type"],
            },
        ),
    )


def test_a_json_schema_stays_as_it_is_and_tools_of_the_vendor_are_dropped_aloud() -> None:
    parsed = parse(tools=[{"functionDeclarations": [BASH], "googleSearch": {}}, {"codeExecution": {}}])
    assert parsed.chat.tools == (Tool("bash", "Run a command.", BASH["parametersJsonSchema"]),)
    assert [warning.split()[0] for warning in parsed.warnings] == ["tools[0].googleSearch", "tools[1].codeExecution"]


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        ({"mode": "AUTO"}, "auto"),
        ({"mode": "any"}, "required"),
        ({"mode": "NONE"}, "none"),
        ({"mode": "ANY", "allowedFunctionNames": ["bash"]}, "bash"),
        ({"mode": "ANY", "allowedFunctionNames": ["bash", "read"]}, "required"),
        ({}, None),
    ],
)
def test_a_calling_mode_is_a_tool_choice(config: Any, choice: str | None) -> None:
    tools = [{"functionDeclarations": [BASH, {"name": "read"}]}]
    assert parse(tools=tools, toolConfig={"functionCallingConfig": config}).chat.tool_choice == choice
    assert parse(toolConfig={"functionCallingConfig": config}).chat.tool_choice is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"mode": "VALIDATED"}, "VALIDATED"),
        ({"mode": "AUTO", "allowedFunctionNames": ["bash"]}, "allowedFunctionNames"),
        ({"mode": "ANY", "allowedFunctionNames": ["bash", "read"]}, "allowedFunctionNames"),
    ],
)
def test_a_calling_mode_that_is_not_wholly_kept_is_said(config: Any, named: str) -> None:
    tools = [{"functionDeclarations": [BASH, {"name": "read"}]}]
    parsed = parse(tools=tools, toolConfig={"functionCallingConfig": config})
    assert parsed.chat.tool_choice == ("required" if config["mode"] == "ANY" else "auto")
    assert [named in warning for warning in parsed.warnings] == [True]


# ---- settings --------------------------------------------------------------------------------------------


def test_settings_are_sampling() -> None:
    generation = {"temperature": 1, "topP": 0.95, "topK": 64.0, "maxOutputTokens": 100, "stopSequences": ["END", ""]}
    generation |= {"seed": 7, "presencePenalty": 0.5, "frequencyPenalty": 0.25, "candidateCount": 1}
    assert parse(generationConfig=generation).chat.sampling == Sampling(
        temperature=1.0,
        top_p=0.95,
        top_k=64,
        max_tokens=100,
        stop=("END",),
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({"responseMimeType": "application/json"}, {"type": "json_object"}),
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING"}}, None),
        ({}, None),
        ({"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}}, {"type": "object"}),
        ({"responseMimeType": "application/json", "responseJsonSchema": {"type": "object"}}, {"type": "object"}),
        # As Gemini CLI's router writes it.
        ({"responseMimeType": "application/json", "responseJsonSchema": {"type": "OBJECT"}}, {"type": "object"}),
    ],
)
def test_a_mime_type_and_a_schema_are_a_response_format(generation: Any, wanted: Any) -> None:
    if wanted == {"type": "object"}:
        wanted = {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted, "strict": True}}
    assert parse(generationConfig=generation).chat.response_format == wanted


@pytest.mark.parametrize(
    ("thinking", "args"),
    [
        ({"thinkingBudget": 0}, {"enable_thinking": False}),
        ({"thinkingBudget": -1}, {"enable_thinking": True}),
        ({"includeThoughts": True}, {}),
        ({"thinkingLevel": "HIGH"}, {"reasoning_effort": "high"}),
        ({"thinkingLevel": "minimal"}, {"reasoning_effort": "low"}),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, {}),
    ],
)
def test_a_thinking_budget_switches_thinking_and_a_level_is_an_effort(thinking: Any, args: Any) -> None:
    parsed = parse(generationConfig={"thinkingConfig": thinking})
    assert (parsed.chat.template_args, parsed.warnings) == (args, ())


def test_what_cant_be_honoured_is_a_warning() -> None:
    generation = {
        "responseLogprobs": True,
        "responseModalities": ["TEXT", "AUDIO"],
        "responseMimeType": "text/x.enum",
    }
    parsed = parse(generationConfig=generation, safetySettings=[{"category": "X"}], labels={"a_b": "c"})
    assert len(parsed.warnings) == 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"nextWeek": 1}, "nextWeek"),
        ({"generation_config": {"media_resolution": "LOW"}}, "generationConfig.mediaResolution"),
        ({"generationConfig": {"speechConfig": {"languageCode": "de"}}}, "generationConfig.speechConfig"),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": 512}}}, "thinkingBudget"),
        ({"generationConfig": {"thinkingConfig": {"thinkingLevel": "HEROIC"}}}, "'heroic'"),
        ({"generationConfig": {"thinkingConfig": {"nextWeek": 1}}}, "thinkingConfig.nextWeek"),
        ({"toolConfig": {"retrievalConfig": {"languageCode": "de"}}}, "toolConfig.retrievalConfig"),
        (
            {"toolConfig": {"functionCallingConfig": {"streamFunctionCallArguments": True}}},
            "functionCallingConfig.streamFunctionCallArguments",
        ),
        ({"tools": [{"functionDeclarations": [{"name": "f", "behavior": "NON_BLOCKING"}]}]}, "behavior"),
        ({"contents": [user("hi"), {"parts": [{"toolCall": {"id": "x"}}]}]}, "toolCall"),
        ({"contents": [user("hi"), {"parts": [{"videoMetadata": {"fps": 1}}]}]}, "no known kind"),
        ({"contents": [user("json"), model("{")]}, "does not go on from it"),
    ],
)
def test_what_a_reply_will_lack_is_named_once(fields: Any, named: str) -> None:
    [warning] = parse(**fields).warnings
    assert named in warning


def test_fields_that_change_no_reply_are_passed_over() -> None:
    fields = {"safetySettings": [{"category": "X"}], "labels": {"a": "b"}, "store": True, "serviceTier": "flex"}
    assert parse(**fields, cachedContent=None, nextWeek=[]) == parse()


def test_snake_case_is_the_same_request() -> None:
    snake = {
        "system_instruction": {"parts": [{"text": "s"}]},
        "tools": [{"function_declarations": [{"name": "f", "parameters_json_schema": {"properties": {"a_b": {}}}}]}],
        "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["f"]}},
        "generation_config": {"max_output_tokens": 5, "thinking_config": {"include_thoughts": True}},
    }
    camel = {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"properties": {"a_b": {}}}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {"maxOutputTokens": 5, "thinkingConfig": {"includeThoughts": True}},
    }
    turn = [user("hi"), model({"function_call": {"name": "f", "args": {"a_b": 1}}})]
    turn.append(user({"function_response": {"name": "f", "response": {"out_put": 1}}}))
    camel_turn = json.loads(json.dumps(turn).replace("function_c", "functionC").replace("function_r", "functionR"))
    assert parse(*turn, **snake) == parse(*camel_turn, **camel)
    assert parse(*turn).chat.messages[1].tool_calls[0].arguments == '{"a_b":1}'
    assert parse(*turn).chat.messages[2].content == '{"out_put":1}'


def test_the_route_says_whether_a_reply_is_streamed() -> None:
    assert not parse().stream
    assert parse(path=STREAM).stream
    assert parse(path=STREAM).chat.model == "m"


def test_a_count_may_wrap_its_request() -> None:
    wrapped = {"generateContentRequest": {"model": "models/m", "contents": [user("hi")]}}
    parsed = Gemini().parse(json.dumps(wrapped).encode(), {}, {"model": "m", "verb": "countTokens"})
    assert parsed.chat.messages == (Message("user", "hi"),)


# ---- what makes no sense ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid"),
        (b"[]", "not valid"),
        (b'"\xff"', "not valid"),
        (b"[" * 100_000, "not valid"),
        (b"{}", "contents"),
        (b'{"contents": []}', "contents"),
        (b'{"contents": [{"parts": [{"text": 7}]}]}', "$.contents[0].parts[0].text"),
        (b'{"contents": [{"role": "robot", "parts": []}]}', "contents[0].role"),
        (b'{"contents": [{"parts": [{"functionCall": {"name": "f"}}]}]}', "contents[0].parts[0].functionCall"),
        (b'{"contents": [{"role": "model", "parts": [{"functionResponse": {}}]}]}', "functionResponse"),
        (b'{"contents": [{"parts": [{"inlineData": {"mimeType": "text/plain", "data": "!"}}]}]}', "inlineData.data"),
        (b'{"contents": [{}], "generationConfig": {"candidateCount": 2}}', "candidateCount"),
        (b'{"contents": [{}], "generationConfig": {"maxOutputTokens": 0}}', "maxOutputTokens"),
        (b'{"contents": [{"role": "system"}]}', "contents"),
        (b'{"contents": [{}], "generationConfig": {"topK": 1.5}}', "topK"),
        (b'{"contents": [{}], "generationConfig": {"seed": 1e300}}', "seed"),
        (b'{"contents": [{}], "cachedContent": "x"}', "cachedContent"),
        (b'{"contents": [{}], "tools": [{"functionDeclarations": [{}]}]}', "name"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused_with_the_field_at_fault(body: bytes, words: str) -> None:
    with pytest.raises(CallError) as caught:
        Gemini().parse(body, {}, {"model": "m", "verb": "generateContent"})
    assert caught.value.kind == "bad_request"
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("config", "words"), [({"mode": "SOME"}, "mode"), ({"mode": "ANY", "allowedFunctionNames": ["f"]}, "'f'")]
)
def test_a_calling_mode_that_makes_no_sense_is_refused(config: Any, words: str) -> None:
    with pytest.raises(CallError, match=words):
        parse(tools=[{"functionDeclarations": [BASH]}], toolConfig={"functionCallingConfig": config})


KEYS = st.sampled_from(
    """contents parts role text thought thoughtSignature inlineData data mimeType fileData fileUri functionCall name
    id args functionResponse response systemInstruction tools functionDeclarations parameters parametersJsonSchema
    type properties items anyOf nullable toolConfig functionCallingConfig mode allowedFunctionNames generationConfig
    temperature topK seed candidateCount stopSequences responseMimeType responseSchema thinkingConfig thinkingLevel
    toolCall nextWeek
    generation_config function_call __unparsedToolInput raw generateContentRequest""".split()  # noqa: SIM905
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(max_size=4) | st.sampled_from(["user", "model", "AUTO", "image/png", "text/plain", "AAAA", "OBJECT"])
ANY = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)
PARTS = st.lists(st.dictionaries(KEYS, ANY, max_size=3), max_size=3)
CONTENTS = st.lists(
    st.fixed_dictionaries(
        {"parts": PARTS}, optional={"role": st.sampled_from(["user", "model", "function", "system"])}
    ),
    min_size=1,
    max_size=3,
)
BODIES = ANY | st.fixed_dictionaries(
    {"contents": CONTENTS}, optional={"generationConfig": ANY, "tools": ANY, "systemInstruction": ANY}
)


@settings(max_examples=300, deadline=None)
@given(BODIES)
@example({"contents": [{"parts": [{"functionResponse": {"response": {"output": 10**40}}}]}]})
@example({"contents": [{}], "generationConfig": {"seed": 10**400}})
def test_any_json_is_a_call_or_a_refusal(body: Any) -> None:
    refusal, parsed = None, None
    try:
        parsed = Gemini().parse(json.dumps(body).encode(), {}, {"model": "m", "verb": "generateContent"})
    except CallError as error:
        refusal = error
    if refusal is None:
        assert isinstance(parsed, Call)
        assert parsed.chat.messages
    else:
        assert refusal.kind == "bad_request"
        assert json.loads(Gemini().error(refusal).body)["error"]["code"] == 400
