"""The real harnesses in a real sandbox, at a real gateway, with a scripted model behind it that has Qwen3's own
tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from polar.runtimes.bubblewrap import find_bwrap
from tests.harnesses.running import Ran, run_session
from tests.rendering.conftest import assets

__all__ = ["Ran", "Run", "assets"]

Run = Callable[..., Awaitable[Ran]]


@pytest.fixture(scope="session")
def qwen3(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's model folder, but for the weights."""
    folder = tmp_path_factory.mktemp("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(assets / "qwen3" / name)
    (folder / "chat_template.jinja").symlink_to(assets / "templates" / "Qwen-Qwen3-0.6B.jinja")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    return folder


@pytest.fixture
def session(qwen3: Path, tmp_path: Path) -> Run:
    """Run one session of a harness: see ``run_session``."""
    if find_bwrap() is None:
        pytest.skip("no bubblewrap here")

    async def go(*args: object, **options: object) -> Ran:
        return await run_session(qwen3, tmp_path, *args, **options)  # type: ignore[arg-type]

    return go
