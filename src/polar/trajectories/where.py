"""Choosing rows by a small expression: ``reward >= 1``, ``role == "main" and reward > 0``.

It is written like Python, but is none: comparisons of columns with constants, joined by ``and``, ``or`` and
``not``. Nothing is ever evaluated or called, so an expression from a task file can do no harm. A column
without a value (no reward) equals ``None`` and nothing else, and is neither above nor below anything.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from polar.contract.errors import UsageError
from polar.trajectories.rows import PLAIN_COLUMNS

Row = Mapping[str, Any]
Condition = Callable[[Row], bool]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: lambda value, choices: value in choices,
    ast.NotIn: lambda value, choices: value not in choices,
}
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def compile_where(text: str) -> Condition:
    """The condition as a function of a row's plain columns.

    Raises:
        UsageError: it is no such expression; the message has the column names.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SyntaxWarning)  # "1and" parses, with a warning on the user's screen
            tree = ast.parse(text.strip(), mode="eval")
        return _condition(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        columns = ", ".join(PLAIN_COLUMNS)
        raise UsageError(
            f'where {text!r}: {reason}. Write it like reward >= 1 and role == "main"; columns: {columns}'
        ) from None


def _condition(node: ast.expr) -> Condition:
    if isinstance(node, ast.BoolOp):
        parts = [_condition(value) for value in node.values]
        every = isinstance(node.op, ast.And)
        return lambda row: (all if every else any)(part(row) for part in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _condition(node.operand)
        return lambda row: not inner(row)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        links = [_comparison(sides[i], op, sides[i + 1]) for i, op in enumerate(node.ops)]
        return lambda row: all(link(row) for link in links)
    raise ValueError(f"{ast.unparse(node)!r} is no comparison")


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Condition:
    a, a_kind = _operand(left)
    b, b_kind = _operand(right)
    compare = _COMPARE[type(op)]
    if isinstance(op, ast.In | ast.NotIn):
        if b_kind is not list:
            raise ValueError(f"{ast.unparse(right)!r} is no list")
    elif a_kind is not b_kind and type(None) not in (a_kind, b_kind):
        raise ValueError(f"{ast.unparse(left)!r} and {ast.unparse(right)!r} are not of one type")
    if not isinstance(op, _ORDER):
        return lambda row: compare(a(row), b(row))
    return lambda row: (x := a(row)) is not None and (y := b(row)) is not None and compare(x, y)


def _operand(node: ast.expr) -> tuple[Callable[[Row], Any], type]:
    """How to get a side's value, and its kind: ``str``, ``float`` for every number, ``list``, ``NoneType``."""
    if isinstance(node, ast.Name):
        name = node.id
        if name not in PLAIN_COLUMNS:
            raise ValueError(f"there is no column {name!r}")
        kind = PLAIN_COLUMNS[name]
        return lambda row: row[name], str if kind is str else float
    value = _constant(node)
    if isinstance(value, int | float):
        return lambda row: value, float
    return lambda row: value, type(value)


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand)
        if isinstance(value, int | float):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(item) for item in node.elts]
    raise ValueError(f"{ast.unparse(node)!r} is neither a column nor a constant")
