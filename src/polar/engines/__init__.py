"""Inference engines. A new one is a file here and a line in ``make_engine``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from polar.contract.completion import Mode
from polar.contract.errors import UsageError
from polar.engines.base import Engine
from polar.engines.pool import pool_of

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
KINDS = ("local", "vllm", "sglang", "openai")
_MODES: dict[str, Mode] = {"tito": "tito", "chat": "chat"}


def make_engine(
    kind: str,
    *,
    url: str | None = None,
    model: str | None = None,
    mode: str | None = None,
    tokenizer: str | None = None,
    max_inflight: int | None = None,
    require_token_ids: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Engine:
    """The engine a user asks for, not yet started.

    Args:
        kind: ``local`` (embedded), or a server: ``vllm`` and ``sglang`` take token ids where they can, ``openai``
            (anything compatible) only chats, and must return the ids by itself.
        url: of a server, with or without ``/v1``; several of one model, separated by commas, are used as one.
        model: a model folder or a known name for ``local``; the served name for a server (its first, if None).
        mode: ``tito`` or ``chat``; ``None`` takes the engine's best.
        tokenizer: for a server that takes token ids: a folder, or a name in a local cache; by default what it
            names as its model.
        max_inflight: calls at a time at a server, over which others wait here; ``None``: no limit.
        require_token_ids: a chat without token ids is an error; if not, its ids stay empty.

    Raises:
        UsageError: the combination makes no sense, or the model can't be had.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown engine {kind!r}: use {', '.join(KINDS)}")
    if mode not in (None, *_MODES):
        raise UsageError(f"unknown mode {mode!r}: use tito or chat")
    if kind == "local":
        return _embedded(url, model, mode, tokenizer, progress)
    if not url:
        raise UsageError(f"--engine {kind} needs --engine-url, such as http://127.0.0.1:8000")
    if kind == "openai" and (mode == "tito" or tokenizer):
        raise UsageError("--engine openai only chats: name --engine vllm or sglang for --mode tito and --tokenizer")
    urls = [_checked_url(each.strip()) for each in url.split(",")]
    options: dict[str, Any] = {
        "api_key": os.environ.get("POLAR_ENGINE_API_KEY"),
        "max_inflight": max_inflight,
        "require_token_ids": require_token_ids,
    }
    if kind == "openai":
        from polar.engines.openai import OpenAIEngine

        return pool_of([OpenAIEngine(each, model, **options) for each in urls])
    options |= {"mode": _MODES[mode] if mode else None, "tokenizer": tokenizer}
    if kind == "vllm":
        from polar.engines.vllm import VLLMEngine

        return pool_of([VLLMEngine(each, model, **options) for each in urls])
    from polar.engines.sglang import SGLangEngine
    from polar.engines.sglang_workers import SGLangWorkers

    return SGLangWorkers(urls, lambda at: SGLangEngine(at, model, **options), api_key=options["api_key"])


def _embedded(
    url: str | None, model: str | None, mode: str | None, tokenizer: str | None, progress: Callable[[str], None]
) -> Engine:
    if tokenizer:
        raise UsageError("the embedded engine has the tokenizer of its model: leave out --tokenizer")
    if mode == "chat":
        raise UsageError("the embedded engine takes token ids: leave out --mode chat")
    if url:
        raise UsageError(
            "the embedded engine has no URL: leave out --engine-url, or name --engine vllm, sglang or openai"
        )
    from polar.engines.local import LocalEngine

    return LocalEngine(model or DEFAULT_MODEL, progress=progress)


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"--engine-url {url} is no address: write it like http://127.0.0.1:8000")
    return url
