"""What a user writes, checked: task files, engine choices, folders. Every mistake is one line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from polar.contract.errors import UsageError
from polar.contract.misspelt import explained
from polar.contract.task import ID_PATTERN, TaskRequest
from polar.other_clients import in_our_words
from polar.runtimes import refuse_impossible

WRITTEN_OUT = {
    "runtime": "{{backend: {}}}",
    "agent": "{{harness: {}}}",
    "builder": "{{strategy: {}, config: {{...}}}}",
    "evaluator": "{{strategy: {}, config: {{...}}}}",
}
"""How the parts of a task that have a name are written, by their field."""


def load_task(path: Path, samples: int | None = None, builder: str | None = None) -> TaskRequest:
    """A task file (YAML or JSON).

    Args:
        samples, builder: the number of sessions and the builder's strategy, instead of the file's own.

    Raises:
        UsageError: it can't be read or does not say a task; the message names file and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such task file") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder: name a task file in it, such as {path}/task.yaml") from None
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path} can't be read: {error}") from None
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if isinstance(data, dict):
        data |= {} if samples is None else {"num_samples": samples}
        data |= {} if builder is None else {"builder": {"strategy": builder}}
    return parse_task(data, str(path))


def parse_task(data: Any, source: str = "task") -> TaskRequest:
    """A task from plain data, checked whole.

    Raises:
        UsageError: a field is unknown, missing or out of range; the message names it.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{source}: a task is a mapping with task_id, instruction and agent")
    for field, form in WRITTEN_OUT.items():
        if isinstance(name := data.get(field), str):
            known = name if re.fullmatch(r"[\w-]+", name) else "NAME"
            raise UsageError(f"{source}: {field} has more than a name: write {form.format(known)}")
    try:
        task = msgspec.convert(in_our_words(data), TaskRequest)
        if task.runtime.backend == "local":
            refuse_impossible(task.runtime)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {explained(error, TaskRequest)}") from None
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    problem = _problem(task)
    if problem:
        raise UsageError(f"{source}: {problem}")
    return task


def _problem(task: TaskRequest) -> str | None:
    """What is wrong with a task, beyond its shape."""
    if not re.fullmatch(ID_PATTERN, task.task_id) or len(task.task_id) > 120:
        return "task_id must be letters, digits, '_', '.' or '-', begin with a letter or digit, 120 at most"
    try:
        text = msgspec.json.encode(task).decode()
    except (UnicodeError, ValueError, RecursionError):
        return "there is half a character (a lone surrogate) or too deep a nesting in it"
    if "\\u0000" in text:
        return "there is a NUL character in it"
    if not task.instruction.strip():
        return "instruction is empty: say what the agent is to do"
    if task.num_samples < 1:
        return "num_samples must be 1 or more"
    if not 0 <= task.dispatch_priority <= 100:
        return "dispatch_priority must be from 0 to 100"
    usable = task.early_stop_min_usable_sessions
    if usable is not None and not 1 <= usable <= task.num_samples:
        return "early_stop_min_usable_sessions must be from 1 to num_samples"
    limits = {
        "timeout_seconds": task.timeout_seconds,
        "agent_timeout_seconds": task.agent_timeout_seconds,
        "metadata.agent_timeout": task.metadata.get("agent_timeout"),
    }
    for name, seconds in limits.items():
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and math.isfinite(seconds) and seconds > 0):
            return f"{name} must be a number of seconds over 0"
    sampling = task.sampling
    if sampling.temperature is not None and not 0 <= sampling.temperature < math.inf:
        return "sampling.temperature must be 0 or more"
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        return "sampling.top_p must be over 0 and at most 1"
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        return "sampling.max_tokens must be 1 or more"
    if (task.agent.harness is None) == (task.agent.import_path is None):
        return "agent needs one of harness and import_path"
    return None


def session_id(task: TaskRequest, sample: int) -> str:
    """The id of a task's n-th session."""
    return task.session_id(sample)
