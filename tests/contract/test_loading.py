"""Whatever is wrong with a class of the user's own, it is one line that names it, wherever it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.contract.errors import PolarError, UsageError
from polar.contract.task import AgentSpec, BuilderSpec, EvaluatorSpec
from polar.evaluators import make_evaluator
from polar.harnesses import make_harness
from polar.redaction import RedactionConfig, load_redaction
from polar.trajectories import make_builder

BAD_MODULES = {
    "polar_syntax_error": "class Mine(:\n",
    "polar_key_error": "{}['missing']\n",
    "polar_exit": "raise SystemExit(3)\n",
    "polar_assertion": "assert False\n",
}
BAD_CLASSES = {
    "polar_raises": "class Mine:\n    def __init__(self, *a, **k): raise KeyError('two\\nlines')\n",
    "polar_own_error": (
        "from polar.contract.errors import PolarError\n"
        "class Mine:\n    def __init__(self, *a, **k): raise PolarError('mine')\n"
    ),
}
LOADERS: dict[str, Callable[[str], Any]] = {
    "builder": lambda path: make_builder(BuilderSpec(strategy=path), allow_import=True),
    "harness": lambda path: make_harness(AgentSpec(import_path=path), allow_import=True),
    "evaluator": lambda path: make_evaluator(EvaluatorSpec(strategy=path), allow_import=True),
    "redaction": lambda path: load_redaction(RedactionConfig(hooks=(path,))),
}


@pytest.mark.parametrize("what", LOADERS)
@pytest.mark.parametrize("module", [*BAD_MODULES, *BAD_CLASSES])
def test_what_its_code_raises_is_a_line(
    what: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "redaction" and module in BAD_CLASSES:
        pytest.skip("a hook is not made, only found")
    (tmp_path / f"{module}.py").write_text({**BAD_MODULES, **BAD_CLASSES}[module])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=f"{module}:Mine") as caught:
        LOADERS[what](f"{module}:Mine")
    assert "\n" not in str(caught.value)


def test_what_a_class_says_of_its_own_use_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "polar_words.py").write_text(
        "from polar.contract.errors import UsageError\n"
        "class Mine:\n    def __init__(self, spec): raise UsageError('config needs reward')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PolarError, match=r"^config needs reward$"):
        LOADERS["evaluator"]("polar_words:Mine")
