"""Why: what ``runtime.prepare`` does to the agent's sandbox, it may have to do to the evaluation's as well."""

from __future__ import annotations

from pathlib import Path

from polar.contract.runtime import Command, Runtime, RuntimeFailure
from polar.contract.task import TaskRequest
from polar.harnesses.plans import last_words


async def prepare(runtime: Runtime, task: TaskRequest, logs: Path, name: str) -> None:
    """Run the lines of ``runtime.prepare``, one after another; what they say goes to ``logs/name-N.stdout`` and
    ``.stderr``.

    Raises:
        RuntimeFailure: one did not end well; the message has its number and its last words.
    """
    for index, line in enumerate(task.runtime.prepare):
        command = Command(line, env=task.runtime.env)
        result = await runtime.exec(command, timeout=task.timeout_seconds, logs=logs, name=f"{name}-{index}")
        if result.exit_code != 0:
            ended = "timed out" if result.timed_out else f"failed with exit code {result.exit_code}"
            raise RuntimeFailure(f"prepare[{index}] {ended}: {last_words(result)}")
