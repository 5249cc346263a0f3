"""The Trainer: a model, data and TrainingArguments in, a trained model out; every method can be overridden."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from echelon.accelerator import AcceleratedOptimizer, Accelerator
from echelon.accelerator.saving import write_tensors
from echelon.accelerator.weights import load_weights, read_weights
from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.base.warnings import warn
from echelon.trainer import batches
from echelon.trainer.acceleration import make_accelerator, set_seeds
from echelon.trainer.arguments import TrainingArguments
from echelon.trainer.callbacks import CallbackHandler, DefaultFlowCallback, TrainerCallback
from echelon.trainer.checkpoints import (
    ARGUMENTS_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    SavesItself,
    remove_surplus,
    write_json,
)
from echelon.trainer.collate import PaddingCollator, Tokenizer, default_data_collator
from echelon.trainer.columns import ColumnFilter, KeptColumns, Table, drop_columns, find_labels, kept_columns
from echelon.trainer.enums import IntervalStrategy
from echelon.trainer.evaluation import run_evaluation
from echelon.trainer.loaders import length_of, make_loader, train_sampler
from echelon.trainer.loop import TrainingLoop
from echelon.trainer.optimizers import decay_parameter_names, optimizer_class_and_arguments, parameter_groups
from echelon.trainer.plan import announce, make_plan, no_length
from echelon.trainer.progress_bars import PrinterCallback, ProgressCallback
from echelon.trainer.reports import metrics_format, metrics_table, write_metrics
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput, speed_metrics
from echelon.trainer.schedules import get_scheduler
from echelon.trainer.signatures import parameters_of, takes, takes_anything
from echelon.trainer.state import TrainerControl, TrainerState
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
        self.accelerator: Accelerator = make_accelerator(self.args)
        if self.args.log_level != "passive":
            speak_at(self.args.get_process_log_level())

        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = _processing_class(processing_class, tokenizer)
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer: Any = optimizers[0]  # once training, the prepared one
        self.lr_scheduler: Any = optimizers[1]
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._check_arguments(model, optimizers)

        self.model: nn.Module = model if model is not None else self.call_model_init()
        self.model_wrapped: nn.Module = self.model
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
            [DefaultFlowCallback, *(callbacks or [])],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self.add_callback(PrinterCallback if self.args.disable_tqdm else ProgressCallback)
        if self.args.should_save:
            self._output_dir.mkdir(parents=True, exist_ok=True)
        self._made_scheduler = False
        self._is_trained = False
        self._is_predicting = False
        self._preparation_time: float | None = None
        self._tell("on_init_end")

    def _check_arguments(self, model: nn.Module | None, optimizers: tuple[Any, Any]) -> None:
        if (model is None) == (self.model_init is None):
            raise UsageError(
                "Trainer needs a model or model_init, and was given " + ("neither" if model is None else "both"),
                where="Trainer(model=, model_init=)",
                do="give one of them",
            )
        if self.model_init is not None and any(part is not None for part in optimizers):
            raise UsageError(
                "optimizers belong to one model, and model_init makes a new one for each training",
                where="Trainer(optimizers=, model_init=)",
                do="give model= in place of model_init=, or override create_optimizer_and_scheduler",
            )
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise UsageError(
                "optimizers and optimizer_cls_and_kwargs both say what the optimizer is",
                where="Trainer(optimizers=, optimizer_cls_and_kwargs=)",
                do="give one of them",
            )
        if self.args.eval_strategy != IntervalStrategy.NO and self.eval_dataset is None:
            raise UsageError(
                f"eval_strategy={str(self.args.eval_strategy)!r}, but there is no eval_dataset",
                where="Trainer(eval_dataset=)",
                do="give an eval_dataset, or set eval_strategy='no'",
            )
        if self.train_dataset is not None and length_of(self.train_dataset) is None and self.args.max_steps <= 0:
            raise no_length()

    def _model_changed(self) -> None:
        """Look once at what the model and the overridden methods take."""
        model = self.model
        if not hasattr(model, "hf_device_map"):  # spread over devices already
            model.to(self.accelerator.device)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = self.args.use_cache
        declared = getattr(model, "accepts_loss_kwargs", None)
        self.model_accepts_loss_kwargs = takes_anything(model.forward) if declared is None else bool(declared)
        self._computes_own_loss = (
            type(self).compute_loss is not Trainer.compute_loss
            or "compute_loss" in vars(self)
            or self.compute_loss_func is not None
        )
        found = find_labels(model.forward)
        self._guesses_labels = self.args.label_names is None and not found and self._computes_own_loss
        self.label_names = list(self.args.label_names or found or (["labels"] if self._guesses_labels else []))
        return_loss = inspect.signature(model.forward).parameters.get("return_loss")
        self.can_return_loss = return_loss is not None and return_loss.default is True
        self._compute_loss_takes_items = takes(self.compute_loss, "num_items_in_batch")
        self._training_step_takes_items = takes(self.training_step, "num_items_in_batch")
        self._log_takes_start = takes(self.log, "start_time")
        self._counts_flops = type(self).floating_point_ops is not Trainer.floating_point_ops or hasattr(
            model, "floating_point_ops"
        )
        self._counts_items = (
            self.model_accepts_loss_kwargs and self._compute_loss_takes_items
        ) or self.compute_loss_func is not None
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
            resume_from_checkpoint: not offered yet.
            trial: not offered yet.
            ignore_keys_for_eval: outputs of the model that evaluations leave out.
            kwargs: none; old programs pass ``model_path``.

        Collective: every rank.
        """
        self._refuse_in_train(resume_from_checkpoint, trial, kwargs)
        args = self.args
        if self.model_init is not None:
            set_seeds(args)
            self.accelerator.free_memory()
            self.model = self.model_wrapped = self.call_model_init(trial)
            self.optimizer = self.lr_scheduler = None
        self._model_changed()
        self.is_in_train = True
        try:
            loader = self.get_train_dataloader()
            batch_size = getattr(loader, "batch_size", None) or args.train_batch_size
            plan = make_plan(
                args,
                loader,
                num_examples=self._num_examples(loader),
                batch_size=batch_size // self.accelerator.num_processes
                if self.accelerator.split_batches
                else batch_size,
                world_size=self.accelerator.num_processes,
            )
            self.state = TrainerState(
                max_steps=plan.max_steps,
                num_train_epochs=plan.num_epochs,
                train_batch_size=args.train_batch_size,
                is_local_process_zero=self.is_local_process_zero(),
                is_world_process_zero=self.is_world_process_zero(),
            )
            self.state.compute_steps(args, plan.max_steps)
            self.control = TrainerControl()
            self._prepare_training(plan.max_steps)
            self.callback_handler.train_dataloader = loader
            announce(plan, args, num_parameters=self.get_num_trainable_parameters())
            return TrainingLoop(self, plan, loader, ignore_keys=ignore_keys_for_eval).run()
        finally:
            self.is_in_train = False

    def _refuse_in_train(self, resume_from_checkpoint: Any, trial: Any, kwargs: Mapping[str, Any]) -> None:
        if resume_from_checkpoint not in (None, False) or kwargs.get("model_path") is not None:
            raise UsageError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} is not offered yet: it comes with crash-safe checkpoints",
                where="Trainer.train",
                do="load the weights of the checkpoint into the model (model.safetensors) and start a new training",
            )
        if trial is not None:
            raise UsageError(
                "train(trial=) is not offered yet by this version of echelon", where="Trainer.train", do="leave it out"
            )
        unknown = [name for name in kwargs if name != "model_path"]
        if unknown:
            raise UsageError(
                f"train() does not take {', '.join(unknown)}", where="Trainer.train", do="see help(Trainer.train)"
            )

    def _prepare_training(self, max_steps: int) -> None:
        """Make the optimizer and the schedule, and hand them and the model to the ranks."""
        self.optimizer = _unwrapped(self.optimizer)
        if self._made_scheduler:
            self.lr_scheduler = None  # of an earlier training, and at its end
        own_scheduler = self.lr_scheduler is not None
        self.create_optimizer_and_scheduler(max_steps)
        self._made_scheduler = not own_scheduler
        self._steps_schedule = not isinstance(self.lr_scheduler, ReduceLROnPlateau)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self._has_gradients_elsewhere = any(p.requires_grad and id(p) not in held for p in self.model.parameters())
        self.model_wrapped, self.optimizer, self.lr_scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.lr_scheduler
        )
        self.model = self.accelerator.unwrap_model(self.model_wrapped)
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
        if num_items_in_batch is None and self.current_gradient_accumulation_steps > 1:
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def _training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        if self._training_step_takes_items:
            return self.training_step(model, inputs, num_items_in_batch)
        return self.training_step(model, inputs)

    def _compute_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        try:
            if self._compute_loss_takes_items:
                return self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)  # type: ignore[return-value]
            return self.compute_loss(model, inputs)  # type: ignore[return-value]
        except KeyError as error:
            if isinstance(inputs, Mapping) and error.args and error.args[0] not in inputs:
                raise self._missing_column(str(error.args[0]), inputs) from error
            raise

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
        if not isinstance(inputs, Mapping):
            raise UsageError(
                f"a batch is a {type(inputs).__name__}, and the Trainer calls the model by names",
                where="Trainer.compute_loss",
                do="override compute_loss, or let the data set return dicts whose keys are the parameters of forward",
            )
        labels = inputs.get("labels") if self.compute_loss_func is not None else None
        if labels is not None:
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        else:
            outputs = model(**inputs)
        if self.compute_loss_func is not None and labels is not None:
            loss = self._call_loss_func(outputs, labels, num_items_in_batch)
        else:
            loss = self._loss_in(outputs, inputs)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # divided by the items of all ranks, then averaged over them
        return (loss, outputs) if return_outputs else loss

    def _call_loss_func(self, outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        assert self.compute_loss_func is not None
        if takes(self.compute_loss_func, "num_items_in_batch"):
            return self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        return self.compute_loss_func(outputs, labels)

    def _loss_in(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss that the model computed: ``outputs["loss"]``, the first of a tuple, or a single number."""
        loss = None
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        elif isinstance(outputs, torch.Tensor):
            loss = outputs if not outputs.dim() else None
        elif isinstance(outputs, (tuple, list)) and outputs:
            loss = outputs[0]
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss
        missing = [name for name in self.label_names if name not in inputs] or ([] if self.label_names else ["labels"])
        what = f"the model ({type(self.model).__name__}) gave no loss"
        if missing:
            what += f", and the batch has no {' or '.join(repr(name) for name in missing)}"
        raise UsageError(
            f"{what}: its columns are {', '.join(map(str, inputs)) or 'none'} "
            f"(label_names: {', '.join(self.label_names) or 'none'})",
            where="Trainer.compute_loss",
            do="name the label column 'labels', or set label_names to its name"
            if self.label_names
            else "override compute_loss, give compute_loss_func, or let forward take labels and return the loss first",
        )

    def _missing_column(self, name: str, inputs: Mapping[str, Any]) -> UsageError:
        kept = self._kept_columns()
        hint = (
            "set remove_unused_columns=False: it leaves out what the model's forward does not take"
            if kept is not None and not kept.keeps(name)
            else "rename a column of the data set, or set label_names"
        )
        return UsageError(
            f"compute_loss needs {name!r}, and the batch has only {', '.join(map(str, inputs)) or 'no columns'} "
            f"(label_names: {', '.join(self.label_names) or 'none'})",
            where="Trainer.compute_loss",
            do=hint,
        )

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
        num_items: Any = None
        if self._counts_items and samples and isinstance(samples[0], Mapping) and "labels" in samples[0]:
            num_items = sum(self._count_items(batch) for batch in samples)
            if self.args.average_tokens_across_devices and self.accelerator.num_processes > 1:
                num_items = self.accelerator.reduce(num_items.to(device), "sum")
        return samples, num_items

    def _count_items(self, batch: Mapping[str, Any]) -> torch.Tensor:
        labels = batch.get("shift_labels", batch["labels"])
        if "shift_labels" not in batch and getattr(self.model, "loss_type", None) == "ForCausalLM":
            labels = labels[..., 1:]  # the model predicts the next token: the first one is nobody's target
        count: torch.Tensor = labels.ne(-100).sum()
        return count

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what was not given: ``self.optimizer`` and ``self.lr_scheduler``."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make ``self.optimizer`` by the arguments, if none was given, and return it."""
        if self.optimizer is None:
            model = model if model is not None else self.model
            kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            groups = parameter_groups(
                model, decaying=self.get_decay_parameter_names(model), weight_decay=self.args.weight_decay
            )
            self.optimizer = kind(groups, **arguments)
        optimizer: Optimizer = self.optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Make ``self.lr_scheduler`` by the arguments, if none was given, and return it."""
        if self.lr_scheduler is None:
            chosen = optimizer if optimizer is not None else self.optimizer
            assert chosen is not None
            more = self.args.lr_scheduler_kwargs
            assert more is None or isinstance(more, dict), more
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                chosen,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=more,
            )
        scheduler: LRScheduler = self.lr_scheduler
        return scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class of the optimizer and its arguments."""
        return optimizer_class_and_arguments(args)

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
        return self._make_loader(self.train_dataset, sampler, self.args.train_batch_size)

    def get_eval_dataloader(self, eval_dataset: str | Any | None = None) -> DataLoader[Any]:
        """Return the loader of ``eval_dataset`` (also the name of one of several), dealt to the ranks."""
        dataset = self._eval_dataset(eval_dataset)
        return self._make_loader(dataset, self._get_eval_sampler(dataset), self.args.eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of ``test_dataset``, dealt to the ranks."""
        return self._make_loader(test_dataset, self._get_eval_sampler(test_dataset), self.args.eval_batch_size)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        return train_sampler(self.args, train_dataset if train_dataset is not None else self.train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        return None if length_of(eval_dataset) is None else SequentialSampler(eval_dataset)

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
        return dataset

    def _make_loader(self, dataset: Any, sampler: Sampler[int] | None, batch_size: int) -> DataLoader[Any]:
        collator, kept = self.data_collator, self._kept_columns()
        if kept is not None and isinstance(dataset, Table):
            dataset, dropped = drop_columns(dataset, kept, model=self.model)
            if dropped:
                logger.info("columns that %s.forward does not take: %s", type(self.model).__name__, ", ".join(dropped))
        elif kept is not None:
            collator = ColumnFilter(collator, kept)
        loader: DataLoader[Any] = self.accelerator.prepare(
            make_loader(
                self.args,
                dataset,
                collator=collator,
                batch_size=batch_size,
                sampler=sampler,
                rank=self.accelerator.process_index,
                device=self.accelerator.device,
            )
        )
        return loader

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
        dataloader = self.get_eval_dataloader(eval_dataset)
        start = time.time()
        output = self.evaluation_loop(
            dataloader,
            description="Evaluation",
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        output.metrics.update(self._speed(metric_key_prefix, start, output.num_samples))
        self._log(output.metrics)
        self._tell("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Dataset[Any] | Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return the predictions for ``test_dataset``, its labels if it has any, and then the metrics; nothing is logged.

        Collective: every rank.
        """
        dataloader = self.get_test_dataloader(test_dataset)
        start = time.time()
        self._is_predicting = True
        try:
            output = self.evaluation_loop(
                dataloader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
        finally:
            self._is_predicting = False
        output.metrics.update(self._speed(metric_key_prefix, start, output.num_samples))
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
        return run_evaluation(
            self,
            dataloader,
            description=description,
            prediction_loss_only=loss_only,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return (loss, logits, labels) of one batch; each may be None."""
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"])
        inputs = self._prepare_inputs(inputs)
        labels = self._labels_in(inputs)
        loss = None
        with torch.no_grad():
            if self._has_loss(inputs):
                with self.compute_loss_context_manager():
                    loss, outputs = self._loss_and_outputs(model, inputs)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
        if prediction_loss_only:
            return loss, None, None
        if isinstance(outputs, Mapping):
            left_out = [*ignore_keys, *(["loss"] if loss is not None else [])]
            logits: Any = tuple(value for name, value in outputs.items() if name not in left_out)
        elif isinstance(outputs, (tuple, list)):
            # A model of transformers returns its loss first; an overridden compute_loss need not.
            has_loss = loss is not None and isinstance(outputs[0], torch.Tensor) and not outputs[0].dim()
            logits = tuple(outputs[1:] if has_loss else outputs)
        else:
            logits = (outputs,)
        logits = batches.detach(logits)
        return loss, logits[0] if len(logits) == 1 else logits, batches.detach(labels)

    def _loss_and_outputs(self, model: nn.Module, inputs: Any) -> tuple[torch.Tensor, Any]:
        try:
            result = self.compute_loss(model, inputs, return_outputs=True)
        except KeyError as error:
            if isinstance(inputs, Mapping) and error.args and error.args[0] not in inputs:
                raise self._missing_column(str(error.args[0]), inputs) from error
            raise
        if not (isinstance(result, tuple) and len(result) == 2):
            raise UsageError(
                f"compute_loss(..., return_outputs=True) returned a {type(result).__name__}, not (loss, outputs)",
                where=f"{type(self).__name__}.compute_loss",
                do="end it with: return (loss, outputs) if return_outputs else loss",
            )
        return result

    def _has_loss(self, inputs: Any) -> bool:
        """Tell whether a loss can be computed for a batch of an evaluation."""
        if not isinstance(inputs, Mapping):
            return self._computes_own_loss and (len(inputs) > 1 or not self._is_predicting)
        if self.label_names and all(inputs.get(name) is not None for name in self.label_names):
            return True
        if self._guesses_labels:  # forward takes no labels: only compute_loss knows what it needs
            return not self._is_predicting
        return not self.label_names and self.can_return_loss

    def _labels_in(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            labels = tuple(inputs.get(name) for name in self.label_names)
            if not labels or any(label is None for label in labels):
                return None
            return labels[0] if len(labels) == 1 else labels
        # Tuples of a TensorDataset: the labels are last.
        return inputs[-1] if isinstance(inputs, (tuple, list)) and len(inputs) > 1 else None

    def _model_for_evaluation(self) -> nn.Module:
        if not self._is_trained and self._preparation_time is None:
            start = time.time()
            self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
            self._preparation_time = round(time.time() - start, 4)
        return self.model_wrapped

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
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs=logs)

    def _log(self, logs: dict[str, Any]) -> None:
        if self._log_takes_start:
            self.log(logs, start_time=None)
        else:
            self.log(logs)

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
    def _output_dir(self) -> Path:
        return Path(self.args.output_dir or "trainer_output")

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the weights, the tokenizer and the arguments to ``output_dir``.

        Collective: every rank must call this.
        """
        folder = Path(output_dir) if output_dir is not None else self._output_dir
        state_dict = self.accelerator.get_state_dict(self.model_wrapped)
        if self.args.should_save:
            self._save(str(folder), state_dict=state_dict)
        if not _internal_call:
            self.accelerator.wait_for_everyone()  # the next line of any rank may read the files

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the files of ``save_model``, on the one rank that writes."""
        folder = Path(output_dir) if output_dir is not None else self._output_dir
        folder.mkdir(parents=True, exist_ok=True)
        state = self.model.state_dict() if state_dict is None else state_dict
        if isinstance(self.model, SavesItself):
            self.model.save_pretrained(str(folder), state_dict=state)
        else:
            write_tensors(state, folder / WEIGHTS_FILE)
        if isinstance(self.processing_class, SavesItself):
            self.processing_class.save_pretrained(str(folder))
        write_json(folder / ARGUMENTS_FILE, self.args.to_dict())

    def save_state(self) -> None:
        """Write the state of the training to ``trainer_state.json`` in the output folder."""
        if self.args.should_save:
            self.state.save_to_json(self._output_dir / STATE_FILE)

    def _save_checkpoint(self) -> None:
        """Write ``checkpoint-<step>``: aside first, then under its name.

        Collective: every rank.
        """
        folder = self._output_dir / f"checkpoint-{self.state.global_step}"
        aside = folder.with_name(f"{folder.name}.tmp")
        self.save_model(aside, _internal_call=True)
        self.accelerator.wait_for_everyone()
        best = self.state.best_global_step
        best_folder = self._output_dir / f"checkpoint-{best}"
        if best is not None and (best == self.state.global_step or best_folder.exists()):
            self.state.best_model_checkpoint = str(best_folder)
        self.state.stateful_callbacks = self._callback_states()
        if self.args.should_save:
            self.state.save_to_json(aside / STATE_FILE)
            if folder.exists():
                shutil.rmtree(folder)  # of an earlier training into the same folder
            aside.rename(folder)
            remove_surplus(
                self._output_dir,
                limit=self.args.save_total_limit,
                best=self.state.best_model_checkpoint,
                keep_newest=True,
            )
        self.accelerator.wait_for_everyone()

    def _callback_states(self) -> dict[str, Any]:
        states: dict[str, Any] = {"TrainerControl": self.control.state()}
        for callback in self.callback_handler.callbacks:
            state = getattr(callback, "state", None)  # the user's object, or one written for transformers
            if callable(state):
                states[type(callback).__name__] = state()
        return states

    def _note_best(self, metrics: dict[str, float]) -> bool:
        """Note the metric of an evaluation if it is the best so far, and tell whether it is."""
        if self.args.metric_for_best_model is None:
            return False
        value, best = self._metric_for_best(metrics), self.state.best_metric
        is_better = best is None or (value > best if self.args.greater_is_better else value < best)
        if is_better:
            self.state.best_metric = value
            self.state.best_global_step = self.state.global_step
        return is_better

    def _metric_for_best(self, metrics: dict[str, float]) -> float:
        name = self.args.metric_for_best_model or "loss"
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"metric_for_best_model={self.args.metric_for_best_model!r}, but the evaluation gives no {name!r}; "
                f"it gives {', '.join(metrics)}",
                where="TrainingArguments.metric_for_best_model",
                do="choose one of them, or let compute_metrics return it",
            )
        return metrics[name]

    def _load_best(self) -> None:
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            logger.info("loading the best model from %s (%s)", best, self.state.best_metric)
            path = Path(best) / WEIGHTS_FILE
            load_weights(self.model, read_weights(path), source=path)

    def _remove_last_checkpoint(self) -> None:
        """With save_total_limit=1 and a best checkpoint that is not the last one: the last one was kept to go on from."""
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        if self.args.should_save and best is not None and limit == 1:
            remove_surplus(self._output_dir, limit=limit, best=best, keep_newest=False)

    def end(self) -> None:
        """Close the process group: the last line of a program.

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
        """Return a new model of ``model_init``, which takes no argument or the trial."""
        assert self.model_init is not None
        model_init: Callable[..., nn.Module] = self.model_init
        model = model_init(trial) if parameters_of(model_init) else model_init()
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
        return length_of(getattr(dataloader, "dataset", None))

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

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Return the samples of one optimizer step, over all ranks."""
        args = args if args is not None else self.args
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


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
