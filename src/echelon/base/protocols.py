"""What echelon asks of objects that are not its own, once, at the border."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["SupportsSetEpoch", "SupportsStateDict", "SupportsTo"]


@runtime_checkable
class SupportsSetEpoch(Protocol):
    """A sampler or dataset whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""


@runtime_checkable
class SupportsStateDict(Protocol):
    """An object that can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state."""


@runtime_checkable
class SupportsTo(Protocol):
    """Something that can be moved to a device, such as a tokenizer's batch."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return it on the device."""
