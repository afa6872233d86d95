"""The conformance table of docs/rendering.md, made by running the real templates.

``python -m tests.rendering.conformance`` writes it into the page; with ``--check`` it exits with 1 where the page is
out of date.
A cell says ``exact`` where the template only appends and the next call is bridged from the sampled ids, which are
then followed by just what the template appends; otherwise why the bridge is declined. ``exact`` is only said after
this was checked: of the reply as the template itself writes it, bridged and rendered afresh give the same ids.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from polar.contract.chat import Chat, Message
from polar.rendering.base import Declined
from polar.rendering.generic import TemplateRenderer
from polar.rendering.offered import DROPPED
from polar.rendering.parsers import same_reply
from tests.rendering import assets
from tests.rendering.models import MODELS, Model, load
from tests.rendering.talk import WEATHER, Talk, result, system, user
from tests.rendering.written import Arguments

PAGE = Path(__file__).parents[2] / "docs" / "rendering.md"
BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"
COLUMNS = (
    *("Family", "Template", "Tokenizer", "Tools in prompt", "Calls", "Thinking"),
    *("Tool result", "Tool result, after thinking", "User turn", "User turn, after thinking", "Broken call"),
)
CALL: tuple[str, Arguments] = (WEATHER.name, {"city": "Paris"})
NONE = "–"


@dataclass(frozen=True)
class Case:
    """One reply and what follows it."""

    thought: str | None
    calls: bool


def cell(model: Model, renderer: TemplateRenderer, case: Case) -> str:
    """What becomes of the calls after two such replies."""
    if (case.thought and not model.think) or (case.calls and not model.call):
        return NONE
    talk = _asked(model, renderer, case)
    for which in ("", ", from the second on"):
        reply = _sampled(model, talk, case)
        outcome = talk.go_on(*_follow(case, reply))
        if isinstance(outcome, Declined):
            return f"{outcome.reason}{which}"
    return "exact" if _bridge_is_the_full_rendering(model, renderer, case) else "bridged, but not as rendered"


def broken(model: Model, renderer: TemplateRenderer) -> str:
    """How a call with arguments that are no JSON, or that was cut short, is read, and whether it is bridged."""
    if not model.call:
        return NONE
    talk = _asked(model, renderer, Case(None, True))
    assert talk.prompt is not None
    text = model.reply(talk.prompt, None, "", (WEATHER.name, {"city": "BROKEN"}))
    end = model.call_end or model.end
    if '"BROKEN"' in text:
        sampled = text.replace('"BROKEN"', "BROKEN")
    else:
        sampled = text[: text.index("BROKEN") + len("BROK")] + end
    message = talk.sample(sampled).message
    read = "raw arguments" if message.tool_calls else "text"
    if not message.tool_calls:
        assert "BROK" in str(message.content)
        outcome = talk.go_on(user("That was no call."))
    else:
        assert "BROK" in message.tool_calls[0].arguments
        outcome = talk.go_on(result("not valid JSON", message))
    return f"{read}, {outcome.reason if isinstance(outcome, Declined) else 'exact'}"


def _asked(model: Model, renderer: TemplateRenderer, case: Case) -> Talk:
    talk = Talk(renderer, tools=(WEATHER,) if model.call else (), template_args=model.args)
    talk.ask(system("Be brief."), user("Weather in Paris?"))
    return talk


def _sampled(model: Model, talk: Talk, case: Case) -> Message:
    """A reply in the model's own form, which must be read as what it says."""
    assert talk.prompt is not None
    text = "" if case.calls else "Sunny."
    sampled = model.reply(talk.prompt, case.thought, text, *([CALL] if case.calls else []))
    reply = talk.sample(sampled).message
    assert same_reply(reply, _meant(talk, case, reply)), (model.name, reply)
    return reply


def _meant(talk: Talk, case: Case, reply: Message) -> Message:
    said = Message(role="assistant", content="" if case.calls else "Sunny.", reasoning=case.thought)
    if case.calls:
        assert len(reply.tool_calls) == 1
        assert reply.tool_calls[0].name == WEATHER.name
        assert reply.tool_calls[0].arguments.replace(" ", "") == '{"city":"Paris"}'
        said = Message(role="assistant", reasoning=case.thought, tool_calls=reply.tool_calls)
    return said


def _follow(case: Case, reply: Message) -> list[Message]:
    return [result("sunny, 20 degrees", reply)] if case.calls else [user("And Rome?")]


def _bridge_is_the_full_rendering(model: Model, renderer: TemplateRenderer, case: Case) -> bool:
    """The same conversation, the reply sampled as the template writes it: bridged and rendered afresh are one text,
    and the same ids from the end of the reply on."""
    talk = _asked(model, renderer, case)
    assert talk.prompt is not None
    decode, start = renderer.tokenizer.decode, len(talk.prompt.ids)
    reply = _sampled(model, talk, case)
    talk.messages += _follow(case, reply)
    full = talk.full()
    before, whole = decode(talk.prompt.ids.tolist()), decode(full)
    end_text = (model.call_end if case.calls else None) or model.end
    end = renderer.tokenizer.token_id(end_text)
    if not whole.startswith(before) or end is None:
        return False
    again = _asked(model, renderer, case)
    canonical = again.sample(whole[len(before) : whole.index(end_text, len(before))] + end_text).message
    outcome = again.go_on(*_follow(case, canonical))
    if isinstance(outcome, Declined):
        return False
    ids, tail = outcome.ids.tolist(), full[full.index(end, start - 1) :]
    return decode(ids) == whole and ids[-len(tail) :] == tail and same_reply(canonical, reply)


def row(folder: Path, model: Model) -> tuple[str, ...]:
    """The cells of one model."""
    renderer = load(folder, model)
    family = renderer.family
    thinking = "channels" if family.inner_end else _tags(family.thinking.open) if family.thinking else NONE
    cases = [Case(thought, calls) for calls in (True, False) for thought in (None, "Let me see.")]
    cells = [cell(model, renderer, case) for case in cases]
    tokenizer = f"{model.tokenizer}, standing in" if model.stands_in else model.tokenizer
    reads = (offered(model, renderer), family.calls or NONE, thinking)
    return (model.family, model.name, tokenizer, *reads, *cells, broken(model, renderer))


def offered(model: Model, renderer: TemplateRenderer) -> str:
    """Whether tools reach the prompt."""
    chat = Chat("m", (user("Weather in Paris?"),), tools=(WEATHER,), template_args=model.args)
    prompt = renderer.render(chat)
    written = WEATHER.name in renderer.tokenizer.decode(prompt.ids.tolist())
    assert written == (renderer.tools_lost(chat, prompt) != DROPPED), model.name
    return "yes" if written else "no"


def _tags(tag: str) -> str:
    return f"`{tag.strip()}`".replace("|", "\\|")


def table(folder: Path) -> str:
    """The whole table in Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(folder, model) for model in MODELS)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def replaced(page: str, begin: str, end: str, text: str) -> str:
    """The page with what stands between two marks replaced."""
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main() -> int:
    """Write or check the page."""
    page, folder = PAGE.read_text(encoding="utf-8"), assets.fetch()
    new = replaced(page, BEGIN, END, table(folder))
    if "--check" in sys.argv[1:]:
        return int(page != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
