"""The forward of the sampler: weights laid out for speed, and batches of ragged pieces.

On a CPU a decoding step is the reading of all weights once, so two things decide its speed: that the tokens
of all sequences go through each linear layer together, and that the weights lie the way the matrix kernel
reads them. oneDNN's packed layout is two to three times as fast as the plain one for batches of up to 32
tokens. Attention is per sequence, each over its own keys and values: no padding, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polar.contract.arrays import Ids
from polar.engines.local.config import ModelConfig
from polar.engines.local.kv import KV
from polar.engines.local.model import rope_tables, rotate

Linear = Callable[[Tensor], Tensor]

ROWS_HINT = 32
"""The batch that the packed layout is chosen for."""


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """``x -> x @ weight.T + bias`` for [rows, columns] float32 input. The result owns its memory."""
    if bias is not None:
        bias = bias.clone()
    mkldnn = torch.ops.mkldnn
    # Both operators are torch's own, but not promised by it: without them the plain way is only slower.
    known = hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")
    if torch.backends.mkldnn.is_available() and known:
        packed = mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        return lambda x: mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    plain = weight.clone()
    return lambda x: F.linear(x, plain, bias)


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence: a part of its prompt, or the one token sampled last."""

    ids: Ids
    kv: KV


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights: query, key and value in one matrix, gate and up in another."""

    attention_norm: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class _View:
    """Where a piece's rows lie in the batch, and its keys and values by layer, each with a batch of 1 in front."""

    def __init__(self, piece: Piece, start: int, groups: int) -> None:
        n = len(piece.ids)
        self.start, self.end = start, start + n
        new, keys, values = piece.kv.append(piece.ids)
        self.new, self.keys, self.values = new.unbind(0), keys[:, None].unbind(0), values[:, None].unbind(0)
        self.mask: Tensor | None = None
        if n > 1:
            # One row per query; the query heads of a group are folded into the rows, so that keys and
            # values need no repeating.
            end = piece.kv.length
            position = torch.arange(end - n, end)
            hidden = torch.arange(end)[None] > position[:, None]
            self.mask = torch.zeros(n, end).masked_fill_(hidden, float("-inf")).repeat(groups, 1)

    def write(self, layer: int, pairs: Tensor, rows: Sequence[Tensor]) -> None:
        """Put the new keys and values in; ``pairs`` is [batch rows, 2, kv_heads, 1, head_dim], ``rows`` its rows."""
        if self.mask is None:
            self.new[layer].copy_(rows[self.start])
        else:
            self.new[layer].copy_(pairs[self.start : self.end, :, :, 0].permute(1, 2, 0, 3))

    def attend(self, layer: int, queries: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Attention [n, kv_heads, group, head_dim] of the piece's queries; ``queries`` is [batch rows, 1, kv_heads,
        group, head_dim], ``rows`` its rows."""
        keys, values = self.keys[layer], self.values[layer]
        if self.mask is None:
            return F.scaled_dot_product_attention(rows[self.start], keys, values)
        query = queries[self.start : self.end, 0].permute(1, 2, 0, 3).flatten(1, 2)[None]
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask)
        return seen[0].unflatten(1, (-1, self.end - self.start)).permute(2, 0, 1, 3)


class PackedModel:
    """The weights of a model, ready for sampling. Independent of the tensors it was built from."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._embedding = weights["model.embed_tokens.weight"].clone()
        head = self._embedding if config.tied else weights["lm_head.weight"]
        self._head = pack_linear(head, None)
        self._norm = weights["model.norm.weight"].clone()
        self._layers = [_pack_layer(config, weights, f"model.layers.{i}.") for i in range(config.layers)]
        self._cos, self._sin = (t[:, None] for t in rope_tables(config, config.context_length))

    def hidden(self, pieces: Sequence[Piece]) -> Tensor:
        """Hidden states [total new tokens, hidden] before the final norm; the pieces' KV takes the new tokens in."""
        config = self.config
        starts = np.cumsum([0, *(len(p.ids) for p in pieces)])
        ids = torch.from_numpy(np.concatenate([p.ids for p in pieces])).long()
        positions = torch.cat([torch.arange(p.kv.length, p.kv.length + len(p.ids)) for p in pieces])
        cos, sin = self._cos[positions], self._sin[positions]
        views = [_View(p, int(s), config.heads // config.kv_heads) for p, s in zip(pieces, starts, strict=False)]
        x = self._embedding[ids]
        for index, layer in enumerate(self._layers):
            x = x + layer.output(self._attend(layer, index, x, cos, sin, views))
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] of rows of ``hidden``."""
        return self._head(self._normed(hidden, self._norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _attend(
        self, layer: Layer, index: int, x: Tensor, cos: Tensor, sin: Tensor, views: Sequence[_View]
    ) -> Tensor:
        heads, shared, size = self.config.heads, self.config.kv_heads, self.config.head_dim
        qkv = layer.qkv(self._normed(x, layer.attention_norm)).view(len(x), heads + 2 * shared, size)
        turned = qkv[:, : heads + shared]
        if layer.qk_norms:
            norms = zip(turned.split([heads, shared], 1), layer.qk_norms, strict=True)
            turned = torch.cat([self._normed(part, weight) for part, weight in norms], 1)
        qkv[:, : heads + shared] = rotate(turned, cos, sin)
        # Taking all rows apart at once is far cheaper than slicing for each sequence.
        queries = qkv[:, :heads].unflatten(1, (1, shared, -1))
        pairs = qkv[:, heads:].unflatten(1, (2, shared, 1))
        query_rows, pair_rows = queries.unbind(0), pairs.unbind(0)
        seen = []
        for view in views:
            view.write(index, pairs, pair_rows)
            seen.append(view.attend(index, queries, query_rows))
        return torch.cat(seen).reshape(len(x), heads * size)


def _pack_layer(config: ModelConfig, weights: Mapping[str, Tensor], start: str) -> Layer:
    def joined(part: str, *names: str) -> Linear:
        keys = [f"{start}{part}.{name}_proj" for name in names]
        biased = f"{keys[0]}.bias" in weights
        bias = torch.cat([weights[f"{key}.bias"] for key in keys]) if biased else None
        return pack_linear(torch.cat([weights[f"{key}.weight"] for key in keys]), bias)

    def norm(name: str) -> Tensor:
        return weights[f"{start}{name}.weight"].clone()

    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=joined("self_attn", "q", "k", "v"),
        qk_norms=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None,
        output=joined("self_attn", "o"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=joined("mlp", "gate", "up"),
        down=joined("mlp", "down"),
    )
