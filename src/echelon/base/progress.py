"""A run's progress counters, which are saved in checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from echelon.base.errors import UsageError

__all__ = ["Progress"]


@dataclass(slots=True, kw_only=True)
class Progress:
    """A run's progress counters, which start at zero."""

    epoch: int = 0
    """Index of the current pass over the training data, starting at 0."""
    step: int = 0
    """Number of optimizer steps, excluding steps skipped by loss scaling."""
    micro_step: int = 0
    """Number of micro-steps started in the current update (exact modes). Saved as 0, because a partial update is replayed."""
    samples_seen: int = 0
    """Number of samples in all updates so far, across all ranks (exact modes)."""
    tokens_seen: float = 0.0
    """Sum of ``num_items=`` over all updates so far, across all ranks."""
    position: int = 0
    """Number of samples of the current epoch that complete updates have used; a resumed pass continues after them (exact
    modes)."""

    def to_json(self) -> dict[str, Any]:
        """Return the counters as a dict."""
        return asdict(self)

    def load_json(self, counters: dict[str, Any]) -> None:
        """Load counters returned by ``to_json``.

        Raises:
            UsageError: the counter names differ. This object is left unchanged.
        """
        names = {field.name for field in fields(self)}
        if set(counters) != names:
            raise UsageError(
                f"the saved progress has counters {sorted(counters)}, but this version of echelon has {sorted(names)}",
                do="load the checkpoint with the version of echelon that saved it",
            )
        for name, value in counters.items():
            setattr(self, name, value)
