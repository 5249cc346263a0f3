"""The state of a Trainer beside its public attributes: each part has one owner, and helpers are given the part they use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from echelon.trainer.arguments.training_arguments import TrainingArguments, resolve_path
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.features.hub import HubUpload
from echelon.trainer.features.hyperparameter_search import SearchState
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.model_interface import ModelInterface
from echelon.trainer.optim.prepared_optimizer import PreparedOptimizer

__all__ = ["EvaluationState", "TrainerSession", "UpdateSize", "global_batch_size"]


class UpdateSize(NamedTuple):
    """What one optimizer step takes of this process."""

    batch_size: int
    """Samples in one forward pass."""
    accumulation_steps: int
    """Forward passes."""


@dataclass
class EvaluationState:
    """What an evaluation that is running tells the code inside it."""

    is_predicting: bool = False
    """It is a call of ``predict``, whose samples need no labels."""
    is_repeatable: bool = False
    """The training repeats it after a resume, so that it may be interrupted."""
    real_samples: tuple[int, int] | None = None
    """Samples of the current batch that are no padding, on this rank and on all ranks; None: not known."""
    preparation_time: float | None = None
    """Seconds that preparing the model took, where it was evaluated before any training."""


@dataclass
class TrainerSession:
    """The parts of one Trainer."""

    base: type[Any]
    """The class whose methods count as not overridden."""
    cursor: TrainCursor = field(default_factory=TrainCursor)
    optimizer: PreparedOptimizer = field(default_factory=PreparedOptimizer)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    search: SearchState = field(default_factory=SearchState)
    interface: ModelInterface = field(init=False)
    memory: MemoryMeter = field(init=False)
    hub: HubUpload = field(init=False)
    fitted: UpdateSize | None = None
    """The size of an update in the latest training; None before the first."""

    def update_size(self, args: TrainingArguments) -> UpdateSize:
        """Return the size of an update: that of the latest training, which ``auto_find_batch_size`` may have changed."""
        return self.fitted or UpdateSize(args.train_batch_size, args.gradient_accumulation_steps)

    def output_dir(self, args: TrainingArguments) -> Path:
        """Return the output folder (of the trial that is running), as an absolute path."""
        return self._of_trial(resolve_path(args))

    def output_dir_as_given(self, args: TrainingArguments) -> Path:
        """Return the output folder as ``args`` spell it."""
        return self._of_trial(Path(args.output_dir or "trainer_output"))

    def _of_trial(self, folder: Path) -> Path:
        trial = self.search.trial
        return folder if trial is None else folder / trial.name


def global_batch_size(args: TrainingArguments, num_processes: int) -> int:
    """Return the samples of one optimizer step over all ranks, in the exact modes."""
    return args.global_batch_size or args.train_batch_size * args.gradient_accumulation_steps * num_processes
