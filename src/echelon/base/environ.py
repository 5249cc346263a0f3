"""The only file that reads or writes the process environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

__all__ = ["get", "is_strict", "own", "patch", "restored", "snapshot", "write"]


def get(name: str) -> str | None:
    """Return the value of the variable ``name``, or None if it is unset or empty."""
    return os.environ.get(name) or None


@cache
def own(name: str) -> str | None:
    """Return the variable ``name``, which only echelon sets. Cached, because looking up a missing variable takes microseconds."""
    return get(name)


def is_strict() -> bool:
    """Return whether method overrides without effect are errors, not warnings (``launch --strict`` or ECHELON_STRICT=1)."""
    return get("ECHELON_STRICT") not in (None, "0", "false")


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment for a child process. Never log it, because it contains secrets."""
    return dict(os.environ)


def write(values: Mapping[str, str | None]) -> None:
    """Set each variable permanently; None removes it. Use ``patch`` instead in processes that were not started by echelon."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    own.cache_clear()


@contextmanager
def patch(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set each variable (None removes it) inside the ``with`` block, and restore the old values on exit."""
    before = {name: os.environ.get(name) for name in values}
    try:
        write(values)
        yield
    finally:
        write(before)


@contextmanager
def restored(chosen: Callable[[str], bool]) -> Iterator[None]:
    """On exit from the ``with`` block, restore the variables whose names ``chosen`` accepts."""
    before = {name: value for name, value in os.environ.items() if chosen(name)}
    try:
        yield
    finally:
        write({name: before.get(name) for name in {*os.environ, *before} if chosen(name)})
