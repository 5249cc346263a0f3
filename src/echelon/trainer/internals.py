"""The private methods of transformers' Trainer that libraries override; the loop calls them where transformers does.

Each method calls the component that does the work. Those of a running training (``TrainerSession.run``, ``resumed`` and
``loop``) exist only while the Trainer trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from echelon.accelerator import Accelerator, sequences
from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.logging import get_logger
from echelon.trainer.argument_conflicts import check_arguments
from echelon.trainer.arguments.training_arguments import TrainingArguments, loader_batch_size
from echelon.trainer.batch_loss import count_update_items
from echelon.trainer.build_accelerator import accelerator_arguments
from echelon.trainer.checkpoint.best_model import load_best, update_best_metric
from echelon.trainer.checkpoint.resume_point import load_model_from
from echelon.trainer.checkpoint.save import CheckpointWriter
from echelon.trainer.checkpoint.save_model import write_model_files
from echelon.trainer.checkpoint.transformers_layout import save_optimizer_and_scheduler, save_rng_state, save_scaler
from echelon.trainer.data import batches, data_loaders
from echelon.trainer.data.columns import ColumnFilter, KeptColumns, drop_columns, signature_columns
from echelon.trainer.data.loader_source import LoaderSource
from echelon.trainer.data.num_tokens import count_tokens
from echelon.trainer.data.sequence_inputs import sequence_inputs
from echelon.trainer.features.hyperparameter_search import set_arguments
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.model_interface import columns_of
from echelon.trainer.optim.optimizers import param_groups_of
from echelon.trainer.results import TrainOutput
from echelon.trainer.session import TrainerSession, UpdateSize, global_batch_size
from echelon.trainer.state import TrainerControl
from echelon.trainer.training_plan import num_examples_of
from echelon.trainer.training_run import plan_training

__all__ = ["TrainerInternals"]

logger = get_logger(__name__)

_Component = TypeVar("_Component")


class TrainerInternals:
    """Base class of the Trainer, with the private methods of transformers' Trainer."""

    args: TrainingArguments
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    control: Any
    state: Any
    callback_handler: Any
    data_collator: Callable[[Any], Any]
    train_dataset: Any
    processing_class: Any
    label_names: list[str]
    current_flos: float
    push_in_progress: Any
    _session: TrainerSession
    _signature_columns: list[str] | None

    # What libraries read. The Trainer sets these where transformers' does.
    deepspeed: Any = None
    is_model_parallel: bool = False
    model_preparation_time: float
    # What has one value here (see ``NOT_READ``).
    is_distributed_loading_by_transformers: bool = False
    is_fsdp_xla_enabled: bool = False
    is_fsdp_xla_v1_enabled: bool = False
    is_fsdp_xla_v2_enabled: bool = False
    _loggers_initialized: bool = False

    # ---- construction ------------------------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        """Check the constructor's arguments for conflicts."""
        check_arguments(self)  # type: ignore[arg-type]

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Return the Accelerator's arguments: those that ``args`` determines, and ``kwargs``."""
        return {**accelerator_arguments(self.args, getattr(self, "model", None)), **kwargs}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move ``model`` to ``device``, unless it is already split over several devices."""
        if getattr(model, "hf_device_map", None) is not None:
            logger.warning(
                "the model is already placed on its devices (hf_device_map), so it is not moved to %s", device
            )
            return
        model.to(device)

    # ---- data --------------------------------------------------------------------------------------------------------

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
        loader = data_loaders.build_loader(
            self,  # type: ignore[arg-type]
            dataset,
            description=description,
            batch_size=batch_size,
            sampler_fn=sampler_fn,
            purpose="train" if is_training else "eval",
        )
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self.__dict__.setdefault("_eval_dataloaders", {})[dataloader_key] = loader
            self._session.kept_loaders[dataloader_key] = self._loader_source(dataset)
        return loader

    def _loader_source(self, dataset: Any) -> LoaderSource:
        size, columns = self.args.eval_batch_size, self._kept_columns()
        return LoaderSource(dataset, self.data_collator, self.accelerator, batch_size=size, columns=columns)

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
            return columns_of(self, self._session.interface)  # type: ignore[arg-type]
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
        return data_collator if kept is None else ColumnFilter(data_collator, kept)

    # ---- a batch -----------------------------------------------------------------------------------------------------

    def _prepare_input(self, data: Any) -> Any:
        """Return part of a batch, moved to the device."""
        # An override gets every part; otherwise a batch of any kind is moved as a whole.
        if type(self)._prepare_input is not TrainerInternals._prepare_input or "_prepare_input" in vars(self):
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
        batch, buffers = sequence_inputs(self, self.model, self._prepare_inputs(inputs))  # type: ignore[arg-type]
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
        return count_update_items(self, self._session, batch_samples, device)  # type: ignore[arg-type]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Add a batch's token count to ``state.num_input_tokens_seen``. Collective if tokens are counted."""
        if self.args.include_num_input_tokens_seen != "no":
            count_tokens(self, [inputs])  # type: ignore[arg-type]

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

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in param_groups_of(self.optimizer, "get_learning_rates")]

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

    # ---- training ----------------------------------------------------------------------------------------------------

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
        return update_best_metric(self, metrics)  # type: ignore[arg-type]

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the arguments that ``trial`` contains, if it is a dict."""
        self._trial = trial
        if isinstance(trial, Mapping):
            set_arguments(self.args, trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report the objective to a search. Collective: call on every rank."""
        if (running := self._session.search.trial) is not None:
            running.report_evaluation(metrics, step=step)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """Return the directory for checkpoints: the search trial's directory, or the output directory."""
        return str(self._session.output_dir_as_given(self.args))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model files on the saving rank; a sharded model requires ``state_dict``."""
        folder = Path(output_dir) if output_dir is not None else self._session.output_dir(self.args)
        write_model_files(self, self._session, folder, state_dict)  # type: ignore[arg-type]

    def _save_checkpoint(self, model: Any = None, trial: Any = None) -> None:
        """Write ``checkpoint-<step>`` and delete surplus checkpoints. Collective: call on every rank."""
        CheckpointWriter(self, self._session).save(trial)  # type: ignore[arg-type]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write optimizer.pt and scheduler.pt, in transformers' checkpoint format."""
        if self.args.should_save:
            state = _running(self._session.optimizer.saved_state, self, "_save_optimizer_and_scheduler")
            save_optimizer_and_scheduler(self._session, state, Path(output_dir))

    def _save_scaler(self, output_dir: str) -> None:
        """Write scaler.pt if loss scaling is enabled, in transformers' checkpoint format."""
        save_scaler(self, Path(output_dir))  # type: ignore[arg-type]

    def _save_rng_state(self, output_dir: str) -> None:
        """Write this rank's RNG states, in transformers' checkpoint format."""
        save_rng_state(self, Path(output_dir))  # type: ignore[arg-type]

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
        load_best(self, self._session.output_dir(self.args), report=self._issue_warnings_after_load)  # type: ignore[arg-type]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Log which weights are missing from or unexpected in a checkpoint."""
        for name in ("missing_keys", "unexpected_keys"):
            if keys := getattr(load_result, name):
                logger.warning("the checkpoint has %s: %s", name.replace("_", " "), ", ".join(map(str, keys)))

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

    # ---- public methods that the loop calls ------------------------------------------------------------------------------

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return the training plan's numbers, in the same order as in transformers. Collective: call on every rank."""
        plan = self._session.plan = plan_training(self, self._session, dataloader)  # type: ignore[arg-type]
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

    def get_tp_size(self) -> int:
        """Return the number of ranks that divide layers."""
        layout = self.accelerator.parallelism_config
        return 1 if layout is None else layout.tp_size

    def get_cp_size(self) -> int:
        """Return the number of ranks that divide sequences by ring attention."""
        layout = self.accelerator.parallelism_config
        return 1 if layout is None else layout.cp_size

    def get_sp_size(self) -> int:
        """Return the number of ranks that divide sequences by Ulysses."""
        layout = self.accelerator.parallelism_config
        return 1 if layout is None else layout.sp_size

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Return the number of samples per optimizer step across all ranks."""
        size = self._session.update_size(self.args)
        if args is not None and args is not self.args:
            size = UpdateSize(args.train_batch_size, args.gradient_accumulation_steps)
        return size.batch_size * size.accumulation_steps * self.accelerator.session.num_readers


def _running(component: _Component | None, trainer: TrainerInternals, name: str) -> _Component:
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
