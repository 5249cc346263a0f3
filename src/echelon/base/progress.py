"""Where the run is: the only mutable record, saved whole by checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from echelon.base.errors import UsageError

__all__ = ["Progress"]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a run; all of them start at zero."""

    epoch: int = 0
    """Passes begun over the training data, less one."""
    step: int = 0
    """Optimizer steps taken (a step that loss scaling skipped counts not)."""
    micro_step: int = 0
    """Micro-steps of the present update that have begun (exact modes); saved as 0, as half an update is made again."""
    samples_seen: int = 0
    """Samples of all ranks in the updates so far (exact modes)."""
    tokens_seen: float = 0.0
    """The sum of ``num_items=`` of all ranks in the updates so far."""
    position: int = 0
    """Samples of the present epoch in whole updates: where a pass goes on (exact modes)."""

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name."""
        return asdict(self)

    def load_json(self, counters: dict[str, Any]) -> None:
        """Take over what ``to_json`` gave.

        Raises:
            UsageError: the names are not those of this record; nothing is changed then.
        """
        names = {field.name for field in fields(self)}
        if set(counters) != names:
            raise UsageError(
                f"the saved progress has the counters {sorted(counters)}, and this version has {sorted(names)}",
                do="load it with the version that saved it",
            )
        for name, value in counters.items():
            setattr(self, name, value)
