"""Which call a repeated request is: one harness turn is one generation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from polar.capture.retries import KeyReused, RetryLedger


@dataclass
class Call:
    waiting: int = 1
    delivered: bool = False
    failed: bool = False


def ledger(call: Call, key: str | None = None) -> RetryLedger[Call]:
    made: RetryLedger[Call] = RetryLedger()
    made.add(b"body", call, key=key)
    return made


def test_a_marked_retry_joins_the_call_in_flight_and_gets_the_finished_one() -> None:
    for call in (Call(), Call(waiting=0, delivered=True)):
        assert ledger(call).find(b"body", key=None, marked=True) is call


def test_two_clients_that_are_both_there_are_two_calls() -> None:
    assert ledger(Call()).find(b"body", key=None, marked=False) is None


def test_an_unmarked_repetition_after_the_client_went_away_is_the_same_call() -> None:
    call = Call(waiting=0)
    assert ledger(call).find(b"body", key=None, marked=False) is call


def test_an_unmarked_repetition_of_an_answered_call_is_sampled_afresh() -> None:
    assert ledger(Call(waiting=0, delivered=True)).find(b"body", key=None, marked=False) is None


def test_a_failed_call_is_started_afresh() -> None:
    call = Call(waiting=0, failed=True)
    assert ledger(call, "k").find(b"body", key=None, marked=True) is None
    assert ledger(call, "k").find(b"body", key="k", marked=True) is None


def test_another_body_is_another_call() -> None:
    assert ledger(Call()).find(b"other", key=None, marked=True) is None


def test_an_idempotency_key_names_the_call_and_refuses_another_body() -> None:
    call = Call(waiting=0, delivered=True)
    assert ledger(call, "k").find(b"body", key="k", marked=False) is call
    with pytest.raises(KeyReused):
        ledger(call, "k").find(b"other", key="k", marked=False)
    assert ledger(call, "k").find(b"body", key="new", marked=False) is None
    left = Call(waiting=0)
    assert ledger(left, "k").find(b"body", key="new", marked=False) is None
    assert ledger(left, "k").find(b"body", key="new", marked=True) is None
    assert ledger(left, "k").find(b"body", key="k", marked=False) is left


def test_old_calls_are_let_go() -> None:
    calls: RetryLedger[Call] = RetryLedger(keep=2)
    made = [Call() for _ in range(3)]
    for index, call in enumerate(made):
        calls.add(bytes([index]), call, key=str(index))
    found = [calls.find(bytes([index]), key=None, marked=True) for index in range(3)]
    assert found == [None, made[1], made[2]]
    assert calls.find(b"\x00", key="0", marked=False) is None


def test_a_call_that_came_again_is_kept_as_the_newest() -> None:
    calls: RetryLedger[Call] = RetryLedger(keep=2)
    again = Call()
    for digest, call in ((b"a", Call()), (b"b", Call()), (b"a", again), (b"c", Call())):
        calls.add(digest, call, key=None)
    assert calls.find(b"a", key=None, marked=True) is again
    assert calls.find(b"b", key=None, marked=True) is None


def test_each_of_several_failed_calls_is_started_afresh() -> None:
    """Best of three, and the engine was away: three retries are three calls, and none is a sibling's."""
    calls: RetryLedger[Call] = RetryLedger()
    first = [Call() for _ in range(3)]
    for call in first:
        calls.add(b"body", call, key=None)
    for call in first:
        call.waiting, call.failed = 0, True
    for _ in first:
        assert calls.find(b"body", key=None, marked=True) is None
        calls.add(b"body", newest := Call(), key=None)
    assert calls.find(b"body", key=None, marked=True) is newest, "all failed calls have come again"


def test_the_retry_of_a_failed_call_does_not_get_what_another_was_answered() -> None:
    calls: RetryLedger[Call] = RetryLedger()
    calls.add(b"body", Call(waiting=0, delivered=True), key=None)
    calls.add(b"body", Call(waiting=0, failed=True), key=None)
    assert calls.find(b"body", key=None, marked=True) is None


def test_of_many_calls_whose_clients_timed_out_each_is_joined() -> None:
    calls: RetryLedger[Call] = RetryLedger()
    left = [Call() for _ in range(64)]
    for call in left:
        calls.add(b"body", call, key=None)
    for call in left:
        call.waiting = 0
    for call in left:
        assert calls.find(b"body", key=None, marked=True) is call
        call.waiting = 1


def test_a_key_that_joined_a_call_names_it_from_then_on() -> None:
    left = Call(waiting=0)
    calls = ledger(left)
    assert calls.find(b"body", key="k", marked=False) is left
    left.delivered = True
    assert calls.find(b"body", key="k", marked=False) is left
    with pytest.raises(KeyReused):
        calls.find(b"other", key="k", marked=False)
