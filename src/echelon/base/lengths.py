"""Lengths of objects that may not define one."""

from __future__ import annotations

from typing import Any


def length_of(sized: Any) -> int:
    """Return ``len(sized)``, or -1 if the object has no length."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        # Not an error: len() of an object without __len__ raises TypeError, and so does that of a DataLoader over it. Some
        # iterable datasets define a __len__ that raises NotImplementedError.
        return -1
