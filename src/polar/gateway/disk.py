"""A full disk is no session's fault: none may end because of it, and none is begun on one."""

from __future__ import annotations

import shutil
from pathlib import Path

LEAST_ROOM = 1 << 20
"""Bytes that must be free where sessions and their store are."""


def is_full(folder: Path) -> bool:
    """Whether there is no room for more where this folder is."""
    return shutil.disk_usage(folder).free < LEAST_ROOM


def full(folder: Path) -> str:
    """That in a line for a person."""
    return f"the disk of {folder} is full: make room there"
