"""Tracks the existing Accelerators; ``AcceleratorState()`` refers to the one built last."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _


class _Built:
    accelerators: ClassVar[tuple[weakref.ref[Any], ...]] = ()
    """Accelerators in order of construction. The references are weak so that unused ones can be garbage-collected."""


def register_accelerator(accelerator: Any) -> None:
    """Register ``accelerator`` as the one built last, without keeping it alive."""
    living = (reference for reference in _Built.accelerators if reference() is not None)
    _Built.accelerators = (*living, weakref.ref(accelerator))


def living_accelerators() -> Iterator[Any]:
    """Yield the existing Accelerators, newest first."""
    references = reversed(_Built.accelerators)
    return (accelerator for reference in references if (accelerator := reference()) is not None)


def has_accelerator() -> bool:
    """Return whether an Accelerator exists."""
    return next(living_accelerators(), None) is not None


def current_accelerator() -> Any:
    """Return the existing Accelerator that was built last.

    Raises:
        UsageError: none exists.
    """
    accelerator = next(living_accelerators(), None)
    if accelerator is None:
        raise UsageError(_("there is no Accelerator yet"), do=_("create one first: accelerator = Accelerator()"))
    return accelerator
