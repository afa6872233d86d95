"""The small model of the fast tests, and real tokenizers and chat templates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.rendering.generic import TemplateRenderer
from polar.rendering.template import ChatTemplate, special_variables
from polar.rendering.tokenizer import Tokenizer, load_stop_ids, read_json
from tests.rendering.assets import fetch
from tests.rendering.talk import Talk, counted_ids
from tests.support.tinymodel import make_tiny_model

RendererOf = Callable[..., TemplateRenderer]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose template keeps everything."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose template drops reasoning before the last user message."""
    return make_tiny_model(tmp_path_factory.mktemp("forgetful"), rewrites_history=True)


@pytest.fixture
def talk(tiny: Path) -> Talk:
    """A conversation with the small model."""
    return Talk(renderer(tiny))


@pytest.fixture(scope="session")
def assets() -> Path:
    """Real tokenizers and templates: ``tests.rendering.assets``."""
    return fetch()


@pytest.fixture(scope="session")
def renderer_of(assets: Path) -> RendererOf:
    """A renderer of a real template with a real tokenizer: ``renderer_of("Qwen-Qwen3-0.6B", "qwen3")``."""

    @functools.cache
    def load(name: str) -> Tokenizer:
        return Tokenizer.load(assets / name)

    def make(template: str, tokenizer: str, **options: object) -> TemplateRenderer:
        folder = assets / tokenizer
        source = (assets / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
        chat_template = ChatTemplate(
            {"default": source}, special_variables(read_json(folder / "tokenizer_config.json"))
        )
        stops = load_stop_ids(folder, load(tokenizer))
        return TemplateRenderer(
            load(tokenizer),
            chat_template,
            stop_ids=stops,
            new_id=counted_ids(),
            **options,  # type: ignore[arg-type]
        )

    return make


def renderer(folder: Path, **options: object) -> TemplateRenderer:
    """The renderer of a model folder, with ids that count."""
    tokenizer = Tokenizer.load(folder)
    stops = load_stop_ids(folder, tokenizer)
    return TemplateRenderer(tokenizer, ChatTemplate.load(folder), stop_ids=stops, new_id=counted_ids(), **options)  # type: ignore[arg-type]
