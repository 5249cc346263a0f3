"""Finds the line on which a program divides what an evaluation counted by the length of the evaluated dataset."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from types import FrameType

from echelon.base.warnings import UserLine, is_library

__all__ = ["find_division"]

_MAX_FRAMES = 30


def find_division(dataset: object) -> UserLine | None:
    """Return the line that divides the results of the loop that is ending by ``len(dataset)``, or None.

    A result is a name that the loop's body assigns or calls a method of, or what is computed from one; outside of the loop's
    function it is the value of the call that runs the loop. ``dataset`` is recognized by identity, under any name. Lines before
    the loop do not count, nor a division of something else, nor one that may not be executed (below an ``if`` that does not ask
    for the rank, or after such an ``if`` that may return).

    Args:
        dataset: the whole dataset, as the user passed it to the loader.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if not is_library(frame.f_code.co_filename):
            line = _division_in(frame, dataset)
            if line is not None:
                return UserLine((frame.f_code.co_filename, line))
        frame = frame.f_back
    return None


def _division_in(frame: FrameType, dataset: object) -> int | None:
    """Return the first line of ``frame``'s function, from its current statement on, that divides a result by the length."""
    body = _function_body(frame)
    statement = None if body is None else _innermost(body, frame.f_lineno)
    if body is None or statement is None:
        return None
    results: set[str] = set()
    is_loop = isinstance(statement, (ast.For, ast.AsyncFor))
    if is_loop:
        for child in ast.walk(statement):
            results |= _changed_by(child)
    lengths = {
        name for node in _nodes(body) if _is_length(_value(node), frame, dataset, frozenset()) for name in _stored(node)
    }
    here = frame.f_lineno if is_loop else statement.lineno
    for node in _executed(body, statement):
        if node.lineno < here:
            continue
        is_current = node is statement and not is_loop
        for part in _own_expressions(node):
            for divided in _divisions(part, frame, dataset, frozenset(lengths)):
                has_call = any(isinstance(one, (ast.Call, ast.GeneratorExp, ast.ListComp)) for one in ast.walk(divided))
                is_sum = is_loop and isinstance(node, ast.AugAssign) and node.lineno <= (statement.end_lineno or 0)
                if is_sum or results & _names(divided) or (is_current and has_call):
                    return divided.lineno
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Div)
            and _is_length(node.value, frame, dataset, frozenset(lengths))
            and results & _names(node.target)
        ):
            return node.lineno
        value = _value(node)
        if is_current or (value is not None and results & _names(value)):
            results |= _stored(node)
    return None


def _function_body(frame: FrameType) -> list[ast.stmt] | None:
    """Return the statements of ``frame``'s function or module, or None if they are unknown or contain no such division."""
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    numbers = [number for _, _, number in code.co_lines() if number]
    if not any("len(" in line for line in lines[max(0, code.co_firstlineno - 1) : max(numbers, default=0)]):
        return None
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):  # a file that was edited since, or a notebook's magic commands
        return None
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node.body
    return None


def _nodes(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements below ``body``, without those of nested functions and classes."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _nodes(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _nodes(handler.body)


def _executed(body: list[ast.stmt], statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements below ``body`` that are executed if ``statement`` is; those before it may be among them."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield node
        is_outer = node.lineno <= statement.lineno and (statement.end_lineno or 0) <= (node.end_lineno or 0)
        is_of_rank = isinstance(node, ast.If) and any(map(_RANK_NAME.search, _words(node.test)))
        if is_outer:
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            blocks = [block for block in blocks if (block and node is statement) or _contains(block, statement)]
            for block in blocks[:1]:
                yield from _executed(block, statement)
        elif isinstance(node, (ast.With, ast.AsyncWith, ast.Try)) or is_of_rank:
            yield from _executed(getattr(node, "body", []), statement)
        elif node.lineno > statement.lineno and _may_leave(node):
            return


def _may_leave(node: ast.stmt) -> bool:
    """Return whether a branch or a loop may skip the statements after it."""
    if not isinstance(node, (ast.If, ast.For, ast.While, ast.Match)):
        return False
    return any(isinstance(one, (ast.Return, ast.Raise, ast.Break, ast.Continue)) for one in ast.walk(node))


_RANK_NAME = re.compile(r"rank|main_process|is_main|is_master|is_first")


def _words(expression: ast.expr) -> list[str]:
    return [
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(expression)
        if isinstance(node, (ast.Name, ast.Attribute))
    ]


def _contains(block: list[ast.stmt], statement: ast.stmt) -> bool:
    return bool(block) and block[0].lineno <= statement.lineno <= (block[-1].end_lineno or 0)


def _innermost(body: list[ast.stmt], line: int) -> ast.stmt | None:
    """Return the innermost statement that contains ``line``; a loop where it is the line of the loop's header."""
    found = None
    for node in _nodes(body):
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            if isinstance(node, (ast.For, ast.AsyncFor)) and line <= (node.iter.end_lineno or node.lineno):
                return node  # its body may be on the same line
            found = node  # inner statements come later
    return found


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of ``statement`` itself, without those of the statements in its body."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


def _value(statement: ast.stmt) -> ast.expr | None:
    return statement.value if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else None


def _stored(statement: ast.stmt) -> set[str]:
    """Return the names that an assignment sets."""
    if isinstance(statement, ast.Assign):
        return set().union(*map(_names, statement.targets))
    return _names(statement.target) if isinstance(statement, (ast.AugAssign, ast.AnnAssign)) else set()


def _changed_by(node: ast.AST) -> set[str]:
    """Return the names that ``node`` assigns, or whose method it calls as a statement, such as ``losses.append(loss)``."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        return _names(node.value.func.value)
    return _stored(node) if isinstance(node, ast.stmt) else set()


def _names(expression: ast.expr) -> set[str]:
    """Return the names in an expression, and ``self.name`` for the attributes of ``self``."""
    found = set()
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id != "self":
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(f"self.{node.attr}")
    return found


def _divisions(expression: ast.expr, frame: FrameType, dataset: object, lengths: frozenset[str]) -> Iterator[ast.expr]:
    """Yield each dividend in ``expression`` that is divided by the dataset's length."""
    match expression:
        case ast.BinOp(left=dividend, op=ast.Div(), right=divisor) if _is_length(divisor, frame, dataset, lengths):
            yield dividend
    parts: Iterable[ast.AST] = ast.iter_child_nodes(expression)
    if isinstance(expression, ast.IfExp):
        parts = (expression.test,)  # the other parts may not be executed
    elif isinstance(expression, ast.BoolOp):
        parts = expression.values[:1]
    elif isinstance(expression, ast.Lambda):
        parts = ()
    for part in parts:
        if isinstance(part, ast.keyword):
            part = part.value
        if isinstance(part, ast.expr):
            yield from _divisions(part, frame, dataset, lengths)


def _is_length(expression: ast.expr | None, frame: FrameType, dataset: object, lengths: frozenset[str]) -> bool:
    """Return whether an expression is ``len(dataset)``, or a name that was assigned it."""
    if isinstance(expression, ast.Name):
        return expression.id in lengths
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        return False
    if expression.func.id in ("float", "int") and len(expression.args) == 1:
        return _is_length(expression.args[0], frame, dataset, lengths)
    if expression.func.id != "len" or len(expression.args) != 1:
        return False
    return _object(expression.args[0], frame) is dataset


def _object(expression: ast.expr, frame: FrameType) -> object:
    """Return the object that a name, or an attribute of an instance, refers to; None if that takes more than a look-up."""
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        # Not getattr: properties run the user's code.
        return getattr(_object(expression.value, frame), "__dict__", {}).get(expression.attr)
    return None
