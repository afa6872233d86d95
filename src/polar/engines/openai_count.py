"""Why: some harnesses ask how long a prompt is before they send it, to compact in time. Where the engine renders,
only it can tell, and OpenAI's API has no word for it; vLLM and SGLang have a route of their own.
"""

from __future__ import annotations

import msgspec

from polar.contract.chat import Chat, Sampling
from polar.engines.base import EngineError
from polar.engines.http import Upstream
from polar.engines.openai_errors import error_of_reply
from polar.engines.openai_request import request_body

_SECONDS = 60.0
_NEEDED = ("model", "messages", "tools", "chat_template_kwargs")


class WireCount(msgspec.Struct):
    count: int | None = None


_decoder = msgspec.json.Decoder(WireCount)


async def count_tokens(upstream: Upstream, chat: Chat, *, kind: str, model: str) -> int:
    """Tokens of the prompt of a conversation, with the generation prompt.

    Raises:
        EngineError: see ``CountingEngine``; with status 404 where the server can't count a conversation.
    """
    path = "/v1/tokenize" if kind == "sglang" else "/tokenize"
    plain = msgspec.structs.replace(chat, sampling=Sampling(), response_format=None, tool_choice=None)
    body = request_body(plain, kind=kind, model=model, context_length=0, stream=False)
    asked = {name: body[name] for name in _NEEDED if name in body} | {"add_generation_prompt": True}
    status, reply = await upstream.ask(path, asked, seconds=_SECONDS)
    if status not in (200, 404, 405, 501):
        raise error_of_reply(status, reply, upstream.url + path)
    try:
        count = _decoder.decode(reply).count if status == 200 else None
    except msgspec.MsgspecError:
        count = None
    if not count:
        raise EngineError("bad_request", f"{upstream.url}{path} does not count the tokens of a chat", status=404)
    return count
