"""A run's position in its data and logs, which a checkpoint holds along with weights, optimizer and scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

LENGTH_FIELDS = ("num_steps_beyond", "has_no_end")
"""``TrainCursor`` fields that describe data whose reported length is wrong; a resumed run keeps them."""
CURSOR_FIELDS = ("epoch", "num_batches", "is_over", *LENGTH_FIELDS)
"""``TrainCursor`` fields saved in ``ECHELON_DATA``; the global step alone is ambiguous if the epoch length changes."""


@dataclass(kw_only=True)
class TrainCursor:
    """A run's position; registered for checkpointing, so that ``Accelerator.save_state`` saves it."""

    epoch: int = 0
    num_batches: int = 0
    """Number of batches of this epoch that this rank has consumed; in the exact modes, the number of updates."""
    is_over: bool = False
    """Whether the epoch is complete, including its evaluation."""
    is_read: bool = False
    """Whether the data of this epoch is exhausted."""
    has_no_end: bool = False
    """Whether the data yielded far more batches than its length and is still not exhausted; later epochs end as
    planned."""
    num_steps_beyond: int = 0
    """Number of steps, over all epochs, taken with batches beyond the data's length."""
    is_within_update: bool = False
    """Whether training stopped in the middle of an update. If so, a resumed run repeats the update from its start."""
    batch_size: int = 0
    """Samples per batch on one rank; in the exact modes, across all ranks."""
    world_size: int = 0
    parity: str = "off"
    canonical_shards: int | None = None
    window: dict[str, Any] = field(default_factory=dict)
    """State of the losses that have not been logged yet."""
    last_logged_step: int = 0
    learning_rate: float = 0.0
    grad_norm: float | None = None
    schedule: dict[str, Any] | None = None
    """State of a scheduler that is not a torch ``LRScheduler``."""
    is_within_evaluation: bool = False
    """Whether training stopped during the evaluation that follows this step. If so, a resumed run repeats the evaluation."""
    saves_after_evaluation: bool = False
    """Whether a checkpoint was due after the interrupted evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the fields in ``state``; keep the others."""
        for item in fields(self):
            if item.name in state:  # missing in checkpoints of older versions
                setattr(self, item.name, state[item.name])
