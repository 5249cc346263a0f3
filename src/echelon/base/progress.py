"""The counters of a run: the only mutable record; checkpoints save it whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from echelon.base.errors import UsageError

__all__ = ["Progress"]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a run, starting at zero."""

    epoch: int = 0
    """The current pass over the training data, from 0."""
    step: int = 0
    """Optimizer steps taken; steps skipped by loss scaling do not count."""
    micro_step: int = 0
    """Micro-steps of the current update that have started (exact modes); saved as 0, as a partial update is replayed."""
    samples_seen: int = 0
    """Samples of all ranks in the updates so far (exact modes)."""
    tokens_seen: float = 0.0
    """The sum of ``num_items=`` of all ranks in the updates so far."""
    position: int = 0
    """Samples of the current epoch in complete updates: the position at which a pass resumes (exact modes)."""

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name."""
        return asdict(self)

    def load_json(self, counters: dict[str, Any]) -> None:
        """Load the result of ``to_json``.

        Raises:
            UsageError: the names differ from those of this record, which stays unchanged.
        """
        names = {field.name for field in fields(self)}
        if set(counters) != names:
            raise UsageError(
                f"the saved progress has the counters {sorted(counters)}, and this version has {sorted(names)}",
                do="load it with the version that saved it",
            )
        for name, value in counters.items():
            setattr(self, name, value)
