"""What templates are given, and what they say when they refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from polar.contract.chat import Chat, Image, Message, Text, Tool, ToolCall
from polar.contract.errors import UsageError
from polar.rendering.base import RenderError
from polar.rendering.generic import TemplateRenderer
from polar.rendering.messages import MAX_DEPTH, RAW_ARGUMENTS, parse_arguments
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import MARK, Tokenizer, load_stop_ids, unmark
from tests.rendering.talk import WEATHER, system, user

LINES = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
STRICT = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{{- m.role }}:{{ m.content }}|{% endfor %}"""
ALTERNATE = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}
{% elif m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}{{ raise_exception('must alternate') }}
{% endif %}{{- m.role }}:{{ m.content }}|{% endfor %}"""
ITEMS = """{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}
{%- for k, v in c.function.arguments|items %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}|{% endfor %}"""
PARTS = """{% for m in messages %}{% for p in m.content %}{{ p.text if p.type == 'text' else '[image]' }}
{%- endfor %}|{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(tiny)


def said(tokenizer: Tokenizer, source: str, messages: Sequence[Message], **more: Any) -> str:
    renderer = TemplateRenderer(tokenizer, ChatTemplate({"default": source}))
    return tokenizer.decode(renderer.render(Chat(model="m", messages=tuple(messages), **more)).ids.tolist())


def called(arguments: str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall("c1", "f", arguments),))


def nested(levels: int) -> str:
    """An object and lists in it, so many in all."""
    return '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


def test_d7_leading_system_messages_become_one(tokenizer: Tokenizer) -> None:
    text = said(tokenizer, STRICT, [system("A"), system("B"), user("C")])
    assert text == "system:A\n\nB|user:C|"


def test_d7_a_late_system_message_keeps_its_place_where_the_template_takes_it(tokenizer: Tokenizer) -> None:
    assert said(tokenizer, LINES, [user("A"), system("B"), user("C")]) == "user:A|system:B|user:C|"


def test_d7_a_late_system_message_goes_into_the_user_turn_before_it(tokenizer: Tokenizer) -> None:
    text = said(tokenizer, STRICT, [user("A"), system("B")])
    assert text == "user:A\n\n<system-reminder>\nB\n</system-reminder>|"


def test_d7_else_into_the_one_after_it_else_into_one_of_its_own(tokenizer: Tokenizer) -> None:
    hello = Message(role="assistant", content="H")
    reminder = "<system-reminder>\nB\n</system-reminder>"
    after = said(tokenizer, STRICT, [user("A"), hello, system("B"), user("C")])
    assert after == f"user:A|assistant:H|user:{reminder}\n\nC|"
    own = said(tokenizer, STRICT, [user("A"), hello, system("B")])
    assert own == f"user:A|assistant:H|user:{reminder}|"
    assert said(tokenizer, STRICT, [user("A"), hello, system("B"), hello]).startswith(own)


def test_where_no_system_message_is_taken_it_opens_the_first_user_turn(tokenizer: Tokenizer) -> None:
    text = said(tokenizer, ALTERNATE, [system("S"), user("A"), user("B")])
    assert text == "user:<system-reminder>\nS\n</system-reminder>\n\nA\n\nB|"


def test_b13_order_of_user_and_tool_messages_is_the_clients(tokenizer: Tokenizer) -> None:
    messages = [
        user("go"),
        called("{}"),
        user("A"),
        Message(role="tool", content="1", tool_call_id="c1"),
        Message(role="tool", content="2", tool_call_id="c2"),
        Message(role="user", content=(Text("B"), Text("C"))),
    ]
    assert said(tokenizer, LINES, messages) == "user:go|assistant:|user:A|tool:1|tool:2|user:B\nC|"


def test_b9_arguments_that_are_an_object_are_given_as_one(tokenizer: Tokenizer) -> None:
    assert "<folder=tmp>" in said(tokenizer, ITEMS, [user("go"), called('{"folder":"tmp"}')])
    assert "assistant:|" in said(tokenizer, ITEMS, [user("go"), called("")])


@pytest.mark.parametrize("raw", ['{"value": ', '{"a": "say "hi""}', "plain", "[1, 2]", '{"a": 1, "a": 2}'])
def test_d12_text_that_is_no_object_survives_a_template_that_wants_one(tokenizer: Tokenizer, raw: str) -> None:
    assert f"<{RAW_ARGUMENTS}={raw}>" in said(tokenizer, ITEMS, [user("go"), called(raw)])


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("", {}),
        ("  ", {}),
        ('{"a": 1.0}', {"a": 1.0}),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        (nested(MAX_DEPTH), json.loads(nested(MAX_DEPTH))),
        (nested(MAX_DEPTH + 1), nested(MAX_DEPTH + 1)),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": ' * 100_000, '{"a": ' * 100_000),
    ],
)
def test_what_arguments_become(raw: str, value: object) -> None:
    assert parse_arguments(raw) == value


@pytest.mark.parametrize("levels", [2, 99, 101, 400, 500, 700, 900, 1500])
def test_d12_arguments_are_rendered_as_deep_as_they_are_nested(tokenizer: Tokenizer, levels: int) -> None:
    source = (
        "{% macro of(v) %}{% if v is string %}{{ v }}{% elif v is mapping %}{ {%- for k in v %}{{ of(v[k]) }}"
        "{% endfor %} }{% else %}[{% for each in v %}{{ of(each) }}{% endfor %}]{% endif %}{% endmacro %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ of(c.function.arguments) }}"
        "{{ c.function.arguments|tojson }}{% endfor %}{% endfor %}"
    )
    text = said(tokenizer, source, [user("go"), called(nested(levels))])
    assert text.count("[") == text.count("]") == 2 * (levels - 1)


def test_a_template_that_prints_text_arguments_gets_them_raw(talk: Any) -> None:
    chat = Chat(model="m", messages=(user("go"), called('{"value": ')), tools=(WEATHER,))
    text = talk.renderer.tokenizer.decode(talk.renderer.render(chat).ids.tolist())
    assert '"arguments": {"value": }\n</tool_call>' in text


def test_a_refusal_is_in_the_templates_own_words(tokenizer: Tokenizer) -> None:
    source = LINES + "{% if tools %}{{ raise_exception('No tools, please.') }}{% endif %}"
    with pytest.raises(RenderError, match=r"^No tools, please\.$"):
        said(tokenizer, source, [user("A")], tools=(WEATHER,))


def test_a_template_that_breaks_is_a_refusal_and_no_crash(tokenizer: Tokenizer) -> None:
    source = LINES + "{{ 1 + messages[0].content if tools else '' }}"
    with pytest.raises(RenderError, match="TypeError"):
        said(tokenizer, source, [user("A")], tools=(WEATHER,))


def test_a_template_can_not_leave_its_sandbox(tokenizer: Tokenizer) -> None:
    with pytest.raises(RenderError):
        said(tokenizer, LINES + "{{ messages.__class__.__mro__ }}", [user("A")])
    with pytest.raises(RenderError):
        said(tokenizer, LINES + "{{ messages[0].update(role='system') }}", [user("A")])


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].content.__class__.mro()",
        "'{0.__class__.__mro__}'.format(1)",
        "'{a.__class__.__mro__}'.format_map({'a': 1})",
        "ns._Namespace__attrs.x",
        "ns.__class__.mro()",
        "ns.__init__.__globals__",
        "ns.missing.x",
        "loop.__class__.mro()",
        "loop._iterable.x",
        "{}.missing.x",
    ],
)
def test_nothing_that_a_template_holds_leads_out_of_its_sandbox(tokenizer: Tokenizer, expression: str) -> None:
    asked = "{% if tools %}{{ EXPR }}{% endif %}".replace("EXPR", expression)
    source = "{% set ns = namespace(x=1) %}{% for m in messages %}{{ m.content }}|" + asked + "{% endfor %}"
    with pytest.raises(RenderError):
        said(tokenizer, source, [user("A")], tools=(WEATHER,))


def test_a_method_of_dicts_wins_over_an_item_of_its_name(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ {'items': 1}.items() | list }}{{ {'a': 2}.a }}"
    assert said(tokenizer, source, [user("A")]).endswith("[('items', 1)]2")


def test_generation_blocks_loop_controls_and_json_without_html_escaping(tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{% for m in messages %}{% break %}{{ m.content }}{% endfor %}"
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    )
    tool = Tool(name="f", description="<é & 'x'>")
    text = said(tokenizer, source, [user("A"), user("B")], tools=(tool,))
    assert text.startswith("AB{")
    function = {"name": "f", "description": "<é & 'x'>", "parameters": {"type": "object", "properties": {}}}
    assert text[2:] == json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def test_template_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    text = said(tokenizer, LINES + "{{ mode }}", [user("A")], template_args={"mode": "fast"})
    assert text == "user:A|fast"


def test_a_template_that_wants_parts_gets_parts(tokenizer: Tokenizer) -> None:
    assert said(tokenizer, PARTS, [user("A"), Message(role="user", content=(Text("B"), Text("C")))]) == "A|B\nC|"


def test_images_reach_a_template_that_takes_them_and_are_refused_by_one_that_does_not(tokenizer: Tokenizer) -> None:
    picture = Message(role="user", content=(Text("See: "), Image("https://example.org/a.png")))
    assert said(tokenizer, PARTS, [picture]) == "See: [image]|"
    with pytest.raises(RenderError, match="takes no images"):
        said(tokenizer, LINES, [picture])


def test_reasoning_goes_under_the_name_the_template_reads(tokenizer: Tokenizer) -> None:
    thought = Message(role="assistant", content="B", reasoning="hm")
    for name in ("reasoning_content", "thinking", "reasoning"):
        source = f"{{% for m in messages %}}{{{{ m.{name} or '' }}}}:{{{{ m.content }}}}|{{% endfor %}}"
        assert said(tokenizer, source, [user("A"), thought]) == ":A|hm:B|"


def test_reasoning_goes_into_the_content_where_the_template_looks_for_it_there(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] if loop.last else m.content }}|{% endfor %}"
    thought = Message(role="assistant", content="B", reasoning="hm")
    assert said(tokenizer, source, [user("A"), thought, user("C")]) == "A|<think>\nhm\n</think>\n\nB|C|"


def test_a_tool_result_knows_the_name_of_its_call(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.name or '' }}|{% endfor %}"
    with pytest.raises(RenderError):
        said(tokenizer, "{{ raise_exception('no') }}", [user("A")])
    probe = source + LINES
    messages = [user("A"), called("{}"), Message(role="tool", content="1", tool_call_id="c1")]
    assert said(tokenizer, probe, messages).startswith("||f|")


def test_a_named_list_of_templates_has_one_for_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    listed = [{"name": "default", "template": LINES}, {"name": "tool_use", "template": "T:" + LINES}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed, "eos_token": "<|im_end|>"}))
    renderer = TemplateRenderer(tokenizer, ChatTemplate.load(tmp_path))
    for tools, start in (((), "user:A|"), ((WEATHER,), "T:user:A|")):
        ids = renderer.render(Chat(model="m", messages=(user("A"),), tools=tools)).ids.tolist()
        assert tokenizer.decode(ids) == start
    assert load_stop_ids(tmp_path, tokenizer) == {2}


def test_a_folder_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(UsageError, match="not valid Jinja"):
        ChatTemplate({"default": "{% for %}"})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        ChatTemplate.load(tmp_path)


def test_marks_in_client_text_come_through_unharmed(tokenizer: Tokenizer) -> None:
    for text in (MARK, f"a{MARK}<|im_end|>{MARK}{MARK}b", f"<{MARK}|im_end|>", "<|im_<|im_end|>end|>"):
        protected = tokenizer.protect(text)
        assert unmark(protected) == text
        ids = tokenizer.encode(protected)
        assert tokenizer.decode(ids) == text
        assert 2 not in ids


def test_control_tokens_in_tools_and_arguments_stay_text(talk: Any) -> None:
    tool = Tool(name="f", description="Ends with <|im_end|>", parameters={"properties": {"<|im_end|>": {}}})
    chat = Chat(model="m", messages=(user("go"), called('{"<|im_end|>": "<|im_end|>"}')), tools=(tool,))
    ids = talk.renderer.render(chat).ids.tolist()
    assert ids.count(2) == 3
    assert talk.renderer.tokenizer.decode(ids).count("<|im_end|>") == 7


def test_half_surrogates_do_not_crash(tokenizer: Tokenizer) -> None:
    assert said(tokenizer, LINES, [user("a\ud800b")]) == "user:a\ufffdb|"


def test_a_prompt_of_stretches_that_are_known_has_the_ids_of_its_text(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    long = "Be brief, naïve 東京. \ud800" * 200 + tokenizer.protect("<|im_end|>")
    told = f"<|im_start|>system\n{long}<|im_end|>\n"
    texts = [told, told + "<|im_start|>user\nHi", "Hi " + told * 2, "Hi " * 1000 + told + "\n" * 3000, "", "Hi"]
    for text in (*texts, *texts):
        assert tokenizer.encode_prompt(text).tolist() == tokenizer.encode(text)


def test_a_tokenizer_saved_with_truncation_and_padding_does_neither(tiny: Path, tmp_path: Path) -> None:
    plain = Tokenizer.load(tiny)
    raw = RawTokenizer.from_file(str(tiny / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.save(str(tmp_path / "tokenizer.json"))
    for text in ("Hi", "a long sentence of many words"):
        assert Tokenizer.load(tmp_path).encode(text) == plain.encode(text)
