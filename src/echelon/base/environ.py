"""The only file that reads or writes the process environment.

Other modules of ``base/`` use the functions for one fact each; ``get`` and the functions with any names are for ``config/``
(settings), ``world/`` (this process's place in a run) and ``launch/`` (what is handed to children), which
``tests/test_layering.py`` checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# The rank that torchrun, Slurm, Open MPI or MPICH sets.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# As in gettext: the first variable that is set decides.
_LOCALES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")


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


def process_rank() -> int | None:
    """Return the rank that the launcher has set for this process, or None."""
    texts = [get(name) or "" for name in _RANKS]
    return next((int(text) for text in texts if text.isdigit()), None)


def locale_names() -> str:
    """Return the locales that the user wants, separated by colons; empty if none is set."""
    return next(filter(None, map(get, _LOCALES)), "")


def wants_colour() -> bool | None:
    """Return whether the user wants colours (FORCE_COLOR) or none (NO_COLOR); None if they leave it to the program."""
    if get("NO_COLOR"):
        return False
    return True if get("FORCE_COLOR") else None


def has_cursor() -> bool:
    """Return whether the terminal can move its cursor and show colours (``TERM``)."""
    return get("TERM") != "dumb"


def cache_home() -> Path:
    """Return the folder for this user's caches."""
    home = get("XDG_CACHE_HOME")
    return Path(home) if home else Path.home() / ".cache"


def has_visible_devices(variables: Iterable[str]) -> bool:
    """Return whether one of the drivers' ``variables`` limits the devices that this process sees."""
    return any(map(get, variables))


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
