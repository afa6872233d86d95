"""The command line. One file a command; every error is one line that says what to do.

Exit codes: 0 done; 1 the job ran and something in it failed; 2 wrong usage or configuration; 130 (Ctrl-C) and 143
(SIGTERM) where it was interrupted before its end.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import NoReturn

import typer

import polar
from polar.contract.errors import Interrupted, PolarError, UsageError

COMMANDS = {
    "demo": "demo:demo",
    "capture": "capture:capture",
    "run": "run:run",
    "serve": "serve:serve",
    "up": "up:up",
    "submit": "service:submit",
    "status": "service:status",
    "results": "service:results",
    "cancel": "service:cancel",
    "nodes": "service:nodes",
    "drain": "service:drain",
    "show": "show:show",
    "export": "export:export_command",
    "doctor": "doctor:doctor",
}
"""Where each command is. Only the one that is called is imported: the others bring much that it does not need."""


def command_line(names: Iterable[str]) -> typer.Typer:
    """The command line with these commands."""
    app = typer.Typer(
        name="polar",
        help="Reinforcement learning over agent harnesses as they are.",
        no_args_is_help=False,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode=None,
    )
    app.callback()(_main)
    for name in names:
        module, _, function = COMMANDS[name].partition(":")
        # What follows the command of ``capture`` is that command's own.
        settings = {"allow_interspersed_args": False, "ignore_unknown_options": False} if name == "capture" else {}
        app.command(name, context_settings=settings)(getattr(import_module(f"polar.cli.{module}"), function))
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"polar {polar.__version__}")
        raise typer.Exit


def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    level = os.environ.get("POLAR_LOG", "ERROR").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise UsageError(f"POLAR_LOG={level} is no level: use DEBUG, INFO, WARNING, ERROR or CRITICAL")
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")
    if "POLAR_LOG" not in os.environ:
        # How an engine is used, that one is away, or another version of a harness, changes what comes out: nobody
        # should have to ask for that.
        for name in ("polar.engines", "polar.harnesses"):
            logging.getLogger(name).setLevel(logging.WARNING)


def main() -> None:
    """The entry point: runs a command and turns its errors into one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    args = sys.argv[1:] or ["--help"]
    named = next((arg for arg in args if not arg.startswith("-")), None)
    if named in COMMANDS:
        chosen: Iterable[str] = [named]
    else:
        chosen = [] if "--version" in args else COMMANDS
    try:
        sys.exit(command_line(chosen)(args, prog_name="polar", standalone_mode=False))
    except PolarError as error:
        _fail(error)
    except typer.Abort:
        _fail(Interrupted("interrupted", signal.SIGINT))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        # The parser's own errors: a typo in an option, a missing argument.
        if not hasattr(error, "format_message"):
            raise
        _fail(UsageError(error.format_message()))


def _fail(error: PolarError) -> NoReturn:
    print(f"polar: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
