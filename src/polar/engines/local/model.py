"""The model as a module that can be trained: parameters under their Hugging Face names.

The sampler does not run this module. It runs ``packed.PackedModel``, which is built from the same state
dict and lays the weights out for speed; a test holds the two to each other. So a trainer works on a plain
``nn.Module`` and publishes with ``engine.load_weights(model.state_dict(), version)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polar.engines.local.config import ModelConfig, read_config
from polar.engines.local.weights import read_weights


def rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, float32 [length, head_dim]; the sines carry the sign of the
    half they belong to, so that rotating is ``x * cos + roll(x, head_dim / 2) * sin``."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency = 1.0 / config.rope_theta**half
    if config.rope_scaling:
        frequency = _scale_llama3(frequency, config.rope_scaling)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    sin = angle.sin()
    return torch.cat([angle.cos()] * 2, -1), torch.cat([-sin, sin], -1)


def _scale_llama3(frequency: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * torch.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (keep + (1 - keep) / scaling["factor"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding over the last dimension, with tables of ``rope_tables``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):  # type: ignore[misc]
    """Causal self-attention with grouped key/value heads over whole sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        query, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self.config.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):  # type: ignore[misc]
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):  # type: ignore[misc]
    """One layer: attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):  # type: ignore[misc]
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class CausalLM(nn.Module):  # type: ignore[misc]
    """The whole model, float32. ``state_dict()`` has the names that a Hugging Face folder has."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def load(cls, folder: Path) -> CausalLM:
        """A model from a Hugging Face folder.

        Raises:
            UsageError: the folder has no model, or one that is not supported.
        """
        config = read_config(folder)
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(read_weights(folder, config), strict=True, assign=True)
        return model

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states [batch, length, hidden] of whole sequences ``ids`` [batch, length] (int64).

        Padding goes to the right: attention is causal, so it changes nothing before it.
        """
        cos, sin = rope_tables(self.config, ids.shape[1])
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states; apart from ``hidden`` so that a trainer can take only the rows
        it needs, or take them in pieces: with a large vocabulary they are the largest tensor there is."""
        head = self.model.embed_tokens if self.config.tied else self.lm_head
        return F.linear(hidden, head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocab] of whole sequences ``ids`` [batch, length] (int64)."""
        return self.logits(self.hidden(ids))
