"""Real tokenizers and chat templates: which bridges are exact, and where a template forgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from polar.contract.chat import Chat, Message
from polar.rendering.base import Declined, Prompt, RenderError
from polar.rendering.generic import TemplateRenderer
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import Tokenizer
from tests.rendering.assets import TOKENIZERS
from tests.rendering.conftest import RendererOf
from tests.rendering.talk import WEATHER, Talk, hermes_call, result, system, user
from tests.rendering.written import CALLS

pytestmark = pytest.mark.assets

IM_END, EOT, DS_END = "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"
HERMES = hermes_call("get_weather", '{"city": "Paris"}')
XML = """<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>"""
DEEPSEEK = CALLS["deepseek"]("get_weather", {"city": "Paris"})
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'

# template, tokenizer, end of turn, a call as the model writes it, how it is read, bridged at the tool result,
# bridged at the next user message, bridged there after a reply with thinking
FAMILIES = [
    ("Qwen-Qwen2.5-7B-Instruct", "qwen3", IM_END, HERMES, "hermes", True, True, None),
    ("Qwen-Qwen3-0.6B", "qwen3", IM_END, HERMES, "hermes", True, True, False),
    ("Qwen3-Coder", "qwen3", IM_END, "Sure.\n\n" + XML, "qwen_xml", True, True, None),
    ("Qwen3.5-4B", "qwen3", IM_END, "Hm.\n</think>\n\n" + XML, "qwen_xml", True, False, False),
    ("meta-llama-Llama-3.1-8B-Instruct", "llama3_1", EOT, LLAMA, "llama3_json", True, True, None),
    ("meta-llama-Llama-3.2-3B-Instruct", "llama3_1", EOT, LLAMA, "llama3_json", True, True, None),
    ("meta-llama-Llama-3.3-70B-Instruct", "llama3_1", EOT, LLAMA, "llama3_json", True, True, None),
    ("deepseek-ai-DeepSeek-V3.1", "deepseek_v3", DS_END, DEEPSEEK, "deepseek", True, True, False),
    ("Qwen-QwQ-32B", "qwen3", IM_END, "<think>\n\n</think>\n\n" + HERMES, "hermes", False, False, False),
]
IDS = [row[0] for row in FAMILIES]


def outcome(talk: Talk, *messages: Message) -> bool:
    """Whether the next call is bridged; a bridge must be exact where the reply was canonical."""
    got = talk.go_on(*messages)
    if isinstance(got, Declined):
        assert got.reason == "template_rewrites_history"
        return False
    assert got.ids.tolist() == talk.full()
    return True


@pytest.mark.parametrize("row", FAMILIES, ids=IDS)
def test_families(renderer_of: RendererOf, row: tuple[Any, ...]) -> None:
    template, tokenizer, end, call, reads, at_tool, at_user, after_thinking = row
    renderer = renderer_of(template, tokenizer)
    assert renderer.family.calls == reads
    assert renderer.tokenizer.token_id(end) in renderer.stop_ids

    if call:
        talk = Talk(renderer)
        talk.ask(system("Be brief."), user("Weather in Paris?"))
        reply = talk.sample(call + end)
        assert reply.finish_reason == "tool_calls"
        assert outcome(talk, result("sunny", reply.message)) == at_tool
        talk.sample(f"Sunny.{end}")
        assert outcome(talk, user("Thanks.")) == at_user

    talk = Talk(renderer, tools=())
    talk.ask(user("Hi"))
    talk.sample(f"Hello.{end}")
    assert outcome(talk, user("Bye")) == at_user
    if after_thinking is not None:
        talk = Talk(renderer, tools=())
        prompt = talk.ask(user("Hi"))
        opened = "" if prompt.state.opened else "<think>\n"
        assert talk.sample(f"{opened}Hm.\n</think>\n\nHello.{end}").message.reasoning == "Hm."
        assert outcome(talk, user("Bye")) == after_thinking


def test_b2_qwen3_keeps_thinking_at_the_tool_and_drops_it_at_the_user(renderer_of: RendererOf) -> None:
    talk = Talk(renderer_of("Qwen-Qwen3-0.6B", "qwen3"))
    talk.ask(user("Weather?"))
    call = talk.sample(f"<think>\nLook.\n</think>\n\n{HERMES}{IM_END}").message
    assert outcome(talk, result("sunny", call))
    talk.sample(f"<think>\nSay.\n</think>\n\nSunny.{IM_END}")
    assert not outcome(talk, user("And Rome?"))


def test_sampled_brace_tokens_survive_the_bridge(renderer_of: RendererOf) -> None:
    """`"}` `}` was sampled where the tokenizer itself would write `"` `}}`."""
    talk = Talk(renderer_of("Qwen-Qwen2.5-7B-Instruct", "qwen3"))
    encode = talk.renderer.tokenizer.encode  # type: ignore[attr-defined]
    talk.ask(user("Weather?"))
    head, tail = HERMES.split('"}}')
    sampled = [*encode(head), *encode('"}'), *encode("}"), *encode(tail + IM_END)]
    assert sampled != encode(HERMES + IM_END)
    reply = talk.sample(sampled).message
    assert reply.tool_calls[0].arguments == '{"city": "Paris"}'
    got = talk.go_on(result("sunny", reply))
    assert isinstance(got, Prompt)
    assert got.ids.tolist() != talk.full()


def test_prompts_are_those_of_transformers(renderer_of: RendererOf, assets: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    for template, tokenizer in (("Qwen-Qwen3-0.6B", "qwen3"), ("meta-llama-Llama-3.1-8B-Instruct", "llama3_1")):
        renderer = renderer_of(template, tokenizer)
        source = (assets / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
        theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(assets / tokenizer / "tokenizer.json"), bos_token="<|begin_of_text|>"
        )
        chat = Chat(model="m", messages=(system("Be brief. é"), user("Weather?\n\n  now")), tools=(WEATHER,))
        function = {"name": WEATHER.name, "description": WEATHER.description, "parameters": WEATHER.parameters}
        text = theirs.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in chat.messages],
            tools=[{"type": "function", "function": function}],
            chat_template=source,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert renderer.render(chat).ids.tolist() == renderer.tokenizer.encode(text)


def test_d7_qwen35_refuses_late_system_messages_and_gets_them_in_the_user_turn(renderer_of: RendererOf) -> None:
    renderer = renderer_of("Qwen3.5-4B", "qwen3")
    chat = Chat(model="m", messages=(system("A"), system("B"), user("C"), system("D")))
    text = renderer.tokenizer.decode(renderer.render(chat).ids.tolist())
    assert "<|im_start|>system\nA\n\nB<|im_end|>" in text
    assert "<|im_start|>user\nC\n\n<system-reminder>\nD\n</system-reminder><|im_end|>" in text


def test_llama_refuses_parallel_calls_in_its_own_words(renderer_of: RendererOf) -> None:
    renderer = renderer_of("meta-llama-Llama-3.1-8B-Instruct", "llama3_1")
    reader = renderer_of("Qwen-Qwen3-0.6B", "qwen3")
    talk = Talk(reader)
    talk.ask(user("Weather?"))
    two = talk.sample(f"{HERMES}\n{HERMES}{IM_END}").message
    with pytest.raises(RenderError, match="only supports single tool-calls"):
        renderer.render(Chat(model="m", messages=(user("Weather?"), two)))


def test_llama_content_beside_a_call_is_dropped_by_the_template_and_declined(renderer_of: RendererOf) -> None:
    """The template writes the call alone; the reply said more."""
    renderer = renderer_of("meta-llama-Llama-3.1-8B-Instruct", "llama3_1", parser="hermes")
    talk = Talk(renderer)
    talk.ask(user("Weather?"))
    reply = talk.sample(f"I look.\n{HERMES}{EOT}").message
    assert reply.content == "I look."
    got = talk.go_on(result("sunny", reply))
    assert got == Declined("template_rewrites_history")


@pytest.mark.parametrize("cut_off", [False, True])
def test_a11_a_stop_token_that_opens_the_next_turn_stands_once(assets: Path, tiny: Path, cut_off: bool) -> None:
    """GLM's turns have no end of their own: a reply ends with the token that opens what comes next."""
    raw = RawTokenizer.from_file(str(tiny / "tokenizer.json"))
    raw.add_special_tokens(["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"])
    tokenizer = Tokenizer(raw)
    opener = tokenizer.token_id("<|user|>")
    assert opener is not None
    source = (assets / "templates" / "GLM-4.6.jinja").read_text(encoding="utf-8")
    renderer = TemplateRenderer(tokenizer, ChatTemplate({"default": source}), stop_ids=frozenset({opener}))
    assert set(renderer.traits.turn_ends) >= {"<|user|>", "<|observation|>"}
    talk = Talk(renderer, tools=())
    talk.ask(user("Hi"))
    text = "\n<think></think>\nHello."
    talk.sample(text if cut_off else f"{text}<|user|>", finish="length" if cut_off else "stop")
    got = talk.go_on(user("Bye"))
    assert isinstance(got, Prompt)
    assert got.ids.tolist().count(opener) == 2
    assert got.ids.tolist() == talk.full()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_plain_way(name: str, assets: Path) -> None:
    """What is encoded as a batch of one, so that other calls go on meanwhile."""
    raw = RawTokenizer.from_file(str(assets / name / "tokenizer.json"))
    tokenizer = Tokenizer.load(assets / name)
    page = Path(__file__).read_text(encoding="utf-8")
    for text in (
        "",
        " ",
        "a",
        "é\u0301\n\n\t x",
        "日本語 \U0001f600\u200d",
        "\ufffd\x00",
        "<think>a</think>",
        page,
        page * 3,
    ):
        assert tokenizer.encode(text) == raw.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_as_sent(text, special=True) == raw.encode(text).ids
