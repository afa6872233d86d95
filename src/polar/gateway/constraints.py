"""Why: a harness may ask that a reply follows a schema, or that it is a tool call. Where tokens are sampled from ids,
only a grammar of the engine can hold a reply to a schema, and nothing can force a call. What can't be honoured is
dropped, and a line says so: in the log once, and with every call in its record.
"""

from __future__ import annotations

import msgspec

from polar.contract.chat import Chat
from polar.dialects.base import CallError
from polar.engines.base import EngineInfo


def heed(
    chat: Chat, info: EngineInfo, *, thinking: bool = False, tools_lost: str | None = None
) -> tuple[Chat, tuple[str, ...]]:
    """The call with what a token engine can honour, and a line for each thing that it can't.

    Args:
        thinking: the reply begins inside the model's thinking, which a grammar would bind too.
        tools_lost: why the model can't use the tools that are offered, if it can't.

    Raises:
        CallError: ``bad_request``: a schema was asked for and is none.
    """
    warnings = [] if tools_lost is None else [tools_lost]
    form = chat.response_format
    kind = (form or {}).get("type")
    if form is not None and kind not in (None, "text"):
        if kind == "json_schema":
            _check(form)
        why = _why_not(chat, info, thinking)
        if kind not in ("json_schema", "json_object"):
            why = f"type '{kind}' is not known here"
        if why is not None:
            warnings.append(f"response_format was dropped: {why}")
            form = None
    else:
        form = None
    choice = chat.tool_choice
    if choice not in (None, "auto", "none"):
        warnings.append(f"tool_choice '{choice}' was dropped: with token ids nothing can make the model call a tool")
        choice = "auto"
    return msgspec.structs.replace(chat, response_format=form, tool_choice=choice), tuple(warnings)


def _why_not(chat: Chat, info: EngineInfo, thinking: bool) -> str | None:
    """Why a reply to this call can't be held to a schema."""
    if not info.structured:
        return f"the engine ({info.url or info.kind}) has no grammar where it takes token ids"
    if chat.tools and chat.tool_choice != "none":
        return "tools are offered, and a grammar would keep the model from calling one"
    if thinking:
        return "the model thinks first, and a grammar would bind its thinking: turn thinking off"
    return None


def _check(form: dict[str, object]) -> None:
    inner = form.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise CallError("bad_request", "response_format.json_schema.schema must be a JSON schema object")
