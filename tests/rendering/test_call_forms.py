"""Tool calls of every family in the form that its models write: read as meant, cut, broken, next to text."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.contract.chat import Message, Tool, ToolCall
from polar.rendering.detect import Family
from polar.rendering.parsers import THINKING, fold, same_reply
from polar.rendering.values import Values
from tests.rendering.talk import counted_ids
from tests.rendering.test_parsers import TOOLS, calls, parse
from tests.rendering.written import CALLS, PARSER

VALUES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["</tool_call>", "a\nb\n", "\n", '{"a": 1}', "3", "true", '\\"', "é🙂", "<arg_value>", "[", "}"]),
)
TYPED = st.fixed_dictionaries({}, optional={"text": VALUES, "count": st.integers(), "flag": st.booleans()})
ENDS_OF_TAGS = re.compile(r"</?[a-z｜D]|<[|｜]|\[[A-Z]|\r")


@pytest.mark.parametrize("form", CALLS)
@settings(deadline=None, max_examples=40)
@given(arguments=TYPED, spoken=st.booleans())
def test_law_a_call_is_read_as_it_was_meant(form: str, arguments: dict[str, object], spoken: bool) -> None:
    family = Family(PARSER[form], None)
    if any(isinstance(value, str) and ENDS_OF_TAGS.search(value) for value in arguments.values()):
        return  # text that looks like markup can't be told from it in every family
    before = "I look.\n" if spoken and form not in ("llama3_json", "harmony") else ""
    message = parse(family, [before + CALLS[form]("f", arguments)])
    assert [call.name for call in message.tool_calls] == ["f"]
    assert json.loads(message.tool_calls[0].arguments) == arguments
    assert str(message.content).strip() == before.strip()


@pytest.mark.parametrize("form", [form for form in CALLS if form not in ("llama3_json", "harmony")])
def test_text_before_a_call_streams_and_parallel_calls_are_calls(form: str) -> None:
    parser = Family(PARSER[form], None).parser(counted_ids(), tools=TOOLS, opened=False)
    assert fold(parser.feed("I look.")).content == "I look."
    call = CALLS[form]("f", {"text": "a"})
    message = fold([*parser.feed(call + "\n" + call), *parser.finish()])
    assert message.content == ""
    assert [call.name for call in message.tool_calls] == ["f", "f"]


@pytest.mark.parametrize("form", CALLS)
def test_d12_a_call_cut_anywhere_is_a_call_that_does_not_pass_for_whole_or_text(form: str) -> None:
    text = CALLS[form]("f", {"text": "rm -rf build", "count": 3})
    for cut in range(1, len(text)):
        message = parse(Family(PARSER[form], None), [text[:cut]])
        assert message.content or message.tool_calls or form == "harmony"
        for call in message.tool_calls:
            assert call.name == "f"
            try:
                whole = json.loads(call.arguments) if call.arguments else None
            except ValueError:
                continue
            assert whole in (None, {"text": "rm -rf build", "count": 3}), text[:cut]


@pytest.mark.parametrize("form", ["deepseek", "deepseek_fenced", "kimi", "mistral", "harmony", "hermes"])
def test_d12_broken_json_stays_raw(form: str) -> None:
    text = CALLS[form]("f", {"text": "BROKEN"}).replace('"BROKEN"', "BROKEN")
    assert calls(parse(Family(PARSER[form], None), [text])) == [("f", '{"text": BROKEN}')]


@pytest.mark.parametrize("form", [form for form in CALLS if form not in ("llama3_json", "harmony")])
def test_text_behind_a_call_is_kept(form: str) -> None:
    message = parse(Family(PARSER[form], None), [CALLS[form]("f", {"text": "a"}) + "\nDone."])
    assert (message.content, len(message.tool_calls)) == ("\nDone.", 1)


def test_sections_hold_several_calls() -> None:
    one, two = (CALLS["kimi"]("f", {"text": text}) for text in "ab")
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    both = begin + one.removeprefix(begin).removesuffix(end) + two.removeprefix(begin).removesuffix(end) + end
    assert [json.loads(raw)["text"] for _, raw in calls(parse(Family("kimi", None), [both]))] == ["a", "b"]
    both = CALLS["minimax"]("f", {"text": "a"}).replace(
        "</invoke>\n", '</invoke>\n<invoke name="f">\n<parameter name="text">b</parameter>\n</invoke>\n'
    )
    assert [json.loads(raw)["text"] for _, raw in calls(parse(Family("minimax", None), [both]))] == ["a", "b"]
    both = '<TOOLCALL>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"count": 1]</TOOLCALL>'
    assert calls(parse(Family("json_list", None), [both])) == [("f", "{}"), ("f", '{"count": 1')]


def test_mistral_ids_that_the_model_wrote_are_kept() -> None:
    for form in ("mistral_id", "mistral_list"):
        assert parse(Family("mistral", None), [CALLS[form]("f", {})]).tool_calls[0].id == "a1B2c3D4e"
    short = parse(Family("mistral", None), ["[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}"])
    assert short.tool_calls[0].id == "call_0"


def test_glm_name_alone_is_a_call_only_of_a_known_tool() -> None:
    assert calls(parse(Family("glm", None), ["<tool_call>f\n</tool_call>"])) == [("f", "{}")]
    assert parse(Family("glm", None), ["Like <tool_call>this</tool_call>."]).content == (
        "Like <tool_call>this</tool_call>."
    )


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"text": "a"}<|call|>'
    )
    message = parse(Family("harmony", None), [text])
    assert (message.reasoning, message.content, calls(message)) == ("Look.", "I look.", [("f", '{"text": "a"}')])
    final = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"
    assert parse(Family("harmony", None), [final]) == Message(role="assistant", content="Hi", reasoning="A")
    without = parse(Family("harmony", None), [CALLS["harmony"]("f", {})], tools=False)
    assert (without.content, without.tool_calls) == (CALLS["harmony"]("f", {}), ())
    assert parse(Family("harmony", None), ["Just text."]).content == "Just text."


def test_harmony_streams_thinking_text_and_arguments() -> None:
    parser = Family("harmony", None).parser(counted_ids(), tools=TOOLS, opened=False)
    assert parser.feed("<|channel|>analy") == []
    assert fold(parser.feed("sis<|message|>Lo")).reasoning == "Lo"
    assert fold(parser.feed("ok.<|en")).reasoning == "ok."
    assert parser.feed("d|><|start|>assistant to=functions.f<|channel|>commentary json") == []
    begun = fold(parser.feed('<|message|>{"te')).tool_calls[0]
    assert (begun.name, begun.arguments) == ("f", '{"te')


def test_thinking_in_other_tags() -> None:
    message = parse(Family("mistral", THINKING[1]), ["[THINK]Hm.[/THINK]Answer"])
    assert (message.reasoning, message.content) == ("Hm.", "Answer")
    message = parse(Family("gemma", THINKING[2]), ["<|channel>thought\nHm.\n<channel|>Answer"])
    assert (message.reasoning, message.content) == ("Hm.", "Answer")


def test_values_follow_the_schema_and_its_alternatives() -> None:
    either = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    text = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    values = Values([Tool(name="g", parameters={"type": "object", "properties": {"a": either, "b": text}})])
    assert [values.typed("g", "a", word) for word in ("3", "null", "None", "x")] == [3, None, None, "x"]
    assert [values.typed("g", "b", word) for word in ("3", "null")] == ["3", "null"]
    assert values.typed("g", "c", "3") == values.typed("nobody", "a", "3") == "3"


def test_what_a_template_wraps_is_the_same_reply_only_where_it_was_rendered() -> None:
    def called(arguments: str) -> Message:
        return Message(role="assistant", tool_calls=(ToolCall("x", "f", arguments),))

    raw = '{"value": '
    for wrapped in (json.dumps({"raw_arguments": raw}), json.dumps(raw)):
        assert same_reply(called(wrapped), called(raw), rendered=True)
        assert not same_reply(called(wrapped), called(raw))
    assert not same_reply(called('{"raw_arguments": "x"}'), called(raw), rendered=True)
