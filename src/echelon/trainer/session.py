"""A Trainer's state apart from its public attributes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from echelon.trainer.arguments.training_arguments import TrainingArguments, resolve_path
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data.loader_source import LoaderSource
from echelon.trainer.features.hub import HubUpload
from echelon.trainer.features.hyperparameter_search import SearchState
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.loss_window import MeanLoss
from echelon.trainer.model_interface import ModelInterface
from echelon.trainer.optim.prepared_optimizer import PreparedOptimizer
from echelon.trainer.running import LoadedCheckpoint, RunningCall, RunningLoop
from echelon.trainer.training_plan import TrainingPlan

__all__ = ["EvaluationState", "TrainerSession", "UpdateSize", "global_batch_size"]


class UpdateSize(NamedTuple):
    """The size of one optimizer step on this process."""

    batch_size: int
    """Samples per forward pass."""
    accumulation_steps: int
    """Number of forward passes."""


@dataclass
class EvaluationState:
    """The running evaluation's state."""

    is_predicting: bool = False
    """Whether ``predict`` is running, which does not need labels."""
    is_repeatable: bool = False
    """Whether a resumed run would repeat this evaluation, so that preemption may interrupt it."""
    real_samples: tuple[int, int] | None = None
    """Number of non-padding samples in the current batch, on this rank and across all ranks; None if unknown."""
    rows_per_sample: int = 1
    """Number of rows that the collator makes from each sample, for weighting a batch's loss; 1 for a single process."""
    preparation_time: float | None = None
    """Seconds spent preparing the model for an evaluation before any training."""


@dataclass
class TrainerSession:
    """One Trainer's components."""

    base: type[Any]
    """The class whose methods do not count as overridden."""
    internals: type[Any]
    """The base class of ``base`` that defines transformers' private methods."""
    run: RunningCall | None = None
    """The running ``Trainer.train`` call; None outside training, like ``resumed`` and ``loop``."""
    resumed: LoadedCheckpoint | None = None
    """The checkpoint that the running call resumes from."""
    loop: RunningLoop | None = None
    """The running call's loop, once it is prepared."""
    losses: MeanLoss | None = None
    """The losses of the latest training run; None before the first run."""
    cursor: TrainCursor = field(default_factory=TrainCursor)
    optimizer: PreparedOptimizer = field(default_factory=PreparedOptimizer)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    search: SearchState = field(default_factory=SearchState)
    interface: ModelInterface = field(init=False)
    memory: MemoryMeter = field(init=False)
    hub: HubUpload = field(init=False)
    loss_func_result: Literal["unused", "scaled", "mean"] = "unused"
    """How ``compute_loss_func`` was used for the current batch: not called, called for its share of the update's mean, or
    called for the mean over the batch."""
    fitted: UpdateSize | None = None
    """Size of an update in the latest training run; None before the first run."""
    wanted_batch_size: int | None = None
    """Batch size that a subclass has set in place of the arguments' batch size."""
    kept_loaders: dict[str, LoaderSource] = field(default_factory=dict)
    """What the loaders in ``_eval_dataloaders`` were built from, for those that the Trainer has built."""
    initial_step: int = 0
    """Step at which the latest training run started; not 0 for a resumed run."""
    initial_num_tokens: int = 0
    """Tokens that were counted before the latest training run."""
    saved_steps: set[int] = field(default_factory=set)
    """Steps whose checkpoints the latest training run has saved, or has resumed from, in its output directory."""
    plan: TrainingPlan | None = None
    """The latest training run's plan."""
    own_attributes: frozenset[str] = frozenset()
    """Attributes that the Trainer had after construction, and those that have been reported since."""
    default_columns: list[str] | None = None
    """The value of ``_signature_columns``, if no subclass has changed it."""
    keeps_weights_with_state: bool = False
    """Whether the checkpoint being loaded stores the weights along with the training state, not in separate files."""
    loads_weights_with_state: bool = False
    """Whether to load the weights that are stored along with the training state."""
    is_warned_of_weights_outside: bool = False
    """Whether a warning has named trained weights that belong to no adapter."""
    is_warned_of_other_state: bool = False
    """Whether a warning has named entries of the model's state dict that are not tensors."""

    def is_overridden(self, hooks: TrainerHooks, name: str) -> bool:
        """Return whether a subclass, or an assignment to the Trainer or its class, replaces a method of ``internals``.

        Ask only where an override changes more than the method's own work, for example the number of calls.
        """
        return name in vars(hooks) or getattr(type(hooks), name) is not getattr(self.internals, name)

    def update_size(self, args: TrainingArguments) -> UpdateSize:
        """Return the size of an update, which ``auto_find_batch_size`` may have changed."""
        return self.fitted or UpdateSize(args.train_batch_size, args.gradient_accumulation_steps)

    def output_dir(self, args: TrainingArguments) -> Path:
        """Return the absolute path of the output directory, or of the running trial's subdirectory."""
        return self._of_trial(resolve_path(args))

    def output_dir_as_given(self, args: TrainingArguments) -> Path:
        """Return the same directory as ``output_dir``, with the path as written in ``args``."""
        return self._of_trial(Path(args.output_dir or "trainer_output"))

    def _of_trial(self, folder: Path) -> Path:
        trial = self.search.trial
        return folder if trial is None else folder / trial.name


def global_batch_size(args: TrainingArguments, num_readers: int) -> int:
    """Return the number of samples per optimizer step across all ranks, in the exact modes."""
    return args.global_batch_size or args.train_batch_size * args.gradient_accumulation_steps * num_readers
