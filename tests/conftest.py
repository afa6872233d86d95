"""What may run side by side (``-n 2``). The tests of a file stay together, for they share what they have started.
So do all those of ``ONE_AFTER_ANOTHER``: each is many processes, with leases and patience in real seconds, or an
engine that fills the machine. They come first, then the other slow files: what is left at the end is short."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

ONE_AFTER_ANOTHER = ("tests/engines/real/", "tests/faults/", "tests/placement/")
SLOW = ("slow", "real", "assets")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Of two threads of PyTorch's on cores that others use as well, each waits for the other, spinning.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So a shell starts what runs in the background, and so it would be for all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something about the machine.
settings.register_profile("tests", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


class Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        """The name of what a test stays together with."""
        file = nodeid.partition("::")[0]
        return "one after another" if file.startswith(ONE_AFTER_ANOTHER) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    config.option.loadscopereorder = False  # keep the order of pytest_collection_modifyitems
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    slow = {item.path for item in items if any(item.get_closest_marker(mark) for mark in SLOW)}
    items.sort(key=lambda item: (not item.nodeid.startswith(ONE_AFTER_ANOTHER), item.path not in slow))
