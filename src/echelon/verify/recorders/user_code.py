"""Finds the line of the user's script in a call stack."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

__all__ = ["line_of_user"]

_PACKAGE = str(Path(__file__).resolve().parents[2])
_STANDARD_LIBRARY = str(Path(sysconfig.get_paths()["stdlib"]).resolve())


def line_of_user() -> str:
    """Return ``file:line`` of the innermost call that is in no library; an empty string if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_in_library(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@lru_cache(maxsize=4096)
def _is_in_library(file: str) -> bool:
    if file.startswith(("<frozen", "<string")):
        return True
    if "/site-packages/" in file or "/dist-packages/" in file:
        return True
    return file.startswith((_PACKAGE, _STANDARD_LIBRARY))
