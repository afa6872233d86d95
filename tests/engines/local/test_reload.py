"""New weights between two steps: each token says which weights it came from, and that is true."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polar.contract.arrays import ids
from polar.contract.chat import Sampling
from polar.contract.errors import UsageError
from polar.engines.local.model import CausalLM

from .calls import call, prompt_of, scored
from .conftest import StartEngine, write_tiny


def logprobs_under(folder: Path, prompt: list[int], reply: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = CausalLM.load(folder)(torch.tensor([prompt + reply])).log_softmax(-1)[0]
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(reply)]


async def test_the_version_changes_at_the_token_where_the_weights_do(start: StartEngine, tmp_path: Path) -> None:
    old = write_tiny(tmp_path / "old", 0, max_position_embeddings=4096)
    new = write_tiny(tmp_path / "new", 1, max_position_embeddings=4096)
    engine, prompt = await start(old), prompt_of(12)
    stream = engine.generate(prompt, Sampling(), stop_ids=frozenset(), request_id="r", affinity="s")
    chunks = [await anext(stream) for _ in range(3)]
    await engine.load_weights(new, "1")
    while chunks[-1].weight_version == "0":
        chunks.append(await anext(stream))
    await stream.aclose()
    assert engine.weight_version == "1"
    assert [chunk.weight_version for chunk in chunks] == ["0"] * (len(chunks) - 1) + ["1"]
    expected = logprobs_under(old, prompt.tolist(), [chunk.ids[0] for chunk in chunks])
    captured = [chunk.logprobs[0] for chunk in chunks]
    assert captured[:-1] == pytest.approx(expected[:-1], abs=1e-4)
    assert captured[-1] != pytest.approx(expected[-1], abs=1e-3)


async def test_after_a_reload_no_call_starts_from_what_old_weights_computed(
    start: StartEngine, tmp_path: Path
) -> None:
    engine, prompt = await start(), prompt_of(50)
    running = engine.generate(prompt, Sampling(), stop_ids=frozenset(), request_id="r", affinity="s")
    await anext(running)
    await call(engine, prompt, max_tokens=3)
    await engine.load_weights(write_tiny(tmp_path / "new", 1), "7")
    reply = await call(engine, prompt, max_tokens=10)
    await running.aclose()
    assert reply.cached_tokens == 0
    assert set(reply.versions) == {"7"}
    assert reply.logprobs == pytest.approx(await scored(engine, prompt, reply), abs=1e-4)
    assert reply.logprobs == pytest.approx(logprobs_under(tmp_path / "new", prompt.tolist(), reply.ids), abs=1e-4)


async def test_a_trainer_may_change_its_weights_after_publishing_them(start: StartEngine, tiny: Path) -> None:
    engine, trained = await start(), CausalLM.load(tiny)
    await engine.load_weights(trained.state_dict(), "1")
    before = await engine.score(prompt_of(20))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    assert (await engine.score(prompt_of(20))).tolist() == before.tolist()


async def test_weights_that_do_not_fit_change_nothing(start: StartEngine, tiny: Path, tmp_path: Path) -> None:
    engine = await start()
    before = await engine.score(ids([1, 2, 3]))
    good = CausalLM.load(tiny).state_dict()
    short = {name: w for name, w in good.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(UsageError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        await engine.load_weights(short, "1")
    with pytest.raises(UsageError, match=r"model\.norm\.weight has the shape \(31,\), not \(32,\)"):
        await engine.load_weights({**good, "model.norm.weight": torch.ones(31)}, "1")
    with pytest.raises(UsageError, match=r"has no model\.safetensors"):
        await engine.load_weights(tmp_path, "1")
    assert engine.weight_version == "0"
    assert (await engine.score(ids([1, 2, 3]))).tolist() == before.tolist()
