"""The laws of reply parsers, and what each family's markup becomes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.contract.chat import Message, TextDelta, Tool, ToolCall
from polar.rendering.detect import CALL_PARSERS, Family
from polar.rendering.parsers import THINK, THINKING, fold, held, random_id, read, same_reply
from tests.rendering.talk import counted_ids
from tests.rendering.written import CALLS

FAMILIES = [
    *(Family(calls, thinking) for calls in (*CALL_PARSERS, None) for thinking in (THINK, None)),
    Family("mistral", THINKING[1]),
    Family("gemma", THINKING[2]),
]

TOOLS = [
    Tool(
        name="f",
        parameters={
            "type": "object",
            "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "flag": {"type": "boolean"}},
        },
    )
]

PIECES = [
    *(write("f", {"text": "Ж </x> Ц"}) for write in CALLS.values()),
    "f",
    "<arg_key>text</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    '<invoke name="f">',
    '<parameter name="text">',
    "</invoke>\n</minimax:tool_call>",
    "<｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>',
    "</｜DSML｜invoke></｜DSML｜function_calls>",
    "</｜DSML｜tool_calls>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "function<｜tool▁sep｜>f\n```json\n",
    "\n```",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
    "<|tool_call_end|><|tool_calls_section_end|>",
    "[TOOL_CALLS]",
    "[CALL_ID]a1B2c3D4e",
    "[ARGS]",
    "[",
    "]",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "[THINK]",
    "[/THINK]",
    "<|tool_call>",
    "call:f{",
    "<tool_call|>",
    'text:<|"|>',
    '<|"|>',
    "<|channel>thought\n",
    "<channel|>",
    "<|channel|>analysis",
    "<|channel|>final",
    "<|channel|>commentary to=functions.f ",
    "<|constrain|>json",
    "<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|call|>",
    "<function=f>",
    "</function>",
    "<parameter=text>",
    "<parameter=count>",
    "</parameter>",
    "<function=",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    '{"name": "f", "arguments": {"a": "Ж"}}',
    '{"name": "f", "parameters": {"a": "</tool_call>Щ"}}',
    '{"arguments": {"x": ["Ж", {}]}, "name": "g"}',
    '{"name": "f", "arguments": {"value": ',
    '{"name": "f", "arguments": "Ю"}',
    '{"name": ',
    '"f"',
    "{",
    "}",
    '"',
    "\\",
    "\n",
    "\n\n",
    " ",
    "<",
    "<tool_",
    "</",
    "Hello",
    "Щ",
    " Ю",
    "Я🙂",
]
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.text(max_size=30))


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parse(family: Family, chunks: list[str], *, opened: bool = False, tools: bool = True) -> Message:
    parser = family.parser(counted_ids(), tools=TOOLS if tools else (), opened=opened)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return fold([*deltas, *parser.finish()])


def hermes(text: str, *, opened: bool = False) -> Message:
    return parse(Family("hermes", THINK), [text], opened=opened)


def llama(text: str) -> Message:
    return parse(Family("llama3_json", None), [text])


def calls(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


@given(cut_texts(), st.sampled_from(FAMILIES), st.booleans())
def test_law_cuts_do_not_change_the_message(chunks: list[str], family: Family, opened: bool) -> None:
    assert parse(family, chunks, opened=opened) == parse(family, ["".join(chunks)], opened=opened)


@given(TEXTS, st.sampled_from(FAMILIES), st.booleans())
def test_law_one_character_at_a_time_is_the_same(text: str, family: Family, opened: bool) -> None:
    assert parse(family, list(text), opened=opened) == parse(family, [text], opened=opened)


def _words(text: str) -> str:
    """What was said: the letters that no markup has."""
    return "".join(sorted(letter for letter in text if letter in "ЖЦЩЮЯ🙂"))


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.sampled_from(FAMILIES), st.booleans())
def test_law_nothing_sampled_is_lost(text: str, family: Family, opened: bool) -> None:
    message = parse(family, [text], opened=opened)
    said = [message.reasoning or "", str(message.content)]
    said += [part for call in message.tool_calls for part in (call.name, call.arguments)]
    assert _words("".join(said)) == _words(text)


@given(TEXTS, st.booleans())
def test_law_without_calls_in_sight_text_streams_at_once(text: str, opened: bool) -> None:
    parser = Family("hermes", None).parser(counted_ids(), tools=TOOLS, opened=opened)
    out = "".join(delta.text for delta in parser.feed(text) if isinstance(delta, TextDelta))
    if "<tool_call>" not in text:
        waiting = text[len(out) :]
        assert text.startswith(out)
        assert not waiting.strip() or "<tool_call>".startswith(waiting.strip())


@given(
    st.text(alphabet="ab \n<é", max_size=12),
    st.one_of(st.none(), st.text(alphabet="ab \né", min_size=1, max_size=12)),
    st.lists(st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=6), st.integers())), max_size=3),
)
def test_law_what_a_template_writes_is_read_back(
    content: str, reasoning: str | None, arguments: list[dict[str, object]]
) -> None:
    """Written as Qwen3's template does it."""
    text = f"<think>\n{reasoning.strip(chr(10))}\n</think>\n\n" if reasoning else ""
    text += content.lstrip("\n")
    for place, value in enumerate(arguments):
        text += "\n" if place or content.lstrip("\n") else ""
        text += '<tool_call>\n{"name": "f", "arguments": ' + json.dumps(value, ensure_ascii=False) + "}\n</tool_call>"
    message = Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(ToolCall("", "f", json.dumps(value)) for value in arguments),
    )
    assert same_reply(hermes(text), message)


def test_hermes_text_then_call() -> None:
    message = hermes('I look.\n<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>')
    assert message.content == "I look."
    assert calls(message) == [("f", '{"a":1}')]


def test_hermes_only_the_line_end_that_templates_write_is_markup() -> None:
    message = hermes('A\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n')
    assert message.content == "A\n"
    assert hermes('\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n').content == ""


def test_hermes_call_without_a_closing_tag_at_the_end() -> None:
    assert calls(hermes('<tool_call>\n{"name": "f", "arguments": {"a": 1}}')) == [("f", '{"a": 1}')]


def test_hermes_call_not_closed_before_the_next() -> None:
    one = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
    assert calls(hermes(one + one + "</tool_call>")) == [("f", '{"a": 1}')] * 2
    assert calls(hermes(one.replace("}}", "}") + one)) == [("f", '{"a": 1}')] * 2


def test_hermes_closing_tag_inside_a_string_is_text() -> None:
    arguments = '{"text": "ends with </tool_call> and <tool_call>"}'
    message = hermes(f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call> done')
    assert calls(message) == [("write", arguments)]
    assert message.content == " done"


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "say "hi""}}', '{"a": "say "hi""}'),
        ('{"name": "f", "arguments": {"value": }', '{"value":'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}}'),
        ('{"name": "f", "arguments": {"a": "line\nbreak"}}', '{"a": "line\nbreak"}'),
        ('{"name": "f", "arguments": {\'a\': 1}}', "{'a': 1}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '"{\\"a\\": 1}"'),
        ('{"name": "f", "arguments": ""}', '""'),
        ('{"name": "f"}', ""),
    ],
)
def test_d12_a_call_whose_name_can_be_read_keeps_its_raw_arguments(block: str, arguments: str) -> None:
    assert calls(hermes(f"<tool_call>\n{block}\n</tool_call>")) == [("f", arguments)]


@pytest.mark.parametrize(
    "block",
    ['{"name": }', '{"arguments": {}}', '{"name": 3, "arguments": {}}', "[1, 2]", "", "hello", '{"name": "f", "arg'],
)
def test_markup_that_is_no_call_stays_visible(block: str) -> None:
    text = f"Look:\n<tool_call>{block}</tool_call>"
    message = hermes(text)
    assert message.content == text
    assert message.tool_calls == ()


def test_a_call_cut_before_its_arguments_is_no_call() -> None:
    text = '<tool_call>\n{"name": "delete_everything", "arguments": '
    assert hermes(text).content == text


def test_calls_are_text_where_none_were_offered() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert parse(Family("hermes", THINK), [text], tools=False).content == text


def test_thinking_then_answer() -> None:
    message = hermes("<think>\nHm.\n\nYes.\n</think>\n\nAnswer")
    assert (message.reasoning, message.content) == ("Hm.\n\nYes.", "Answer")


def test_thinking_opened_by_the_prompt() -> None:
    message = hermes("Hm.\n</think>\n\nAnswer", opened=True)
    assert (message.reasoning, message.content) == ("Hm.", "Answer")


def test_empty_thinking_is_none() -> None:
    assert hermes("<think>\n\n</think>\n\nAnswer") == Message(role="assistant", content="Answer")


def test_thinking_that_never_ends_is_all_thinking() -> None:
    message = hermes("<think>\nOn and on <tool_call>")
    assert (message.reasoning, message.content) == ("On and on <tool_call>", "")


def test_think_in_the_middle_of_an_answer_is_text() -> None:
    assert hermes("Use <think> tags.").content == "Use <think> tags."


def test_a_call_after_thinking() -> None:
    message = hermes('<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert (message.reasoning, message.content, calls(message)) == ("Hm.", "", [("f", "{}")])


def test_llama_call_is_the_whole_reply() -> None:
    assert calls(llama('{"name": "f", "parameters": {"a": 1}}')) == [("f", '{"a": 1}')]
    assert calls(llama('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}')) == [("f", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Paris"}',
        '{"name": "Alice"}',
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        '<|python_tag|>search.call(query="x")',
        'See {"name": "f", "parameters": {}}',
        "{",
    ],
)
def test_llama_text_that_is_no_call_stays_as_it_is(text: str) -> None:
    assert llama(text) == Message(role="assistant", content=text)


def test_llama_ordinary_json_is_not_held_back() -> None:
    parser = Family("llama3_json", None).parser(counted_ids(), tools=TOOLS, opened=False)
    assert parser.feed('{"city') == [TextDelta('{"city')]


def test_equal_as_json_is_the_same_reply_b7() -> None:
    def called(arguments: str) -> Message:
        return Message(role="assistant", tool_calls=(ToolCall("x", "f", arguments),))

    assert same_reply(called('{"a":1,"b":2}'), called('{"b": 2, "a": 1}'))
    assert same_reply(called(""), called("{}"))
    assert not same_reply(called('{"a": 1}'), called('{"a": true}'))
    assert not same_reply(called('{"a": 1'), called('{"a": 1}'))


def test_held_is_the_longest_beginning_of_a_tag() -> None:
    assert [held(text, "<tool>") for text in ("a", "a<", "<to", "<tool>", "<<")] == [0, 1, 3, 0, 1]


def test_call_ids_are_unique() -> None:
    assert len({random_id() for _ in range(100)}) == 100
    assert read(Family(None, None).parser(random_id, tools=TOOLS, opened=False), "x").content == "x"


def xml(text: str) -> Message:
    return parse(Family("qwen_xml", THINK), [text])


XML = """<tool_call>
<function=f>
<parameter=text>
a < b
"x" </tool_call>
</parameter>
<parameter=count>
3
</parameter>
<parameter=flag>
True
</parameter>
</function>
</tool_call>"""


def test_xml_values_follow_the_tools_schema() -> None:
    message = xml(f"I look.\n{XML}\n{XML}")
    assert message.content == "I look."
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1"]
    value = {"text": 'a < b\n"x" </tool_call>', "count": 3, "flag": True}
    assert [json.loads(call.arguments) for call in message.tool_calls] == [value, value]


def test_xml_without_arguments_and_without_a_closing_tag() -> None:
    assert calls(xml("<tool_call>\n<function=f>\n</function>\n</tool_call>")) == [("f", "{}")]
    assert calls(xml("<tool_call>\n<function=f>\n</function>")) == [("f", "{}")]


def test_xml_cut_short_does_not_pass_for_whole() -> None:
    message = xml("<tool_call>\n<function=f>\n<parameter=text>\nrm -rf build")
    assert calls(message) == [("f", '{"text": "rm -rf build"')]


@pytest.mark.parametrize("block", ["hello", "<function=f>hello</function>", "<function=f", "<function=f>\n", ""])
def test_xml_that_is_no_call_stays_visible(block: str) -> None:
    assert xml(f"<tool_call>{block}").content == f"<tool_call>{block}"
