"""The model computes what the reference implementation of its family computes; what it cannot, it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polar.contract.arrays import ids
from polar.contract.errors import UsageError
from polar.engines.local.config import read_config
from polar.engines.local.kv import KV
from polar.engines.local.model import CausalLM
from polar.engines.local.packed import PackedModel, Piece
from polar.engines.local.weights import read_weights

from .calls import prompt_of
from .conftest import CONFIG, StartEngine, write_tiny

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-untied-biased": {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3-rope": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6},
}


@pytest.mark.parametrize("name", FAMILY)
def test_both_forwards_agree_with_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    changes = {k: v for k, v in FAMILY[name].items() if k != "architectures"}
    (architecture,) = FAMILY[name]["architectures"]
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    torch.manual_seed(0)
    fields = {k: v for k, v in CONFIG.items() if k != "architectures"}
    reference = getattr(transformers, architecture)(kind(**{**fields, **changes})).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path)
    prompt = prompt_of(90)
    batch = torch.from_numpy(prompt)[None].long()
    with torch.no_grad():
        expected = reference(batch).logits[0]
        whole = CausalLM.load(tmp_path)(batch)[0]
    config = read_config(tmp_path)
    with torch.inference_mode():
        packed = PackedModel(config, read_weights(tmp_path, config))
        kv, other = KV(config, 4), KV(config, 4)
        rows = []
        for start, end in ((0, 40), (40, 41), (41, 90)):
            # Beside it, another sequence of the batch takes its own way.
            hidden = packed.hidden([Piece(prompt_of(3, seed=end), other), Piece(prompt[start:end], kv)])
            rows.append(packed.logits(hidden[3:]))
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(rows), expected, atol=2e-4, rtol=1e-4)


def test_the_model_can_be_trained_and_saved_under_the_names_it_was_read_with(tiny: Path, tmp_path: Path) -> None:
    model = CausalLM.load(tiny)
    batch = torch.from_numpy(prompt_of(20))[None].long()
    loss = torch.nn.functional.cross_entropy(model(batch)[0, :-1], batch[0, 1:])
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert set(CausalLM.load(tmp_path).state_dict()) == set(load_file(tiny / "model.safetensors"))


async def test_a_sharded_folder_in_half_precision_loads(tiny: Path, tmp_path: Path, start: StartEngine) -> None:
    weights = {name: w.bfloat16() for name, w in load_file(tiny / "model.safetensors").items()}
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    engine, exact = await start(tmp_path), await start()
    scores = [(await e.score(ids(range(30)))).tolist() for e in (engine, exact)]
    assert scores[0] == pytest.approx(scores[1], abs=0.2)
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "cannot run MambaForCausalLM"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling of type 'longrope'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(UsageError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_field_and_a_broken_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}))
    with pytest.raises(UsageError, match="lacks the field 'hidden_size'"):
        read_config(tmp_path)
    folder = write_tiny(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="cannot read the weights in"):
        read_weights(folder, read_config(folder))
