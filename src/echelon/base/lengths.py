"""Lengths that may be unknown."""

from __future__ import annotations

from typing import Any

__all__ = ["length_of"]


def length_of(sized: Any) -> int:
    """Return the length; -1 if it is unknown."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # some iterable datasets have a __len__ that raises
        return -1
