"""The state of a Trainer that is not in its public attributes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from echelon.trainer.arguments.training_arguments import TrainingArguments, resolve_path
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.features.hub import HubUpload
from echelon.trainer.features.hyperparameter_search import SearchState
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.model_interface import ModelInterface
from echelon.trainer.optim.prepared_optimizer import PreparedOptimizer
from echelon.trainer.override_points import OverridePoints
from echelon.trainer.training_plan import TrainingPlan

__all__ = ["EvaluationState", "TrainCall", "TrainerSession", "UpdateSize", "global_batch_size"]


class UpdateSize(NamedTuple):
    """The size of one optimizer step on this process."""

    batch_size: int
    """Samples per forward pass."""
    accumulation_steps: int
    """Number of forward passes."""


@dataclass
class EvaluationState:
    """The state of the running evaluation."""

    is_predicting: bool = False
    """Whether ``predict`` is running, whose samples need no labels."""
    is_repeatable: bool = False
    """Whether a resumed run repeats this evaluation, so that preemption may interrupt it."""
    real_samples: tuple[int, int] | None = None
    """Number of samples in the current batch without padding, on this rank and on all ranks; None if unknown."""
    rows_per_sample: int = 1
    """Number of rows that the collator makes of a sample, on several processes; it weighs the loss of a batch."""
    preparation_time: float | None = None
    """Seconds spent on preparing the model for an evaluation before any training."""


@dataclass
class TrainerSession:
    """The parts of one Trainer."""

    base: type[Any]
    """Class whose methods count as not overridden."""
    points: OverridePoints
    """The overridden private methods, and the default implementations of the others."""
    cursor: TrainCursor = field(default_factory=TrainCursor)
    optimizer: PreparedOptimizer = field(default_factory=PreparedOptimizer)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    search: SearchState = field(default_factory=SearchState)
    interface: ModelInterface = field(init=False)
    memory: MemoryMeter = field(init=False)
    hub: HubUpload = field(init=False)
    fitted: UpdateSize | None = None
    """Size of an update in the latest training run; None before the first."""
    wanted_batch_size: int | None = None
    """Batch size that a subclass has set instead of that of the arguments."""
    plan: TrainingPlan | None = None
    """Plan of the latest training run."""
    own_attributes: frozenset[str] = frozenset()
    """Attributes that the Trainer had after its construction, and those that were reported later."""
    default_columns: list[str] | None = None
    """The columns of ``_signature_columns`` that no subclass has changed."""
    keeps_weights_with_state: bool = False
    """Whether the checkpoint that is loaded holds the weights beside the training state, not in files of their own."""
    loads_weights_with_state: bool = False
    """Whether these weights are wanted."""

    def update_size(self, args: TrainingArguments) -> UpdateSize:
        """Return the size of an update, which ``auto_find_batch_size`` may have changed."""
        return self.fitted or UpdateSize(args.train_batch_size, args.gradient_accumulation_steps)

    def output_dir(self, args: TrainingArguments) -> Path:
        """Return the absolute path of the output directory, or of the running trial's directory in it."""
        return self._of_trial(resolve_path(args))

    def output_dir_as_given(self, args: TrainingArguments) -> Path:
        """Return the same directory as ``output_dir``, with the path as written in ``args``."""
        return self._of_trial(Path(args.output_dir or "trainer_output"))

    def _of_trial(self, folder: Path) -> Path:
        trial = self.search.trial
        return folder if trial is None else folder / trial.name


class TrainCall(NamedTuple):
    """The objects that one call of ``Trainer.train`` works with."""

    hooks: TrainerHooks
    session: TrainerSession
    ignore_keys: list[str] | None
    """Outputs of the model that evaluations ignore."""


def global_batch_size(args: TrainingArguments, num_processes: int) -> int:
    """Return the number of samples per optimizer step over all ranks, in the exact modes."""
    return args.global_batch_size or args.train_batch_size * args.gradient_accumulation_steps * num_processes
