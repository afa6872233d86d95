"""Text to token ids and back, over a model folder's ``tokenizer.json``.

Why not transformers: it takes seconds to import and decides on its own which special tokens to add. Here
a template's text is encoded as it stands, and nothing is added.

Control tokens in client text. A file that an agent reads may hold ``<|im_end|>``, and the usual stacks
would turn that text into the real token: whoever writes the file could end the turn and speak as the
user. Here only the template writes control tokens. ``protect`` breaks every control token in what a
client sent with a mark (a Unicode noncharacter), and ``encode`` encodes the two halves as the plain text
they are and drops the mark. Text without such words is encoded just as the usual stacks do, and tags that
the tokenizer does not call special (``<think>``, ``<tool_call>``) stay tokens wherever they stand. It is also
what makes the end of a turn in a rendered text something that can be searched for (see ``generic.py``).

Every session of a harness begins with the same long system prompt and list of tools, and tokenizing these takes many
times as long as all else in rendering. The library cuts a text at control tokens before it does anything else, so
the ids of a stretch from one to another depend on nothing around it: ``encode_prompt`` remembers the long ones.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer as RawTokenizer

from polar.contract.arrays import Ids
from polar.contract.errors import UsageError

T = TypeVar("T")

MARK = "\ufdd0"
_MARKED = re.compile(f"{MARK}({MARK})?")
_BARRED = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_SURROGATES = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_LONG = 2048  # characters of a stretch that is worth remembering
_REMEMBERED = 64  # stretches


class Tokenizer:
    """One model's tokenizer.

    Args:
        raw: the ``tokenizers`` object.
        control: texts of added tokens that client text must not turn into, beside those the tokenizer
            itself calls special and those written between bars (``<|user|>``).
    """

    def __init__(self, raw: RawTokenizer, control: Sequence[str] = ()) -> None:
        self.raw = raw
        added = {token.content: (index, token.special) for index, token in raw.get_added_tokens_decoder().items()}
        self._added = {text: index for text, (index, _) in added.items()}
        self._texts = {index: text for text, index in self._added.items()}
        words = {text for text, (_, special) in added.items() if special or _BARRED.fullmatch(text)}
        words.update(text for text in control if text in self._added)
        self.control = frozenset(word for word in words if len(word) > 1)
        self._control = _any_of(self.control)
        self._openings = tuple({word[:2] for word in self.control})
        self._cuts = _any_of(self.control & _cutting(raw))
        self._remembered = functools.lru_cache(_REMEMBERED)(self._encode_stretch)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder.

        Raises:
            UsageError: the folder has no readable ``tokenizer.json``.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"no tokenizer.json in {folder}: name a model folder that has one")
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(f"cannot read {path}: {error}") from None
        raw.no_truncation()  # files saved after a training may say to cut a text short or to fill it up
        raw.no_padding()
        return cls(raw)

    def token_id(self, text: str) -> int | None:
        """The id of an added token, by its text."""
        return self._added.get(text)

    def token_text(self, token_id: int) -> str | None:
        """The text of an added token; ``None`` for any other id."""
        return self._texts.get(token_id)

    def protect(self, value: T) -> T:
        """``value`` (strings, lists and dicts, nested) with every control token in it marked as plain text."""
        return self._protect(value)  # type: ignore[no-any-return]

    def _protect(self, value: Any) -> Any:
        if isinstance(value, str):
            if MARK in value:
                value = value.replace(MARK, MARK + MARK)
            # Far faster than the pattern, which is needed only where one of these is.
            return self._control.sub(_break, value) if any(map(value.__contains__, self._openings)) else value
        if isinstance(value, dict):
            return {self._protect(key): self._protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._protect(item) for item in value]
        return value

    def control_at(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first unmarked control token in protected text at or after ``start``."""
        return self._control.search(text, start)

    def encode(self, text: str) -> list[int]:
        """Ids of protected or plain text. Unmarked control tokens become themselves; none are added."""
        if _SURROGATES.search(text):
            text = _SURROGATES.sub(_REPLACEMENT, text)
        if MARK not in text:
            return self._raw_ids(text)
        ids: list[int] = []
        for piece in _pieces(text):
            ids.extend(self._raw_ids(piece))
        return ids

    def encode_as_sent(self, text: str, *, special: bool) -> list[int]:
        """Ids of text in which control tokens are meant as such and no marks are; ``special``: with those that the
        tokenizer itself adds."""
        return self._raw_ids(_SURROGATES.sub(_REPLACEMENT, text), special=special)

    def _raw_ids(self, text: str, *, special: bool = False) -> list[int]:
        """As a batch of one: ``encode`` holds the interpreter's lock, so a long prompt would hold up all other calls,
        in a thread as well (1 MB of code with Qwen3's: 3.5 s; as a batch 0.1 s)."""
        return self.raw.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def encode_prompt(self, text: str) -> Ids:
        """``encode`` of a whole prompt, as an int32 array. Long stretches that were in an earlier one are not
        tokenized again."""
        starts = [0, *(match.start() for match in self._cuts.finditer(text)), len(text)]
        stretches, run = [], 0
        for start, end in itertools.pairwise(starts):
            if end - start >= _LONG:
                stretches += [self._encode_stretch(text[run:start]), self._remembered(text[start:end])]
                run = end
        return np.concatenate([*stretches, self._encode_stretch(text[run:])])

    def _encode_stretch(self, text: str) -> Ids:
        return np.asarray(self.encode(text), dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Bytes that are no UTF-8 become U+FFFD."""
        return self.raw.decode(ids, skip_special_tokens=False)


class TextStream:
    """Decodes ids as they come. A character is given out when all its bytes are there, never half of it.

    What comes out in all does not depend on how the ids were cut into calls.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = ""  # the text of ids[:_read], which gives ids after it their context
        self._read = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Text that is now complete."""
        if not ids:
            return ""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        if len(text) <= len(self._before) or text.endswith(_REPLACEMENT):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """What was held back: bytes that never became a character, as U+FFFD."""
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        out = text[len(self._before) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._before = self._tokenizer.decode(self._ids)
        return out


def unmark(text: str) -> str:
    """Protected text as its reader sees it: without marks."""
    return "".join(_pieces(text)) if MARK in text else text


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the words, the longest where several begin at one place."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _cutting(raw: RawTokenizer) -> set[str]:
    """Added tokens at whose start the library always cuts a text, whatever stands around them: it looks for them
    before it normalizes, and no other added token can reach into them. None, where one takes in what is around it."""
    added = raw.get_added_tokens_decoder().values()
    if any(token.lstrip or token.single_word for token in added):
        return set()
    inside = {char for token in added for char in token.content[1:]}
    words = {token.content for token in added if not token.normalized}
    return {word for word in words if word[0] not in inside and not word[0].isspace()}


def _break(match: re.Match[str]) -> str:
    word = match.group()
    return word[0] + MARK + word[1:]


def _pieces(text: str) -> list[str]:
    """The runs of protected text between marks; a doubled mark is the character itself."""
    pieces, start, run = [], 0, ""
    for match in _MARKED.finditer(text):
        run += text[start : match.start()]
        start = match.end()
        if match.group(1):
            run += MARK
        else:
            pieces.append(run)
            run = ""
    pieces.append(run + text[start:])
    return [piece for piece in pieces if piece]


def load_stop_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a reply, by the folder's generation_config.json, config.json and tokenizer_config.json."""
    stops: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name)
        for holder in (config, config.get("text_config") or {}):
            value = holder.get("eos_token_id")
            stops.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    eos = token_string(read_json(folder / "tokenizer_config.json").get("eos_token"))
    eos_id = tokenizer.token_id(eos) if eos else None
    if eos_id is not None:
        stops.add(eos_id)
    return frozenset(stops)


def token_string(value: Any) -> str | None:
    """A token as configs write it: a string, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no such file.

    Raises:
        UsageError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object")
    return value
