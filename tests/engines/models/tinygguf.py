"""Writes a small GGUF file and a wheel around it, so that fetching and converting run without a network."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from polar.engines.models import Packaged

HEADS, KV_HEADS, HIDDEN, INNER = 4, 2, 32, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "ĠĠ"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.block_count": 1,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["Ġ Ġ"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
F32, Q4_1, Q8_0 = 0, 3, 8
TENSORS: dict[str, tuple[tuple[int, ...], int]] = {
    "token_embd.weight": ((len(TOKENS), HIDDEN), Q8_0),
    "output_norm.weight": ((HIDDEN,), F32),
    "blk.0.attn_norm.weight": ((HIDDEN,), F32),
    "blk.0.attn_q.weight": ((HIDDEN, HIDDEN), Q4_1),
    "blk.0.attn_k.weight": ((HIDDEN // 2, HIDDEN), Q4_1),
    "blk.0.attn_v.weight": ((HIDDEN // 2, HIDDEN), Q4_1),
    "blk.0.attn_output.weight": ((HIDDEN, HIDDEN), Q4_1),
    "blk.0.ffn_norm.weight": ((HIDDEN,), F32),
    "blk.0.ffn_gate.weight": ((INNER, HIDDEN), Q4_1),
    "blk.0.ffn_up.weight": ((INNER, HIDDEN), Q4_1),
    "blk.0.ffn_down.weight": ((HIDDEN, INNER), Q4_1),
}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list) and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(v) for v in value)
    if isinstance(value, list):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def blocks(kind: int, count: int, random: np.random.Generator) -> bytes:
    """Random quantized values: small scales, any nibbles and bytes."""
    if kind == F32:
        return random.normal(1, 0.1, count).astype("<f4").tobytes()
    n, body, heads = count // 32, {Q4_1: 16, Q8_0: 32}[kind], {Q4_1: 2, Q8_0: 1}[kind]
    scales = random.normal(0, 0.02, (n, heads)).astype("<f2").view(np.uint8)
    return np.concatenate([scales, random.integers(0, 256, (n, body), dtype=np.uint8)], 1).tobytes()


def write_gguf(metadata: dict[str, Any] = METADATA) -> bytes:
    """The bytes of a tiny Llama model with a byte-level tokenizer."""
    random = np.random.default_rng(0)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(TENSORS), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind) in TENSORS.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += blocks(kind, int(np.prod(shape)), random)
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data


def write_wheel(folder: Path, gguf: bytes) -> Packaged:
    """A wheel that pip finds in ``folder``, and its entry in the list of known models."""
    info = "tiny_polar_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_polar_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_polar_model/tiny.gguf", gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-polar-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Packaged("tiny-polar-model", "1.0", "tiny_polar_model/tiny.gguf", hashlib.sha256(gguf).hexdigest(), 1)
