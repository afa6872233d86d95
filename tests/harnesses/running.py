"""One session of a real harness in a real sandbox, at a real gateway in ids-in, ids-out mode, with a scripted model
behind it that writes down every generation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polar.contract.chat import Chat
from polar.contract.completion import Completion
from polar.contract.result import SessionResult, Trace
from polar.contract.task import AgentSpec, EvaluatorSpec, RuntimeSpec, TaskRequest
from polar.gateway.lifecycle import Pools
from polar.gateway.node import Node
from polar.gateway.tasks import make_parts, run_tasks
from polar.harnesses.install import install
from polar.results import rebuild
from polar.store import open_store
from tests.e2e.oracle import check_accounts, check_against
from tests.support.model import ScriptedModel
from tests.support.script import Script, Step
from tests.support.tokens import ScriptedTokenEngine

Says = Callable[[str, int], Step]
"""What the model says after a prompt (its text, control tokens and all) that has so many replies in it."""


@dataclass(frozen=True)
class Ran:
    """A session that is over: its result, its calls, what the engine generated, and what the harness said.

    ``asked`` has the conversation of each call as its client sent it, by completion id.
    """

    result: SessionResult
    completions: list[Completion]
    model: ScriptedModel
    stdout: str
    stderr: str
    asked: dict[str, Chat]

    @property
    def outcome(self) -> tuple[str, str | None]:
        return self.result.status, self.result.error

    @property
    def fates(self) -> dict[str, int]:
        """How many calls came to each fate."""
        fates: dict[str, list[str]] = self.result.trajectory.metadata["reconstruction"]["completions"]
        return {fate: len(names) for fate, names in fates.items()}

    @property
    def traces(self) -> list[tuple[str, int, float | None]]:
        """Role, number of trained calls and reward of each trace."""
        found = self.result.trajectory.traces
        return [(trace.role, len(trace.completion_ids), trace.reward) for trace in found]

    @property
    def splits(self) -> list[str]:
        """Why each trace after the first began."""
        return [split["reason"] for split in self.result.trajectory.metadata["reconstruction"]["splits"]]

    def main(self) -> Trace:
        """The one trace of the main agent."""
        (trace,) = (trace for trace in self.result.trajectory.traces if trace.role == "main")
        return trace

    def text(self, ids: Any) -> str:
        """Token ids as text, control tokens and all."""
        return str(self.model.tokenizer.decode(list(map(int, ids))))

    def check(self) -> None:
        """Against the engine's own log: each generation is one completion with the ids and logprobs that were
        sampled, each trained token stands behind the context that it was sampled in, each call has one fate."""
        check_accounts(self.result, self.completions)
        generations = [asdict(generation) for generation in self.model.log.generations]
        sampled = {generation["request_id"] for generation in generations}
        refused = [each for each in self.completions if each.completion_id not in sampled]
        assert all(each.outcome == "engine_error" and not len(each.response_ids) for each in refused)
        check_against(generations, [each for each in self.completions if each not in refused], [self.result])


def qwen3_folder(assets: Path, folder: Path) -> Path:
    """Qwen3's model folder, but for the weights, made in an empty ``folder``."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(assets / "qwen3" / name)
    (folder / "chat_template.jinja").symlink_to(assets / "templates" / "Qwen-Qwen3-0.6B.jinja")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    return folder


async def run_session(
    model_dir: Path,
    folder: Path,
    name: str,
    script: Sequence[Step] | Script | Says,
    *,
    instruction: str = "Make greeting.txt with the word hello in it.",
    test: str = "true",
    prepare: Sequence[str] = (),
    context_length: int = 131072,
    timeout: float = 240.0,
    allow_internet: bool = False,
    **agent: Any,
) -> Ran:
    """Run one session of a harness, installed where it is missing.

    Args:
        test: the command whose exit code is the reward.
        context_length: tokens that the model takes.
        agent: more of the ``AgentSpec``.
    """
    install(name)
    model = ScriptedModel(model_dir, Script(), max_model_len=context_length)
    model.script = _script(model, script)
    node = Node(ScriptedTokenEngine(model), open_store(str(folder / "polar.db")), folder)
    task = TaskRequest(
        task_id="t",
        instruction=instruction,
        agent=AgentSpec(harness=None if "import_path" in agent else name, model_name="some/model", **agent),
        evaluator=EvaluatorSpec(strategy="test_on_output", config={"test_command": test}),
        runtime=RuntimeSpec(prepare=tuple(prepare), allow_internet=allow_internet),
        timeout_seconds=timeout,
    )
    await node.start()
    try:
        asked = _listen(node)
        await run_tasks(node, [(task, await make_parts(task, allow_import=True))], pools=Pools())
        result = await rebuild(node.store, (await node.store.results())[0])
        logs = folder / "sessions" / result.session_id / "attempt-1"
        said = [(logs / f"agent.{stream}").read_text(errors="replace") for stream in ("stdout", "stderr")]
        return Ran(result, await node.store.completions(result.session_id), model, said[0], said[1], asked)
    finally:
        await node.close()


def _script(model: ScriptedModel, script: Sequence[Step] | Script | Says) -> Script:
    if isinstance(script, Script):
        return script
    if isinstance(script, Sequence):
        return Script(script)
    return Script(choose=lambda talk: script(str(model.tokenizer.decode(list(talk.prompt_ids))), talk.turn))


def _listen(node: Node) -> dict[str, Chat]:
    """What each call asks from here on, by completion id."""
    asked: dict[str, Chat] = {}
    start = node.gateway.pipeline.start

    def listening(session: Any, call: Any, parsed: Any, *rest: Any) -> None:
        asked[call.call_id] = session.whole(parsed)
        start(session, call, parsed, *rest)

    node.gateway.pipeline.start = listening  # type: ignore[method-assign]
    return asked
