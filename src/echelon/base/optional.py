"""Optional dependencies: import one when it is used, or raise with the command that installs it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from echelon.base.errors import MissingExtraError

__all__ = ["is_available", "require"]


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import ``module``, which ``purpose`` needs and the pip extra ``extra`` installs.

    Raises:
        MissingExtraError: it is not installed; the message contains the pip command.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module is installed, and one of its own dependencies is missing
        raise MissingExtraError(
            f"{purpose} needs the package {module.partition('.')[0]!r}, which is not installed",
            do=f"pip install 'echelon[{extra}]'",
        ) from error


def is_available(module: str) -> bool:
    """Tell whether ``module`` could be imported, without importing it (of ``a.b``, ``a`` is imported)."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # find_spec("a.b") imports a, and raises where a is not installed
        return False
