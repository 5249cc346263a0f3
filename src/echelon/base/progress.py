"""The counters of a run, which checkpoints save."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from echelon.base.errors import UsageError

__all__ = ["Progress"]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a run, starting at zero."""

    epoch: int = 0
    """Index of the current pass over the training data, starting at 0."""
    step: int = 0
    """Number of optimizer steps, without those that loss scaling has skipped."""
    micro_step: int = 0
    """Number of started micro-steps of the current update (exact modes); saved as 0, because a partial update is replayed."""
    samples_seen: int = 0
    """Number of samples of all ranks in the updates so far (exact modes)."""
    tokens_seen: float = 0.0
    """Sum of ``num_items=`` of all ranks in the updates so far."""
    position: int = 0
    """Number of samples of the current epoch in complete updates, at which a pass resumes (exact modes)."""

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name."""
        return asdict(self)

    def load_json(self, counters: dict[str, Any]) -> None:
        """Load the result of ``to_json``.

        Raises:
            UsageError: the names of the counters differ; this object is not changed.
        """
        names = {field.name for field in fields(self)}
        if set(counters) != names:
            raise UsageError(
                f"the saved progress has the counters {sorted(counters)}, but this version has {sorted(names)}",
                do="load it with the version of echelon that saved it",
            )
        for name, value in counters.items():
            setattr(self, name, value)
