"""Why: classes of the user's own are named as ``module:Class``, and whatever goes wrong in their code when they are
loaded is the user's to mend: it is one line that names the class, not a traceback.
"""

from __future__ import annotations

import importlib
from typing import Any

from polar.contract.errors import UsageError


def load_named(path: str, what: str) -> Any:
    """What ``module:name`` stands for.

    Args:
        what: the setting that names it, for errors.

    Raises:
        UsageError: it is not of that form, not there, or its module fails.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise UsageError(f"{what} {path!r} must be module:name")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise _failed(path, what, error) from error


def make_named(path: str, what: str, *args: Any, **config: Any) -> Any:
    """What the class (or function) of that name makes of these arguments.

    Raises:
        UsageError: as ``load_named``; or it fails. A UsageError of its own is passed on as it is.
    """
    make = load_named(path, what)
    try:
        return make(*args, **config)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(path, what, error) from error


def _failed(path: str, what: str, error: BaseException) -> UsageError:
    said = " ".join(str(error).split())
    return UsageError(f"{what} {path!r} can't be loaded: {type(error).__name__}{f': {said}' if said else ''}")
