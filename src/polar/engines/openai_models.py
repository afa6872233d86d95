"""Why: an engine that is wrong (another server, another model, a key that is missing) should be found at the
start and said in one line, not at the first call of the hundredth session.
"""

from __future__ import annotations

import logging

import msgspec

from polar.contract.errors import UsageError
from polar.engines.base import EngineError, EngineInfo
from polar.engines.http import Upstream

log = logging.getLogger("polar.engines")

_KINDS = ("vllm", "sglang")


class WireModel(msgspec.Struct):
    """An entry of GET /v1/models. ``parent`` is set for an adapter, whose tokenizer is its parent's."""

    id: str
    owned_by: str | None = None
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class WireModels(msgspec.Struct):
    data: list[WireModel]


class WireVersion(msgspec.Struct):
    version: str | None = None


async def ask_models(upstream: Upstream, model: str | None) -> EngineInfo:
    """What the server says of itself: GET /v1/models, and GET /version (vLLM has it). ``model`` is the served
    name; the first that is listed, if ``None``.

    Raises:
        UsageError: nothing answers, it is no OpenAI-compatible server, refuses the key, or does not serve ``model``.
    """
    try:
        models, version = await upstream.ask("/v1/models"), await upstream.ask("/version")
    except EngineError as error:
        raise UsageError(
            f"no engine answers at {upstream.url}: start it, or give its address with --engine-url ({error})"
        ) from None
    return _describe(upstream.url, model, models, version)


def _describe(url: str, model: str | None, models: tuple[int, bytes], version: tuple[int, bytes]) -> EngineInfo:
    served = _served(url, *models)
    card = served[0] if model is None else next((m for m in served if m.id == model), None) or _renamed(served)
    if card is None:
        names = ", ".join(m.id for m in served)
        raise UsageError(f"{url} does not serve the model {model!r}: choose one of {names} with --model")
    if model not in (None, card.id):
        log.warning("%s lists no model %r, but only %s: taking it, for new weights rename it", url, model, card.id)
    base = next((m for m in served if m.id == card.parent), card)
    return EngineInfo(
        kind=base.owned_by if base.owned_by in _KINDS else "openai",
        model=card.id,
        context_length=card.max_model_len or base.max_model_len or 0,
        model_path=base.root,
        version=_version(*version),
        url=url,
    )


def _renamed(served: list[WireModel]) -> WireModel | None:
    """The model that may have had another name: an update of the weights makes SGLang go by their path."""
    bases = [model for model in served if model.parent is None]
    return bases[0] if len(bases) == 1 and bases[0].owned_by == "sglang" else None


def _served(url: str, status: int, body: bytes) -> list[WireModel]:
    if status in (401, 403):
        raise UsageError(f"{url}/v1/models refused the API key ({status}): set POLAR_ENGINE_API_KEY")
    if status == 503:
        raise UsageError(
            f"{url}/v1/models answered 503: the engine is still loading, or down; try again when it is up"
        )
    try:
        served = msgspec.json.decode(body, type=WireModels).data if status == 200 else None
    except msgspec.DecodeError:
        served = None
    if served is None:
        raise UsageError(
            f"{url}/v1/models is no list of models (status {status}): --engine-url must be the root of an "
            "OpenAI-compatible server, like http://127.0.0.1:8000"
        )
    if not served:
        raise UsageError(f"{url}/v1/models lists no model: load one in the engine")
    return served


def _version(status: int, body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=WireVersion).version if status == 200 else None
    except msgspec.DecodeError:
        return None
