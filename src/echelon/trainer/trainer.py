"""The Trainer: a model, data and TrainingArguments in, a trained model out; every method can be overridden."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from echelon.accelerator import AcceleratedOptimizer, AcceleratedScheduler, Accelerator, DummyScheduler
from echelon.accelerator.checkpoint.folders import alone_in, require_folder
from echelon.accelerator.preemption import Preempted
from echelon.accelerator.prepare.data_loaders import forget_loader
from echelon.accelerator.setup.build_deepspeed import groups_of
from echelon.base.errors import ConfigError, UsageError
from echelon.base.lengths import length_of
from echelon.base.logging import get_logger
from echelon.base.optional import require
from echelon.base.warnings import warn
from echelon.checkpoint.formats import transformers as transformers_format
from echelon.checkpoint.formats.torch_files import write_pickled
from echelon.checkpoint.formats.weight_files import write_tensors
from echelon.trainer.argument_conflicts import check_arguments
from echelon.trainer.arguments.deepspeed import deepspeed_optimizer, deepspeed_schedule
from echelon.trainer.arguments.devices import has_fixed_devices
from echelon.trainer.arguments.training_arguments import TrainingArguments, resolve_path
from echelon.trainer.build_accelerator import accumulation_options, make_accelerator, set_seeds
from echelon.trainer.callbacks.callback_handler import CallbackHandler, DefaultFlowCallback, TrainerCallback
from echelon.trainer.callbacks.notebook_progress import NotebookProgressCallback
from echelon.trainer.callbacks.progress_bars import PrinterCallback, ProgressCallback
from echelon.trainer.callbacks.time_limit import TimeLimitCallback
from echelon.trainer.callbacks.trackers import CSVCallback, TrackerCallback, run_folder
from echelon.trainer.checkpoint.checkpoint_folders import (
    ARGUMENTS_FILE,
    PREFIX,
    STATE_FILE,
    WEIGHTS_FILE,
    SavesItself,
    checkpoint_format,
    write_json,
)
from echelon.trainer.checkpoint.resume import checkpoint_to_resume, go_on, plan_from, restore_state
from echelon.trainer.checkpoint.save import save_checkpoint
from echelon.trainer.checkpoint.save_on_error import save_after
from echelon.trainer.checkpoint.train_cursor import ResumePoint, TrainCursor
from echelon.trainer.data import batches
from echelon.trainer.data.collators import PaddingCollator, Tokenizer, default_data_collator
from echelon.trainer.data.columns import (
    ColumnFilter,
    KeptColumns,
    Table,
    drop_columns,
    find_labels,
    forward_of,
    kept_columns,
)
from echelon.trainer.data.data_loaders import already_sharded, as_dataset, make_loader, train_sampler
from echelon.trainer.data.num_items import WatchedNumber, count_items, ignored_number
from echelon.trainer.evaluation.evaluation_loop import run_evaluation, whole_model_as
from echelon.trainer.evaluation.metric_reports import metrics_format, metrics_table, write_metrics
from echelon.trainer.evaluation.prediction_step import predict_batch
from echelon.trainer.features.auto_find_batch_size import train_with_a_batch_that_fits
from echelon.trainer.features.gradient_checkpointing import enable_activation_checkpointing
from echelon.trainer.features.hub import HubUpload, push, write_card
from echelon.trainer.features.hyperparameter_search import (
    BestRun,
    Trial,
    default_compute_objective,
    search,
    set_arguments,
)
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.features.neftune import noisy_embeddings
from echelon.trainer.features.nonfinite import checked_forward
from echelon.trainer.loop import TrainingLoop
from echelon.trainer.model_loss import LabelSmoother, is_causal, loss_in, missing_column, without_labels
from echelon.trainer.optim.lr_schedules import follows_a_metric, get_scheduler
from echelon.trainer.optim.optimizers import (
    decay_parameter_names,
    optimizer_class_and_arguments,
    parameter_groups,
    without_compiler,
)
from echelon.trainer.parity import check_exact, items_of, keep_global_batch, plan_of_updates
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput, speed_metrics
from echelon.trainer.signatures import num_positional, parameters_of, takes, takes_anything, takes_trial
from echelon.trainer.state import TrainerControl, TrainerState, begin_state
from echelon.trainer.training_plan import TrainingPlan, announce, make_plan
from echelon.trainer.verbosity import speak_at

__all__ = ["Trainer"]

logger = get_logger(__name__)


class Trainer:
    """Trains, evaluates and predicts, on one process or many.

    The interface is that of transformers' Trainer: same names, same order, same defaults. ``compute_loss`` may be
    overridden with three or four parameters, ``training_step`` with two or three, ``log`` with one or two.

    Args:
        model: a module whose forward returns the loss first (or as ``loss``), or any module with ``compute_loss``
            overridden or ``compute_loss_func`` given.
        args: the choices; none given: the defaults, and the folder tmp_trainer.
        data_collator: a list of samples -> a batch; none given: padding where ``processing_class`` pads, else stacking.
        train_dataset: what to train on.
        eval_dataset: what to evaluate on; a dict of several.
        processing_class: a tokenizer or the like; it is saved beside the model.
        model_init: makes the model anew for each training, instead of ``model``.
        compute_loss_func: (outputs, labels, num_items_in_batch=) -> loss.
        compute_metrics: EvalPrediction -> dict of metrics.
        callbacks: classes or objects.
        optimizers: your own optimizer and schedule; None: by ``args``.
        optimizer_cls_and_kwargs: the class and the arguments of the optimizer.
        preprocess_logits_for_metrics: (logits, labels) -> what is gathered instead of the logits.
        tokenizer: the old name of ``processing_class``.

    Collective: every rank makes one.

    Raises:
        EchelonError: arguments that cannot work together.
    """

    loss_is_scaled_for_ga: bool | None = None
    """Whether an overridden ``compute_loss`` divides by the labels (or batches) of the whole update itself; None: when it
    gets their number. False: the loss is a mean over its batch, and the Trainer divides by the batches of the update."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Dataset[Any] | Any | None = None,
        eval_dataset: Dataset[Any] | dict[str, Any] | Any | None = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        self.args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        set_seeds(self.args)  # before model_init makes a model
        if has_fixed_devices(model):
            self.args._n_gpu = min(self.args.n_gpu, 1)  # type: ignore[misc]
        self.create_accelerator_and_postprocess()
        self._memory = MemoryMeter(self.accelerator.device, is_on=not self.args.skip_memory_metrics)
        if self.args.log_level != "passive":
            speak_at(self.args.get_process_log_level())

        self.train_dataset = as_dataset(train_dataset)
        self.eval_dataset = as_dataset(eval_dataset)
        self.processing_class = _processing_class(processing_class, tokenizer)
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer: Any = optimizers[0]  # once training, the prepared one
        self.lr_scheduler: Any = optimizers[1]
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.label_smoother = (
            LabelSmoother(self.args.label_smoothing_factor) if self.args.label_smoothing_factor else None
        )
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        self._trial: Trial | None = None
        self._hp_name: Callable[[Any], str] | None = None
        self._fitted: tuple[int, int] | None = None
        check_arguments(self, model, optimizers)
        self._memory.begin("init")

        self.model: nn.Module = model if model is not None else self.call_model_init()
        if model is None and self.args.n_gpu > 1 and has_fixed_devices(self.model):
            self.args._n_gpu = 1  # type: ignore[misc]
            self.create_accelerator_and_postprocess()
        self.model_wrapped: nn.Module = self.model
        if self.args.use_liger_kernel:
            self._use_liger_kernel()
        self._model_changed()
        padding = PaddingCollator(self.processing_class) if isinstance(self.processing_class, Tokenizer) else None
        self.data_collator: Callable[[Any], Any] = data_collator or padding or default_data_collator

        self.is_in_train = False
        self.current_gradient_accumulation_steps = 1
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        self.control = TrainerControl()
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *self._own_callbacks(), *(callbacks or [])],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        on_screen = NotebookProgressCallback if _in_notebook() else ProgressCallback
        self.add_callback(PrinterCallback if self.args.disable_tqdm else on_screen)
        self._hub = HubUpload(self.args, self._output_dir)
        require_folder(self._output_dir, makes=self.args.should_save)
        self._made_scheduler = False
        self._prepared_schedule: Any = None
        self._is_foreign_schedule = False  # of a class that torch does not know: the Accelerator does not save it
        self._allows_changed_data = False  # of this call of train()
        self._saved_batch_size: int | None = None  # of the checkpoint that it goes on from
        self._is_trained = False
        self._is_predicting = False
        self._round: tuple[int, int] | None = (
            None  # samples of an evaluation's batch that count: of this rank, and of all
        )
        self._evaluates_again = False  # an evaluation that is left is made again when the training goes on
        self._preparation_time: float | None = None
        self._memory.keep(self._memory.end("init"))
        self._tell("on_init_end")

    def create_accelerator_and_postprocess(self) -> None:
        """Make ``self.accelerator`` by the arguments.

        Collective: every rank.
        """
        self.accelerator: Accelerator = make_accelerator(self.args)
        self.accelerator.preemption.is_driven = True
        self._place = TrainCursor()
        self.accelerator.register_for_checkpointing(self._place)
        self._syncs_each_batch = bool(accumulation_options(self.args).get("sync_each_batch"))

    def _own_callbacks(self) -> list[TrainerCallback]:
        found: list[TrainerCallback] = []
        if self.args.report_to:
            folder = run_folder(self.args)
            if list(self.args.report_to) != ["csv"]:
                found.append(TrackerCallback(lambda: self.accelerator, folder))
            if "csv" in self.args.report_to:
                found.append(CSVCallback(folder))
        if self.args.max_time is not None:
            assert isinstance(self.args.max_time, timedelta), self.args.max_time
            found.append(TimeLimitCallback(self.args.max_time, self.accelerator))
        return found

    def _use_liger_kernel(self) -> None:
        package: Any = require("liger_kernel.transformers", extra="liger", purpose="use_liger_kernel=True")
        package._apply_liger_kernel_to_instance(model=self.model, **(self.args.liger_kernel_config or {}))

    def _model_changed(self) -> None:
        """Look once at what the model and the overridden methods take."""
        model = self.model
        if self.label_smoother is not None and _has_many_labels(model):
            warn(
                f"{type(model).__name__} is for multi_label_classification: label_smoothing_factor="
                f"{self.args.label_smoothing_factor} is left out, because it is for one label a sample"
            )
            self.label_smoother = None
        if not hasattr(model, "hf_device_map"):  # spread over devices already
            model.to(self.accelerator.device)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = self.args.use_cache
        forward = forward_of(model)
        declared = getattr(model, "accepts_loss_kwargs", None)
        self.model_accepts_loss_kwargs = takes_anything(forward) if declared is None else bool(declared)
        self._overrides_compute_loss = type(self).compute_loss is not Trainer.compute_loss or "compute_loss" in vars(
            self
        )
        self._computes_own_loss = (
            self._overrides_compute_loss or self.compute_loss_func is not None or self.label_smoother is not None
        )
        self._num_positional = num_positional(model.forward)
        self._is_causal = is_causal(model)
        found = find_labels(forward)
        self._guesses_labels = self.args.label_names is None and not found and self._computes_own_loss
        self.label_names = list(self.args.label_names or found or (["labels"] if self._guesses_labels else []))
        return_loss = inspect.signature(forward).parameters.get("return_loss")
        self.can_return_loss = return_loss is not None and return_loss.default is True
        self._compute_loss_takes_items = takes(self.compute_loss, "num_items_in_batch")
        self._training_step_takes_items = takes(self.training_step, "num_items_in_batch")
        self._log_takes_start = takes(self.log, "start_time")
        self._saves_in_its_own_way = type(self).save_model is not Trainer.save_model
        self._counts_flops = type(self).floating_point_ops is not Trainer.floating_point_ops or hasattr(
            model, "floating_point_ops"
        )
        self._loss_func_takes_items = self.compute_loss_func is not None and takes(
            self.compute_loss_func, "num_items_in_batch"
        )
        self._counts_items = self._compute_loss_takes_items and (
            self.model_accepts_loss_kwargs if self.compute_loss_func is None else self._loss_func_takes_items
        )
        compiles = self.args.torch_compile or any(hasattr(part, "_orig_mod") for part in model.modules())
        self._watches_items = self._counts_items and not compiles  # a compiler would compile for it
        # Of the wrapped model; looked at when the training begins.
        self._has_gradients_elsewhere = False
        self._steps_schedule = True

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train, as ``args`` say.

        Args:
            resume_from_checkpoint: a checkpoint; True: the newest of ``output_dir`` that is whole; ``auto``: the same, or a
                new training where there is none; False: a new training; None: as ``args.resume_from_checkpoint`` says.
            trial: of a search: settings as a dict, or the trial of ``hyperparameter_search``.
            ignore_keys_for_eval: outputs of the model that evaluations leave out.
            kwargs: ``allow_changed_data``, as of the arguments: go on from the middle of an epoch although the data are others
                now. Old programs pass ``model_path``.

        Collective: every rank.

        Raises:
            UsageError: there is no checkpoint.
            CheckpointError: it is damaged, another model's, or means nothing here (docs/checkpoints.md); or another process
                trains in ``output_dir``.
        """
        self._allows_changed_data = bool(
            kwargs.pop("allow_changed_data", False)
            or self.args.allow_changed_data
            or self.accelerator.config.value.allow_changed_data
        )
        wanted = _old_model_path(resume_from_checkpoint, kwargs)
        if isinstance(trial, Mapping):
            set_arguments(self.args, trial)
        wanted = self.args.resume_from_checkpoint if wanted is None else wanted
        saves = str(self.args.save_strategy) != "no"
        # Before the first step: a run that could not save would have computed for nothing.
        place = alone_in(self.accelerator, self._output_dir, prefix=PREFIX) if saves else contextlib.nullcontext()
        with place:
            return self._train_from(checkpoint_to_resume(self, wanted), trial, ignore_keys_for_eval)

    def _train_from(self, folder: Path | None, trial: Any, ignore_keys_for_eval: list[str] | None) -> TrainOutput:
        accumulation = accumulation_options(self.args).get("num_steps") or self.args.gradient_accumulation_steps
        self._fitted = None
        if self.accelerator.parity != "off":
            check_exact(self)
            keep_global_batch(self, folder)
        if not self.args.auto_find_batch_size:
            return self._train(self.args.train_batch_size, accumulation, trial, ignore_keys_for_eval, folder)
        return train_with_a_batch_that_fits(
            self,
            lambda size, num_batches: self._train(size, num_batches, trial, ignore_keys_for_eval, folder),
            accumulation=accumulation,
        )

    def _train(
        self,
        batch_size: int,
        accumulation: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        folder: Path | None,
    ) -> TrainOutput:
        args = self.args
        self._fitted = batch_size, accumulation
        if self.model_init is not None:
            set_seeds(args)
            self.accelerator.free_memory()
            self.model = self.model_wrapped = self.call_model_init(trial)
            self.optimizer = self.lr_scheduler = None
        self._model_changed()
        self.is_in_train = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave_training)
            self._memory.begin("train")
            if args.activation_checkpointing:
                enable_activation_checkpointing(self.model, args.activation_checkpointing_kwargs)
            stack.enter_context(noisy_embeddings(self.model, self.neftune_noise_alpha))
            if "underflow_overflow" in args.debug:
                stack.enter_context(checked_forward(self.model))
            loader = self.get_train_dataloader()
            plan = self._plan(loader)
            plan = plan if folder is None else plan_from(self, folder, plan)
            self.state = begin_state(self, plan) if folder is None else restore_state(self, folder, plan)
            if self._trial is not None:
                self.state.is_hyper_param_search = True
                self.state.trial_name, self.state.trial_params = self._trial.name, dict(self._trial.values)
            self.control = TrainerControl()
            self._prepare_training(plan.max_steps)
            self.callback_handler.train_dataloader = loader
            self._place.load_state_dict(TrainCursor().state_dict())
            start = ResumePoint() if folder is None else go_on(self, folder, loader, plan)
            announce(
                plan,
                batch_size=batch_size,
                num_devices=self.accelerator.capabilities.num_devices,
                accumulation=accumulation,
                num_parameters=self.get_num_trainable_parameters(),
            )
            preemption, is_wanted = self.accelerator.preemption, args.save_on_signal or args.enable_jit_checkpoint
            if is_wanted and not stack.enter_context(preemption.during(self.accelerator)):
                warn(
                    "save_on_signal has no effect: the program takes the signals itself, or this is not its main thread"
                )
            elif args.save_strategy != "no":
                preemption.join()
            loop = TrainingLoop(self, plan, loader, start=start, ignore_keys=ignore_keys_for_eval)
            try:
                return loop.run()
            except (Exception, KeyboardInterrupt) as error:
                if args.save_on_exception:
                    save_after(error, loop)
                raise

    def _plan(self, loader: Any) -> TrainingPlan:
        if self.accelerator.parity != "off":
            return plan_of_updates(self, loader)
        batch_size = getattr(loader, "batch_size", None) or self._train_batch_size
        return make_plan(
            self.args,
            loader,
            num_examples=self._num_examples(loader),
            batch_size=batch_size // self.accelerator.num_processes if self.accelerator.split_batches else batch_size,
            accumulation=self._accumulation_steps,
            world_size=self.accelerator.num_processes,
            gather_rows=self._gather_rows if self.accelerator.num_processes > 1 else None,
        )

    def _gather_rows(self, row: list[int]) -> list[list[int]]:
        rows: list[list[int]] = self.accelerator.gather(torch.tensor([row], device=self.accelerator.device)).tolist()
        return rows

    def _leave_training(self) -> None:
        self.is_in_train = False
        self._memory.cancel()
        forget_loader(self.accelerator, self.callback_handler.train_dataloader)

    @property
    def _train_batch_size(self) -> int:
        """Samples of this process in one forward pass; of auto_find_batch_size, what was found."""
        return self.args.train_batch_size if self._fitted is None else self._fitted[0]

    @property
    def _global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks, in the exact modes."""
        args = self.args
        return args.global_batch_size or (
            args.train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes
        )

    @property
    def _accumulation_steps(self) -> int:
        return self.args.gradient_accumulation_steps if self._fitted is None else self._fitted[1]

    def _prepare_training(self, max_steps: int) -> None:
        """Make the optimizer and the schedule, and hand them and the model to the ranks."""
        self.optimizer = _unwrapped(self.optimizer)
        if self._made_scheduler:
            self.lr_scheduler = None  # of an earlier training, and at its end
        own_scheduler = self.lr_scheduler is not None
        self.create_optimizer_and_scheduler(max_steps)
        self._made_scheduler = not own_scheduler
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        held = {id(p) for group in groups_of(self.optimizer) for p in group}
        self._has_gradients_elsewhere = any(p.requires_grad and id(p) not in held for p in self.model.parameters())
        self.model_wrapped, self.optimizer, prepared = self.accelerator.prepare(self.model, optimizer, scheduler)
        # Schedules count optimizer steps here, so that the user's own object can be stepped, and asked what it is.
        self.lr_scheduler = prepared.scheduler if isinstance(prepared, AcceleratedScheduler) else prepared
        self._prepared_schedule = prepared
        self._is_foreign_schedule = not isinstance(scheduler, (LRScheduler, DummyScheduler))
        if self._is_foreign_schedule and getattr(scheduler, "optimizer", None) is optimizer:
            scheduler.optimizer = self.optimizer.optimizer  # as engines do for a schedule that they know
        self._steps_schedule = not follows_a_metric(self.lr_scheduler)
        self.model = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
        self._is_trained = True
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the loss of a batch and backpropagate it.

        Args:
            model: the wrapped model.
            inputs: a batch.
            num_items_in_batch: labels of the whole update, over all ranks; None where nobody divides by them.

        Returns:
            The loss, detached, divided by the number of batches of the update.

        Collective: at the last batch of an update.
        """
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self._compute_loss(model, inputs, num_items_in_batch)
        if loss.dim() and self.accelerator.capabilities.num_devices > 1:
            loss = loss.mean()  # of one for each device
        if self.accelerator.parity != "off":
            self.accelerator.backward(loss, num_items=items_of(inputs, model=self.model))
            return loss.detach()
        is_scaled, num_steps = self.loss_is_scaled_for_ga, self.current_gradient_accumulation_steps
        if num_steps != 1 and not (num_items_in_batch is not None if is_scaled is None else is_scaled):
            loss = loss / num_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def _training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        if self._training_step_takes_items:
            return self.training_step(model, inputs, num_items_in_batch)
        return self.training_step(model, inputs)

    def _compute_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        if self._watches_items and isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = WatchedNumber.of(num_items_in_batch)
        loss: torch.Tensor = self._call_compute_loss(model, inputs, num_items_in_batch)
        if isinstance(num_items_in_batch, WatchedNumber):
            self._watches_items = False  # once
            if not num_items_in_batch.is_used:
                self._tell_ignored_items()
        return loss

    def _call_compute_loss(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any, *, return_outputs: bool = False
    ) -> Any:
        """Call ``compute_loss`` with what it takes."""
        options: dict[str, Any] = {"return_outputs": True} if return_outputs else {}
        if self._compute_loss_takes_items:
            options["num_items_in_batch"] = num_items_in_batch
        try:
            return self.compute_loss(model, inputs, **options)
        except KeyError as error:
            if isinstance(inputs, Mapping) and error.args and error.args[0] not in inputs:
                raise self._missing_column(str(error.args[0]), inputs) from error
            raise

    def _tell_ignored_items(self) -> None:
        """Warn of a loss that is not divided by the items of the update, where that makes a difference."""
        is_overridden = self._overrides_compute_loss
        num_batches = 1 if self.loss_is_scaled_for_ga is False else self._accumulation_steps
        num_ranks = (
            1 if is_overridden or not self.args.average_tokens_across_devices else self.accelerator.num_processes
        )
        if num_batches * num_ranks == 1:
            return
        if self.compute_loss_func is not None and not is_overridden:
            who, do = "compute_loss_func", "Divide the sum of its losses by it, or leave that parameter out."
        else:
            model = type(self.model).__name__
            who = f"{type(self).__name__}.compute_loss" if is_overridden else f"{model}.forward"
            do = f"Divide the sum of its losses by it, or set {model}.accepts_loss_kwargs = False: then the mean is meant."
        parts = [f"{num_batches} batches of an update"] if num_batches > 1 else []
        parts += [f"{num_ranks} processes"] if num_ranks > 1 else []
        warn(ignored_number(who=who, factor=num_batches * num_ranks, of=" x ".join(parts), do=do))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the loss of a batch; with ``return_outputs`` also what the model returned.

        Called in training and in evaluation. Override it for a model that does not compute its own loss.

        Raises:
            UsageError: the model gives no loss, for example because the batch holds no labels.
        """
        computes = self.compute_loss_func is not None or self.label_smoother is not None
        batch = inputs
        inputs, labels = without_labels(inputs) if computes else (inputs, None)
        outputs = self._call_model(model, inputs, num_items_in_batch)
        has_func = self.compute_loss_func is not None and (labels is not None or isinstance(inputs, Mapping))
        if labels is None and not has_func:
            num_devices = self.accelerator.capabilities.num_devices
            loss = loss_in(outputs, inputs, model=self.model, label_names=self.label_names, num_devices=num_devices)
            if num_items_in_batch is not None and loss.dim():
                loss = loss * loss.numel()  # each device divided its sum by the items of all, and their mean is taken
        elif self.compute_loss_func is None:
            assert self.label_smoother is not None
            assert labels is not None
            loss = self.label_smoother(outputs, labels, self._is_causal, num_items_in_batch)
        elif self._loss_func_takes_items:
            num_items = num_items_in_batch
            if num_items is None and self.accelerator.parity != "off":
                num_items = count_items(batch, model=self.model)  # its own: the weight of a loss is known besides
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items)
        else:
            loss = self.compute_loss_func(outputs, labels)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self._share_of_items()
        return (loss, outputs) if return_outputs else loss

    def _share_of_items(self) -> float:
        """Return what a sum that was divided by the items of all ranks is multiplied by, before their mean is taken."""
        if self._round is None:
            return self.accelerator.num_processes
        mine, of_all = self._round  # there each rank counts by its samples, and one may have fewer than the others
        return of_all / mine if mine else 1

    def _call_model(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Call ``model`` with the columns of a batch by name, or with its parts in their order, as many as it takes."""
        if isinstance(inputs, Mapping):
            if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
                return model(**inputs, num_items_in_batch=num_items_in_batch)
            return model(**inputs)
        return model(*self._parts(inputs))

    def _parts(self, inputs: Any) -> Any:
        parts = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return parts if self._num_positional is None else parts[: self._num_positional]

    def _missing_column(self, name: str, inputs: Mapping[str, Any]) -> UsageError:
        return missing_column(name, inputs, kept=self._kept_columns(), label_names=self.label_names)

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context around ``compute_loss``; the model's forward has its autocast by itself."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Return an empty context; kept because subclasses call it."""
        return contextlib.nullcontext()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return ``inputs`` on the device."""
        return batches.to_device(inputs, self.accelerator.device)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Take the batches of one update, and count their labels where the loss is divided by that number.

        Collective: where labels are counted over all ranks.
        """
        samples = list(itertools.islice(epoch_iterator, num_batches))
        return samples, self._get_num_items_in_batch(samples, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return how many labels ``batch_samples`` hold, over all ranks; None where nobody divides by them.

        Collective: with ``average_tokens_across_devices``, where labels are counted.
        """
        is_exact = self.accelerator.parity != "off"  # there each loss brings its weight with it
        first = batch_samples[0] if batch_samples else None
        if not self._counts_items or is_exact or not isinstance(first, Mapping) or "labels" not in first:
            return None
        counts = [count_items(batch, model=self.model) for batch in batch_samples]
        if any(count is None for count in counts):
            return None
        num_items: Any = sum(count for count in counts if count is not None)
        if self._round is not None and not self._round[0]:
            num_items = num_items * 0  # all of it is another rank's
        if self.args.average_tokens_across_devices and self.accelerator.num_processes > 1:
            num_items = self.accelerator.reduce(num_items.to(device), "sum")
        return num_items

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what was not given: ``self.optimizer`` and ``self.lr_scheduler``."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make ``self.optimizer`` by the arguments, if none was given, and return it."""
        if self.optimizer is None:
            model = model if model is not None else self.model
            kind, given = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            arguments = dict(given)
            groups = parameter_groups(
                model, decaying=self.get_decay_parameter_names(model), weight_decay=self.args.weight_decay
            )
            groups = arguments.pop("params", groups)  # of an optimizer that treats some weights in its own way
            if self.args.world_size == 1 and not self.args.torch_compile:  # elsewhere torch loads its compiler anyway
                kind = without_compiler(kind)
            self.optimizer = deepspeed_optimizer(self.args, groups) or kind(groups, **arguments)
        optimizer: Optimizer = self.optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Make ``self.lr_scheduler`` by the arguments, if none was given, and return it."""
        if self.lr_scheduler is None:
            chosen = optimizer if optimizer is not None else self.optimizer
            assert chosen is not None
            more = self.args.lr_scheduler_kwargs
            assert more is None or isinstance(more, dict), more
            make = partial(
                get_scheduler,
                self.args.lr_scheduler_type,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=more,
            )
            shares = 1 if self.accelerator.split_batches else self.accelerator.num_processes
            self.lr_scheduler = deepspeed_schedule(
                self.args, chosen, num_steps=num_training_steps, num_shares=shares, make=lambda own: make(optimizer=own)
            ) or make(optimizer=chosen)
        scheduler: LRScheduler = self.lr_scheduler
        return scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class of the optimizer and its arguments."""
        return optimizer_class_and_arguments(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that decay: all but biases and those of normalisation layers."""
        return decay_parameter_names(model)

    # ---- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training data, dealt to the ranks."""
        if self.train_dataset is None:
            raise UsageError(
                "there is nothing to train on: train_dataset is None",
                where="Trainer(train_dataset=)",
                do="give a train_dataset, or override get_train_dataloader",
            )
        takes_dataset = bool(parameters_of(self._get_train_sampler))
        sampler = self._get_train_sampler(self.train_dataset) if takes_dataset else self._get_train_sampler()
        size = self._train_batch_size if self.accelerator.parity == "off" else self._global_batch_size
        return self._make_loader(self.train_dataset, sampler, size, purpose="train")

    def get_eval_dataloader(self, eval_dataset: str | Any | None = None) -> DataLoader[Any]:
        """Return the loader of ``eval_dataset`` (also the name of one of several), dealt to the ranks."""
        dataset = self._eval_dataset(eval_dataset)
        return self._make_loader(dataset, self._get_eval_sampler(dataset), self.args.eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of ``test_dataset``, dealt to the ranks."""
        dataset = as_dataset(test_dataset)
        return self._make_loader(dataset, self._get_eval_sampler(dataset), self.args.eval_batch_size)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        names = getattr(self.processing_class, "model_input_names", None) or ["input_ids"]
        return train_sampler(
            self.args,
            train_dataset if train_dataset is not None else self.train_dataset,
            batch_size=self._train_batch_size,
            accumulation=self._accumulation_steps,
            num_ranks=self.accelerator.num_processes,
            length_name=names[0],
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        return None if length_of(eval_dataset) < 0 else SequentialSampler(eval_dataset)

    def _eval_dataset(self, given: Any) -> Any:
        if isinstance(given, str) and isinstance(self.eval_dataset, dict) and given in self.eval_dataset:
            return self.eval_dataset[given]
        dataset = given if given is not None else self.eval_dataset
        if dataset is None or isinstance(dataset, str):
            known = list(self.eval_dataset) if isinstance(self.eval_dataset, dict) else "none by name"
            raise UsageError(
                "there is nothing to evaluate on: eval_dataset is None"
                if dataset is None
                else f"there is no evaluation set {dataset!r} (there are: {known})",
                where="Trainer.evaluate",
                do="give an eval_dataset to the Trainer or to evaluate()",
            )
        return as_dataset(dataset)

    def _make_loader(
        self,
        dataset: Any,
        sampler: Sampler[Any] | None,
        batch_size: int,
        *,
        purpose: Literal["train", "eval"] = "eval",
    ) -> DataLoader[Any]:
        collator, kept = self.data_collator, self._kept_columns()
        if kept is not None and isinstance(dataset, Table):
            dataset, dropped = drop_columns(dataset, kept, model=self.model)
            if dropped:
                logger.info("columns that %s.forward does not take: %s", type(self.model).__name__, ", ".join(dropped))
        elif kept is not None:
            collator = ColumnFilter(collator, kept)
        loader: DataLoader[Any] = make_loader(
            self.args,
            dataset,
            collator=collator,
            batch_size=batch_size,
            sampler=sampler,
            rank=self.accelerator.process_index,
            device=self.accelerator.device,
        )
        return self.accelerator.prepare_data_loader(loader, already_sharded=already_sharded(self.args, purpose=purpose))

    def _kept_columns(self) -> KeptColumns | None:
        if not self.args.remove_unused_columns:
            return None
        return kept_columns(self.model, label_names=self.label_names, own_loss=self._computes_own_loss)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Dataset[Any] | dict[str, Any] | Any | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate, log the metrics, and return them.

        Args:
            eval_dataset: in place of the Trainer's own; of a dict, each one, with its name in the metrics.
            ignore_keys: outputs of the model to leave out.
            metric_key_prefix: begins the names of the metrics.

        Collective: every rank.
        """
        given = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(given, dict):
            metrics: dict[str, float] = {}
            for name, dataset in given.items():
                part = dataset if eval_dataset is not None else name
                metrics |= self.evaluate(part, ignore_keys=ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return metrics
        self._memory.begin("eval")
        dataloader = self.get_eval_dataloader(eval_dataset)
        start = time.time()
        output = self.evaluation_loop(
            dataloader,
            description="Evaluation",
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        forget_loader(self.accelerator, dataloader)
        output.metrics.update(self._speed(metric_key_prefix, start, output.num_samples))
        output.metrics.update(self._memory.end("eval"))
        self._log(output.metrics)
        self._tell("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Dataset[Any] | Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return the predictions for ``test_dataset``, its labels if it has any, and then the metrics; nothing is logged.

        Collective: every rank.
        """
        self._memory.begin("test")
        dataloader = self.get_test_dataloader(test_dataset)
        start = time.time()
        self._is_predicting = True
        try:
            output = self.evaluation_loop(
                dataloader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
        finally:
            self._is_predicting = False
            forget_loader(self.accelerator, dataloader)
        output.metrics.update(self._speed(metric_key_prefix, start, output.num_samples))
        output.metrics.update(self._memory.end("test"))
        self._tell("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over ``dataloader``; ``evaluate`` and ``predict`` both end here.

        Collective: every rank.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        with whole_model_as(self._dtype_of_evaluation(), self.model):
            return run_evaluation(
                self,
                dataloader,
                description=description,
                prediction_loss_only=loss_only,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )

    def _dtype_of_evaluation(self) -> torch.dtype | None:
        """Return what the whole model is cast to for an evaluation outside of the training; None: nothing."""
        if self.is_in_train or not (self.args.bf16_full_eval or self.args.fp16_full_eval):
            return None
        if self.accelerator.capabilities.shards_parameters:
            raise ConfigError(
                "the whole model cannot be cast for an evaluation while each rank has a part of it",
                where="TrainingArguments.bf16_full_eval, .fp16_full_eval",
                do="leave it out: with bf16=True (or fp16=True) evaluations compute in it, too",
            )
        return torch.bfloat16 if self.args.bf16_full_eval else torch.float16

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return (loss, logits, labels) of one batch; each may be None."""
        return predict_batch(self, model, inputs, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys)

    def _model_for_evaluation(self) -> nn.Module:
        if not self._is_trained and self._preparation_time is None:
            start = time.time()
            devices = self.accelerator.capabilities.num_devices
            # A batch of several devices would not fit on one.
            self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=devices == 1)
            self._preparation_time = round(time.time() - start, 4)
        return self.model_wrapped

    def _tell_optimizer(self, mode: str) -> None:
        """Tell an optimizer that keeps other weights for evaluations (schedule-free) what comes: ``train`` or ``eval``."""
        switch = getattr(_unwrapped(self.optimizer), mode, None)
        if callable(switch):
            switch()

    def _speed(self, prefix: str, start: float, num_samples: int | None) -> dict[str, float]:
        size = self.args.eval_batch_size * self.accelerator.num_processes
        steps = -(-num_samples // size) if num_samples is not None else None
        metrics = speed_metrics(prefix, start, num_samples=num_samples, num_steps=steps)
        if not self._is_trained and self._preparation_time is not None:
            metrics[f"{prefix}_model_preparation_time"] = self._preparation_time
        return metrics

    # ---- logs and callbacks ------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch to ``logs``, note them in the history, and tell the callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                logs |= speed_metrics("train", start_time, num_tokens=self.state.num_input_tokens_seen)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs=logs)

    def _log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if self._log_takes_start:
            self.log(logs, start_time=start_time)
        else:
            self.log(logs)

    def _after_evaluation_batch(self) -> None:
        """End here if the run was asked to end, and nothing is lost by it.

        Raises:
            Preempted: it was.
        """
        self._tell("on_prediction_step")
        is_boundary = self._evaluates_again or not self.is_in_train
        if is_boundary and self.accelerator.preemption.at_boundary(is_new_step=False, is_whole=True):
            raise Preempted

    def _tell(self, event: str, **more: Any) -> TrainerControl:
        self.control = self.callback_handler.call_event(event, self.args, self.state, self.control, **more)
        return self.control

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, or make one of a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Take a callback (or the first of a class) out and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Take a callback (or the first of a class) out."""
        self.callback_handler.remove_callback(callback)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print ``metrics`` as a table, on rank zero."""
        if self.is_world_process_zero():
            print(metrics_table(split, metrics), flush=True)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return ``metrics`` as they are shown."""
        return metrics_format(metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``metrics`` to ``<split>_results.json`` and, ``combined``, into ``all_results.json``, on rank zero."""
        if self.is_world_process_zero():
            write_metrics(self._output_dir, split, metrics, combined=combined)

    # ---- files -------------------------------------------------------------------------------------------------------

    @property
    def _output_dir_as_given(self) -> Path:
        folder = Path(self.args.output_dir or "trainer_output")
        return folder if self._trial is None else folder / self._trial.name

    @property
    def _output_dir(self) -> Path:
        folder = resolve_path(self.args)
        return folder if self._trial is None else folder / self._trial.name

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the weights, the tokenizer and the arguments to ``output_dir``.

        Collective: every rank must call this.
        """
        folder = Path(output_dir) if output_dir is not None else self._output_dir
        state_dict = self.accelerator.get_state_dict(self.model_wrapped)
        if self.args.should_save:
            if state_dict is None:  # of a sharded model only rank zero gets it
                raise ConfigError(
                    "save_on_each_node=True, and the weights of a sharded model are whole on rank zero only",
                    where="TrainingArguments.save_on_each_node",
                    do="leave it out, and share output_dir between the machines",
                )
            self._save(str(folder), state_dict=state_dict)
        if not _internal_call:
            self.accelerator.wait_for_everyone()  # the next line of any rank may read the files
            if self.args.push_to_hub:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the files of ``save_model``, on the one rank that writes.

        Raises:
            UsageError: no ``state_dict``, where this rank has a part of the model.
        """
        if state_dict is None and self.accelerator.capabilities.shards_parameters:
            raise UsageError(
                "_save() on one rank has a part of the sharded model, and the other ranks are not asked for theirs",
                do="call save_model() on every rank, or give _save() the state_dict that accelerator.get_state_dict() "
                "returned on rank zero",
            )
        folder = Path(output_dir) if output_dir is not None else self._output_dir
        folder.mkdir(parents=True, exist_ok=True)
        state = self.model.state_dict() if state_dict is None else state_dict
        if isinstance(self.model, SavesItself):
            self.model.save_pretrained(str(folder), state_dict=state)
        else:
            write_tensors(state, folder / WEIGHTS_FILE)
        if isinstance(self.processing_class, SavesItself):
            self.processing_class.save_pretrained(str(folder))
        if checkpoint_format(self.args) == "transformers":
            write_pickled(self.args.to_dict(), folder / transformers_format.ARGUMENTS)
        else:
            write_json(folder / ARGUMENTS_FILE, self.args.to_dict())

    def save_state(self) -> None:
        """Write the state of the training to ``trainer_state.json`` in the output folder."""
        if self.args.should_save:
            self.state.save_to_json(self._output_dir / STATE_FILE)

    def _save_checkpoint(self, model: Any = None, trial: Any = None) -> None:
        """Write ``checkpoint-<step>`` whole, then delete what is too much; both arguments are there for overrides.

        Collective: every rank.
        """
        save_checkpoint(self)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, write its card, and upload both.

        Args:
            commit_message: of the upload.
            blocking: wait until it is done.
            token: in place of ``hub_token``.
            revision: the branch, in place of ``hub_revision``.
            kwargs: of ``create_model_card``.

        Returns:
            What huggingface_hub returns (of the commit; not blocking: of the upload that runs); None on other ranks.

        Collective: every rank.

        Raises:
            MissingExtraError: huggingface_hub is not installed.
        """
        return push(self, commit_message, blocking=blocking, token=token, revision=revision, card=kwargs)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository of the upload, on rank zero."""
        if self.is_world_process_zero():
            self.args.hub_model_id = self._hub.open(token)

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
        """Write README.md with the metadata, the results, the settings and the versions, on rank zero."""
        if self.is_world_process_zero():
            metadata = {
                "language": language,
                "license": license,
                "base_model": finetuned_from,
                "tags": tags,
                "datasets": dataset_tags,
                "pipeline_tag": tasks,
            }
            write_card(self, metadata, name=model_name, data=dataset if dataset is not None else dataset_tags)

    # ---- search ------------------------------------------------------------------------------------------------------

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun] | None:
        """Train with different settings, and return the best run, on every rank.

        Args:
            hp_space: optuna's trial -> settings; None: learning rate, passes, seed and batch size.
            compute_objective: metrics of an evaluation -> number; None: the loss, or the sum of all other metrics.
            n_trials: trainings.
            direction: ``minimize``, ``maximize``, or a list of these where the objective has several numbers.
            backend: ``optuna``.
            hp_name: trial -> name of its folder; None: run-<number>.
            kwargs: of ``optuna.create_study`` (pruner, sampler, storage, ...) and of its ``optimize`` (timeout, ...).

        Collective: every rank.

        Raises:
            UsageError: the Trainer was made without ``model_init``.
            MissingExtraError: optuna is not installed.
        """
        self._hp_name = hp_name
        return search(
            self,
            space=hp_space,
            objective=compute_objective or default_compute_objective,
            num_trials=n_trials,
            direction=direction,
            backend=backend,
            options=kwargs,
        )

    def _run_trial(self, trial: Trial) -> Any:
        """Train with the settings of ``trial`` and return its objective."""
        set_arguments(self.args, trial.values)
        trial.name = self._hp_name(trial.trial) if self._hp_name is not None else f"run-{trial.trial.number}"
        self._trial = trial
        self.accelerator.free_memory()
        self.create_accelerator_and_postprocess()  # the order of the data, precision and the like may be another one
        self.train(trial=trial.trial)
        if trial.objective is None:
            trial.objective = trial.of(self.evaluate())
        return trial.objective

    def _end_trials(self) -> None:
        self._trial = None
        self.create_accelerator_and_postprocess()

    def end(self) -> None:
        """Close the trackers and the process group: the last line of a program.

        Collective: every rank.
        """
        self.accelerator.end_training()

    # ---- small things that scripts and subclasses ask ------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The old name of ``processing_class``."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, processing_class: Any) -> None:
        self.processing_class = processing_class

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model of ``model_init``, which takes nothing or the trial."""
        assert self.model_init is not None
        model_init: Callable[..., nn.Module] = self.model_init
        model = model_init(trial) if takes_trial(model_init) else model_init()
        if model is None:
            raise UsageError("model_init returned None", where="Trainer(model_init=)", do="return the model")
        return model

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.accelerator.is_local_main_process

    def is_world_process_zero(self) -> bool:
        """Whether this is rank zero."""
        return self.accelerator.is_main_process

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the samples of ``dataloader``, over all ranks; an estimate where its data set has no length."""
        known = self._num_examples(dataloader)
        return known if known is not None else len(dataloader) * self.args.per_device_train_batch_size

    def _num_examples(self, dataloader: Any) -> int | None:
        num_examples = length_of(getattr(dataloader, "dataset", None))
        return None if num_examples < 0 else num_examples

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the operations of one forward and backward pass, if the model can tell."""
        count = getattr(self.model, "floating_point_ops", None)
        return float(count(inputs)) if callable(count) else 0.0

    def get_num_trainable_parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each group."""
        self._require_optimizer("get_learning_rates")
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the group of the optimizer that holds ``param``; all groups, if none is given."""
        self._require_optimizer("get_optimizer_group")
        groups = self.optimizer.param_groups
        if param is None:
            return [group["params"] for group in groups]
        wanted = self.model.get_parameter(param) if isinstance(param, str) else param
        return next((group for group in groups if any(p is wanted for p in group["params"])), None)

    def _require_optimizer(self, method: str) -> None:
        if self.optimizer is None:
            raise UsageError(
                "there is no optimizer yet", where=f"Trainer.{method}", do="call train() or create_optimizer() first"
            )

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return passes, steps of a pass, samples of a pass and of all, samples of a step, batches of a pass, and steps.

        Collective: every rank.
        """
        plan = self._plan(dataloader)
        return (
            plan.num_epochs,
            plan.steps_per_epoch,
            plan.num_examples,
            plan.num_train_samples,
            plan.total_train_batch_size,
            plan.batches_per_epoch,
            plan.max_steps,
        )

    def store_flos(self) -> None:
        """Do nothing: the operations are added to ``state.total_flos`` by the loop; kept because scripts call it."""

    def get_tp_size(self) -> int:
        """Return over how many ranks one layer is split: it is not."""
        return 1

    def get_cp_size(self) -> int:
        """Return over how many ranks one sequence is split: it is not."""
        return 1

    def get_sp_size(self) -> int:
        """Return over how many ranks one sequence is split inside attention: it is not."""
        return 1

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Return the samples of one optimizer step, over all ranks."""
        args = args if args is not None else self.args
        if args is self.args:
            return self._train_batch_size * self._accumulation_steps * self.accelerator.num_processes
        return args.train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes


def _processing_class(processing_class: Any, tokenizer: Any) -> Any:
    if tokenizer is None:
        return processing_class
    warn("Trainer(tokenizer=) is called processing_class= now")
    if processing_class is not None and processing_class is not tokenizer:
        raise UsageError(
            "tokenizer and processing_class are the same setting with two values",
            where="Trainer(processing_class=, tokenizer=)",
            do="keep processing_class= only",
        )
    return tokenizer


def _old_model_path(given: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the checkpoint that ``train`` was given, also under its old name."""
    unknown = [name for name in kwargs if name != "model_path"]
    if unknown:
        raise UsageError(
            f"train() does not take {', '.join(unknown)}", where="Trainer.train", do="see help(Trainer.train)"
        )
    if kwargs.get("model_path") is None:
        return given
    warn("train(model_path=) is called resume_from_checkpoint= now")
    return kwargs["model_path"] if given is None else given


def _has_many_labels(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _in_notebook() -> bool:
    """Tell whether what is printed appears in a notebook; a terminal with IPython is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
