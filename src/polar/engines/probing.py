"""Which questions a server is asked: those of its kind, which is what it calls itself in ``/v1/models``."""

from __future__ import annotations

from polar.engines.capabilities import Capabilities
from polar.engines.http import Upstream
from polar.engines.openai_models import ask_models
from polar.engines.vllm_probing import probe_vllm


async def workers_at(url: str, *, api_key: str | None = None) -> list[str]:
    """The servers behind ``url``, where it is SGLang's router, to be probed one by one; none: it is a server itself.

    Raises:
        UsageError: nothing answers there, or the servers behind it can't be talked to one by one.
    """
    from polar.engines.sglang_server import KeyRefused, workers_behind

    upstream = Upstream(url, api_key=api_key)
    upstream.open()
    try:
        if (await ask_models(upstream, None)).kind != "vllm":
            found = await workers_behind(url, api_key=api_key)
            return [] if found == [upstream.url] else found
    except KeyRefused:
        pass  # it took the key before, and refuses paths that it doesn't know: no router
    finally:
        await upstream.close()
    return []


async def probe(url: str, model: str | None = None, *, api_key: str | None = None) -> Capabilities:
    """What the server at ``url`` can do with ``model`` (the first that it lists, by default).

    Raises:
        UsageError: nothing answers there, it does not serve the model, or it takes minutes for a few tokens.
    """
    upstream = Upstream(url, api_key=api_key)
    upstream.open()
    try:
        info = await ask_models(upstream, model)
        if info.kind == "sglang":
            from polar.engines.sglang_probing import probe_sglang

            return await probe_sglang(upstream, info)
        return await probe_vllm(upstream, info)
    finally:
        await upstream.close()
