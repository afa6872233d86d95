"""Run a test command in a fresh sandbox with a copy of the workspace, and reward what it says."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from polar.contract.errors import UsageError
from polar.contract.misspelt import explained
from polar.contract.runtime import Command, ExecResult, Runtime, RuntimeFailure
from polar.contract.task import EvaluatorSpec
from polar.evaluators.base import Evaluation, EvaluationFailed, FinishedSession
from polar.evaluators.statuses import STATUSES, read_statuses

TAIL = 4000
NOT_RUN = {126: "could not be run", 127: "was not found"}
"""What a shell's exit code says of a command in it."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``expected_output_json`` maps test names to statuses; without it the exit code decides."""

    test_command: str
    expected_output_json: dict[str, str] | None = None
    timeout_seconds: float | None = None


class TestOnOutput:
    """1.0 if the tests end as expected, else 0.0.

    ``runtime.eval_prepare`` runs first, in the same fresh sandbox: that is the place to put back test files that
    the agent could have changed. Then ``config.test_command`` runs there:

    - with ``config.expected_output_json`` (``{"test name": "PASSED", ...}``) every named test must have exactly
      that status in the command's output, whatever the exit code;
    - without it, the exit code must be 0.

    A test command over ``config.timeout_seconds`` is 0.0, with ``timed_out`` in the metadata. One that had not ended
    when the evaluation's own time was over has failed nothing: the session is an error, without a reward.
    """

    __test__ = False
    name = "test_on_output"
    uses_sandbox = True

    def __init__(self, spec: EvaluatorSpec) -> None:
        try:
            self._config = msgspec.convert(spec.config, Config)
        except msgspec.ValidationError as error:
            raise UsageError(f"evaluator.config of test_on_output: {explained(error, Config)}") from None
        if not self._config.test_command.strip():
            raise UsageError("evaluator.config.test_command is empty: give the command that runs the tests")
        if self._config.timeout_seconds is not None and self._config.timeout_seconds <= 0:
            raise UsageError("evaluator.config.timeout_seconds must be above 0")
        if self._config.expected_output_json == {}:
            raise UsageError("evaluator.config.expected_output_json names no test: leave it out, or name some")
        for name, status in (self._config.expected_output_json or {}).items():
            if status not in STATUSES:
                raise UsageError(f"expected_output_json[{name!r}] is {status!r}: use one of {', '.join(STATUSES)}")
        self._env = spec.env
        self.seconds = self._config.timeout_seconds or 0.0

    async def evaluate(self, session: FinishedSession) -> Evaluation:
        try:
            runtime = await session.sandbox()
            deadline = time.monotonic() + session.timeout
            try:
                await self._prepare(session, runtime, deadline)
                result = await self._test(session, runtime, deadline)
            finally:
                await runtime.close()
        except RuntimeFailure as error:
            raise EvaluationFailed(f"the evaluation's sandbox failed: {error}") from error
        return await asyncio.to_thread(self._score, result)

    async def _prepare(self, session: FinishedSession, runtime: Runtime, deadline: float) -> None:
        for index, line in enumerate(session.task.runtime.eval_prepare):
            result = await runtime.exec(
                Command(line, env=self._env),
                timeout=max(0.1, deadline - time.monotonic()),
                logs=session.logs,
                name=f"eval-prepare-{index}",
            )
            if result.timed_out:
                raise EvaluationFailed(f"runtime.eval_prepare[{index}] was not done after {session.timeout:g} s")
            if result.exit_code != 0:
                words = " ".join(_tail(result).split())[-300:] or "it said nothing"
                raise EvaluationFailed(
                    f"runtime.eval_prepare[{index}] failed with exit code {result.exit_code}: {words}"
                )

    async def _test(self, session: FinishedSession, runtime: Runtime, deadline: float) -> ExecResult:
        left = max(0.1, deadline - time.monotonic())
        own = self._config.timeout_seconds
        result = await runtime.exec(
            Command(self._config.test_command, env=self._env),
            timeout=left if own is None else min(left, own),
            logs=session.logs,
            name="evaluation",
        )
        if result.timed_out and (own is None or left < own):
            raise EvaluationFailed(
                f"test_command was not done after {left:.0f} s, which was all that the evaluation had: set "
                "evaluator.config.timeout_seconds to give it more"
            )
        return result

    def _score(self, result: ExecResult) -> Evaluation:
        metadata: dict[str, Any] = {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "log_tail": _tail(result),
        }
        passed = result.exit_code == 0
        if self._config.expected_output_json is not None:
            found = read_statuses(_lines(result.stdout) + _lines(result.stderr), self._config.expected_output_json)
            expected = self._config.expected_output_json
            metadata["tests"] = {
                name: {"expected": status, "got": found.get(name)} for name, status in expected.items()
            }
            passed = all(found.get(name) == status for name, status in expected.items())
        if not passed and result.exit_code in NOT_RUN:
            metadata["warning"] = (
                f"test_command ended with {result.exit_code}: it, or a command in it, {NOT_RUN[result.exit_code]} "
                "(see evaluation.stderr)"
            )
        return Evaluation(outcome_reward=1.0 if passed and not result.timed_out else 0.0, metadata=metadata)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _tail(result: ExecResult) -> str:
    """The end of the output, stdout before stderr."""
    texts = (path.read_bytes()[-TAIL:].decode(errors="replace") for path in (result.stdout, result.stderr))
    return "\n".join(text.strip() for text in texts if text.strip())[-TAIL:]
