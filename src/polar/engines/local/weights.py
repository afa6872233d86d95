"""Reading weights: safetensors folders, checked against the shape that the configuration promises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polar.contract.errors import UsageError
from polar.engines.local.config import ModelConfig


def read_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """All weights of a Hugging Face folder as float32, by name, checked.

    Raises:
        UsageError: a file is missing or broken, or the weights do not fit ``config``.
    """
    weights: dict[str, Tensor] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    weights[name] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot read the weights in {file}: {error}") from error
    return check_weights(weights, config)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise UsageError(f"{folder} has no model.safetensors and no model.safetensors.index.json")


def check_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The weights that ``config`` asks for, as detached float32 tensors.

    Raises:
        UsageError: one is missing, too many, or of another shape; the message names the first.
    """
    checked: dict[str, Tensor] = {}
    for name, shape in expected_shapes(config).items():
        tensor = weights.get(name)
        if tensor is None:
            raise UsageError(f"the weights lack {name}")
        if tuple(tensor.shape) != shape:
            raise UsageError(f"the weight {name} has the shape {tuple(tensor.shape)}, not {shape}")
        checked[name] = tensor.detach().to(torch.float32)
    # A tied head may be written out all the same, and old folders carry computed rope frequencies.
    extra = [
        n for n in weights if n not in checked and n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")
    ]
    if extra:
        raise UsageError(f"the weights have {min(extra)}, which the model has no place for")
    return checked


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linear = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (shared, hidden, config.qkv_bias),
        "self_attn.v_proj": (shared, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        start = f"model.layers.{layer}."
        shapes |= {f"{start}{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{start}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{start}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
