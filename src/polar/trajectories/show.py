"""A session in the terminal: what was captured, what is trained, and where and why its traces part.

Only what the trajectory itself holds is shown, so it needs no tokenizer and no engine. Every mark that has a
colour has a word or a sign too, for terminals without colours. What a model or a tool printed is shown without
its control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from polar.contract.chat import Image, Message
from polar.contract.result import SessionResult, Trace, Trajectory

REASONS = {
    "new_conversation": "another conversation begins",
    "resampled": "the same conversation was asked again",
    "history_edited": "the harness edited its history",
    "reply_not_recorded": "the history has a reply that was not sampled here",
    "retokenized": "the tokens sent back are not those that were sampled",
    "parent_without_ids": "the call before it has no token ids",
    "fork": "another trace already continues the call before it",
    "role_changed": "the call before it belongs to another role",
    "per_request": "one trace for each call",
    "template_rewrites_history": "the model's template rewrites earlier turns here",
    "reply_not_rendered": "the reply before it can't be put back as it was sampled",
    "no_turn_end": "the reply before it did not end its turn",
    "tools_changed": "the tools offered changed",
}
"""What the short reasons in the reconstruction report mean."""

_COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_CONTROL = {code: "?" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_RULE = 80
_CONTEXT_CHARS = 400
_REPLY_CHARS = 4000
_LAST_WORDS = 200


def show_session(result: SessionResult, tokens: bool = False) -> RenderableType:
    """A session's header and all its traces.

    Args:
        tokens: also list every response token with its logprob.
    """
    parts: list[RenderableType] = [_header(result)]
    for index, trace in enumerate(result.trajectory.traces):
        parts.append(_trace_title(index, trace))
        parts.extend(_turns(trace))
        if tokens:
            parts.append(_token_view(trace))
    return Group(*parts)


def _header(result: SessionResult) -> Text:
    trajectory = result.trajectory
    colour = "green" if result.status == "COMPLETED" else "red"
    text = Text.assemble(
        ("session ", "bold"), f"{result.session_id}  task {result.task_id}  attempt {result.attempt}  "
    )
    text.append(f"{result.status}\n", style=f"bold {colour}")
    error = result.error or trajectory.error
    if error:
        text.append(f"error: {_clean(error)}\n", style="red")
    text.append(f"reward: {_rewards(trajectory)}\n")
    evaluation = trajectory.metadata.get("evaluation") or {}
    if "strategy" in evaluation:
        text.append(f"evaluation: {_evaluation(evaluation)}\n")
    report = trajectory.metadata.get("reconstruction", {})
    fates = report.get("completions", {})
    total = sum(len(ids) for ids in fates.values())
    counts = ", ".join(f"{len(ids)} {fate}" for fate, ids in fates.items()) or "none"
    text.append(f"model calls: {total} ({counts})\n")
    merged = trajectory.metadata.get("merge_factor", 0.0)
    trained = report.get("tokens_trained", 0)
    text.append(f"traces: {len(trajectory.traces)}, {merged:.2f} calls each, {trained} tokens trained\n")
    for split in report.get("splits", []):
        reason = split["reason"]
        words = REASONS.get(reason, reason.replace("_", " "))
        text.append(f"split at {split['completion_id']}: {words} ({reason})\n")
    for warning in trajectory.metadata.get("warnings") or ():
        text.append(f"warning: {_clean(warning)}\n", style="yellow")
    return text


def _rewards(trajectory: Trajectory) -> str:
    """The rewards of the session's traces in a few words; where they have none, that of the whole session."""
    rewards = list(dict.fromkeys(t.reward for t in trajectory.traces if t.reward is not None))
    if not rewards:
        return _number((trajectory.metadata.get("evaluation") or {}).get("outcome_reward"))
    return ", ".join(_number(reward) for reward in rewards)


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


def _evaluation(found: Mapping[str, Any]) -> str:
    """Why the reward is what it is, in one line, as far as the evaluator's metadata say so."""
    for_each = found.get("outcome_reward") is None and found.get("trace_rewards")
    reward = "a reward for each trace" if for_each else f"reward {_number(found.get('outcome_reward'))}"
    parts = [str(found["strategy"]), reward]
    if found.get("timed_out") is True:
        parts.append("timed out")
    elif isinstance(code := found.get("exit_code"), int):
        parts.append(f"exit code {code}")
    if isinstance(tests := found.get("tests"), dict):
        pairs = [(test.get("got"), test.get("expected")) for test in tests.values() if isinstance(test, dict)]
        wrong = sum(got != expected for got, expected in pairs)
        parts += [f"{wrong} of {len(tests)} tests not as expected"] if wrong else []
    said = found.get("log_tail")
    lines = said.split("\n") if isinstance(said, str) else []
    last = next((line for line in map(str.strip, reversed(lines)) if line), "")
    if len(last) > _LAST_WORDS:
        last = f"... {last[-_LAST_WORDS:]}"
    return _clean(" ".join(", ".join(parts).split()) + (f": {last}" if last else ""))


def _trace_title(index: int, trace: Trace) -> RenderableType:
    trained = int(trace.loss_mask.sum())
    text = Text.assemble(
        (f"trace {index}", "bold"),
        f"  {trace.role}  reward {_number(trace.reward)}  finish {trace.finish_reason}  "
        f"calls {len(trace.completion_ids)}\n",
        f"{len(trace.prompt_ids)} prompt tokens, {len(trace.response_ids)} response tokens, {trained} trained",
    )
    if not trace.metadata.get("context_exact", True):
        drifted = trace.metadata.get("drifted_tokens", "some")
        text.append(f"\ncontext not exact: {drifted} tokens drifted", style="bold red")
    return Group(Constrain(Rule(characters="-", style="dim"), _RULE), text)


def _turns(trace: Trace) -> Iterator[RenderableType]:
    for message in trace.prompt_messages:
        yield _turn(message, "", _CONTEXT_CHARS)
    notes = _reply_notes(trace)
    for index, message in enumerate(trace.response_messages):
        note = notes.get(index)
        yield _turn(message, note or "", _REPLY_CHARS if note else _CONTEXT_CHARS)


def _reply_notes(trace: Trace) -> dict[int, str]:
    """For each response message that is trained: its tokens and how likely they were."""
    notes: dict[int, str] = {}
    for index, start, end in trace.metadata.get("replies", []):
        mean = float(trace.response_logprobs[start:end].mean())
        notes[index] = f"  [trained: {end - start} tokens, mean logprob {mean:.3f}]"
    return notes


def _turn(message: Message, note: str, limit: int) -> RenderableType:
    colour = _COLOURS[message.role]
    head = Text.assemble((message.role, f"bold {colour}"), (note, "bold"))
    body = Text()
    if message.reasoning:
        body.append(f"(thinking) {_shorten(message.reasoning, limit)}\n", style="italic dim")
    content = _shorten(_words(message), limit)
    if content:
        body.append(f"{content}\n", style="" if note else "dim")
    for call in message.tool_calls:
        body.append(f"-> {_clean(call.name)}({_shorten(call.arguments, limit)})\n", style=colour)
    body.rstrip()
    return Group(head, Padding(body, (0, 0, 0, 2), expand=False)) if body.plain else head


def _words(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join("[image]" if isinstance(p, Image) else p.text for p in message.content)


def _shorten(text: str, limit: int) -> str:
    text = _clean(text).strip()
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [{len(text) - limit} more characters]"


def _clean(text: str) -> str:
    """The text without what could move the cursor or change colours."""
    return text.translate(_CONTROL)


def _token_view(trace: Trace) -> Text:
    """Response ids in runs: ``+`` trained, each with its logprob; ``.`` context."""
    text = Text("tokens (+ trained as id/logprob, . context)\n", style="bold")
    for start, end in _runs(trace.loss_mask.tolist()):
        if trace.loss_mask[start]:
            pairs = zip(trace.response_ids[start:end], trace.response_logprobs[start:end], strict=True)
            text.append("+ " + " ".join(f"{int(i)}/{float(p):.2f}" for i, p in pairs) + "\n", style="green")
        else:
            text.append(". " + " ".join(str(i) for i in trace.response_ids[start:end].tolist()) + "\n", "dim")
    return text


def _runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``[start, end)`` of each stretch of equal mask."""
    start = 0
    for position in range(1, len(mask) + 1):
        if position == len(mask) or mask[position] != mask[start]:
            yield start, position
            start = position
