"""TrainingArguments: every choice of a training, under the names, the order and the defaults of transformers."""

# ruff: noqa: RUF009 - `_setting` is `dataclasses.field` with the help text behind the default

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from echelon.accelerator import PartialState
from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.trainer.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
    choose,
)
from echelon.trainer.not_offered import refuse_what_is_not_offered
from echelon.trainer.old_names import KEPT, translate
from echelon.trainer.optimizers import refuse_optimizers_of_other_packages

__all__ = ["TrainingArguments"]

logger = get_logger(__name__)

_Value = TypeVar("_Value")
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "passive": -1,
}
_SAMPLING = ("random", "sequential", "group_by_length", "batch_rebalance")
_SECRETS = ("hub_token",)


def _setting(default: _Value, meaning: str) -> _Value:
    """Declare a field; ``meaning`` is also the help text of an argument parser made from the dataclass."""
    return field(default=default, metadata={"help": meaning})


class _AcceptsOldNames(type):
    """Translates keyword arguments that older tutorials use, for TrainingArguments and every class derived from it."""

    if not TYPE_CHECKING:  # editors and type checkers see the dataclass' own signature

        def __call__(cls, *values: Any, **named: Any) -> Any:
            known = {item.name: _default(item) for item in fields(cls) if item.init}
            extra = inspect.signature(cls.__init__).parameters.keys() - known.keys()  # a subclass' own __init__
            renamed = translate(named, fields={**known, **dict.fromkeys(extra)})
            kept = {name: renamed.pop(name) for name in KEPT if name in renamed and name not in known}
            arguments = super().__call__(*values, **renamed)
            for name, value in kept.items():
                setattr(arguments, name, value)
            return arguments

        @property
        def __signature__(cls) -> inspect.Signature:
            own = inspect.signature(cls.__init__)
            return own.replace(parameters=list(own.parameters.values())[1:])


@dataclass
class TrainingArguments(metaclass=_AcceptsOldNames):
    """The choices of a training.

    Names, order and defaults are those of transformers 5; names of its older versions are accepted with a warning. A
    setting that this version cannot do yet is an error (``not_offered.py``), never ignored. Reading ``device``,
    ``world_size`` and the like looks at what started the process.
    """

    # Where the results go, and how long to train.
    output_dir: str | None = _setting(None, "Folder for checkpoints and results; none given: trainer_output.")
    per_device_train_batch_size: int = _setting(8, "Samples of one process in one forward pass of the training.")
    num_train_epochs: float = _setting(3.0, "Passes over the training data; may be a fraction.")
    max_steps: int = _setting(-1, "Optimizer steps in all; if positive, it decides instead of num_train_epochs.")
    # The optimizer and its schedule.
    learning_rate: float = _setting(5e-5, "The peak of the learning-rate schedule.")
    lr_scheduler_type: SchedulerType | str = _setting("linear", "The shape of the learning-rate schedule.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = _setting(None, "More arguments of the schedule, as a dict.")
    warmup_steps: float = _setting(0, "Steps in which the rate rises from 0; below 1: a part of all steps.")
    optim: OptimizerNames | str = _setting("adamw_torch_fused", "The optimizer, by name.")
    optim_args: str | None = _setting(None, "More arguments of the optimizer, as 'name=value,name=value'.")
    weight_decay: float = _setting(0.0, "Decay of all weights but biases and those of normalisation layers.")
    adam_beta1: float = _setting(0.9, "Decay rate of Adam's average of the gradients.")
    adam_beta2: float = _setting(0.999, "Decay rate of Adam's average of the squared gradients.")
    adam_epsilon: float = _setting(1e-8, "Keeps Adam from dividing by zero.")
    optim_target_modules: str | list[str] | None = _setting(None, "Modules that a low-rank optimizer treats.")
    # One update.
    gradient_accumulation_steps: int = _setting(1, "Forward and backward passes of one optimizer step.")
    average_tokens_across_devices: bool = _setting(True, "Divide a loss over tokens by the tokens of all processes.")
    max_grad_norm: float = _setting(1.0, "Scale gradients down to this norm; 0: leave them.")
    label_smoothing_factor: float = _setting(0.0, "Part of the target that is spread over all classes.")
    # Precision.
    bf16: bool = _setting(False, "Compute in bfloat16 where that is safe, keep weights in float32.")
    fp16: bool = _setting(False, "Compute in float16 where that is safe, with loss scaling.")
    bf16_full_eval: bool = _setting(False, "Cast the whole model to bfloat16 for evaluation.")
    fp16_full_eval: bool = _setting(False, "Cast the whole model to float16 for evaluation.")
    tf32: bool | None = _setting(None, "Allow TF32 matrix products; none given: torch's default.")
    # Memory and speed.
    activation_checkpointing: bool | None = _setting(None, "Compute activations twice in place of keeping them.")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = _setting(None, "How to, as a dict.")
    gradient_checkpointing: bool | None = _setting(None, "Another name of activation_checkpointing.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = _setting(
        None, "Another name of activation_checkpointing_kwargs."
    )
    torch_compile: bool = _setting(False, "Compile the model.")
    torch_compile_backend: str | None = _setting(None, "The compiler's backend; switches torch_compile on.")
    torch_compile_mode: str | None = _setting(None, "The compiler's mode; switches torch_compile on.")
    use_liger_kernel: bool = _setting(False, "Use the Liger kernels.")
    liger_kernel_config: dict[str, Any] | None = _setting(None, "Which of the Liger kernels, as a dict.")
    use_cache: bool = _setting(False, "Let a language model keep keys and values; of no use in training.")
    neftune_noise_alpha: float | None = _setting(None, "Strength of the noise on embeddings (NEFTune).")
    torch_empty_cache_steps: int | None = _setting(None, "Empty the device's memory cache every so many steps.")
    auto_find_batch_size: bool = _setting(False, "Try smaller batches when the memory is too small.")
    # Logs.
    logging_strategy: IntervalStrategy | str = _setting("steps", "When to log: no, steps, epoch.")
    logging_steps: float = _setting(500, "Log every so many optimizer steps; below 1: a part of all steps.")
    logging_first_step: bool = _setting(False, "Log the first step, too.")
    log_on_each_node: bool = _setting(True, "One process of every machine speaks, not one in all.")
    logging_nan_inf_filter: bool = _setting(True, "Leave infinite losses out of the logged mean; training sees them.")
    include_num_input_tokens_seen: str | bool = _setting("no", "Count tokens: no, all, non_padding.")
    log_level: str = _setting("passive", "What the main process says: debug ... critical; passive: as it is set.")
    log_level_replica: str = _setting("warning", "What the other processes say.")
    disable_tqdm: bool | None = _setting(None, "No progress bars; none given: by the log level.")
    report_to: str | list[str] | None = _setting("none", "Where the logs go beside the screen.")
    run_name: str | None = _setting(None, "A name of the run for those.")
    project: str = _setting("huggingface", "A project of theirs.")
    trackio_space_id: str | None = _setting(None, "Where Trackio shows the run.")
    trackio_bucket_id: str | None = _setting(None, "Where Trackio keeps the run.")
    trackio_static_space_id: bool | str | None = _setting(None, "Where Trackio keeps a fixed view of the run.")
    # Evaluation.
    eval_strategy: IntervalStrategy | str = _setting("no", "When to evaluate: no, steps, epoch.")
    eval_steps: float | None = _setting(None, "Evaluate every so many optimizer steps; none given: logging_steps.")
    eval_delay: float = _setting(0, "Epochs or steps (by eval_strategy) before the first evaluation.")
    per_device_eval_batch_size: int = _setting(8, "Samples of one process in one forward pass of an evaluation.")
    prediction_loss_only: bool = _setting(False, "Gather the loss only, no predictions.")
    eval_on_start: bool = _setting(False, "Evaluate before the first step.")
    eval_do_concat_batches: bool = _setting(True, "Join the predictions of all batches; else a list of batches.")
    eval_use_gather_object: bool = _setting(False, "Gather objects that are no tensors.")
    eval_accumulation_steps: int | None = _setting(None, "Move predictions to the CPU every so many batches.")
    include_for_metrics: list[str] = field(
        default_factory=list, metadata={"help": "What else compute_metrics gets: inputs, loss."}
    )
    batch_eval_metrics: bool = _setting(False, "Call compute_metrics for each batch.")
    # Checkpoints.
    save_only_model: bool = _setting(False, "Save the weights, not what a resumed training needs.")
    save_strategy: SaveStrategy | str = _setting("steps", "When to save: no, steps, epoch, best.")
    save_steps: float = _setting(500, "Save every so many optimizer steps; below 1: a part of all steps.")
    save_on_each_node: bool = _setting(False, "Save on every machine.")
    save_total_limit: int | None = _setting(None, "Keep so many checkpoints: the newest, and the best one always.")
    enable_jit_checkpoint: bool = _setting(False, "Save when the process is asked to end.")
    # Upload.
    push_to_hub: bool = _setting(False, "Upload the model when it is saved.")
    hub_token: str | None = _setting(None, "The secret for it.")
    hub_private_repo: bool | None = _setting(None, "Whether others may see the upload.")
    hub_model_id: str | None = _setting(None, "Its name there.")
    hub_strategy: HubStrategy | str = _setting("every_save", "What to upload, and when.")
    hub_always_push: bool = _setting(False, "Start an upload while another one runs.")
    hub_revision: str | None = _setting(None, "The branch to upload to.")
    # The best model.
    load_best_model_at_end: bool = _setting(False, "Go back to the best checkpoint after the training.")
    metric_for_best_model: str | None = _setting(None, "What makes it the best: a name of the evaluation's metrics.")
    greater_is_better: bool | None = _setting(None, "Whether more of it is better; none given: unless it is a loss.")
    # Going on after a stop, and chance.
    ignore_data_skip: bool = _setting(False, "Start the data anew in a resumed training.")
    restore_callback_states_from_checkpoint: bool = _setting(False, "Give callbacks their saved state back.")
    full_determinism: bool = _setting(False, "Deterministic algorithms only; slower.")
    seed: int = _setting(42, "The seed of everything.")
    data_seed: int | None = _setting(None, "The seed of the data order; none given: seed.")
    # Where it runs.
    use_cpu: bool = _setting(False, "Use the CPU even where there is an accelerator.")
    accelerator_config: dict[str, Any] | str | None = _setting(None, "Settings of the Accelerator: a dict or a file.")
    parallelism_config: Any = _setting(None, "How to split the model.")
    # Data.
    dataloader_drop_last: bool = _setting(False, "Leave a short last batch out.")
    dataloader_num_workers: int = _setting(0, "Processes that read data; 0: this one.")
    dataloader_pin_memory: bool = _setting(True, "Keep batches in pinned memory.")
    dataloader_persistent_workers: bool = _setting(False, "Keep those processes between passes.")
    dataloader_prefetch_factor: int | None = _setting(None, "Batches that each of them reads ahead.")
    dataloader_multiprocessing_context: str | None = _setting(None, "How they are started: fork, spawn, forkserver.")
    dataloader_in_order: bool = _setting(True, "Take batches in order, not as they come.")
    remove_unused_columns: bool = _setting(True, "Leave out columns that the model's forward does not take.")
    label_names: list[str] | None = _setting(None, "The keys of a batch that are labels; none given: by forward.")
    train_sampling_strategy: str = _setting("random", "The order of the training data: random, sequential.")
    length_column_name: str = _setting("length", "The column that holds the length of each sample.")
    # Several processes.
    ddp_find_unused_parameters: bool | None = _setting(None, "As DistributedDataParallel's.")
    ddp_bucket_cap_mb: int | None = _setting(None, "As DistributedDataParallel's.")
    ddp_broadcast_buffers: bool | None = _setting(None, "As DistributedDataParallel's.")
    ddp_static_graph: bool | None = _setting(None, "As DistributedDataParallel's.")
    ddp_backend: str | None = _setting(None, "The backend of torch.distributed.")
    ddp_timeout: int = _setting(1800, "Seconds before a collective fails.")
    fsdp: bool | str | list[str] | None = _setting(None, "Shard the model.")
    fsdp_config: dict[str, Any] | str | None = _setting(None, "How: a dict or a file.")
    deepspeed: dict[str, Any] | str | None = _setting(None, "Settings of DeepSpeed: a dict or a file.")
    # Finding faults.
    debug: str | list[str] = _setting("", "underflow_overflow: find where numbers stop being finite.")
    skip_memory_metrics: bool = _setting(True, "Leave memory out of the metrics.")
    # Not read by the Trainer; for scripts.
    do_train: bool = _setting(False, "For scripts: whether to train.")
    do_eval: bool = _setting(False, "For scripts: whether to evaluate.")
    do_predict: bool = _setting(False, "For scripts: whether to predict.")
    resume_from_checkpoint: str | None = _setting(None, "For scripts: a checkpoint to go on from.")
    local_rank: int = _setting(-1, "Of old launchers; see local_process_index.")

    logging_dir: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        self.output_dir = str(Path(self.output_dir or "trainer_output").expanduser())
        self._read_names()
        self._read_dicts()
        self._refuse()
        self._complete()
        self._check()

    def _read_names(self) -> None:
        self.eval_strategy = choose(IntervalStrategy, self.eval_strategy, setting="eval_strategy")
        self.logging_strategy = choose(IntervalStrategy, self.logging_strategy, setting="logging_strategy")
        self.save_strategy = choose(SaveStrategy, self.save_strategy, setting="save_strategy")
        self.hub_strategy = choose(HubStrategy, self.hub_strategy, setting="hub_strategy")
        self.lr_scheduler_type = choose(SchedulerType, self.lr_scheduler_type, setting="lr_scheduler_type")
        refuse_optimizers_of_other_packages(str(self.optim))
        self.optim = choose(OptimizerNames, self.optim, setting="optim")
        _one_of("train_sampling_strategy", self.train_sampling_strategy, _SAMPLING)
        _one_of("log_level", self.log_level, tuple(_LEVELS))
        _one_of("log_level_replica", self.log_level_replica, tuple(_LEVELS))
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"

    def _read_dicts(self) -> None:
        for name in ("accelerator_config", "fsdp_config", "deepspeed", "lr_scheduler_kwargs"):
            setattr(self, name, _as_dict(name, getattr(self, name)))
        for new, old in (
            ("activation_checkpointing", "gradient_checkpointing"),
            ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        ):
            value = getattr(self, old) if getattr(self, new) is None else getattr(self, new)
            setattr(self, new, value)
            setattr(self, old, value)

    def _refuse(self) -> None:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.report_to in (None, [], ["none"]):
            values["report_to"] = "none"
        if self.fsdp in ("", []):
            values["fsdp"] = None
        defaults = {item.name: _default(item) for item in fields(self)}
        refuse_what_is_not_offered(values, defaults)
        self.report_to = []
        if self.lr_scheduler_type == SchedulerType.GREEDY:
            raise ConfigError(
                "lr_scheduler_type='greedy' is not offered yet by this version of echelon",
                where="TrainingArguments.lr_scheduler_type",
                do="use 'reduce_lr_on_plateau'",
            )
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ConfigError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} is not offered yet by this version of echelon",
                where="TrainingArguments.train_sampling_strategy (old name: group_by_length)",
                do="use 'random' or 'sequential', or override _get_train_sampler",
            )

    def _complete(self) -> None:
        if self.eval_strategy != IntervalStrategy.NO:
            self.do_eval = True
        if self.eval_strategy == IntervalStrategy.STEPS and not self.eval_steps:
            if not self.logging_steps > 0:
                raise ConfigError(
                    "eval_strategy='steps' needs a number of steps, and neither eval_steps nor logging_steps is positive",
                    where="TrainingArguments.eval_steps",
                    do="set eval_steps",
                )
            self.eval_steps = self.logging_steps
        wants_best = self.load_best_model_at_end or self.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
        if wants_best and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        if self.use_cpu:
            self.dataloader_pin_memory = False
        if self.disable_tqdm is None:
            self.disable_tqdm = logger.getEffectiveLevel() > logging.WARNING
        for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
            setattr(self, name, _steps(name, getattr(self, name)))

    def _check(self) -> None:
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 exclude each other", where="TrainingArguments", do="choose one of them")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be at least 1",
                    where=f"TrainingArguments.{name}",
                    do="set it to 1",
                )
        if self.warmup_steps < 0:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} must not be negative", where="TrainingArguments.warmup_steps"
            )
        if self.dataloader_prefetch_factor is not None and not self.dataloader_num_workers:
            raise ConfigError(
                f"dataloader_prefetch_factor={self.dataloader_prefetch_factor} needs processes that read data",
                where="TrainingArguments.dataloader_prefetch_factor",
                do="set dataloader_num_workers to 1 or more",
            )
        if self.logging_strategy == IntervalStrategy.STEPS and not self.logging_steps > 0:
            raise ConfigError(
                f"logging_strategy='steps' needs a positive number, not logging_steps={self.logging_steps}",
                where="TrainingArguments.logging_steps",
                do="set logging_steps, or logging_strategy='no'",
            )
        if self.save_strategy == SaveStrategy.BEST and self.metric_for_best_model is None:
            raise ConfigError(
                "save_strategy='best' does not know what is best",
                where="TrainingArguments.metric_for_best_model",
                do="set metric_for_best_model to a name of the evaluation's metrics, such as 'loss'",
            )
        if self.load_best_model_at_end and self.save_strategy != SaveStrategy.BEST:
            self._check_saved_when_evaluated()

    def _check_saved_when_evaluated(self) -> None:
        if str(self.eval_strategy) != str(self.save_strategy):
            raise ConfigError(
                f"load_best_model_at_end needs a checkpoint of each evaluation, but eval_strategy={str(self.eval_strategy)!r}"
                f" and save_strategy={str(self.save_strategy)!r}",
                where="TrainingArguments.load_best_model_at_end",
                do="set both to the same, or save_strategy='best'",
            )
        if self.eval_strategy == IntervalStrategy.STEPS and self.eval_steps is not None:
            ratio = self.save_steps / self.eval_steps
            if abs(ratio - round(ratio)) > 1e-9 or round(ratio) < 1:
                raise ConfigError(
                    f"load_best_model_at_end needs an evaluation at each checkpoint, but save_steps={self.save_steps} is no"
                    f" multiple of eval_steps={self.eval_steps}",
                    where="TrainingArguments.save_steps",
                    do="choose a multiple, or save_strategy='best'",
                )

    # What started this process.

    @property
    def distributed_state(self) -> PartialState:
        """The place of this process among the others. Collective: on first use with several processes."""
        options = {"backend": self.ddp_backend, "timeout": self.ddp_timeout_delta}
        return PartialState(cpu=self.use_cpu, **options)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.distributed_state.device

    @property
    def n_gpu(self) -> int:
        """Accelerators that this process uses: one, or none. Several need one process each (``echelon launch``)."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether other processes share the work."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.distributed_state.num_processes

    @property
    def process_index(self) -> int:
        """The rank."""
        return self.distributed_state.process_index

    @property
    def local_process_index(self) -> int:
        """The rank among the processes of this machine."""
        return self.distributed_state.local_process_index

    @property
    def train_batch_size(self) -> int:
        """Samples of this process in one forward pass of the training."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples of this process in one forward pass of an evaluation."""
        return self.per_device_eval_batch_size

    @property
    def should_log(self) -> bool:
        """Whether this process speaks."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return self.process_index == 0

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16`` or ``bf16``."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "no"

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """``ddp_timeout`` as a duration."""
        return timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """Return the level of ``logging`` for this process."""
        name = self.log_level if self.should_log else self.log_level_replica
        return logger.getEffectiveLevel() if name == "passive" else _LEVELS[name]

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on the main process, then on the others: to fill a cache once.

        Collective: every process must enter.
        """
        state = self.distributed_state
        logger.debug("main process first: %s", desc)
        with state.local_main_process_first() if local else state.main_process_first():
            yield

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warm-up steps of a training of ``num_training_steps``."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; secrets are masked."""
        return {name: _plain(name, value) for name, value in asdict(self).items()}

    def to_json_string(self) -> str:
        """Return ``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, bool | int | float | str]:
        """Return ``to_dict`` with everything but numbers and strings as text, for trackers of hyperparameters."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {
            name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in values.items()
        }

    def __str__(self) -> str:
        lines = [f"{name}={value!r}," for name, value in sorted(self.to_dict().items())]
        return f"{type(self).__name__}(\n" + "\n".join(lines) + "\n)"


def _default(item: Any) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} is none of the choices: {', '.join(choices)}",
            where=f"TrainingArguments.{name}",
            do="choose one of them",
        )


def _as_dict(name: str, value: Any) -> Any:
    """Return a dict from a dict, from JSON text that begins with a brace, or from a JSON file."""
    if not isinstance(value, (str, Path)) or not str(value):
        return value
    text = str(value)
    try:
        return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{name}={text!r} is neither JSON nor a file with JSON: {error}",
            where=f"TrainingArguments.{name}",
            do="give a dict, text such as '{\"key\": 1}', or the path of a JSON file",
        ) from error


def _steps(name: str, value: float | None) -> float | None:
    if value is None or value < 1:
        return value
    if value != int(value):
        raise ConfigError(
            f"{name}={value} is no whole number of steps, and no part of all steps (below 1)",
            where=f"TrainingArguments.{name}",
            do=f"set it to {round(value)}",
        )
    return int(value)


def _plain(name: str, value: Any) -> Any:
    if name in _SECRETS and value is not None:
        return f"<{name.upper()}>"
    if isinstance(value, Enum):
        return value.value
    return [_plain("", part) for part in value] if isinstance(value, list) else value
