"""Why: an engine names its model as it was named to it: a folder on its own machine, or a name on a hub. Whether
that is a tokenizer at hand here is found out by looking, never by fetching.
"""

from __future__ import annotations

import os
from pathlib import Path

from polar.engines.models import packaged_folder

_FILES = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tekken.json", "tokenizer.model")


def tokenizer_folder(name: str) -> Path | None:
    """The local folder of a tokenizer and its template.

    Args:
        name: a folder; a model that Polar has fetched; or a name (``org/model``) in the Hugging Face cache.
    """
    places = [Path(name).expanduser(), packaged_folder(name.replace("/", "--")), *_snapshots(name)]
    return next((place for place in places if any((place / file).is_file() for file in _FILES)), None)


def _snapshots(name: str) -> list[Path]:
    """The revision that ``main`` points to first, then the others."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        main = [hub / "snapshots" / (hub / "refs" / "main").read_text().strip()]
    except OSError:
        main = []
    return [*main, *sorted(hub.glob("snapshots/*"))]
