"""Imports optional dependencies when they are needed, or raises an error with the command that installs them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from echelon.base.errors import MissingExtraError

__all__ = ["is_available", "require"]


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import ``module``, which ``purpose`` requires and which the pip extra ``extra`` installs.

    Raises:
        MissingExtraError: the module is not installed; the message contains the pip command.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module is installed, but one of its dependencies is missing
        raise MissingExtraError(
            f"{purpose} requires the package {module.partition('.')[0]!r}, which is not installed",
            do=f"pip install 'echelon[{extra}]'",
        ) from error


def is_available(module: str) -> bool:
    """Return whether ``module`` is installed, without importing it. For ``a.b``, the parent package ``a`` is
    imported.
    """
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # find_spec("a.b") imports a, and raises if a is not installed
        return False
