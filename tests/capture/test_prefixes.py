"""The longest known beginning of a sequence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar.capture.prefixes import Prefixes

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6).map(bytes), max_size=12)


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=8).map(bytes))
def test_it_finds_just_the_known_sequences_that_a_new_one_begins_with(known: list[bytes], new: bytes) -> None:
    prefixes: Prefixes[tuple[int, bytes]] = Prefixes()
    for number, sequence in enumerate(known):
        prefixes.add(sequence, (number, sequence))
    newest = {sequence: number for number, sequence in enumerate(known)}
    expected = [(number, sequence) for sequence, number in newest.items() if new.startswith(sequence)]
    assert prefixes.find(new) == sorted(expected, key=lambda found: -len(found[1]))
