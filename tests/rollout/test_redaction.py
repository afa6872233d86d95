"""Text taken out before it is stored: its ids go with it, and what goes back to it is not trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polar import redaction
from polar.contract.chat import Message, Sampling, Text, Tool
from polar.contract.completion import Completion
from polar.contract.errors import PolarError, UsageError
from polar.contract.task import BuilderSpec
from polar.redaction import Redaction, RedactionConfig, load_redaction
from polar.trajectories.assemble import assemble
from tests.rollout.making import completion


def hide(text: str) -> str:
    return text.replace("secret", "[gone]")


def fails(text: str) -> str:
    raise RuntimeError("no idea")


def stored(completions: list[Completion], *, keep_ids: bool = False) -> list[Completion]:
    session = Redaction([("hide", hide)], keep_ids=keep_ids).session()
    return [session.apply(each) for each in completions]


def with_secret() -> list[Completion]:
    """Three calls in a row; the second one's tool result has the secret in it."""
    tool = (Message("tool", (Text("a secret"),), tool_call_id="c0"),)
    return [completion(seq=0), completion(seq=1, messages=tool), completion(seq=2)]


def test_a_call_without_a_secret_stays_as_it_is() -> None:
    assert stored([completion()])[0] is not None
    before, (after,) = completion(), stored([completion()])
    assert np.array_equal(before.response_ids, after.response_ids)
    assert after.outcome == "ok"


def test_a_redacted_call_loses_its_ids_and_so_does_what_goes_back_to_it() -> None:
    first, second, third = stored(with_secret())
    assert first.outcome == "ok"
    assert second.messages[0].content == (Text("a [gone]"),)
    for each in (second, third):
        assert each.outcome == "redacted"
        assert (each.shared, len(each.prompt_delta), len(each.response_ids), len(each.logprobs)) == (0, 0, 0, 0)


def test_every_text_of_a_call_is_looked_at() -> None:
    reply = Message("assistant", "my secret", reasoning="think secret", tool_calls=completion().reply.tool_calls)
    (after,) = stored([completion(reply=reply, messages=(Message("system", "secret"), Message("user", "x")))])
    assert "secret" not in repr((after.messages, after.reply))


def test_what_a_tool_says_of_itself_is_looked_at() -> None:
    schema = {"properties": {"x": {"description": "a secret", "enum": ["secret", 1, None]}}}
    tools = (Tool("calc", "knows the secret", schema), Tool("bare"))
    first, second = stored([completion(tools=tools), completion(seq=1)])
    described = {"properties": {"x": {"description": "a [gone]", "enum": ["[gone]", 1, None]}}}
    assert first.tools == (Tool("calc", "knows the [gone]", described), Tool("bare"))
    assert [each.outcome for each in (first, second)] == ["redacted", "redacted"], "its ids say the same"
    assert schema["properties"]["x"]["description"] == "a secret", "the harness's own stays"


def test_names_of_an_object_that_become_alike_are_all_kept() -> None:
    said = {"secret": 1, "[gone] (2)": {"a secret": 2}, "[gone]": 3, "x": 4}
    kept = Redaction([("hide", hide)]).value(said)
    assert kept == {"[gone]": 1, "[gone] (2)": {"a [gone]": 2}, "[gone] (3)": 3, "x": 4}


def test_what_is_not_in_the_ids_costs_none() -> None:
    (after,) = stored([completion(detail="the engine said secret", sampling=Sampling(stop=("secret",)))])
    assert (after.detail, after.sampling.stop) == ("the engine said [gone]", ("[gone]",))
    assert (after.outcome, len(after.response_ids)) == ("ok", 4)


def test_an_error_that_can_not_be_redacted_is_not_kept() -> None:
    assert Redaction([("hide", hide)]).error("a secret") == "a [gone]"
    kept = Redaction([("fails", fails)]).error("a secret")
    assert "secret" not in kept
    assert "fails failed" in kept


def test_a_file_is_redacted_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "PIECE", 10)
    path = tmp_path / "agent.stdout"
    path.write_bytes(b"one\r\n\xff a secret here\n\na secret")
    Redaction([("hide", hide)]).file(path)
    assert path.read_bytes() == "one\r\n\ufffd a [gone] here\n\na [gone]".encode()
    with pytest.raises(PolarError, match="fails failed"):
        Redaction([("fails", fails)]).file(path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_redacted_is_accounted_for_and_not_trained() -> None:
    trajectory = assemble(stored(with_secret()), BuilderSpec())
    assert trajectory.metadata["reconstruction"]["completions"] == {
        "trained": ["t1-0.1-0"],
        "redacted": ["t1-0.1-1", "t1-0.1-2"],
    }
    assert len(trajectory.traces) == 1


def test_with_keep_ids_only_the_text_goes() -> None:
    before, after = with_secret(), stored(with_secret(), keep_ids=True)
    assert "secret" not in repr([each.messages for each in after])
    for one, other in zip(before, after, strict=True):
        assert one.outcome == other.outcome == "ok"
        assert np.array_equal(one.prompt_delta, other.prompt_delta)
        assert np.array_equal(one.response_ids, other.response_ids)


def test_a_call_that_did_not_end_well_keeps_its_reason() -> None:
    (after,) = stored([completion(outcome="abandoned", messages=(Message("user", "secret"),))])
    assert (after.outcome, len(after.response_ids)) == ("abandoned", 0)


def test_what_can_not_be_redacted_is_not_stored() -> None:
    session = Redaction([("fails", fails)]).session()
    with pytest.raises(PolarError, match="fails failed: RuntimeError"):
        session.apply(completion())


def test_hooks_are_functions_by_name() -> None:
    assert load_redaction(RedactionConfig()) is None
    made = load_redaction(RedactionConfig(hooks=("html:escape",)))
    assert made is not None
    after = made.session().apply(completion(messages=(Message("user", "<b>"),)))
    assert after.messages[0].content == "&lt;b&gt;"
    for bad in ("no_such_module_at_all:x", "html:no_such", "html", ":x", "html:__name__"):
        with pytest.raises(UsageError, match=r"redaction\.hooks"):
            load_redaction(RedactionConfig(hooks=(bad,)))
