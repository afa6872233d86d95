"""Half characters in JSON bodies."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from polar.surrogates import mend_surrogates

PIECES = ["\ud83d", "\ude00", "\ud800", "a", "\\", "u", '"', "\U0001f680"]
ANY_TEXT = st.lists(st.sampled_from(PIECES)).map("".join)


@given(ANY_TEXT)
def test_a_mended_body_is_strict_json_and_differs_only_in_the_halves(text: str) -> None:
    body = json.dumps({"x": text}).encode()
    mended = json.loads(mend_surrogates(body))["x"]
    whole = json.loads(body)["x"]  # joins pairs, keeps halves
    assert mended == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in whole)


def test_an_escaped_backslash_before_u_is_no_escape() -> None:
    body = rb'{"x": "\\ud83d"}'
    assert mend_surrogates(body) == body
