"""Signatures that are read back: each says what was signed, and none is much more than what was sent."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.dialects.signatures import Signed, read_signature, signature


@given(st.none() | st.text(), st.none() | st.text(min_size=1))
def test_what_was_signed_is_read_back(call_id: str | None, reasoning: str | None) -> None:
    assert read_signature(signature(call_id, reasoning)) == Signed(call_id, reasoning)


@pytest.mark.parametrize("times", [1, 100, 100_000])
def test_a_thought_that_went_in_circles_is_read_back(times: int) -> None:
    assert read_signature(signature(None, "Wait. " * times)) == Signed(None, "Wait. " * times)


def test_a_small_signature_of_something_huge_is_passed_over() -> None:
    """Anybody can write one, and a body of a few megabytes can hold a thousand."""
    packed = b"\x0apolar" + zlib.compress(b'[null,"' + b"a" * 10_000_000 + b'"]')
    assert read_signature(base64.b64encode(packed).decode()) == Signed()
