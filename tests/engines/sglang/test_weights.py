"""New weights for a running SGLang: the order of the steps, and that it goes on whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.contract.errors import UsageError
from polar.engines.base import EngineError
from polar.engines.weights import UpdateMode, update_weights
from tests.support.scripted_sglang import scripted_sglang


@pytest.mark.parametrize(("mode", "pause", "flush"), [("keep", "retract", True), ("in_place", "in_place", False)])
async def test_calls_under_way_are_kept(mode: UpdateMode, pause: str, flush: bool, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as engine:
        await update_weights(engine.url, "sglang", model_dir, "step-1", mode=mode)
        assert engine.server.administration == [
            ("/pause_generation", {"mode": pause}),
            (
                "/update_weights_from_disk",
                {"model_path": str(model_dir), "weight_version": "step-1", "flush_cache": flush},
            ),
            ("/continue_generation", {}),
        ]
        assert engine.model.weight_version == "step-1"


async def test_calls_under_way_may_end_first(model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as engine:
        await update_weights(engine.url, "sglang", model_dir, "step-1", mode="wait")
        assert [path for path, _ in engine.server.administration] == ["/update_weights_from_disk"]


async def test_weights_that_can_not_be_loaded_leave_it_running(model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as engine:
        engine.server.loads = False
        with pytest.raises(EngineError, match="/update_weights_from_disk answered 400: no such folder"):
            await update_weights(engine.url, "sglang", model_dir, "step-1", mode="abort")
        assert [path for path, _ in engine.server.administration][-1] == "/continue_generation"
        assert engine.model.weight_version == "default"


async def test_vllm_has_no_such_mode(model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as engine:
        with pytest.raises(UsageError, match="use keep"):
            await update_weights(engine.url, "vllm", model_dir, "step-1", mode="in_place")
