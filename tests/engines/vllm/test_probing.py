"""What a server can do is found by asking it, and what it can't is said with what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.contract.errors import UsageError
from polar.engines import make_engine
from polar.engines.base import EngineInfo
from polar.engines.capabilities import Capabilities
from polar.engines.probing import probe
from polar.engines.vllm import VLLMEngine
from polar.engines.vllm_wire import COMPLETIONS, GENERATE
from tests.engines.openai.wire import MODELS, whole, wire_server
from tests.support.script import Step
from tests.support.scripted import scripted_engine

STRIPPED = Step(text="ok", omit_token_ids=True, omit_prompt_ids=True, ids_in_logprobs=False, logprobs="omit")


def lacks(found: Capabilities) -> dict[str, str]:
    return {lack.what: lack.fix for lack in found.missing}


async def test_a_server_with_everything_takes_ids_by_generate(model_dir: Path) -> None:
    async with scripted_engine(model_dir, []) as running:
        found = await probe(running.url)
    assert (found.kind, found.version, found.model) == ("vllm", "0.0.scripted", "scripted")
    assert (found.token_route, found.chat_ids, found.weight_versions) == (GENERATE, True, True)
    assert found.logprobs == "raw"
    assert "token ids in and out (tito mode)" not in lacks(found)
    assert not running.model.log.generations


async def test_where_generate_is_refused_completions_do(model_dir: Path) -> None:
    async with scripted_engine(model_dir, [], off=(GENERATE, "/v1/chat/completions/render")) as running:
        found = await probe(running.url)
    assert (found.token_route, found.weight_versions) == (COMPLETIONS, False)
    assert "--enable-scale-out" in lacks(found)["the weight version of each token"]
    assert "--enable-scale-out" in lacks(found)["rendering by the engine"]


async def test_a_router_that_strips_ids_is_found_out(model_dir: Path) -> None:
    async with scripted_engine(model_dir, [], probe=STRIPPED) as running:
        found = await probe(running.url)
    assert (found.token_route, found.chat_ids) == (None, False)
    assert "router" in lacks(found)["token ids in and out (tito mode)"]
    assert "chat mode only" in found.summary()


async def test_what_is_no_vllm_is_not_told_to_set_its_flags() -> None:
    async with wire_server(*[whole({}, 404)] * 20) as wire:
        wire.models = {"data": [MODELS | {"owned_by": "somebody"}]}
        found = await probe(wire.url)
    assert (found.kind, found.chat_ids) == ("openai", False)
    assert "token ids of chat completions" in lacks(found)
    assert all(fix.startswith("serve it with vLLM or SGLang") for fix in lacks(found).values())


async def test_logprobs_that_are_not_those_of_scoring_are_processed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.model.logprobs", lambda _, sampled: [-20.0] * len(sampled))
    async with scripted_engine(model_dir, []) as running:
        assert (await probe(running.url)).logprobs == "processed"


@pytest.mark.parametrize("fault", ["nan", "null", "sentinel"])
async def test_logprobs_that_are_none_are_unknown(fault: str, model_dir: Path) -> None:
    step = Step(text="ok", logprobs=fault)  # type: ignore[arg-type]
    async with scripted_engine(model_dir, [], probe=step) as running:
        assert (await probe(running.url)).logprobs == "unknown"


async def test_nothing_answers(model_dir: Path) -> None:
    async with scripted_engine(model_dir, []) as running:
        url = running.url
    with pytest.raises(UsageError, match="no engine answers at"):
        await probe(url)


# ---- what becomes of it -------------------------------------------------------------------------------------


async def described(engine: VLLMEngine) -> EngineInfo:
    await engine.start()
    try:
        return engine.info
    finally:
        await engine.close()


async def test_the_engine_says_what_its_logprobs_are_of_and_where_its_tokenizer_is(model_dir: Path) -> None:
    async with scripted_engine(model_dir, []) as running:
        info = await described(VLLMEngine(running.url))
    assert (info.logprobs, info.model_path, info.chat_only, info.renders) == ("raw", str(model_dir), None, True)


async def test_without_ids_it_is_a_chat_engine_and_says_why(model_dir: Path) -> None:
    async with scripted_engine(model_dir, [], probe=STRIPPED) as running:
        info = await described(VLLMEngine(running.url))
        assert info.chat_only is not None
        assert "--enable-scale-out" in info.chat_only
        with pytest.raises(UsageError, match=r"can't be used with --mode tito: .*--enable-scale-out"):
            await described(VLLMEngine(running.url, mode="tito"))


async def test_a_tokenizer_that_is_named_is_taken_instead(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    async with scripted_engine(model_dir, []) as running:
        info = await described(VLLMEngine(running.url, tokenizer=str(tmp_path)))
        assert info.model_path == str(tmp_path)
        with pytest.raises(UsageError, match="--tokenizer /nowhere"):
            await described(VLLMEngine(running.url, tokenizer="/nowhere"))


async def test_a_name_is_looked_up_in_the_local_cache(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub = tmp_path / "models--org--name"
    for revision in ("aaa", "bbb"):
        (hub / "snapshots" / revision).mkdir(parents=True)
        (hub / "snapshots" / revision / "tokenizer.json").write_text("{}")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("bbb")
    async with scripted_engine(model_dir, []) as running:
        info = await described(VLLMEngine(running.url, tokenizer="org/name"))
    assert info.model_path == str(hub / "snapshots" / "bbb")


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("openai", {"mode": "tito"}, "only chats"),
        ("openai", {"tokenizer": "x"}, "only chats"),
        ("vllm", {"mode": "both"}, "unknown mode"),
        ("local", {"tokenizer": "x"}, "leave out --tokenizer"),
    ],
)
def test_options_that_make_no_sense(kind: str, options: dict[str, str], words: str) -> None:
    url = None if kind == "local" else "http://127.0.0.1:1"
    with pytest.raises(UsageError, match=words):
        make_engine(kind, url=url, **options)


async def test_the_health_check_tells_life_from_death(model_dir: Path) -> None:
    async with scripted_engine(model_dir, []) as running:
        engine = VLLMEngine(running.url)
        await engine.start()
        await engine.check()
    with pytest.raises(Exception, match="the connection failed"):
        await engine.check()
    await engine.close()
