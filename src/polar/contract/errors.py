"""Errors that a user reads: one line that says what is wrong and what to do.

Source of the exit codes: 0 done, 1 the job ran and something in it failed, 2 wrong usage or configuration. A job that
was interrupted has not ended: 128 and the signal's number, as shells have it (Ctrl-C 130, SIGTERM 143).
"""

from __future__ import annotations

import signal


class PolarError(Exception):
    """The job ran and something in it failed. The message is one line, and says what to do next."""

    exit_code = 1


class UsageError(PolarError):
    """Wrong usage or configuration: nothing was started."""

    exit_code = 2


class Interrupted(PolarError):
    """A signal ended the job before its end.

    Args:
        what: the line that a user reads.
        by: the signal.
    """

    def __init__(self, what: str, by: signal.Signals) -> None:
        super().__init__(what)
        self.exit_code = 128 + by


class NotAllowed(UsageError):
    """Something that the operator has not allowed was asked for: the message names the setting. A server writes it to
    its audit log."""


class MissingExtra(UsageError):
    """An optional part of Polar is not installed.

    Args:
        what: the feature that was asked for, as the user would say it.
        extra: the name of the extra that brings it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional part: pip install 'polar[{extra}]'")
