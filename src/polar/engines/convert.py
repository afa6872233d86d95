"""From a GGUF file of the Llama family to an ordinary model folder.

Two things are easy to get wrong and silently change every prompt or logit. GGUF stores query and key rows in
another order, which must be undone; and the tokenizer splits numbers into digits, which its file says only by
the name of a rule.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from polar.engines.gguf import GGUF, Array, GGUFError

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPECIAL = 3
"""The token type of GGUF's control tokens."""


def write_folder(gguf: GGUF, folder: Path) -> None:
    """Write config, float32 weights, tokenizer and chat template into an empty folder.

    The weights are exactly those of the file, unpacked. The template is Polar's own, which knows tools; the
    file's is kept as ``chat_template.original.jinja``.

    Raises:
        GGUFError: another architecture or tokenizer than "llama" and "smollm".
        OSError: the disk is full, or the like.
    """
    fields = gguf.fields
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.pre") != "smollm":
        raise GGUFError("only Llama models with the SmolLM tokenizer are converted")
    _write_weights(gguf, folder / "model.safetensors")
    _write_json(folder / "config.json", _config(fields, tied="output.weight" not in gguf.names))
    _write_json(folder / "tokenizer.json", _tokenizer(fields))
    special = {f"{name}_token": fields["tokenizer.ggml.tokens"][i] for name, i in _special(fields).items()}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )
    generation = {f"{name}_token_id": i for name, i in _special(fields).items() if name != "unk"}
    _write_json(folder / "generation_config.json", generation)
    template = resources.files("polar.engines").joinpath("templates/chatml_tools.jinja").read_text("utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    (folder / "chat_template.original.jinja").write_text(fields["tokenizer.chat_template"], "utf-8")


def _special(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {ours: fields[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        # The file holds a float32: 1e-05 comes out as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **{f"{name}_token_id": i for name, i in _special(fields).items() if name != "unk"},
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _SPECIAL
        ],
        "normalizer": None,
        # The digits come first: split later, two spaces before a number give other tokens.
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _weights(gguf: GGUF) -> Iterator[tuple[str, Array]]:
    """Names and values under the names of a Hugging Face folder."""
    heads = {
        "attn_q": gguf.fields["llama.attention.head_count"],
        "attn_k": gguf.fields["llama.attention.head_count_kv"],
    }
    for name in gguf.names:
        values = gguf.tensor(name)
        parts = name.split(".")
        if parts[0] != "blk":
            yield f"{_TOP_NAMES[parts[0]]}.weight", values
            continue
        if parts[2] in heads:
            values = _half_split(values, heads[parts[2]])
        yield f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight", values


def _half_split(rows: Array, heads: int) -> Array:
    """GGUF has the two rows that rotate together side by side; here each head's first rows come first."""
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _write_weights(gguf: GGUF, file: Path) -> None:
    """A safetensors file, written tensor by tensor: the whole model is never in memory unpacked.

    The header comes first and its offsets are known only at the end, so it gets a fixed, padded room.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    room = 256 * (len(gguf.names) + 1)
    with file.open("wb") as out:
        out.seek(8 + room)
        offset = 0
        for name, values in _weights(gguf):
            end = offset + values.nbytes
            header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, end]}
            out.write(values.data)
            offset = end
        text = json.dumps(header).encode().ljust(room)
        out.seek(0)
        out.write(struct.pack("<Q", room) + text)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False), "utf-8")
