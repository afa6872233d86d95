"""A tiny model with random weights as a model folder, and engines on it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polar.engines.local import LocalEngine
from polar.engines.local.config import read_config
from polar.engines.local.model import CausalLM

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

StartEngine = Callable[..., Awaitable[LocalEngine]]


def write_tiny(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A model folder with random weights, large enough to make the distributions uneven."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    torch.manual_seed(seed)
    model = CausalLM(read_config(folder))
    weights = {
        name: torch.ones_like(w) + 0.1 * torch.randn_like(w) if "norm" in name else 0.35 * torch.randn_like(w)
        for name, w in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def start(tiny: Path) -> AsyncIterator[StartEngine]:
    """Starts engines, on the tiny model unless another is named, and closes them after the test."""
    engines: list[LocalEngine] = []

    async def start_one(model: str | Path | None = None, **options: Any) -> LocalEngine:
        engine = LocalEngine(model or tiny, **{"threads": 1, "kv_tokens": 20_000, **options})
        engines.append(engine)
        await engine.start()
        return engine

    yield start_one
    for engine in engines:
        await engine.close()
