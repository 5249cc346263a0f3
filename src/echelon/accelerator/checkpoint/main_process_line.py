"""Finds calls that a program makes on its main process only."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

from echelon.base.warnings import UserLine

__all__ = ["is_on_main_process_only"]

_CONDITIONS = frozenset({"is_main_process", "is_local_main_process", "is_world_process_zero"})


def is_on_main_process_only(line: UserLine) -> bool:
    """Return whether ``line`` is in an ``if`` block whose condition names the main process and does not negate it.

    False if the source is not available.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(line[0])))
    except SyntaxError:
        return False
    return any(_has(block.test) for block in ast.walk(tree) if isinstance(block, ast.If) and _is_in_body(line, block))


def _is_in_body(line: UserLine, block: ast.If) -> bool:
    return block.body[0].lineno <= line[1] <= (block.body[-1].end_lineno or 0)


def _has(test: ast.expr) -> bool:
    return any(name in _CONDITIONS for name in _names_of(test))


def _names_of(test: ast.AST) -> Iterator[str]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return
    if isinstance(test, ast.Attribute):
        yield test.attr
    if isinstance(test, ast.Name):
        yield test.id
    for child in ast.iter_child_nodes(test):
        yield from _names_of(child)
