"""Where a training is in its data and its logs: what a checkpoint holds beside weights, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["TrainCursor"]


@dataclass(kw_only=True)
class TrainCursor:
    """The place of a training; an Accelerator saves it as an object that was registered for checkpointing."""

    epoch: int = 0
    num_batches: int = 0
    """Batches of this rank in the epoch that were used; in the exact modes, updates."""
    is_over: bool = False
    """The epoch is over, with its evaluation."""
    is_read: bool = False
    """Its data have no more batches."""
    has_no_end: bool = False
    """The data gave far more batches than their length says, and go on: epochs end after those."""
    num_steps_beyond: int = 0
    """Steps of all epochs after as many batches as their length says."""
    is_within_update: bool = False
    """The training was left in the middle of an update, which is to be made again from its beginning."""
    batch_size: int = 0
    """Samples of such a batch: of one rank; in the exact modes, of all."""
    world_size: int = 0
    parity: str = "off"
    canonical_shards: int | None = None
    window: dict[str, Any] = field(default_factory=dict)
    """Of the losses that are not logged yet."""
    last_logged_step: int = 0
    learning_rate: float = 0.0
    grad_norm: float | None = None
    schedule: dict[str, Any] | None = None
    """State of a schedule that is none of torch's."""
    is_within_evaluation: bool = False
    """The training was left in the middle of the evaluation after this step, which is to be made again."""
    saves_after_evaluation: bool = False
    """And a checkpoint was to be saved after it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        for item in fields(self):
            if item.name in state:  # else of an older version
                setattr(self, item.name, state[item.name])
