"""How an engine is used: token ids in and out where that can be had, chat where not. Only ids in, ids out keeps a
conversation exact whatever a harness does, so where it can't be had one line says why.
"""

from __future__ import annotations

import logging
from pathlib import Path

from polar.contract.errors import PolarError, UsageError
from polar.engines.base import ChatEngine, Engine, RenderingEngine, TokenEngine
from polar.gateway.backends import Backend, ChatBackend, TitoBackend
from polar.gateway.render_route import RenderRouteBackend
from polar.rendering import load_renderer
from polar.rendering.base import Renderer

log = logging.getLogger("polar.engines")


def choose_backend(engine: Engine, renderer: Renderer | None = None) -> Backend:
    """The best use of a started engine: ids in with our own rendering (``renderer``, or one from the folder that the
    engine names), ids in with the engine's rendering, chat.

    Raises:
        UsageError: the use that the user asked for can't be had, or none can.
    """
    info = engine.info
    if info.mode == "chat":
        if isinstance(engine, ChatEngine):
            return ChatBackend(engine)
        raise UsageError(f"{info.url or info.kind} can't be used with --mode chat: it takes token ids only")
    why = info.chat_only or "it takes no token ids"
    if isinstance(engine, TokenEngine) and info.chat_only is None:
        if renderer is not None:
            return TitoBackend(engine, renderer)
        why = "it names no folder with a tokenizer that is here: name one with --tokenizer"
        if info.model_path is not None:
            try:
                return TitoBackend(engine, load_renderer(Path(info.model_path)))
            except PolarError as error:
                why = str(error)
        if info.renders and isinstance(engine, RenderingEngine):
            log.warning("%s renders by itself, for one more call each way: %s", info.url or info.kind, why)
            return RenderRouteBackend(engine)
    if not isinstance(engine, ChatEngine):
        raise UsageError(f"the engine {info.url or info.kind} can't be used: {why}")
    if info.mode == "tito":
        raise UsageError(f"{info.url or info.kind} can't be used with --mode tito: {why}")
    if isinstance(engine, TokenEngine):
        log.warning("%s is used in chat mode: %s", info.url or info.kind, why)
    return ChatBackend(engine)
