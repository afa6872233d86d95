"""Errors that a user reads: one line that says what is wrong and what to do.

Source of the exit codes: 0 done, 1 the job ran and something in it failed, 2 wrong usage or configuration.
"""

from __future__ import annotations


class PolarError(Exception):
    """The job ran and something in it failed. The message is one line, and says what to do next."""

    exit_code = 1


class UsageError(PolarError):
    """Wrong usage or configuration: nothing was started."""

    exit_code = 2


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
