"""Lengths that may be unknown."""

from __future__ import annotations

from typing import Any

__all__ = ["length_of"]


def length_of(sized: Any) -> int:
    """Return the length; -1 when nobody knows."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # also one in name only, as some iterable datasets have
        return -1
