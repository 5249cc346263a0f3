"""What runs while a Trainer trains, as its methods see it; the classes are in the modules that need the Trainer's session."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from echelon.trainer.results import TrainOutput

__all__ = ["LoadedCheckpoint", "RunningCall", "RunningLoop"]


class RunningCall(Protocol):
    """A call of ``Trainer.train`` (``trainer/training_run.py``)."""

    def train(
        self,
        batch_size: int | None,
        *,
        resume_from_checkpoint: str | None,
        ignore_keys_for_eval: list[str] | None,
    ) -> TrainOutput:
        """Implement ``Trainer._inner_training_loop``."""

    def set_batch_size(self, batch_size: int) -> None:
        """Implement ``Trainer._update_auto_batch_size``."""

    def init_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, checkpoint: str | None
    ) -> tuple[int, int]:
        """Implement ``Trainer._init_training_state``."""

    def prepare(self, max_steps: int, loader: Any) -> tuple[nn.Module, Any]:
        """Implement ``Trainer._prepare_for_training``."""


class RunningLoop(Protocol):
    """The loop of a call, once it is prepared (``trainer/loop.py``)."""

    def run_epoch(self, epoch: int, loader: Any) -> None:
        """Implement ``Trainer._run_epoch``."""

    def log_evaluate_save(self, grad_norm: Any = None, learning_rate: float | None = None) -> None:
        """Implement ``Trainer._maybe_log_save_evaluate``."""

    def evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float] | None:
        """Implement ``Trainer._evaluate``."""

    def load_rng_state(self) -> None:
        """Implement ``Trainer._load_rng_state``."""

    def finalize(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Implement ``Trainer._finalize_training``."""


class LoadedCheckpoint(Protocol):
    """The checkpoint that a call resumes from (``trainer/checkpoint/resume_point.py``)."""

    def load_optimizer_and_scheduler(self, folder: Path) -> None:
        """Implement ``Trainer._load_optimizer_and_scheduler``."""

    def load_scaler(self, folder: Path) -> None:
        """Implement ``Trainer._load_scaler``."""
