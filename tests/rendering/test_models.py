"""Every family's real template: what clients send must render, and the table in docs/rendering.md must be true."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from polar.contract.chat import Chat, Message, Text, ToolCall
from polar.rendering.base import Declined, Prompt, RenderError
from polar.rendering.generic import TemplateRenderer
from tests.rendering import conformance
from tests.rendering.models import MODELS, Model, load
from tests.rendering.talk import WEATHER, Talk, result, system, user

pytestmark = [pytest.mark.assets, pytest.mark.slow]

NAMES = [f"{model.family}: {model.name}" for model in MODELS]
CALLERS = [model for model in MODELS if model.call]
ONE_CALL_ONLY = ("Llama 3.1", "Llama 3.2", "Llama 3.3")


@pytest.fixture(scope="module", params=MODELS, ids=NAMES)
def model(request: pytest.FixtureRequest) -> Model:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def renderer(model: Model, assets: Path) -> TemplateRenderer:
    return _load(assets, MODELS.index(model))


@functools.lru_cache(maxsize=1)
def _load(assets: Path, index: int) -> TemplateRenderer:
    return load(assets, MODELS[index])


def chat(model: Model, *messages: Message) -> Chat:
    tools = (WEATHER,) if model.call else ()
    return Chat(model="m", messages=messages, tools=tools, template_args=model.args)


def text_of(renderer: TemplateRenderer, model: Model, *messages: Message) -> str:
    return renderer.tokenizer.decode(renderer.render(chat(model, *messages)).ids.tolist())


def called(arguments: str, call_id: str = "call_0123456789abcdef") -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(call_id, WEATHER.name, arguments),))


def needs_calls(model: Model) -> None:
    if not model.call:
        pytest.skip("the template writes no calls")


def in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return min(places) >= 0 and places == sorted(places)


def test_b9_arguments_that_parse_are_given_as_the_object(model: Model, renderer: TemplateRenderer) -> None:
    needs_calls(model)
    if renderer.traits.text_arguments:
        pytest.skip("the template takes the text of the arguments")
    texts = {
        text_of(renderer, model, user("Weather?"), message, result("sunny", message))
        for message in (called('{"city": "Paris"}'), called('{ "city":"Paris" }'))
    }
    assert len(texts) == 1
    assert "Paris" in texts.pop()


@pytest.mark.parametrize("arguments", ['{"value": ', '{"value": "a "b""}', "", "text", "[1]", '"x"', "3", "null"])
def test_d12_history_with_broken_arguments_renders(model: Model, renderer: TemplateRenderer, arguments: str) -> None:
    needs_calls(model)
    call = called(arguments)
    text = text_of(renderer, model, user("Weather?"), call, result("Qzresult", call))
    assert "Qzresult" in text


def test_b13_results_and_text_of_one_turn_keep_their_order(model: Model, renderer: TemplateRenderer) -> None:
    needs_calls(model)
    both = Message(role="assistant", tool_calls=tuple(ToolCall(name, WEATHER.name, "{}") for name in "ab"))
    results = [result("Qzone", both, 0), result("Qztwo", both, 1)]
    parts = Message(role="user", content=(Text("Qzthree"), Text("Qzfour")))
    if model.family in ONE_CALL_ONLY:
        with pytest.raises(RenderError, match="single tool-calls"):
            text_of(renderer, model, user("Qzero"), both, *results, parts)
        return
    text = text_of(renderer, model, user("Qzero"), both, *results, parts)
    assert in_order(text, "Qzero", "Qzone", "Qztwo", "Qzthree", "Qzfour")


def test_d7_system_messages_render_wherever_they_stand(model: Model, renderer: TemplateRenderer) -> None:
    hello = Message(role="assistant", content="Qzhello")
    messages = [system("Qzfirst"), system("Qzsecond"), user("Qzask"), hello, system("Qzlate"), user("Qzgo")]
    text = text_of(renderer, model, *messages)
    assert text.find("Qzfirst") < text.find("Qzsecond")
    assert in_order(text, "Qzask", "Qzhello", "Qzlate", "Qzgo")
    assert all(text.count(word) == 1 for word in ("Qzfirst", "Qzsecond", "Qzlate"))


@pytest.mark.parametrize("follow", ["tool", "user"])
def test_b1_b2_the_next_call_goes_on_exactly_or_is_rendered_afresh(
    model: Model, renderer: TemplateRenderer, follow: str
) -> None:
    if follow == "tool":
        needs_calls(model)
    talk = Talk(renderer, tools=(WEATHER,) if model.call else (), template_args=model.args)
    prompt = talk.ask(user("Weather?"))
    thought = "Look." if model.think else None
    calls = [(WEATHER.name, {"city": "Paris"})] if follow == "tool" else []
    reply = talk.sample(model.reply(prompt, thought, "" if calls else "Sunny.", *calls))
    assert reply.message.reasoning == thought
    assert reply.finish_reason == ("tool_calls" if calls else "stop")
    more = [result("Qzresult", reply.message)] if calls else [user("Qzresult")]
    got = talk.go_on(*more)  # checks that a bridge begins with the exact ids
    if isinstance(got, Prompt):
        tail = got.ids.tolist()[len(prompt.ids) + len(talk.response) :]
        assert "Qzresult" in renderer.tokenizer.decode(tail)
        full = talk.full()
        assert full[-len(tail) :] == tail
    else:
        assert isinstance(got, Declined)
        assert "Qzresult" in renderer.tokenizer.decode(talk.full())


def test_text_thinking_and_calls_of_one_reply_render(model: Model, renderer: TemplateRenderer) -> None:
    """gpt-oss refuses a reply that says something, thinks and calls; the conversation must go on."""
    needs_calls(model)
    call = Message(role="assistant", content="Qzsaid", reasoning="Qzthought", tool_calls=called("{}").tool_calls)
    assert "Qzresult" in text_of(renderer, model, user("Weather?"), call, result("Qzresult", call))


def named(assets: Path, family: str) -> tuple[Model, TemplateRenderer]:
    index = next(index for index, model in enumerate(MODELS) if model.family == family)
    return MODELS[index], _load(assets, index)


def test_gpt_oss_replies_end_with_call_or_return_but_not_with_end(assets: Path) -> None:
    _, renderer = named(assets, "gpt-oss")
    assert {renderer.tokenizer.token_text(stop) for stop in renderer.stop_ids} == {"<|return|>", "<|call|>"}


def test_gpt_oss_thinks_speaks_and_calls_and_a_cut_call_goes_on(assets: Path) -> None:
    model, renderer = named(assets, "gpt-oss")
    talk = Talk(renderer)
    prompt = talk.ask(user("Weather?"))
    reply = talk.sample(model.reply(prompt, "Look.", "I look.", (WEATHER.name, {"city": "Paris"}))).message
    assert (reply.reasoning, reply.content, len(reply.tool_calls)) == ("Look.", "I look.", 1)
    assert talk.go_on(result("sunny", reply)) == Declined("template_rewrites_history")

    talk = Talk(renderer)
    prompt = talk.ask(user("Weather?"))
    whole = model.reply(prompt, "Look.", "", (WEATHER.name, {"city": "Paris"}))
    reply = talk.sample(whole[: whole.index("Par") + 3], finish="length").message
    assert reply.tool_calls[0].arguments == '{"city": "Par'
    assert isinstance(talk.go_on(result("broken", reply)), Prompt)


def test_kimi_results_name_the_call_as_the_model_does(assets: Path) -> None:
    model, renderer = named(assets, "Kimi K2")
    call, other = called("{}", "call_a"), called("{}", "call_b")
    text = text_of(renderer, model, user("Qz"), call, result("one", call), other, result("two", other), user("Qz"))
    assert in_order(
        text, "## Return of functions.get_weather:0", "one", "## Return of functions.get_weather:1", "two"
    )


def test_mistral_results_name_the_call_by_the_id_that_was_sampled(assets: Path) -> None:
    model, renderer = named(assets, "Mistral Small 3.2")
    talk = Talk(renderer)
    prompt = talk.ask(user("Weather?"))
    reply = talk.sample(model.reply(prompt, None, "", (WEATHER.name, {"city": "Paris"}))).message
    assert reply.tool_calls[0].id == "a1B2c3D4e"
    got = talk.go_on(result("sunny", reply))
    assert isinstance(got, Prompt)
    assert "[TOOL_RESULTS]a1B2c3D4e[TOOL_CONTENT]sunny" in renderer.tokenizer.decode(got.ids.tolist())
    foreign = called("{}", "toolu_01A09q90qw90lq917835lq9")
    assert "[TOOL_CONTENT]sunny" in text_of(renderer, model, user("Weather?"), foreign, result("sunny", foreign))


def test_mistral_text_behind_a_result_goes_into_it(assets: Path) -> None:
    model, renderer = named(assets, "Mistral Small 3.2")
    call = called("{}")
    text = text_of(renderer, model, user("Weather?"), call, result("sunny", call), user("Hurry."))
    assert "[TOOL_CONTENT]sunny\n\nHurry.[/TOOL_RESULTS]" in text


def test_a_broken_call_stays_in_the_context_as_it_was_sampled(assets: Path) -> None:
    """Qwen3-Coder's template takes only objects: it writes the raw text wrapped, the bridge has it as it was."""
    _, renderer = named(assets, "Qwen3-Coder")
    talk = Talk(renderer)
    talk.ask(user("Weather?"))
    sampled = "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar<|im_end|>"
    reply = talk.sample(sampled).message
    assert reply.tool_calls[0].arguments == '{"city": "Par"'
    got = talk.go_on(result("not JSON", reply))
    assert isinstance(got, Prompt)
    assert sampled in renderer.tokenizer.decode(got.ids.tolist())
    assert "raw_arguments" in renderer.tokenizer.decode(talk.full())


def test_the_conformance_table_is_up_to_date(assets: Path) -> None:
    page = conformance.PAGE.read_text(encoding="utf-8")
    assert conformance.BEGIN in page
    new = conformance.replaced(page, conformance.BEGIN, conformance.END, conformance.table(assets))
    assert page == new, "run python -m tests.rendering.conformance"
