"""What a model folder says about its shape, and a clear no to what this engine cannot run.

Guessing here would be silent damage: a rope scaling that is passed over still gives fluent text, with
wrong logprobs. So whatever is not understood is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.contract.errors import UsageError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The Llama family in one shape. ``rope_scaling`` is None or the fields of the "llama3" kind."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float] | None
    context_length: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a Hugging Face model folder.

    Raises:
        UsageError: no ``config.json``, an architecture or option that is not supported, a missing field.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} is no model folder: config.json: {error}") from error
    try:
        return _parse(raw, str(file))
    except KeyError as error:
        raise UsageError(f"{file} lacks the field {error}") from error


def _parse(raw: dict[str, Any], where: str) -> ModelConfig:
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"the embedded engine cannot run {architecture} ({where}); it runs {', '.join(ARCHITECTURES)}; "
            "serve other models with --engine vllm or --engine sglang"
        )
    _refuse_unknown(raw, where)
    bias = bool(raw.get("attention_bias", False))
    heads = raw["num_attention_heads"]
    theta, scaling = _rope(raw, where)
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        context_length=raw["max_position_embeddings"],
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        output_bias=bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _refuse_unknown(raw: dict[str, Any], where: str) -> None:
    def refuse(what: str) -> None:
        raise UsageError(f"the embedded engine does not support {what} ({where})")

    if (activation := raw.get("hidden_act", "silu")) != "silu":
        refuse(f"hidden_act {activation!r}")
    if raw.get("quantization_config"):
        refuse("quantized weights")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        refuse("sliding-window attention")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial rotary embeddings")


def _rope(raw: dict[str, Any], where: str) -> tuple[float, dict[str, float] | None]:
    # Older folders write rope_theta and rope_scaling, newer ones one rope_parameters object.
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UsageError(f"the embedded engine does not support rope scaling of type {kind!r} ({where})")
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return theta, {name: float(rope[name]) for name in fields}
