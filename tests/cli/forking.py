"""Why: the command line takes a second to import, and there are dozens of mistakes to make with it. This
process imports it once and forks for every command: each has an exit code, a stdout and a stderr of its own.

It reads a request a line (``args``, ``cwd``, ``env``, and ``files`` for stdin, stdout and stderr) and answers
each with the exit code, negative for a signal.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import suppress
from typing import Any

import polar.cli
import polar.engines.openai
from polar.contract.errors import PolarError


def _become(request: dict[str, Any]) -> None:
    for number, (path, flags) in enumerate(
        zip(request["files"], (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)
    ):
        fd = os.open(path, flags)
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["polar", *request["args"]]
    polar.cli.main()


def main() -> None:
    with suppress(PolarError):  # what is imported when used is imported here
        polar.cli.command_line(["run"])(["run", f"{os.devnull}/task.yaml"], standalone_mode=False)
    gc.freeze()  # so that a child leaves these pages alone
    requests = sys.stdin.buffer
    while line := requests.readline():
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
