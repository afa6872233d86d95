"""Inference engines. A new one is a file here and a line in ``make_engine``."""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import urlsplit

from polar.contract.errors import UsageError
from polar.engines.base import Engine

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
KINDS = ("local", "vllm", "sglang", "openai")


def make_engine(
    kind: str,
    *,
    url: str | None = None,
    model: str | None = None,
    mode: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Engine:
    """The engine a user asks for, not yet started.

    Args:
        kind: ``local`` (embedded), or a server: ``vllm``, ``sglang``, ``openai`` (anything compatible).
        url: of a server, with or without ``/v1``.
        model: a model folder or a known name for ``local``; the served name for a server (its first, if None).
        mode: ``tito`` or ``chat``; ``None`` takes the engine's best.

    Raises:
        UsageError: the combination makes no sense, or the model can't be had.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown engine {kind!r}: use {', '.join(KINDS)}")
    if mode not in (None, "tito", "chat"):
        raise UsageError(f"unknown mode {mode!r}: use tito or chat")
    if kind == "local":
        if mode == "chat":
            raise UsageError("the embedded engine takes token ids: leave out --mode chat")
        if url:
            raise UsageError("the embedded engine has no URL: leave out --engine-url, or name --engine openai")
        from polar.engines.local import LocalEngine

        return LocalEngine(model or DEFAULT_MODEL, progress=progress)
    try:
        parts = urlsplit(url or "")
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if url and not good:
        raise UsageError(f"--engine-url {url} is no address: write it like http://127.0.0.1:8000")
    if not url:
        raise UsageError(f"--engine {kind} needs --engine-url, such as http://127.0.0.1:8000")
    if mode == "tito":
        raise UsageError(f"token ids in are not spoken to {kind} servers in this version: use --mode chat")
    from polar.engines.openai import OpenAIEngine

    return OpenAIEngine(url, model, api_key=os.environ.get("POLAR_ENGINE_API_KEY"))
