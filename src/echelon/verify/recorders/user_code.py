"""Finds the line of the user's code that belongs to what is recorded: in the call stack, or in what the user gave to a Trainer."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, TypeAlias

LossCode: TypeAlias = Literal["", "compute_loss", "compute_loss_func", "model", "library"]
"""Which code computes the loss of a Trainer; empty if no Trainer does."""

_PACKAGE = str(Path(__file__).resolve().parents[2])
_STANDARD_LIBRARY = str(Path(sysconfig.get_paths()["stdlib"]).resolve())
_TRAINING = ("training_step", "train", "_inner_training_loop")
"""Methods of a Trainer that are in the stack while it trains."""


def line_of_user() -> str:
    """Return ``file:line`` of the innermost call that is in no library; an empty string if there is none."""
    frame = _user_frame(sys._getframe(1))
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of_loss() -> tuple[str, LossCode]:
    """Return the line that calls ``backward``. If a Trainer does: the line that computes the loss, and which code that is."""
    frame = _user_frame(sys._getframe(1))
    line = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    trainer = _trainer_in(sys._getframe(1))
    if trainer is None:
        return line, ""
    if frame is not None and frame.f_code.co_name == "training_step" and not _calls_super(frame):
        return line, "compute_loss"  # the user's own training step computes the loss and calls backward
    model = getattr(trainer, "model", None)
    model = getattr(model, "module", model)
    functions: tuple[tuple[LossCode, Any], ...] = (
        ("compute_loss", getattr(type(trainer), "compute_loss", None)),
        ("compute_loss_func", getattr(trainer, "compute_loss_func", None)),
        ("model", getattr(type(model), "forward", None)),
    )
    for name, function in functions:
        code = _code_of(function)
        if code is not None:
            return _line_of_result(code), name
    return line, "library"


def line_of_batch() -> str:
    """Return the line of the loop that reads a batch. In a Trainer: where the user's code makes samples or batches, if there is any."""
    line, trainer = line_of_user(), _trainer_in(sys._getframe(1))
    if trainer is None:
        return line
    dataset = getattr(trainer, "train_dataset", None)
    collator = getattr(trainer, "data_collator", None)
    for function in (
        collator,
        inspect.getattr_static(type(collator), "__call__", None),
        getattr(type(trainer), "get_train_dataloader", None),
        getattr(type(dataset), "__getitem__", None),
        getattr(type(dataset), "__iter__", None),
    ):
        code = _code_of(function)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return line


def lines_of_modules(root: Any) -> dict[str, str]:
    """Return, by name of the module, the line of the user's ``forward`` that calls it; ``""`` is the root, with its ``forward`` itself."""
    found = {}
    for name, module in root.named_modules():
        code = _code_of(type(module).forward)
        if code is None:
            continue
        if not name:
            found[name] = f"{code.co_filename}:{code.co_firstlineno}"
        calls = _calls_of_attributes(code)
        for child, _ in module.named_children():
            if child in calls:
                found[f"{name}.{child}" if name else child] = f"{code.co_filename}:{calls[child]}"
    return found


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield ``frame`` and those that have called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_frame(frame: FrameType) -> FrameType | None:
    return next((one for one in frames(frame) if not _is_in_library(one.f_code.co_filename)), None)


def _trainer_in(frame: FrameType) -> Any:
    """Return the Trainer, of echelon or transformers, that trains in this stack, or None."""
    for one in frames(frame):
        if one.f_code.co_name in _TRAINING and _is_of_trainer(one.f_code.co_filename):
            owner = one.f_locals.get("self")
            if callable(getattr(owner, "compute_loss", None)):
                return owner
    return None


def _is_of_trainer(file: str) -> bool:
    return file.startswith(f"{_PACKAGE}/trainer/") or file.endswith("/transformers/trainer.py")


def _calls_super(frame: FrameType) -> bool:
    return "super().training_step" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _code_of(function: Any) -> CodeType | None:
    """Return the code of a function or method that is in no library, else None."""
    function = inspect.unwrap(function) if callable(function) else None
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) and not _is_in_library(code.co_filename) else None


@lru_cache(maxsize=256)
def _line_of_result(code: CodeType) -> str:
    """Return the line of the function that computes the loss: the last assignment to a variable with that word, or the last return."""
    number = code.co_firstlineno
    function = _definition(code)
    statements = [] if function is None else sorted(_own_statements(function), key=lambda one: one.lineno)
    assigned = [one.lineno for one in statements if isinstance(one, ast.Assign | ast.AnnAssign) and _is_loss(one)]
    returned = [one.lineno for one in statements if isinstance(one, ast.Return)]
    return f"{code.co_filename}:{(assigned or returned or [number])[-1]}"


def _is_loss(one: ast.Assign | ast.AnnAssign) -> bool:
    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
    is_none = isinstance(one.value, ast.Constant) or one.value is None
    return not is_none and any(isinstance(each, ast.Name) and "loss" in each.id.lower() for each in targets)


@lru_cache(maxsize=256)
def _calls_of_attributes(code: CodeType) -> dict[str, int]:
    """Return the first line on which a method uses ``self.NAME``, by NAME."""
    function = _definition(code)
    found: dict[str, int] = {}
    for one in () if function is None else ast.walk(function):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
            found[one.attr] = min(one.lineno, found.get(one.attr, one.lineno))
    return found


def _own_statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    """Yield the statements of a function, without those of functions defined in it."""
    rest: list[ast.AST] = list(function.body)
    while rest:
        one = rest.pop()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(one, ast.stmt):
            yield one
        rest += ast.iter_child_nodes(one)


@lru_cache(maxsize=256)
def _definition(code: CodeType) -> ast.FunctionDef | None:
    """Return the definition of a function; None for a lambda, and where the source is not known."""
    tree = _tree(code.co_filename)
    for one in () if tree is None else ast.walk(tree):
        if isinstance(one, ast.FunctionDef) and one.name == code.co_name:
            first = min([one.lineno, *(each.lineno for each in one.decorator_list)])
            if first == code.co_firstlineno:
                return one
    return None


@lru_cache(maxsize=32)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # the file has changed since it was imported
        return None


@lru_cache(maxsize=4096)
def _is_in_library(file: str) -> bool:
    if file.startswith(("<frozen", "<string")):
        return True
    if "/site-packages/" in file or "/dist-packages/" in file:
        return True
    return file.startswith((_PACKAGE, _STANDARD_LIBRARY))
