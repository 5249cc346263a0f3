"""The Accelerator built last: for ``AcceleratorState()`` in code that was not handed one. A weak reference."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from echelon.base.errors import UsageError

__all__ = ["current_accelerator", "has_accelerator", "note_accelerator"]


class _Last:
    accelerator: ClassVar[weakref.ref[Any] | None] = None


def note_accelerator(accelerator: Any) -> None:
    """Remember ``accelerator`` as the one built last, without keeping it alive."""
    _Last.accelerator = weakref.ref(accelerator)


def has_accelerator() -> bool:
    """Tell whether an Accelerator was built and lives."""
    return _Last.accelerator is not None and _Last.accelerator() is not None


def current_accelerator() -> Any:
    """Return the Accelerator built last.

    Raises:
        UsageError: none was built, or it is gone.
    """
    accelerator = None if _Last.accelerator is None else _Last.accelerator()
    if accelerator is None:
        raise UsageError("there is no Accelerator yet", do="make one first: accelerator = Accelerator()")
    return accelerator
