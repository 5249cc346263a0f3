"""The Trainer's attributes, and the methods that its components call on it, because subclasses may override them.

Most do their work themselves or call the component that does it. Those of a running training (``TrainerSession.run``,
``resumed`` and ``loop``) exist only while the Trainer trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler

from echelon.accelerator import Accelerator, sequences
from echelon.accelerator.checkpoint.folders import require_whole
from echelon.accelerator.packed_dataset import PackedDataset
from echelon.accelerator.pipeline import Pipeline
from echelon.accelerator.process import first_rank_saves
from echelon.accelerator.rng_states import current_random_states
from echelon.accelerator.tracking import record_values
from echelon.base.errors import ConfigError, UsageError
from echelon.base.lengths import length_of
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.checkpoint.formats.transformers import OptimizationState, write_random_states, write_state
from echelon.checkpoint.formats.weight_files import exported_to
from echelon.checkpoint.object_store import ObjectPath, location
from echelon.trainer.arguments.training_arguments import TrainingArguments, loader_batch_size, set_arguments
from echelon.trainer.build_accelerator import accelerator_arguments, build_accelerator
from echelon.trainer.callbacks.callback_handler import CallbackHandler, require_agreement, usual_flags
from echelon.trainer.checkpoint.checkpoint_folders import best_folder, update_best_metric
from echelon.trainer.checkpoint.model_files import (
    load_model_from,
    write_model_files,
    write_sharded_model_files,
)
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data import batches, data_loaders
from echelon.trainer.data.collators import default_data_collator
from echelon.trainer.data.columns import ColumnFilter, KeptColumns, Table, drop_columns, kept_columns, signature_columns
from echelon.trainer.data.num_items import WatchedNumber, count_items, items_of, num_tokens
from echelon.trainer.data.packing import packed
from echelon.trainer.features.hub import tags_of, write_card
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.model_loss import LabelSmoother, loss_in, missing_column, without_labels
from echelon.trainer.optim.optimizers import (
    build_optimizer,
    build_scheduler,
    decay_parameter_names,
    optimizer_class_and_arguments,
    param_groups_of,
)
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, TrainOutput, speed_metrics
from echelon.trainer.session import TrainerSession, UpdateSize, global_batch_size
from echelon.trainer.signatures import new_model, num_positional, takes
from echelon.trainer.state import TrainerControl, TrainerState
from echelon.trainer.training_plan import make_plan, num_examples_of

logger = get_logger(__name__)

_Component = TypeVar("_Component")
_NO_CONTEXT = nullcontext()  # has no state


class TrainerMethods:
    """Base class of the Trainer. Scripts may replace its attributes, so components look them up on every use."""

    args: TrainingArguments
    accelerator: Accelerator
    model: nn.Module
    model_wrapped: nn.Module
    model_init: Callable[..., nn.Module] | None
    model_preparation_time: float
    optimizer: Any  # the prepared optimizer during training
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[Any], Any]
    processing_class: Any
    compute_loss_func: Callable[..., torch.Tensor] | None
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    label_smoother: LabelSmoother | None
    label_names: list[str]
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    neftune_noise_alpha: float | None
    place_model_on_device: bool
    current_gradient_accumulation_steps: int
    current_flos: float
    gather_function: Callable[..., Any]
    is_in_train: bool
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    hub_model_id: str | None
    push_in_progress: Any
    _session: TrainerSession
    _signature_columns: list[str] | None
    _trial: Any

    loss_is_scaled_for_ga: bool | None = None
    """Whether an overridden ``compute_loss`` divides by the whole update's number of labels. If False, the
    loss is a mean over its batch, and the Trainer divides it by the update's number of batches. None means True if
    ``compute_loss`` receives the number of labels."""

    # What libraries read. The Trainer sets these where transformers' does.
    deepspeed: Any = None
    is_model_parallel: bool = False
    # What has one value here (see ``NOT_READ``).
    is_distributed_loading_by_transformers: bool = False
    is_fsdp_xla_enabled: bool = False
    is_fsdp_xla_v1_enabled: bool = False
    is_fsdp_xla_v2_enabled: bool = False
    _loggers_initialized: bool = False

    # ---- what the Trainer itself defines, because its components need this class -------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """See ``Trainer.train``."""
        raise NotImplementedError

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See ``Trainer.evaluate``."""
        raise NotImplementedError

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """See ``Trainer.evaluation_loop``."""
        raise NotImplementedError

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, Any, Any]:
        """See ``Trainer.prediction_step``."""
        raise NotImplementedError

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """See ``Trainer._save_checkpoint``."""
        raise NotImplementedError

    # ---- construction ------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create ``self.accelerator`` from the arguments. Collective: call on every rank."""
        self.accelerator = build_accelerator(self.args, self._build_accelerator_args)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.accelerator.state.deepspeed_plugin is not None
        self.is_fsdp_enabled = self.accelerator.state.fsdp_plugin is not None
        self.accelerator.preemption.is_driven = True
        self._session.cursor = TrainCursor()
        self.accelerator.register_for_checkpointing(self._session.cursor)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model from ``model_init``, which takes no argument or takes the trial."""
        return new_model(self.model_init, trial)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Return the Accelerator's arguments: those that ``args`` determines, and ``kwargs``."""
        return {**accelerator_arguments(self.args, getattr(self, "model", None)), **kwargs}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move ``model`` to ``device``, unless it is already split over several devices."""
        if getattr(model, "hf_device_map", None) is not None:
            logger.warning(
                N_("the model is already placed on its devices (hf_device_map), so it is not moved to %s"), device
            )
            return
        model.to(device)

    # ---- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training data loader, sharded across ranks."""
        if self.train_dataset is None:
            raise UsageError(
                "train_dataset is None",
                where="Trainer(train_dataset=)",
                do="pass train_dataset, or override get_train_dataloader",
            )
        size = self._train_batch_size
        if self.accelerator.parity != "off":
            size = global_batch_size(self.args, self.accelerator.session.num_readers)
        dataset = self.train_dataset
        if self.args.pack_to_length is not None:
            if isinstance(dataset, Table):
                dataset = self._remove_unused_columns(dataset, description="Training")
            dataset = packed(
                self.args,
                dataset,
                accelerator=self.accelerator,
                collator=self.data_collator,
                shifts_labels=self._session.interface.shifts_labels,
                tokenizer=self.processing_class,
            )
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: str | Any | None = None) -> DataLoader[Any]:
        """Return a loader for ``eval_dataset`` (a dataset, or the name of one of several), sharded across ranks.

        With ``dataloader_persistent_workers``, a loader is built once for each named dataset, for the Trainer's own, and
        for the last one that was passed, until the dataset, the collator, the columns or the batch size change.
        """
        dataset = data_loaders.choose_eval_dataset(eval_dataset, self.eval_dataset)
        key = eval_dataset if isinstance(eval_dataset, str) else "eval" if dataset is self.eval_dataset else "given"
        kept: dict[str, DataLoader[Any]] = self.__dict__.get("_eval_dataloaders", {})
        if key in kept and self.args.dataloader_persistent_workers:
            source = self._session.kept_loaders.get(key)
            if source is None or source.equals(self._loader_source(dataset)):
                return kept[key]
        return self._get_dataloader(
            dataset=dataset,
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=key,
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return a loader for ``test_dataset``, sharded across ranks."""
        return self._get_dataloader(
            dataset=data_loaders.as_dataset(test_dataset),
            description="test",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
        )

    @property
    def _train_batch_size(self) -> int:
        """Number of samples per training batch on this process; see ``TrainingArguments.train_batch_size``."""
        return loader_batch_size(self.args) or self._session.update_size(self.args).batch_size

    @_train_batch_size.setter
    def _train_batch_size(self, size: int) -> None:
        steps = self._session.update_size(self.args).accumulation_steps
        self._session.fitted, self._session.wanted_batch_size = UpdateSize(size, steps), size

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Sampler[Any] | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """Return a loader for ``dataset``, sharded across ranks, with the columns that the model accepts.

        With ``dataloader_persistent_workers``, it is kept under ``dataloader_key``.
        """
        accelerator, collator, is_iterable = self.accelerator, self.data_collator, isinstance(dataset, IterableDataset)
        if isinstance(dataset, PackedDataset):
            collator = default_data_collator  # a tokenizer would add an attention mask, with which models do not look at positions
        whole = dataset
        if isinstance(dataset, Table) and not is_iterable:
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description=description)
        sampler: Sampler[Any] | None = None
        build_sampler: Any = sampler_fn  # may take no argument
        if build_sampler is not None and not is_iterable:
            sampler = build_sampler() if num_positional(build_sampler) == 0 else build_sampler(dataset)
        local = data_loaders.local_loader(
            self.args,
            dataset,
            collator=collator,
            batch_size=batch_size,
            sampler=sampler,
            rank=accelerator.session.data_world.rank,
            device=accelerator.device,
        )
        # None: not specified, the loader detects it.
        sharded = {"true": True, "train" if is_training else "eval": True, "false": False}
        loader = accelerator.prepare_data_loader(
            local, already_sharded=sharded.get(self.args.already_sharded or "none")
        )
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self.__dict__.setdefault("_eval_dataloaders", {})[dataloader_key] = loader
            self._session.kept_loaders[dataloader_key] = self._loader_source(whole)
        return loader

    def _loader_source(self, dataset: Any) -> data_loaders.LoaderSource:
        size, columns = self.args.eval_batch_size, self._kept_columns()
        return data_loaders.LoaderSource(
            dataset, self.data_collator, self.accelerator, batch_size=size, columns=columns
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        """Return the training data's sampler, or None for data without a length."""
        size, num_ranks = self._session.update_size(self.args), self.accelerator.session.num_readers
        if self.accelerator.parity != "off":  # a batch of the loader is an update, which is split later
            size, num_ranks = UpdateSize(global_batch_size(self.args, num_ranks), 1), 1
        return data_loaders.train_sampler(
            self.args,
            train_dataset if train_dataset is not None else self.train_dataset,
            batch_size=size.batch_size,
            accumulation=size.accumulation_steps,
            num_ranks=num_ranks,
            tokenizer=self.processing_class,
            whole=self.train_dataset,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """Return the evaluation data's sampler, or None for data without a length."""
        return None if length_of(eval_dataset) < 0 else SequentialSampler(eval_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        """Set ``_signature_columns``, the columns to keep, from forward's parameters and the labels."""
        if self._signature_columns in (None, self._session.default_columns):
            found = signature_columns(self.model, self.label_names)
            self._signature_columns, self._session.default_columns = found, list(found)

    def _kept_columns(self) -> KeptColumns | None:
        """Return the columns to keep, or None for all."""
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        if self._signature_columns == self._session.default_columns:
            own_loss = self._session.interface.computes_own_loss
            return kept_columns(self.model, label_names=self.label_names, own_loss=own_loss)
        return KeptColumns(names=frozenset(self._signature_columns or ()), by_word=False)  # a subclass's own list

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return the table without the columns that the model does not accept."""
        kept, model = self._kept_columns(), self.model
        if kept is None:
            return dataset
        dataset, dropped = drop_columns(dataset, kept, model=model)
        if dropped:
            logger.info("dropped columns that %s.forward does not accept: %s", type(model).__name__, ", ".join(dropped))
        return dataset

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[Any], Any], description: str | None = None
    ) -> Callable[[Any], Any]:
        """Return a collator that drops the columns that the model does not accept."""
        kept = self._kept_columns()
        return data_collator if kept is None else ColumnFilter(data_collator, kept, model=self.model)

    # ---- a batch -----------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return one update's batches and their number of labels (None if the loss is not divided by this number).

        Collective: call on every rank if labels are counted across ranks.
        """
        samples = list(islice(epoch_iterator, num_batches))
        return samples, self._get_num_items_in_batch(samples, device)

    def _prepare_input(self, data: Any) -> Any:
        """Return part of a batch, moved to the device."""
        # An override gets every part; otherwise a batch of any kind is moved as a whole.
        if is_overridden(self, "_prepare_input"):
            if isinstance(data, Mapping):
                return type(data)({name: self._prepare_input(part) for name, part in data.items()})  # type: ignore[call-arg]
            if isinstance(data, (tuple, list)):
                return type(data)(self._prepare_input(part) for part in data)
        return batches.to_device(data, self.accelerator.device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch, moved to the device.

        Raises:
            UsageError: the batch is empty.
        """
        inputs = self._prepare_input(inputs)
        if isinstance(inputs, (dict, Mapping)) and not inputs:
            raise UsageError(
                "the batch has no columns",
                where=f"{type(self).__name__}._prepare_inputs",
                do=("check data_collator, and check that the dataset's column names match forward's parameters"),
            )
        return inputs

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[[], AbstractContextManager[Any]], Any]:
        """Return a context in which the batch's sequences are cut over ranks, and the batch; no context without cp and sp."""
        if not sequences.cuts_sequences(self.accelerator):
            return nullcontext, inputs
        own_losses = {"compute_loss_func": self.compute_loss_func, "label_smoothing_factor": self.label_smoother}
        batch, buffers = batches.sequence_inputs(self.model, self._prepare_inputs(inputs), own_losses=own_losses)
        return functools.partial(self.accelerator.context_parallel, buffers, no_restore_buffers=buffers), batch

    @property
    def _loss_shifts_labels(self) -> bool:
        """Whether the loss compares position i with label i + 1, so that the first label does not count."""
        return self._session.interface.shifts_labels

    @_loss_shifts_labels.setter
    def _loss_shifts_labels(self, shifts: bool) -> None:
        self._session.interface.shifts_labels = shifts

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return an update's number of labels across all ranks, or None if the loss is not divided by it."""
        interface, accelerator = self._session.interface, self.accelerator
        first = batch_samples[0] if batch_samples else None
        if (
            not self._counts_items()
            or accelerator.parity != "off"  # then each loss is weighted by its own items
            or not isinstance(first, (dict, Mapping))
            or "labels" not in first
        ):
            return None
        counts = [count_items(batch, shifts=interface.shifts_labels) for batch in batch_samples]
        if any(count is None for count in counts):
            return None
        num_items: Any = sum(count for count in counts if count is not None)
        real = self._session.evaluation.real_samples
        if real is not None and not real[0]:
            num_items = num_items * 0  # the whole batch is padding
        if self.args.average_tokens_across_devices and accelerator.session.num_readers > 1:
            num_items = accelerator.reduce(num_items.to(device), "sum")
        return num_items

    def _counts_items(self) -> bool:
        """Return whether an update's labels are counted, so that its loss can be divided by their number."""
        interface = self._session.interface
        if not interface.compute_loss_takes_items:
            return False
        if self.compute_loss_func is None:
            return self.model_accepts_loss_kwargs
        # An overridden compute_loss may divide by the number although compute_loss_func does not take it.
        return interface.loss_func_takes_items or interface.overrides_compute_loss

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Add a batch's token count to ``state.num_input_tokens_seen``. Collective if tokens are counted."""
        if self.args.include_num_input_tokens_seen != "no":
            count_tokens(self, [inputs])

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the floating-point operations in a forward and backward pass; 0 if the model does not count them.

        Source: transformers' estimate of 6 operations per token and parameter.
        """
        count = getattr(self.model, "floating_point_ops", None)
        if callable(count):
            return float(count(inputs))
        name, num_parameters = (
            getattr(self.model, "main_input_name", "input_ids"),
            self._session.interface.num_parameters,
        )
        if num_parameters is None or not isinstance(inputs, Mapping) or name not in inputs:
            return 0.0
        return float(6 * inputs[name].numel() * num_parameters)

    # ---- the loss ----------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute a batch's loss and run the backward pass.

        Args:
            model: the wrapped model.
            inputs: a batch.
            num_items_in_batch: number of labels in the whole update across all ranks; None if the loss is not divided
                by it.

        Returns:
            The detached loss, divided by the update's number of batches.

        Collective: call on every rank for an update's last batch.
        """
        accelerator, session, num_items = self.accelerator, self._session, num_items_in_batch
        interface, pipeline = session.interface, session.optimizer.pipeline
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with context():
            inputs = self._prepare_inputs(inputs)
            if pipeline is not None and model is pipeline.model:
                return _pipeline_step(self, pipeline, inputs, num_items)
            watched = interface.watches_items and isinstance(num_items, torch.Tensor)
            items = WatchedNumber.of(num_items) if watched else num_items
            session.loss_func_result = "unused"
            with self.compute_loss_context_manager():
                options: Any = {"num_items_in_batch": items} if interface.compute_loss_takes_items else {}
                try:
                    computed: Any = self.compute_loss(model, inputs, **options)
                except KeyError as error:
                    explain_missing_column(self, error, inputs)
                    raise
            loss: torch.Tensor = computed
            if watched:
                interface.watches_items = False
                if not items.is_used:
                    _warn_of_ignored_items(self)
            if loss.dim() and accelerator.capabilities.num_devices > 1:
                loss = loss.mean()  # one element per device
            if accelerator.parity != "off":
                accelerator.backward(loss, num_items=items_of(inputs, shifts=interface.shifts_labels))
                return loss.detach()
            num_steps = self.current_gradient_accumulation_steps
            if num_steps != 1 and not _is_scaled(self, num_items):
                loss = loss / num_steps
            elif num_steps != 1 and num_items is None and self.loss_is_scaled_for_ga is None:
                _warn_of_missing_items(session, num_steps)
            accelerator.backward(loss)
            return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return a batch's loss and, if ``return_outputs``, the model's outputs.

        Called during training and evaluation. Override it if the model does not compute the loss.

        Raises:
            UsageError: the model returned no loss, for example because the batch has no labels.
        """
        func, smoother, accelerator = self.compute_loss_func, self.label_smoother, self.accelerator
        session, num_items, batch = self._session, num_items_in_batch, inputs
        shifts = session.interface.shifts_labels
        inputs, labels = without_labels(batch) if func is not None or smoother is not None else (batch, None)
        outputs = call_model(self, model, inputs, num_items)
        if labels is None and not (func is not None and isinstance(inputs, (dict, Mapping))):
            num_devices = accelerator.capabilities.num_devices
            loss = loss_in(outputs, inputs, model=self.model, label_names=self.label_names, num_devices=num_devices)
            if num_items is not None and loss.dim():
                loss = loss * loss.numel()  # each device divided by all items, and the mean over devices follows
        elif func is None:
            assert smoother is not None
            assert labels is not None
            loss = smoother(outputs, labels, session.interface.is_causal, num_items)
        elif session.interface.loss_func_takes_items:
            session.loss_func_result = "scaled" if isinstance(inputs, (dict, Mapping)) else "mean"
            is_of_batch = num_items is None and accelerator.parity != "off"  # an exact mode weights the loss itself
            count = count_items(batch, shifts=shifts) if is_of_batch else num_items
            loss = func(outputs, labels, num_items_in_batch=count)
        elif callable(func):
            session.loss_func_result = "mean"
            loss = func(outputs, labels)
        else:  # a value that only stands for a loss that an overridden compute_loss scales
            raise UsageError(
                f"compute_loss_func={func!r} cannot be called",
                where=f"{type(self).__name__}.compute_loss",
                do="pass a function of the outputs and the labels, or override compute_loss without calling super().compute_loss",
            )
        is_mean = func is not None and session.loss_func_result == "mean"  # of the batch, not divided by num_items
        if num_items is not None and self.args.average_tokens_across_devices and not is_mean:
            loss = loss * _rank_weight(self)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context around ``compute_loss``; the model's forward applies autocast itself."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return an empty context; kept because subclasses call it."""
        return _NO_CONTEXT

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip the gradients to ``max_grad_norm``; return their original norm. Collective if the model is sharded."""
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return ``grad_norm``, or the gradients' norm if it is None. Collective if the model is sharded."""
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf")) if grad_norm is None else grad_norm

    def _get_learning_rate(self) -> float:
        """Return the first parameter group's learning rate."""
        return float(param_groups_of(self.optimizer, "_get_learning_rate")[0]["lr"])

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save as requested by ``control``; called after every step and every epoch.

        Only ``grad_norm`` and ``learning_rate`` have an effect; the loop knows the other values.
        """
        _running(self._session.loop, self, "_maybe_log_save_evaluate").log_evaluate_save(grad_norm, learning_rate)

    # ---- training ----------------------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create ``self.optimizer`` and ``self.lr_scheduler``, unless they were given."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create ``self.optimizer`` from the arguments, unless it was given, and return it."""
        if self.optimizer is None:
            model = self.model if model is None else model
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            decaying = self.get_decay_parameter_names(model)
            self.optimizer = build_optimizer(self.args, model, kind, options, decaying=decaying)
        return self.optimizer  # type: ignore[no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Create ``self.lr_scheduler`` from the arguments, unless it was given, and return it."""
        if self.lr_scheduler is None:
            chosen = optimizer if optimizer is not None else self.optimizer
            assert chosen is not None
            num_shares = 1 if self.accelerator.split_batches else self.accelerator.session.num_readers
            self.lr_scheduler = build_scheduler(self.args, chosen, num_training_steps, num_shares=num_shares)
            self._created_lr_scheduler = True
        return self.lr_scheduler  # type: ignore[no-any-return]

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the optimizer's class and arguments."""
        return optimizer_class_and_arguments(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters to decay: all except biases and normalization layers."""
        return decay_parameter_names(model)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train with ``batch_size``, and return the results. Collective: call on every rank."""
        return _running(self._session.run, self, "_inner_training_loop").train(
            batch_size, resume_from_checkpoint=resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval
        )

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Set the batch size for the next ``auto_find_batch_size`` attempt."""
        _running(self._session.run, self, "_update_auto_batch_size").set_batch_size(batch_size)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Set ``state``; return how many epochs are complete and how many batches of the next epoch have been used."""
        return _running(self._session.run, self, "_init_training_state").init_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Prepare the optimizer, scheduler and model, and load the checkpoint. Collective: call on every rank."""
        return _running(self._session.run, self, "_prepare_for_training").prepare(max_steps, train_dataloader)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return ``model``, which ``accelerator.prepare`` wraps; an override may return its own wrapper."""
        return model

    def _run_epoch(self, model: nn.Module, epoch: int, train_dataloader: Any, **position: Any) -> None:
        """Train one epoch. Collective: call on every rank.

        Args:
            model: the wrapped model; ignored, like ``position``, because the loop knows it.
            epoch: zero-based index of the epoch.
            train_dataloader: the training data loader.
            position: the other arguments that transformers passes.
        """
        _running(self._session.loop, self, "_run_epoch").run_epoch(epoch, train_dataloader)

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Log the results, load the best model, and return the results. Collective: call on every rank."""
        loop = _running(self._session.loop, self, "_finalize_training")
        return loop.finalize(trial, num_train_samples, start_time)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return the training plan's numbers, in the same order as in transformers. Collective: call on every rank."""
        accelerator, session = self.accelerator, self._session
        world_size = accelerator.session.num_readers
        is_exact = accelerator.parity != "off"
        whole = getattr(dataloader, "original", dataloader) if is_exact else dataloader
        size = UpdateSize(global_batch_size(args, world_size), 1) if is_exact else session.update_size(args)
        batch_size = getattr(whole, "batch_size", None) or size.batch_size

        def gather_rows(row: list[int]) -> list[list[int]]:
            rows: list[list[int]] = accelerator.gather(torch.tensor([row], device=accelerator.device)).tolist()
            return rows

        # The default returns an estimate where the length is unknown.
        count_examples = self.num_examples if is_overridden(self, "num_examples") else num_examples_of
        plan = make_plan(
            args,
            whole,
            num_examples=count_examples(whole),
            batch_size=batch_size // world_size if accelerator.split_batches and not is_exact else batch_size,
            accumulation=size.accumulation_steps,
            world_size=1 if is_exact else world_size,
            gather_rows=None if is_exact or world_size == 1 else gather_rows,
        )
        if not is_exact and is_overridden(
            self, "get_total_train_batch_size"
        ):  # the default does not look at the loader
            plan = replace(plan, total_train_batch_size=self.get_total_train_batch_size(args))
        session.plan = plan
        return plan.initial_values()

    def store_flos(self) -> None:
        """Add to the state the floating-point operations since the last call. Collective if the model counts them."""
        total, self.current_flos = self.current_flos, 0.0
        if self._session.interface.counts_flops and self.accelerator.session.num_readers > 1:
            total = float(
                self.accelerator.reduce(torch.tensor(total, dtype=torch.float64, device=self.accelerator.device))
            )
        self.state.total_flos += total

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples in ``dataloader`` across all ranks; an estimate if the data has no length."""
        known = num_examples_of(dataloader)
        return known if known is not None else len(dataloader) * self.args.per_device_train_batch_size

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Return the number of samples per optimizer step across all ranks."""
        size = self._session.update_size(self.args)
        if args is not None and args is not self.args:
            size = UpdateSize(args.train_batch_size, args.gradient_accumulation_steps)
        return size.batch_size * size.accumulation_steps * self.accelerator.session.num_readers

    # ---- evaluation and search ---------------------------------------------------------------------------------------

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float] | None:
        """Evaluate during training, report to a search, and step a metric-driven scheduler.

        Returns:
            The metrics, or None if preemption interrupted the evaluation and a checkpoint was saved.

        Collective: call on every rank.
        """
        loop = _running(self._session.loop, self, "_evaluate")
        return loop.evaluate(trial, ignore_keys_for_eval, skip_scheduler=skip_scheduler)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Record an evaluation's metric if it is the best so far, and return whether it is."""
        return update_best_metric(self.args, self.state, metrics)

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the arguments that ``trial`` contains, if it is a dict."""
        self._trial = trial
        if isinstance(trial, Mapping):
            set_arguments(self.args, trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report the objective to a search. Collective: call on every rank."""
        if (running := self._session.trial) is not None:
            running.report_evaluation(metrics, step=step)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the weights, the tokenizer and the arguments to ``output_dir``; any rank's next line may read them.

        Collective: call on every rank, or on rank zero alone if each rank has the whole model.

        Examples:
            >>> trainer.save_model("trained")
        """
        place = location(output_dir) if output_dir is not None else self._session.checkpoint_dir(self.args)
        accelerator, args = self.accelerator, self.args
        is_sharded = accelerator.capabilities.shards_parameters
        with (
            self._session.averaged(),
            nullcontext()
            if _internal_call or is_sharded
            else first_rank_saves(f"save_model {place}", on_each_machine=args.save_on_each_node),
            exported_to(place) as folder,
        ):
            by_all_ranks = is_sharded and not (_internal_call or is_overridden(self, "_save"))
            if not by_all_ranks or not write_sharded_model_files(
                args, self._session, accelerator, self.model_wrapped, folder, self.processing_class, weights_to=place
            ):
                options = {"master_weights": True} if self._session.saves_master_weights else {}
                weights = accelerator.get_state_dict(self.model_wrapped, **options)
                if args.should_save and weights is None:  # only rank zero gathers a sharded model
                    raise ConfigError(
                        "save_on_each_node=True does not work with a sharded model, because only rank zero gathers its weights",
                        where="TrainingArguments.save_on_each_node",
                        do="remove save_on_each_node and put output_dir on a file system that all machines share",
                    )
                if args.should_save:
                    self._save(str(folder), state_dict=weights)
        if is_sharded and not _internal_call:
            accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _get_output_dir(self, trial: Any) -> str:
        """Return the directory for checkpoints: the search trial's directory, or the output directory."""
        return str(self._session.output_dir_as_given(self.args))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model files on the saving rank; a sharded model requires ``state_dict``."""
        folder = Path(output_dir) if output_dir is not None else self._session.output_dir(self.args)
        if state_dict is None and self.accelerator.capabilities.shards_parameters:
            raise UsageError(
                "_save() without state_dict would write only this rank's shards of the model",
                do=(
                    "call save_model() on every rank, or pass _save() the state_dict that accelerator.get_state_dict() "
                    "returns on rank zero"
                ),
            )
        state = self.accelerator.get_state_dict(self.model) if state_dict is None else state_dict
        assert state is not None, type(self.model)  # only a sharded model has none
        write_model_files(self.args, self._session, self.model, state, folder, self.processing_class)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write optimizer.pt and scheduler.pt, in transformers' checkpoint format."""
        if self.args.should_save:
            state = _running(self._session.optimizer.saved_state, self, "_save_optimizer_and_scheduler")
            scheduler = self._session.optimizer.scheduler.state_dict()
            write_state(Path(output_dir), OptimizationState(optimizer=state, scheduler=scheduler))

    def _save_scaler(self, output_dir: str) -> None:
        """Write scaler.pt if loss scaling is enabled, in transformers' checkpoint format."""
        if self.args.should_save and self.accelerator.scaler is not None:
            write_state(Path(output_dir), OptimizationState(scaler=self.accelerator.scaler.state_dict()))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write this rank's RNG states, in transformers' checkpoint format."""
        rank, num_ranks = self.accelerator.process_index, self.accelerator.num_processes
        write_random_states(Path(output_dir), current_random_states(), rank=rank, num_ranks=num_ranks)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights. Collective if the model is sharded."""
        if model is None and self._session.keeps_weights_with_state:
            self._session.loads_weights_with_state = True
            return
        load_model_from(
            self.model if model is None else model,
            Path(resume_from_checkpoint),
            report=self._issue_warnings_after_load,
            select=self.accelerator.session.select_tensors,
        )

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights. Collective: call on every rank."""
        best, session = self.state.best_model_checkpoint, self.accelerator.session
        if best is not None:
            # A warning is visible by default: the model is no longer that of the last step.
            name = self.args.metric_for_best_model
            logger.warning(
                N_("the model now has the weights of the best checkpoint: %s (%s %s)"),
                best,
                name,
                self.state.best_metric,
            )
            place, store = (
                best_folder(self.args, self._session.checkpoint_dir(self.args), best),
                self.accelerator.checkpoints.store,
            )
            folder = store.fetch(place) if isinstance(place, ObjectPath) else place
            require_whole(self.accelerator.world, folder)
            load_model_from(self.model, folder, report=self._issue_warnings_after_load, select=session.select_tensors)
            store.drop_copy()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Log which weights are missing from or unexpected in a checkpoint."""
        for name in ("missing_keys", "unexpected_keys"):
            if keys := getattr(load_result, name):
                logger.warning(N_("the checkpoint has %s: %s"), name.replace("_", " "), ", ".join(map(str, keys)))

    def _load_callback_state(self) -> None:
        """Restore the callbacks from ``state.stateful_callbacks`` if the arguments request it."""
        if self.args.restore_callback_states_from_checkpoint:
            self.callback_handler.restore(self.state.stateful_callbacks)
            saved = self.state.stateful_callbacks.get("TrainerControl")
            if saved is not None:
                self.control = TrainerControl(**saved.get("args", {}))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer and scheduler state. Collective: call on every rank."""
        if checkpoint is not None:
            resumed = _running(self._session.resumed, self, "_load_optimizer_and_scheduler")
            resumed.load_optimizer_and_scheduler(Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the loss scaler's state, if there is a loss scaler."""
        if checkpoint is not None:
            _running(self._session.resumed, self, "_load_scaler").load_scaler(Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the saved run's RNG states."""
        if checkpoint is not None:
            _running(self._session.loop, self, "_load_rng_state").load_rng_state()

    # ---- Hub ---------------------------------------------------------------------------------------------------------

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, write its model card, and upload both; if not ``blocking``, upload in the background.

        ``kwargs`` are passed to ``create_model_card``.

        Returns:
            The commit or, if not ``blocking``, a future; None on ranks other than zero.

        Collective: call on every rank.

        Raises:
            MissingExtraError: huggingface_hub is not installed.

        Examples:
            >>> trainer.push_to_hub("a better model")  # doctest: +SKIP
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        notify(self, "on_push_begin")
        self.save_model(_internal_call=True)
        result = None
        if self.is_world_process_zero():
            tags = tags_of(self.model, kwargs.get("tags"))
            self.create_model_card(**{**kwargs, **({"tags": tags} if tags else {})})
            self._finish_current_push()
            result = self._session.hub.upload(
                commit_message or "End of training",
                blocking=blocking,
                token=token,
                revision=revision if revision is not None else self.args.hub_revision,
            )
        self.accelerator.wait_for_everyone()
        return result

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the Hub repository, on rank zero."""
        if self.is_world_process_zero():
            self.hub_model_id = self._session.hub.open(token, private)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write README.md with metadata, results, settings and versions, on rank zero.

        Examples:
            >>> trainer.create_model_card(language="en", tags="regression")
        """
        if self.is_world_process_zero():
            metadata = {"language": language, "license": license, "base_model": finetuned_from, "tags": tags}
            metadata |= {"datasets": dataset_tags, "pipeline_tag": tasks, "dataset_args": dataset_args}
            data = dataset if dataset is not None else dataset_tags
            folder = self._session.output_dir(self.args)
            write_card(folder, self.model, self.args, self.state.log_history, metadata, name=model_name, data=data)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Start the uploads that ``hub_strategy`` requires after a checkpoint, on rank zero."""
        notify_push = functools.partial(self.callback_handler.on_push_begin, self.args, self.state, self.control)
        if self.accelerator.is_main_process:
            self._session.hub.upload_checkpoint(
                Path(checkpoint_folder), step=self.state.global_step, before=notify_push
            )

    def _finish_current_push(self) -> None:
        """Wait for the background uploads."""
        running = self.push_in_progress
        if running is not None and not running.is_done():
            running.wait_until_done()
        self._session.hub.wait()

    # ---- logs, and what libraries read -------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch to ``logs``, append them to the history, and notify the callbacks.

        Examples:
            >>> trainer.log({"accuracy": 0.9})
        """
        state = self.state
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
            if start_time is not None:
                num_tokens = state.num_input_tokens_seen - self._session.initial_num_tokens
                logs |= speed_metrics("train", start_time, num_tokens=num_tokens)
        state.log_history.append({**logs, "step": state.global_step})
        values = {name: value for name, value in logs.items() if name != "epoch"}
        record_values(values, step=state.global_step, epoch=state.epoch)
        notify(self, "on_log", logs=logs)

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process on its machine."""
        return self.accelerator.is_local_main_process

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank zero."""
        return self.accelerator.is_main_process

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def _memory_tracker(self) -> MemoryMeter:
        """Measures memory use (``skip_memory_metrics=False``)."""
        return self._session.memory

    @property
    def _initial_global_step(self) -> int:
        """The step at which the last training run started."""
        return self._session.initial_step

    @property
    def _initial_num_input_tokens_seen(self) -> int:
        """Number of tokens that were counted before the last training run."""
        return self._session.initial_num_tokens

    @property
    def _created_lr_scheduler(self) -> bool:
        """Whether the Trainer has created the scheduler, so that the next training run creates another one."""
        return self._session.optimizer.created_scheduler

    @_created_lr_scheduler.setter
    def _created_lr_scheduler(self, created: bool) -> None:
        self._session.optimizer.created_scheduler = created

    @property
    def _tr_loss(self) -> torch.Tensor:
        """The sum of the losses since the last log, on this rank."""
        return torch.tensor(
            _running(self._session.losses, self, "_tr_loss").window_sum(), device=self.accelerator.device
        )

    @property
    def _globalstep_last_logged(self) -> int:
        """The step at which metrics were last logged."""
        return _running(self._session.losses, self, "_globalstep_last_logged").last_logged_step

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        _running(self._session.losses, self, "_globalstep_last_logged").set_last_logged_step(step)

    @property
    def _total_loss_scalar(self) -> float:
        """The sum of the losses logged in this training run; the run's mean loss is computed from it."""
        return _running(self._session.losses, self, "_total_loss_scalar").sum()

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, value: float) -> None:
        if self._session.losses is not None:  # training starts with 0, whatever was set before
            self._session.losses.set_sum(value)


def is_overridden(trainer: TrainerMethods, name: str) -> bool:
    """Return whether a subclass, or an assignment to the Trainer or its class, replaces a method of ``TrainerMethods``.

    Ask only where an override changes more than the method's own work, for example the number of calls.
    """
    return name in vars(trainer) or getattr(type(trainer), name) is not getattr(TrainerMethods, name)


def notify(trainer: TrainerMethods, event: str, **more: Any) -> TrainerControl:
    """Dispatch ``event`` to the callbacks, and return the resulting control."""
    handler, control, usual = trainer.callback_handler, trainer.control, None
    if trainer.accelerator.num_processes > 1:
        usual = usual_flags(handler.listeners_of(event), event, trainer.args, trainer.state, control)
    trainer.control = getattr(handler, event)(trainer.args, trainer.state, control, **more)
    if usual is not None:
        require_agreement(event, usual, trainer.control)
    return trainer.control


def log(trainer: TrainerMethods, logs: dict[str, Any], start_time: float | None = None) -> None:
    """Call ``Trainer.log``; ``start_time`` is dropped if an override does not accept it."""
    if takes(trainer.log, "start_time"):
        trainer.log(logs, start_time=start_time)
    else:
        trainer.log(logs)


def _running(component: _Component | None, trainer: TrainerMethods, name: str) -> _Component:
    """Return ``component``, which implements the Trainer's method or attribute ``name``.

    Raises:
        UsageError: it does not exist, because the Trainer is not training.
    """
    if component is None:
        raise UsageError(
            f"{name}() works only while the Trainer is training or saving",
            where=f"{type(trainer).__name__}.{name}",
            do="call it from a callback or from an overridden Trainer method",
        )
    return component


def count_tokens(trainer: TrainerMethods, group: list[Any]) -> None:
    """Add the number of tokens in ``group``'s batches across all ranks to the state. Collective: call on every rank."""
    options = {
        "with_padding": trainer.args.include_num_input_tokens_seen == "all",
        "tokenizer": trainer.processing_class,
    }
    count = sum(num_tokens(inputs, model=trainer.model, **options) for inputs in group)
    total = torch.tensor(count, dtype=torch.int64, device=trainer.accelerator.device)
    if trainer.accelerator.session.num_readers > 1:
        total = trainer.accelerator.reduce(total, "sum")
    trainer.state.num_input_tokens_seen += int(total)


# ---- the loss --------------------------------------------------------------------------------------------------------


def call_model(trainer: TrainerMethods, model: nn.Module, inputs: Any, num_items: Any) -> Any:
    """Call ``model`` with a batch's columns by name or, for a tuple, with as many elements as forward accepts."""
    if isinstance(inputs, (dict, Mapping)):
        if num_items is not None and trainer.model_accepts_loss_kwargs:
            inputs = {**inputs, "num_items_in_batch": num_items}
        try:
            return model(**inputs)
        except TypeError as error:
            explain_missing_argument(trainer, error, inputs)
            raise
    parts = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return model(*parts[: trainer._session.interface.num_positional])


def explain_missing_argument(trainer: TrainerMethods, error: TypeError, inputs: Mapping[str, Any]) -> None:
    """Raise a better error if the model's forward requires an argument that the batch does not have."""
    name = type(trainer.model).__name__
    if not str(error).startswith(f"{name}.forward() missing "):
        return
    required, there = str(error).partition(": ")[2], ", ".join(inputs)
    raise UsageError(
        _(
            "{name}.forward requires {required}, but the batch has only {there}",
            name=name,
            required=required,
            there=there,
        ),
        where=f"{type(trainer).__name__}.train_dataset, or the data_collator",
        do=_(
            "name the columns of the dataset as forward's parameters; columns that are no parameters are left out "
            "(remove_unused_columns)"
        ),
    ) from error


def explain_missing_column(trainer: TrainerMethods, error: KeyError, inputs: Any) -> None:
    """Raise a better error if ``compute_loss`` has looked for a column that the batch does not have."""
    if isinstance(inputs, (dict, Mapping)) and error.args and error.args[0] not in inputs:
        name, kept = str(error.args[0]), trainer._kept_columns()
        raise missing_column(name, inputs, kept=kept, label_names=trainer.label_names) from error


def _pipeline_step(trainer: TrainerMethods, pipeline: Pipeline, inputs: Any, num_items: Any) -> torch.Tensor:
    """Run the forward and backward passes of a batch by the stages of a model, and return its loss."""
    interface = trainer._session.interface
    if interface.overrides_compute_loss:
        raise ConfigError(
            f"{type(trainer).__name__}.compute_loss is overridden, but the schedule of a pipeline computes the model's own loss",
            where="TrainingArguments.parallelism_config (pp_size)",
            do="write the loop with accelerator.prepare_pipeline(model, loss_fn=...)",
        )
    interface.watches_items = False
    if trainer.accelerator.parity != "off":
        return pipeline.step(inputs)
    if num_items is None:
        return pipeline.step(inputs, weight=1.0 / trainer.current_gradient_accumulation_steps)
    weight = pipeline.stages.count_items(inputs) / float(num_items)
    if trainer.args.average_tokens_across_devices:
        weight *= trainer.accelerator.session.num_readers  # the ranks' gradients are averaged
    return pipeline.step(inputs, weight=weight)


def _is_scaled(trainer: TrainerMethods, num_items: Any) -> bool:
    """Return whether a batch's loss is its share of the update's mean, which need not be divided by the number of batches.

    Source: transformers' rule. It also calls only functions that accept ``num_items_in_batch``, and only batches that are
    mappings exist there; what other functions return is a mean over their batch.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return trainer.loss_is_scaled_for_ga
    if trainer.compute_loss_func is not None:
        return trainer._session.loss_func_result != "mean"
    return num_items is not None and trainer.model_accepts_loss_kwargs


def _rank_weight(trainer: TrainerMethods) -> float:
    """Return the factor that cancels averaging over ranks, for a loss that is already a global mean."""
    real = trainer._session.evaluation.real_samples
    if real is None:
        return trainer.accelerator.session.num_readers
    mine, of_all = real  # an evaluation weights each rank by its number of samples
    return of_all / mine if mine else 1


def _warn_of_missing_items(session: TrainerSession, num_steps: int) -> None:
    """Warn once if ``compute_loss_func`` gets no number of labels, so that it cannot divide its loss by it."""
    if session.loss_func_result == "scaled" and session.interface.may_miss_items:
        session.interface.may_miss_items = False
        warn(
            _(
                "compute_loss_func gets num_items_in_batch=None, because the batches have no column 'labels' that is "
                "a tensor. Its loss is not divided by the {num_steps} batches of an update either, as in "
                "transformers, so a mean over the batch counts {num_steps} times. Name the label column 'labels', or "
                "set loss_is_scaled_for_ga = False on the Trainer, which then divides the loss",
                num_steps=num_steps,
            )
        )


def _warn_of_ignored_items(trainer: TrainerMethods) -> None:
    """Warn if the loss is not divided by the update's item count and this changes the result."""
    session, args = trainer._session, trainer.args
    overrides = session.interface.overrides_compute_loss
    is_stated = trainer.loss_is_scaled_for_ga is not None or (
        trainer.compute_loss_func is not None and session.loss_func_result != "scaled"
    )
    num_batches = 1 if is_stated else session.update_size(args).accumulation_steps
    averages = args.average_tokens_across_devices and not overrides
    num_ranks = trainer.accelerator.session.num_readers if averages else 1
    if num_batches * num_ranks == 1:
        return
    if trainer.compute_loss_func is not None and not overrides:
        who = "compute_loss_func"
        do = _("Divide the sum of its losses by num_items_in_batch, or remove this parameter.")
    else:
        model = type(trainer.model).__name__
        who = f"{type(trainer).__name__}.compute_loss" if overrides else f"{model}.forward"
        do = _(
            "Divide the sum of its losses by num_items_in_batch, or set {model}.accepts_loss_kwargs = False if it returns "
            "a mean.",
            model=model,
        )
    parts = [_("{number} batches of an update", number=num_batches)] if num_batches > 1 else []
    parts += [_("{number} processes", number=num_ranks)] if num_ranks > 1 else []
    warn(
        _(
            "{who} accepts num_items_in_batch, the number of labels in the whole update, but does "
            "not use it, so its loss counts {number} times in the gradients and in the logs "
            "({parts}), as in transformers. {do}",
            who=who,
            number=num_batches * num_ranks,
            parts=" x ".join(parts),
            do=do,
        )
    )
