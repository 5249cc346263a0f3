"""Where the run is: the only mutable record, saved whole by checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a run; all of them start at zero."""

    epoch: int = 0
    """Passes begun over the training data, less one."""
    step: int = 0
    """Optimizer steps taken (a step that loss scaling skipped counts not)."""
    micro_step: int = 0
    """Forward/backward passes since the last optimizer step."""
