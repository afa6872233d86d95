"""What a test needs and can not bring itself: a server, a cluster, rights. Whoever runs the tests on a laptop goes
without; CI must not, for a test that is skipped there is a test that nobody runs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRE = "POLAR_REQUIRE_ALL"


def missing(what: str) -> NoReturn:
    """Skip the test for this reason; where ``POLAR_REQUIRE_ALL=1``, fail it."""
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{what} ({REQUIRE}=1: all that a test needs must be here)")
    pytest.skip(what)
