"""Notes that are printed once per machine: a file in the user's cache folder marks those that were printed."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from echelon.base import environ

__all__ = ["cache_folder", "is_first_time"]


def cache_folder() -> Path:
    """Return this user's cache folder for echelon."""
    return environ.cache_home() / "echelon"


def is_first_time(note: str) -> bool:
    """Return whether ``note`` has not been printed on this machine, and mark it as printed.

    Home folders are often shared by machines, so that the mark contains the machine's name. If it cannot be written, the
    note is printed each time.
    """
    try:
        mark = cache_folder() / "notes" / f"{note}-{platform.node() or 'machine'}"
        mark.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except (OSError, RuntimeError):  # no home folder, or a read-only one
        return True
    return True
