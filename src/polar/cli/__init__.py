"""The command line. One file a command; every error is one line that says what to do.

Exit codes: 0 done; 1 the job ran and something in it failed; 2 wrong usage or configuration.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import NoReturn

import typer

import polar
from polar.cli import capture, demo, doctor, export, run, show
from polar.contract.errors import PolarError, UsageError

app = typer.Typer(
    name="polar",
    help="Reinforcement learning over agent harnesses as they are.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command(
    "capture",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(capture.capture)
app.command("run")(run.run)
app.command("show")(show.show)
app.command("export")(export.export_command)
app.command("doctor")(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"polar {polar.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    level = os.environ.get("POLAR_LOG", "ERROR").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise UsageError(f"POLAR_LOG={level} is no level: use DEBUG, INFO, WARNING, ERROR or CRITICAL")
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")


def main() -> None:
    """The entry point: runs a command and turns its errors into one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="polar", standalone_mode=False))
    except PolarError as error:
        _fail(str(error), error.exit_code)
    except typer.Abort:
        _fail("interrupted", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        # The parser's own errors: a typo in an option, a missing argument.
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message(), 2)


def _fail(message: str, code: int) -> NoReturn:
    print(f"polar: {message}", file=sys.stderr)
    sys.exit(code)
