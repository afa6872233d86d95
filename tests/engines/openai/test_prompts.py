"""What an engine wrote before is compared and not read; the ids are the same as if it was read."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polar.contract.arrays import NO_IDS, Ids
from polar.engines.openai_prompts import PromptTexts
from polar.engines.openai_reply import ReplyReader

IDS = st.lists(st.sampled_from([0, 1, 2, 12, 123, 2**31 - 1]), max_size=4)
CALL = st.tuples(
    st.sampled_from(["one", "two"]),
    st.integers(0, 6),  # how many ids of the prompt before go on
    IDS,
    IDS,
    st.sampled_from([",", ",", ", "]),
    st.booleans(),
)


def read(payload: bytes, expected: Ids, prompts: PromptTexts, session: str) -> list[int]:
    reader = ReplyReader("u", require_token_ids=True, expected=expected, prompts=prompts, session=session)
    reader.feed(payload)
    chunk = reader.take()
    assert chunk is not None
    assert chunk.prompt_ids is not None
    return chunk.prompt_ids.tolist()


@given(st.lists(CALL, max_size=10), st.sampled_from([1 << 20, 60]))
def test_what_was_kept_changes_nothing(
    calls: list[tuple[str, int, list[int], list[int], str, bool]], limit: int
) -> None:
    prompts, before = PromptTexts(limit, smallest=0), dict[str, list[int]]()
    for session, kept, reply, new, comma, foretold in calls:
        expected = [*before.get(session, []), *reply]
        prompt = [*expected[: len(expected) if foretold else kept], *new]
        payload = json.dumps({"prompt_token_ids": prompt}, separators=(comma, ":")).encode()
        assert read(payload, np.array(expected, dtype=np.int32), prompts, session) == prompt
        before[session] = prompt


def test_the_engines_own_text_is_what_is_compared() -> None:
    prompts, first = PromptTexts(smallest=0), b'{"prompt_token_ids":[1, 2,  3]}'
    read(first, NO_IDS, prompts, "s")
    assert prompts.beginning("s", np.array([1, 2, 3, 4], dtype=np.int32)) == (b"[1, 2,  3", b",4,")
    assert prompts.beginning("s", np.array([1, 2, 3], dtype=np.int32)) == (b"[1, 2,  3", b",")
    for other in ([1, 2], [1, 9, 3, 4]):
        text = json.dumps(other, separators=(",", ":")).encode()
        assert prompts.beginning("s", np.array(other, dtype=np.int32)) == (text[:-1], b",")
    assert prompts.beginning("t", np.array([1], dtype=np.int32)) == (b"[1", b",")
