"""The Accelerators that live: the one built last is for ``AcceleratorState()`` in code that was not handed one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from echelon.base.errors import UsageError

__all__ = ["current_accelerator", "has_accelerator", "living_accelerators", "note_accelerator"]


class _Built:
    accelerators: ClassVar[tuple[weakref.ref[Any], ...]] = ()
    """In the order in which they were built. Weak: one that a function made for itself is gone when it returns."""


def note_accelerator(accelerator: Any) -> None:
    """Remember ``accelerator`` as the one built last, without keeping it alive."""
    living = (reference for reference in _Built.accelerators if reference() is not None)
    _Built.accelerators = (*living, weakref.ref(accelerator))


def living_accelerators() -> Iterator[Any]:
    """Yield the Accelerators that live, the one built last first."""
    references = reversed(_Built.accelerators)
    return (accelerator for reference in references if (accelerator := reference()) is not None)


def has_accelerator() -> bool:
    """Tell whether an Accelerator was built and lives."""
    return next(living_accelerators(), None) is not None


def current_accelerator() -> Any:
    """Return the Accelerator built last, of those that live.

    Raises:
        UsageError: none was built, or all are gone.
    """
    accelerator = next(living_accelerators(), None)
    if accelerator is None:
        raise UsageError("there is no Accelerator yet", do="make one first: accelerator = Accelerator()")
    return accelerator
