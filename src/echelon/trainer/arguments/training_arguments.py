"""TrainingArguments, with the same field names, order and defaults as in transformers."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from echelon.accelerator import DeepSpeedPlugin, PartialState
from echelon.accelerator.setup.local_devices import num_devices_of_process
from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.checkpoint.object_store import Location, ObjectPath, local_folder_of, location
from echelon.trainer.arguments.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
    choose,
)
from echelon.trainer.arguments.fields import TrainingFields, setting
from echelon.trainer.arguments.parsers import as_dict, parse_duration, parse_report_to
from echelon.trainer.arguments.plugins import deepspeed_plugin, fsdp_plugin
from echelon.trainer.arguments.renamed import translate, translate_fields
from echelon.trainer.arguments.validation import (
    check_values,
    refuse_optimizer,
    set_derived_values,
)

__all__ = [
    "TrainingArguments",
    "building_loader",
    "has_fixed_devices",
    "loader_batch_size",
    "num_devices_of",
    "checkpoint_place",
    "resolve_path",
    "set_arguments",
    "set_num_devices",
    "setting",
]

# The arguments whose training loader is being built in an exact mode, and the samples of one of its batches.
_building: ContextVar[tuple[TrainingArguments, int] | None] = ContextVar("_building", default=None)

logger = get_logger(__name__)

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "passive": -1,
}
_TOKENS = ("no", "all", "non_padding")
_SAMPLING = ("random", "sequential", "group_by_length", "batch_rebalance")
# What to recompute may also be given as a mode of the Accelerator.
_BOOL_OR_MODE = ("activation_checkpointing", "gradient_checkpointing")
_ACTIVATION_MODES = ("none", "full", "selective", "offload")
_DICTS = (
    "accelerator_config",
    "fsdp_config",
    "deepspeed",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs",
)
_SECRETS = ("hub_token",)


class _AcceptsOldNames(type):
    """Metaclass through which TrainingArguments and its subclasses accept old keyword arguments."""

    if not TYPE_CHECKING:  # type checkers see the dataclass signature

        def __call__(cls, *values: Any, **named: Any) -> Any:
            known = {item.name: _default(item) for item in fields(cls) if item.init}
            extra = inspect.signature(cls.__init__).parameters.keys() - known.keys()  # of a subclass's __init__
            arguments = super().__call__(*values, **translate(named, fields={**known, **dict.fromkeys(extra)}))
            translate_fields(arguments)
            return arguments

        @property
        def __signature__(cls) -> inspect.Signature:
            own = inspect.signature(cls.__init__)
            return own.replace(parameters=list(own.parameters.values())[1:])


@dataclass
class TrainingArguments(TrainingFields, metaclass=_AcceptsOldNames):
    """A Trainer's settings.

    Names, order and defaults match transformers 5; names from older versions are accepted with a warning. An
    unsupported setting is never ignored: it raises an error (``validation.py``). ``device``, ``world_size`` and
    similar properties are derived from the process's environment.
    """

    _n_gpu: ClassVar[int | None] = None  # existing scripts set this attribute

    default_optim: ClassVar[str] = "adamw_torch_fused"

    _VALID_DICT_FIELDS: ClassVar[list[str]] = list(_DICTS)
    """Fields that accept a dict as a JSON string; a subclass adds its own."""

    def __post_init__(self) -> None:
        self.output_dir = str(location(self.output_dir or "trainer_output"))
        self._creation_dir = Path.cwd()
        self._read_numbers()
        self._read_names()
        self._read_dicts()
        set_derived_values(self)
        self._validate_args()

    def _validate_args(self) -> None:
        """Check the values and their combinations.

        Raises:
            ConfigError: a value is invalid, or two conflict.
        """
        check_values(self)

    def _read_numbers(self) -> None:
        """Convert text, such as the 1e-3 of a YAML file, which PyYAML reads as a string."""
        # Not item.type: HfArgumentParser replaces it, and bool | str by bool.
        annotations = {
            name: a for base in reversed(type(self).__mro__) for name, a in inspect.get_annotations(base).items()
        }
        for item in fields(self):
            annotation, value = annotations[item.name], getattr(self, item.name)
            kind = (annotation.__name__ if isinstance(annotation, type) else str(annotation)).removesuffix(" | None")
            if kind not in _PARSERS or not isinstance(value, str):
                continue
            parse, meaning = _PARSERS[kind]
            do = "set a value"
            if item.name in _BOOL_OR_MODE:
                do = f"set it to {meaning}, or to one of {', '.join(_ACTIVATION_MODES)}"
                if value in _ACTIVATION_MODES:
                    continue
            try:
                setattr(self, item.name, parse(value))
            except ValueError as error:
                raise ConfigError(
                    f"{item.name}={value!r} is not {meaning}",
                    where=f"TrainingArguments.{item.name}",
                    do=do,
                ) from error

    def _read_names(self) -> None:
        self.eval_strategy = choose(IntervalStrategy, self.eval_strategy, setting="eval_strategy")
        self.logging_strategy = choose(IntervalStrategy, self.logging_strategy, setting="logging_strategy")
        self.save_strategy = choose(SaveStrategy, self.save_strategy, setting="save_strategy")
        self.hub_strategy = choose(HubStrategy, self.hub_strategy, setting="hub_strategy")
        self.lr_scheduler_type = choose(SchedulerType, self.lr_scheduler_type, setting="lr_scheduler_type")
        self.optim = choose(OptimizerNames, self.optim, setting="optim")
        refuse_optimizer(self.optim.value)
        _check_choice("train_sampling_strategy", self.train_sampling_strategy, _SAMPLING)
        _check_choice("log_level", self.log_level, tuple(_LEVELS))
        _check_choice("log_level_replica", self.log_level_replica, tuple(_LEVELS))
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"
        _check_choice("include_num_input_tokens_seen", self.include_num_input_tokens_seen, _TOKENS)
        if self.already_sharded is not None:
            self.already_sharded = str(self.already_sharded).lower()  # accepts True and False
            _check_choice("already_sharded", self.already_sharded, ("true", "train", "eval", "false", "none"))
        given = self.debug or ""  # argument parsers pass None
        self.debug = given.split() if isinstance(given, str) else [str(_to_plain("", one)) for one in given]
        for name in self.debug:
            _check_choice("debug", name, ("underflow_overflow",))
        for name in self.include_for_metrics:
            _check_choice("include_for_metrics", name, ("inputs", "loss"))
        self.report_to = parse_report_to(self.report_to)
        self.max_time = None if self.max_time is None else parse_duration(self.max_time)

    def _read_dicts(self) -> None:
        for name in (*_DICTS, "parallelism_config"):
            setattr(self, name, as_dict(name, getattr(self, name)))
        for name in self._VALID_DICT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):
                setattr(self, name, as_dict(name, value))
        for new, old in (
            ("activation_checkpointing", "gradient_checkpointing"),
            ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        ):
            value = getattr(self, old) if getattr(self, new) is None else getattr(self, new)
            setattr(self, new, value)
            setattr(self, old, value)

    # ---- properties of this process

    @property
    def distributed_state(self) -> PartialState:
        """The process group's state. With multiple processes, the first use is collective: call on every rank."""
        options = {"backend": self.ddp_backend, "timeout": self.ddp_timeout_delta}
        return PartialState(cpu=self.use_cpu, **options)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.distributed_state.device

    @property
    def _setup_devices(self) -> torch.device:
        """The device of this process. With multiple processes, the first use is collective: call on every rank."""
        return self.device

    @property
    def _no_sync_in_gradient_accumulation(self) -> bool:
        """Whether gradients are synchronized in the last batch of an update only; DeepSpeed decides that itself."""
        return not self.deepspeed

    @property
    def fsdp_plugin_args(self) -> Mapping[str, Any] | None:
        """The plugin settings that ``fsdp`` and ``fsdp_config`` result in (read-only); None if FSDP is off."""
        plugin = fsdp_plugin(self)
        return None if plugin is None else MappingProxyType(dict(vars(plugin)))

    @property
    def n_gpu(self) -> int:
        """Number of accelerators this process uses: all visible ones without a launcher, otherwise one; 0 on the CPU."""
        return self._n_gpu if self._n_gpu is not None else num_devices_of(self, self.distributed_state)

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to the device; a model split over several devices is never moved."""
        return True

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin for ``deepspeed``, or None."""
        return deepspeed_plugin(self)

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether training is distributed over processes, over this process's devices, or not at all."""
        if self.world_size > 1:
            return ParallelMode.DISTRIBUTED
        return ParallelMode.NOT_DISTRIBUTED if self.n_gpu > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.distributed_state.num_processes

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self.distributed_state.process_index

    @property
    def local_process_index(self) -> int:
        """The local rank of this process."""
        return self.distributed_state.local_process_index

    @property
    def train_batch_size(self) -> int:
        """Training samples per forward pass in this process, across all its devices.

        In the exact modes, while ``get_train_dataloader`` runs: ``global_batch_size``, because one batch of the loader is a
        whole update.
        """
        return loader_batch_size(self) or self.per_device_train_batch_size * max(1, self.n_gpu)

    @property
    def eval_batch_size(self) -> int:
        """Evaluation samples per forward pass in this process, across all its devices."""
        return self.per_device_eval_batch_size * max(1, self.n_gpu)

    @property
    def should_log(self) -> bool:
        """Whether this process logs."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16`` or ``bf16``."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "no"

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """``ddp_timeout`` as a duration."""
        return timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """Return this process's ``logging`` level."""
        name = self.log_level if self.should_log else self.log_level_replica
        return logger.getEffectiveLevel() if name == "passive" else _LEVELS[name]

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on the main process first and then on the others, for example to fill a cache only once.

        Collective: every process must enter the block.
        """
        state = self.distributed_state
        logger.debug("main process first: %s", desc)
        with state.local_main_process_first() if local else state.main_process_first():
            yield

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warm-up steps in a run of ``num_training_steps`` steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def batches_of(self, limit: float | None, loader: Any) -> int | None:
        """Return how many batches of ``loader`` the setting ``limit`` allows (at least one), or None if it allows all.

        Raises:
            ConfigError: ``limit`` is a fraction, and ``loader`` has no length.
        """
        if limit is None:
            return None
        if limit >= 1:
            return int(limit)
        try:
            return max(1, int(len(loader) * limit))
        except TypeError:
            raise ConfigError(
                f"the limit {limit} is a fraction of all batches, but the data has no length",
                where="TrainingArguments.limit_train_batches, .limit_eval_batches",
                do="set the limit to a number of batches",
            ) from None

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0.0,
        num_epochs: float = 3.0,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool | None = False,
        gradient_checkpointing: bool | None = None,
    ) -> TrainingArguments:
        """Set the basic training settings."""
        checkpointing = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=checkpointing,
            gradient_checkpointing=checkpointing,
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> TrainingArguments:
        """Set the evaluation settings."""
        return self._set(
            eval_strategy=strategy,
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay or 0,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> TrainingArguments:
        """Set the prediction settings."""
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self,
        strategy: str | SaveStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> TrainingArguments:
        """Set the checkpoint settings."""
        return self._set(
            save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> TrainingArguments:
        """Set the logging settings."""
        return self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> TrainingArguments:
        """Set the upload settings."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> TrainingArguments:
        """Set the optimizer settings."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
        warmup_ratio: float | None = None,
    ) -> TrainingArguments:
        """Set the scheduler settings; ``warmup_ratio`` is the old name of ``warmup_steps``."""
        return self._set(
            lr_scheduler_type=name,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_ratio if warmup_ratio is not None else warmup_steps,
        )

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> TrainingArguments:
        """Set the data loading settings."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )

    def _set(self, **values: Any) -> TrainingArguments:
        """Set fields and the values derived from them, without checking them against the other fields."""
        for name, value in values.items():
            setattr(self, name, value)
        self._read_names()
        set_derived_values(self)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, with secrets masked."""
        values = {name: _to_plain(name, value) for name, value in asdict(self).items()}
        self._dict_dtype_to_str(values)
        return values

    def _dict_dtype_to_str(self, d: dict[str, Any]) -> None:
        """Replace each torch dtype in ``d`` and in its dicts by its name."""
        for name, value in d.items():
            if isinstance(value, torch.dtype):
                d[name] = str(value).removeprefix("torch.")
            elif isinstance(value, dict):
                self._dict_dtype_to_str(value)

    def to_json_string(self) -> str:
        """Return ``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, bool | int | float | str]:
        """Return ``to_dict()`` for trackers, with all values except numbers and strings converted to strings."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {
            name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in values.items()
        }

    def __str__(self) -> str:
        lines = [f"{name}={value!r}," for name, value in sorted(self.to_dict().items())]
        return f"{type(self).__name__}(\n" + "\n".join(lines) + "\n)"


@contextmanager
def building_loader(args: TrainingArguments, batch_size: int) -> Iterator[None]:
    """Make ``args.train_batch_size`` return the loader's ``batch_size`` inside the block."""
    token = _building.set((args, batch_size))
    try:
        yield
    finally:
        _building.reset(token)


def loader_batch_size(args: TrainingArguments) -> int | None:
    """Return the training loader's batch size while it is being built in an exact mode, otherwise None."""
    building = _building.get()
    return building[1] if building is not None and building[0] is args else None


def resolve_path(args: TrainingArguments, path: str | Path | None = None) -> Path:
    """Resolve ``path`` (default: ``output_dir``) against the directory that was current when ``args`` was created.

    For a URL, this is a local folder that is named after its last part: only checkpoints and models are written to a store.
    """
    place = location(path or args.output_dir or "trainer_output")
    return args._creation_dir / (local_folder_of(place) if isinstance(place, ObjectPath) else place)


def checkpoint_place(args: TrainingArguments, path: str | Location | None = None) -> Location:
    """Return the place of checkpoints that ``path`` (default: ``output_dir``) names: a URL, or the same as ``resolve_path``."""
    place = location(path or args.output_dir or "trainer_output")
    return place if isinstance(place, ObjectPath) else resolve_path(args, place)


def num_devices_of(args: TrainingFields, state: PartialState) -> int:
    """Return the number of accelerators that this process trains on; 0 on the CPU.

    As in transformers, the number exceeds 1 if a process that was started without a launcher sees several accelerators,
    unless an engine other than ``dp`` is set.
    """
    count = num_devices_of_process(state.device, engine=args.engine, parity=args.parity)
    is_split = state.num_processes > 1 or args.fsdp or args.deepspeed or args.parallelism_config
    return min(count, 1) if is_split else count


def has_fixed_devices(model: Any) -> bool:
    """Return whether ``model`` cannot be replicated: it is split over several devices, or its weights are quantized."""
    if not isinstance(model, nn.Module):
        return False
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    quantized = ("is_loaded_in_8bit", "is_loaded_in_4bit")
    return len(devices) > 1 or any(bool(getattr(model, name, False)) for name in quantized)


def set_num_devices(args: TrainingArguments, count: int) -> None:
    """Override ``args.n_gpu`` for a model that cannot be replicated."""
    args._n_gpu = count  # type: ignore[misc]


def set_arguments(args: TrainingArguments, values: Mapping[str, Any]) -> None:
    """Set fields in the training arguments.

    Raises:
        ConfigError: a field does not exist.
    """
    for name, value in values.items():
        if not hasattr(args, name):
            raise ConfigError(
                f"hp_space returned {name!r}, which is not a TrainingArguments setting",
                where="Trainer.hyperparameter_search(hp_space=)",
                do="return only TrainingArguments settings; read model parameters from the trial in model_init(trial)",
            )
        old = getattr(args, name)
        setattr(args, name, type(old)(value) if isinstance(old, (Enum, float)) else value)


def recorded_arguments(args: TrainingArguments) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ``args`` as a record of the run shows them, and the names of those that have their default values."""
    values, defaults = {}, []
    for item in fields(args):
        value = _to_plain(item.name, getattr(args, item.name))
        default = _to_plain(item.name, _default(item))
        # As ``__post_init__`` reads the defaults "", "none" and None of some fields.
        if value == default or ((value is False or value == []) and default in (None, "", "none")):
            defaults.append(item.name)
        values[item.name] = str(value) if isinstance(value, torch.dtype) else value
    return values, defaults


def _default(item: Any) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} is not one of {', '.join(choices)}",
            where=f"TrainingArguments.{name}",
            do="use one of these",
        )


def _as_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_PARSERS: Mapping[str, tuple[Callable[[str], Any], str]] = MappingProxyType(
    {"int": (int, "an integer"), "float": (float, "a number"), "bool": (_as_bool, "true or false")}
)
"""By the text of a field's type: reads its value from text, and what the text must be."""


def _to_plain(name: str, value: Any) -> Any:
    if name in _SECRETS and value is not None:
        return f"<{name.upper()}>"
    if isinstance(value, Enum):
        return value.value
    return [_to_plain("", part) for part in value] if isinstance(value, list) else value
