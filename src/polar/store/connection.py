"""What a rule needs of a database, so that one rule serves SQLite and PostgreSQL.

The statements are the part of SQL that both speak (``ON CONFLICT``, partial indexes, ``?`` for arguments, blobs as
bytes, 0 and 1 for no and yes). ``sqlite3`` connections are connections of this kind as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")

Args = tuple[Any, ...]


class Rows(Protocol):
    """What a statement has found or changed."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Connection(Protocol):
    """An open database, inside a transaction."""

    def execute(self, sql: str, args: Args = ..., /) -> Rows: ...


Apply = Callable[[Connection], T]
"""A write: runs inside a transaction, and raises to refuse. It may be run again from the start when the transaction
failed, so all that it changes is the database."""

Read = Callable[[Connection], T]
"""A read: everything in it is of one moment."""

Recovery = Literal["again", "apart", "failed"]
"""What to do about a group whose transaction failed: run it again, run its writes one by one, or tell its callers."""


class Writes(Protocol):
    """The writing connection as ``GroupWriter`` drives it, on its thread. Nobody else changes what it reads between
    ``begin`` and ``commit``."""

    def execute(self, sql: str, args: Args = ..., /) -> Rows: ...

    def begin(self) -> None: ...

    def commit(self) -> None:
        """On disk when it returns; when it raises, nothing of the group is kept."""
        ...

    def rollback(self) -> None:
        """Give the transaction up, if there still is one. Never raises."""
        ...

    def survives(self, error: Exception) -> bool:
        """Whether the transaction can go on without the write that raised this."""
        ...

    def recover(self, error: Exception, tries: int, writes: int) -> Recovery:
        """After ``rollback``, and the ``tries``-th time for this group of ``writes``. May wait, and connect anew."""
        ...

    def explain(self, error: Exception) -> Exception:
        """The error as a caller shall see it."""
        ...

    def close(self) -> None: ...


def marks(values: Sequence[object]) -> str:
    """``?, ?, ?``: a place for each value, to go between brackets."""
    return ", ".join("?" * len(values))


def chunks(values: Sequence[T], size: int = 500) -> Iterator[Sequence[T]]:
    """Pieces of at most ``size``: there is a limit on the arguments of a statement."""
    return (values[start : start + size] for start in range(0, len(values), size))
