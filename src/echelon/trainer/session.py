"""A Trainer's state apart from its public attributes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn

from echelon.accelerator.pipeline import Pipeline
from echelon.accelerator.weight_average import WeightAverage
from echelon.checkpoint.background_save import HostBuffers
from echelon.checkpoint.object_store import Location, location
from echelon.checkpoint.save import PendingCheckpoint
from echelon.trainer.arguments.training_arguments import TrainingArguments, checkpoint_place, resolve_path
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data.data_loaders import LoaderSource
from echelon.trainer.features.hub import HubUpload
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.loss_window import MeanLoss
from echelon.trainer.results import TrainOutput
from echelon.trainer.training_plan import TrainingPlan


class StartedSave(NamedTuple):
    """A checkpoint of the run whose save has started."""

    step: int
    best_before: str | None
    """The best checkpoint before it."""
    pending: PendingCheckpoint | None
    """None if the save has already failed."""


class RunningCall(Protocol):
    """A call of ``Trainer.train`` (``trainer/training_run.py``); each method implements one of the Trainer's."""

    def train(
        self, batch_size: int | None, *, resume_from_checkpoint: str | None, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput: ...
    def set_batch_size(self, batch_size: int) -> None: ...
    def init_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, checkpoint: str | None
    ) -> tuple[int, int]: ...
    def prepare(self, max_steps: int, loader: Any) -> tuple[nn.Module, Any]: ...
    def run_epoch(self, epoch: int, loader: Any) -> None: ...
    def log_evaluate_save(self, grad_norm: Any = None, learning_rate: float | None = None) -> None: ...
    def evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float] | None: ...
    def load_rng_state(self) -> None: ...
    def finalize(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput: ...


class LoadedCheckpoint(Protocol):
    """The checkpoint that a call resumes from (``trainer/checkpoint/resume_point.py``)."""

    def load_optimizer_and_scheduler(self, folder: Path) -> None: ...
    def load_scaler(self, folder: Path) -> None: ...


class RunningTrial(Protocol):
    """The trial of a search that is running (``trainer/features/hyperparameter_search.py``)."""

    name: str
    values: Any

    def report_evaluation(self, metrics: dict[str, float], *, step: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedAttributes:
    """Attributes of a Trainer that are derived from its model."""

    model_accepts_loss_kwargs: bool
    label_names: tuple[str, ...]
    can_return_loss: bool


@dataclass(kw_only=True)
class ModelInterface:
    """How the model and the loss functions are called."""

    overrides_compute_loss: bool
    computes_own_loss: bool
    """Whether the loss is computed outside the model."""
    num_positional: int | None
    """Number of positional parameters that forward takes; None for any number."""
    is_causal: bool
    shifts_labels: bool
    """Whether the loss shifts the labels; a subclass may have set it."""
    derived_shifts_labels: bool
    derived: DerivedAttributes
    """The values that the inspection gave to the Trainer's attributes; a subclass or a script may have set others."""
    infers_labels: bool
    """Whether the label column is assumed to be ``labels``: True if forward takes no labels and ``label_names`` is not
    set."""
    compute_loss_takes_items: bool
    loss_func_takes_items: bool
    watches_items: bool
    """Whether to check that computing the next loss uses the update's number of labels, if it is counted."""
    may_miss_items: bool = True
    """Whether to warn when ``compute_loss_func`` gets no number of labels."""
    counts_flops: bool
    num_parameters: int | None
    """Number of parameters excluding embeddings, or None for models that do not count them."""
    overrides_save_model: bool


class UpdateSize(NamedTuple):
    """The size of one optimizer step on this process."""

    batch_size: int
    """Samples per forward pass."""
    accumulation_steps: int
    """Number of forward passes."""


@dataclass
class PreparedOptimizer:
    """Optimizer and scheduler state that is not in the Trainer's attributes."""

    is_prepared: bool = False
    """Whether the model, optimizer and scheduler are prepared."""
    scheduler: Any = None
    """The prepared scheduler."""
    is_foreign_scheduler: bool = False
    """Whether the scheduler is not a torch ``LRScheduler``, so that the Accelerator does not save it."""
    pipeline: Pipeline | None = None
    """The model's stages on this rank (``pp_size``)."""
    steps_per_update: bool = True
    """Whether the scheduler steps after each update; otherwise, it steps with each evaluation's metric."""
    created_scheduler: bool = False
    """Whether the Trainer has created the scheduler."""
    saved_state: dict[str, Any] | None = None
    """The optimizer's whole state on the saving rank, while a checkpoint in transformers' format is written."""
    has_other_gradients: bool = False
    """Whether the model has trainable weights that the optimizer does not contain."""


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

    run: RunningCall | None = None
    """The running ``Trainer.train`` call; None outside training, like ``resumed`` and ``loop``."""
    resumed: LoadedCheckpoint | None = None
    """The checkpoint that the running call resumes from."""
    loop: RunningCall | None = None
    """The running call, once it is prepared."""
    trial: RunningTrial | None = None
    """The running trial; None outside a search."""
    losses: MeanLoss | None = None
    """The losses of the latest training run; None before the first run."""
    saves_master_weights: bool = False
    """Whether ``save_model`` keeps float32 master weights, because it writes a part of a checkpoint."""
    cursor: TrainCursor = field(default_factory=TrainCursor)
    optimizer: PreparedOptimizer = field(default_factory=PreparedOptimizer)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
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
    started_save: StartedSave | None = None
    """The checkpoint that may still be being written (``save_blocking=False``)."""
    weights_copy: HostBuffers = field(default_factory=HostBuffers)
    optimizer_copy: HostBuffers = field(default_factory=HostBuffers)
    model_files_hold_weights: bool = False
    """Whether the model files of the latest background save hold all weights under the model's own names."""
    average: WeightAverage | None = None
    """The average of the weights in the running call (``ema_decay``, ``swa_start``)."""
    plan: TrainingPlan | None = None
    """What ``Trainer.set_initial_training_values`` has planned last."""
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

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if an average is kept.

        Collective: enter on every rank if the engine shards parameters or optimizer state.
        """
        return nullcontext() if self.average is None else self.average.average_parameters()

    def update_size(self, args: TrainingArguments) -> UpdateSize:
        """Return the size of an update, which ``auto_find_batch_size`` may have changed."""
        return self.fitted or UpdateSize(args.train_batch_size, args.gradient_accumulation_steps)

    def output_dir(self, args: TrainingArguments) -> Path:
        """Return the absolute path of the output directory, or of the running trial's subdirectory.

        It is local, even if ``args`` name a URL, and then holds all but checkpoints and models.
        """
        folder = resolve_path(args)
        return folder if self.trial is None else folder / self.trial.name

    def checkpoint_dir(self, args: TrainingArguments) -> Location:
        """Return the place of the checkpoints: ``output_dir``, or the URL in ``args``, or the running trial's part of it."""
        return self._of_trial(checkpoint_place(args))

    def output_dir_as_given(self, args: TrainingArguments) -> Location:
        """Return the same place as ``checkpoint_dir``, with the path as written in ``args``."""
        return self._of_trial(location(args.output_dir or "trainer_output"))

    def _of_trial(self, folder: Location) -> Location:
        return folder if self.trial is None else folder / self.trial.name


def global_batch_size(args: TrainingArguments, num_readers: int) -> int:
    """Return the number of samples per optimizer step across all ranks, in the exact modes."""
    return args.global_batch_size or args.train_batch_size * args.gradient_accumulation_steps * num_readers
