"""Which renderer a model folder gets, and the one over the ``renderers`` package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from polar.contract.chat import Chat
from polar.contract.errors import MissingExtra, UsageError
from polar.rendering import load_renderer
from polar.rendering.base import Declined, Prompt
from polar.rendering.families import FamilyRenderer
from polar.rendering.generic import TemplateRenderer
from polar.rendering.tokenizer import Tokenizer
from tests.rendering.talk import WEATHER, Talk, counted_ids, hermes_call, result, system, user

END = "<|im_end|>"
CALL = hermes_call("get_weather", '{"city": "Paris"}')


def test_a_folder_with_a_template_is_rendered_by_it(tiny: Path) -> None:
    renderer = load_renderer(tiny)
    assert isinstance(renderer, TemplateRenderer)
    assert renderer.family.calls == "hermes"
    assert renderer.stop_ids == {0, 2}


def test_parser_and_template_can_be_named(tiny: Path) -> None:
    renderer = load_renderer(tiny, parser="plain", chat_template="{{ messages[0].content }}")
    assert isinstance(renderer, TemplateRenderer)
    assert renderer.family.calls is None
    ids = renderer.render(Chat(model="m", messages=(user("Hi"),))).ids.tolist()
    assert renderer.tokenizer.decode(ids) == "Hi"


def test_wrong_names_are_usage_errors(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no reply parser 'hermit'"):
        load_renderer(tiny, parser="hermit")
    with pytest.raises(UsageError, match="no renderer 'best'"):
        load_renderer(tiny, prefer="best")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load_renderer(tmp_path)
    with pytest.raises(UsageError, match="renderers:FAMILY"):
        load_renderer(tiny, prefer="renderers")
    with pytest.raises(UsageError, match="no renderer 'nobody'"):
        load_renderer(tiny, prefer="renderers:nobody")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot read"):
        load_renderer(tmp_path)


def test_without_the_package_the_extra_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(MissingExtra, match=r"polar\[renderers\]"):
        load_renderer(tiny, prefer="renderers:qwen3")


@pytest.mark.assets
def test_a_known_model_without_a_template_goes_to_the_package(assets: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(assets / "qwen3" / "tokenizer.json")
    with pytest.raises(UsageError, match="no chat template"):
        load_renderer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 151645}))
    assert isinstance(load_renderer(tmp_path), FamilyRenderer)


@pytest.fixture
def qwen(assets: Path) -> Talk:
    return Talk(FamilyRenderer(Tokenizer.load(assets / "qwen3"), "qwen3", new_id=counted_ids()))


@pytest.mark.assets
def test_the_package_and_the_template_give_the_same_prompts(qwen: Talk, assets: Path) -> None:
    ours = load_renderer(assets / "qwen3", prefer="template")
    chat = Chat(model="m", messages=(system("Be brief."), user(f"Hi {END}")), tools=(WEATHER,))
    assert qwen.renderer.render(chat).ids.tolist() == ours.render(chat).ids.tolist()


@pytest.mark.assets
def test_arguments_that_the_family_does_not_know_change_nothing_as_with_a_template(qwen: Talk) -> None:
    off = {"enable_thinking": False}
    plain, asked, quiet, both = (
        qwen.renderer.render(Chat(model="m", messages=(user("Hi"),), template_args=args)).ids.tolist()
        for args in ({}, {"reasoning_effort": "high"}, off, {"reasoning_effort": "high", **off})
    )
    assert plain == asked != quiet == both


@pytest.mark.assets
def test_the_package_reads_replies_and_bridges(qwen: Talk) -> None:
    qwen.ask(user("Weather?"))
    reply = qwen.sample(f"<think>\nLook.\n</think>\n\n{CALL}{END}")
    assert reply.finish_reason == "tool_calls"
    assert reply.message.reasoning == "Look."
    call = reply.message.tool_calls[0]
    assert (call.id, call.name, json.loads(call.arguments)) == ("call_0", "get_weather", {"city": "Paris"})
    got = qwen.go_on(result("sunny", reply.message))
    assert isinstance(got, Prompt)
    assert got.ids.tolist() == qwen.full()
    qwen.sample(f"<think>\nSay.\n</think>\n\nSunny.{END}")
    assert qwen.go_on(user("And Rome?")) == Declined("template_rewrites_history")


@pytest.mark.assets
def test_the_package_is_not_trusted_with_changed_tools(qwen: Talk) -> None:
    qwen.ask(user("Hi"))
    qwen.sample(f"<think>\n\n</think>\n\nHello.{END}")
    qwen.tools = ()
    assert qwen.go_on(user("Bye")) == Declined("tools_changed")


@pytest.mark.assets
def test_the_packages_replies_end_at_stop_strings_too(qwen: Talk) -> None:
    qwen.ask(user("Hi"))
    reply = qwen.sample("<think>\n\n</think>\n\nAction\nObservation: x", stop=["Observation:"])
    assert (reply.message.content, reply.stop_sequence) == ("Action", "Observation:")
