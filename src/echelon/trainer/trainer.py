"""The Trainer: trains, evaluates and predicts with a model, data and TrainingArguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from echelon.accelerator.checkpoint.folders import require_folder
from echelon.base.errors import UsageError
from echelon.base.keywords import suggest_keywords
from echelon.base.lengths import length_of
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.trainer.arguments.enums import IntervalStrategy
from echelon.trainer.arguments.training_arguments import TrainingArguments, has_fixed_devices, set_num_devices
from echelon.trainer.build_accelerator import set_seeds
from echelon.trainer.callbacks.built_in import built_in_callbacks, progress_callback
from echelon.trainer.callbacks.callback_handler import CallbackHandler, TrainerCallback
from echelon.trainer.checkpoint.checkpoint_folders import STATE_FILE
from echelon.trainer.checkpoint.save import CheckpointWriter
from echelon.trainer.data import data_loaders
from echelon.trainer.data.collators import PaddingCollator, Tokenizer, default_data_collator
from echelon.trainer.evaluation.evaluation_loop import measure_evaluation, predict_batch, run_evaluation
from echelon.trainer.features.hub import HubUpload
from echelon.trainer.features.hyperparameter_search import BestRun, default_compute_objective, search
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.features.model_changes import inspect_model, set_up_model
from echelon.trainer.model_loss import LabelSmoother
from echelon.trainer.optim.optimizers import find_param_group, param_groups_of
from echelon.trainer.results import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
    metrics_format,
    metrics_table,
    write_metrics,
)
from echelon.trainer.session import TrainerSession
from echelon.trainer.signatures import takes
from echelon.trainer.state import TrainerControl, TrainerState
from echelon.trainer.trainer_methods import TrainerMethods, log, notify
from echelon.trainer.training_plan import no_length_error
from echelon.trainer.training_run import TrainingRun
from echelon.trainer.unread_members import check_attributes, check_overrides

logger = get_logger(__name__)


@suggest_keywords
class Trainer(TrainerMethods):
    """Trains, evaluates and predicts, on one process or many.

    The arguments' names, order and defaults match transformers' Trainer. Every method can be overridden, including
    transformers' private methods (``TrainerMethods``). An override of ``compute_loss`` may have three or four
    parameters, ``training_step`` two or three, and ``log`` one or two.

    Args:
        model: a module whose forward returns the loss as its first output or as ``loss``; any module if
            ``compute_loss`` is overridden or ``compute_loss_func`` is given.
        args: training arguments (default: ``TrainingArguments("tmp_trainer")``).
        data_collator: builds a batch from a list of samples (default: pads samples with ``processing_class`` if given,
            otherwise stacks them).
        train_dataset: training data.
        eval_dataset: evaluation data, or a dict of several datasets.
        processing_class: a tokenizer or similar object, saved with the model.
        model_init: returns a new model for each call to ``train``; replaces ``model``.
        compute_loss_func: ``compute_loss_func(outputs, labels, num_items_in_batch=)`` returns the loss. With an overridden
            ``compute_loss``, any value except None means that the loss is not divided by the update's number of batches.
        compute_metrics: computes a dict of metrics from an ``EvalPrediction``.
        callbacks: callback classes or objects.
        optimizers: the optimizer and the scheduler; pass None for either one to create it from ``args``.
        optimizer_cls_and_kwargs: the optimizer's class and arguments.
        preprocess_logits_for_metrics: ``preprocess_logits_for_metrics(logits, labels)`` returns the value to gather
            instead of the logits.
        tokenizer: old name of ``processing_class``.

    Collective: call on every rank.

    Raises:
        EchelonError: arguments conflict.
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
        _check_kinds(args, callbacks, optimizers)
        self.args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        self._session = TrainerSession()
        set_seeds(self.args)  # before model_init creates a model
        if has_fixed_devices(model):
            set_num_devices(self.args, min(self.args.n_gpu, 1))
        _check_model(model, model_init)
        if model is not None:
            self.model = model
        self.create_accelerator_and_postprocess()
        memory = self._session.memory = MemoryMeter(self.accelerator.device, is_on=not self.args.skip_memory_metrics)
        if self.args.log_level != "passive":
            _set_log_level(self.args.get_process_log_level())

        self.train_dataset = data_loaders.as_dataset(train_dataset)
        self.eval_dataset = data_loaders.as_dataset(eval_dataset)
        self.processing_class = _choose_processing_class(processing_class, tokenizer)
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer = optimizers[0]
        self.lr_scheduler = optimizers[1]
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.label_smoother = LabelSmoother.of(self.args.label_smoothing_factor)
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        memory.begin("init")
        if model is None:
            self.model = self.call_model_init()
        if model is None and self.args.n_gpu > 1 and has_fixed_devices(self.model):
            set_num_devices(self.args, 1)
            self.create_accelerator_and_postprocess()
        self.place_model_on_device = self.args.place_model_on_device is not False
        set_up_model(self)
        self.model_wrapped = self.model
        self._session.interface = inspect_model(self)
        padding = PaddingCollator(self.processing_class) if isinstance(self.processing_class, Tokenizer) else None
        self.data_collator = data_collator or padding or default_data_collator
        self._validate_args()

        self.is_in_train, self.current_flos = False, 0.0
        self._signature_columns = None
        self.hp_name = self.hp_search_backend = self.push_in_progress = self._trial = self.hub_model_id = None
        self.current_gradient_accumulation_steps = 1
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        self.control = TrainerControl()
        own = [*built_in_callbacks(self.args, lambda: self.accelerator), *(callbacks or [])]
        self.callback_handler = CallbackHandler(own, self.model, self.processing_class, *optimizers)
        self.add_callback(progress_callback(self.args))
        output_dir = self._session.output_dir(self.args)
        self._session.hub = HubUpload(self.args, output_dir)
        if self.args.push_to_hub:
            self.init_hf_repo()
        require_folder(output_dir, makes=self.args.should_save)
        memory.keep(memory.end("init"))
        check_overrides(self, Trainer)
        self._session.own_attributes = frozenset(vars(self))
        notify(self, "on_init_end")

    def _validate_args(self) -> None:
        """Check the constructor's arguments for conflicts.

        Raises:
            UsageError: arguments conflict, or a required one is missing.
        """
        if self.model_init is not None and not (self.optimizer is None and self.lr_scheduler is None):
            raise UsageError(
                "optimizers= belongs to one model, but model_init creates a new model for each call to train()",
                where="Trainer(optimizers=, model_init=)",
                do="pass model= instead of model_init=, or override create_optimizer_and_scheduler",
            )
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise UsageError(
                "optimizers and optimizer_cls_and_kwargs both define the optimizer",
                where="Trainer(optimizers=, optimizer_cls_and_kwargs=)",
                do="pass one of them",
            )
        if self.args.eval_strategy != IntervalStrategy.NO and self.eval_dataset is None:
            raise UsageError(
                f"eval_strategy={str(self.args.eval_strategy)!r}, but there is no eval_dataset",
                where="Trainer(eval_dataset=)",
                do="pass eval_dataset, or set eval_strategy='no'",
            )
        if self.args.max_steps > 0 and self.args.num_train_epochs > 0:
            logger.info("max_steps=%d is set, so num_train_epochs has no effect", self.args.max_steps)
        strategy = self.args.train_sampling_strategy
        if strategy in ("group_by_length", "batch_rebalance") and isinstance(self.train_dataset, IterableDataset):
            logger.warning(
                N_(
                    "train_sampling_strategy=%r is ignored, because an IterableDataset determines the order of its samples "
                    "itself"
                ),
                strategy,
            )
        batch_metrics = self.args.batch_eval_metrics and self.compute_metrics is not None
        if batch_metrics and not takes(self.compute_metrics, "compute_result"):  # type: ignore[arg-type]
            raise UsageError(
                "batch_eval_metrics=True calls compute_metrics for each batch, but compute_metrics "
                "has no parameter compute_result",
                where="Trainer(compute_metrics=)",
                do=(
                    "add the parameter compute_result; when it is True (on the last batch), return the metrics over all "
                    "batches"
                ),
            )
        if self.train_dataset is not None and length_of(self.train_dataset) < 0 and self.args.max_steps <= 0:
            raise no_length_error()

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train the model.

        Args:
            resume_from_checkpoint: path to a checkpoint; True for the newest valid one in ``output_dir``; ``auto`` for
                the same if one exists; False to start from scratch; None for ``args.resume_from_checkpoint``.
            trial: settings as a dict, or a ``hyperparameter_search`` trial.
            ignore_keys_for_eval: model outputs that evaluations ignore.
            kwargs: ``allow_changed_data``, which overrides the training argument of the same name, and ``model_path``,
                the old name of ``resume_from_checkpoint``.

        Collective: call on every rank.

        Raises:
            UsageError: no checkpoint exists.
            CheckpointError: the checkpoint is damaged, belongs to another model or does not fit this run
                (docs/checkpoints.md), or another process is training in ``output_dir``.

        Examples:
            >>> result = trainer.train(resume_from_checkpoint="auto")
            >>> result.global_step
            2
        """
        check_attributes(self, Trainer, self._session.own_attributes)
        self._session.own_attributes = frozenset(vars(self))  # each is named once
        run = TrainingRun(self, self._session, trial=trial, ignore_keys=ignore_keys_for_eval)
        return run.start(resume_from_checkpoint, kwargs)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Dataset[Any] | dict[str, Any] | Any | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate, log the metrics, and return them.

        Args:
            eval_dataset: overrides the Trainer's dataset; if it is a dict, each dataset is evaluated and its key added
                to the metric names.
            ignore_keys: model outputs to ignore.
            metric_key_prefix: prefix for the metric names.

        Collective: call on every rank.

        Examples:
            >>> metrics = trainer.evaluate()
            >>> "eval_loss" in metrics
            True
        """
        given = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(given, dict):
            metrics: dict[str, float] = {}
            for name, part in given.items():
                part = part if eval_dataset is not None else name
                prefix = f"{metric_key_prefix}_{name}"
                metrics |= self.evaluate(part, ignore_keys=ignore_keys, metric_key_prefix=prefix)
            return metrics
        output = measure_evaluation(
            self,
            self._session,
            lambda: self.get_eval_dataloader(eval_dataset),
            description="Evaluation",
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        log(self, output.metrics)
        notify(self, "on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Dataset[Any] | Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return predictions, labels (if any) and metrics for ``test_dataset``. Collective: call on every rank.

        Examples:
            >>> output = trainer.predict(dataset)
            >>> output.predictions.shape
            (8, 2)
        """
        self._session.evaluation.is_predicting = True
        try:
            output = measure_evaluation(
                self,
                self._session,
                lambda: self.get_test_dataloader(test_dataset),
                description="Prediction",
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        finally:
            self._session.evaluation.is_predicting = False
        notify(self, "on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over ``dataloader``; called by ``evaluate`` and ``predict``. Collective: call on every rank."""
        return run_evaluation(
            self,
            self._session,
            dataloader,
            description=description,
            prediction_loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            prefix=metric_key_prefix,
        )

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return one batch's loss, logits and labels; each may be None."""
        return predict_batch(
            self,
            self._session,
            model,
            self._prepare_inputs(inputs),
            prediction_loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            count_items=self._get_num_items_in_batch,
        )

    # ---- logs and callbacks ------------------------------------------------------------------------------------------

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, given as an instance or a class.

        Examples:
            >>> trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=3))
        """
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove and return a callback or, given a class, its first instance.

        Examples:
            >>> callback = trainer.pop_callback(PrinterCallback)
        """
        found: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return found

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback or, given a class, its first instance.

        Examples:
            >>> trainer.remove_callback(PrinterCallback)
        """
        self.callback_handler.remove_callback(callback)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print ``metrics`` as a table, on rank zero.

        Examples:
            >>> trainer.log_metrics("eval", {"eval_accuracy": 0.9})
            ***** eval metrics *****
              eval_accuracy = 0.9
        """
        if self.is_world_process_zero():
            print(metrics_table(split, self.metrics_format(metrics)), flush=True)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Format ``metrics`` for display.

        Examples:
            >>> trainer.metrics_format({"train_runtime": 61.0})
            {'train_runtime': '0:01:01.00'}
        """
        return metrics_format(metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``metrics`` to ``<split>_results.json`` and, if ``combined``, add them to ``all_results.json``, on rank zero.

        Examples:
            >>> trainer.save_metrics("eval", {"eval_accuracy": 0.9})
        """
        if self.is_world_process_zero():
            write_metrics(self._session.output_dir(self.args), split, metrics, combined=combined)

    # ---- files and search --------------------------------------------------------------------------------------------

    def save_state(self) -> None:
        """Write the Trainer's state to ``trainer_state.json`` in the output directory.

        Examples:
            >>> trainer.save_state()
        """
        if self.args.should_save:
            self.state.save_to_json(self._session.output_dir(self.args) / STATE_FILE)

    def _save_checkpoint(self, model: Any = None, trial: Any = None) -> None:
        """Write ``checkpoint-<step>`` and delete surplus checkpoints. Collective: call on every rank."""
        CheckpointWriter(self, self._session).save(trial)

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
        """Train with different settings and return the best run on every rank.

        Args:
            hp_space: takes an optuna trial and returns settings (default: learning rate, epochs, seed and batch size).
            compute_objective: takes an evaluation's metrics and returns a number (default: the sum of all metrics
                except the loss, or the loss if there are no others).
            n_trials: number of trials.
            direction: ``minimize``, ``maximize``, or a list of these if the objective returns several numbers.
            backend: ``optuna``.
            hp_name: takes a trial and returns its directory name (default: run-<number>).
            kwargs: options for ``optuna.create_study`` (pruner, sampler, storage, ...) and ``optimize`` (timeout, ...).

        Collective: call on every rank.

        Raises:
            UsageError: the Trainer has no ``model_init``.
            MissingExtraError: optuna is not installed.

        Examples:
            >>> best = trainer.hyperparameter_search(  # doctest: +SKIP
            ...     hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3, log=True)},
            ...     n_trials=10,
            ... )
        """
        return search(
            self,
            self._session,
            space=hp_space,
            objective=compute_objective or default_compute_objective,
            num_trials=n_trials,
            direction=direction,
            backend=backend,
            name_of=hp_name,
            options=kwargs,
        )

    def end(self) -> None:
        """Close the trackers and the process group at the end of the program. Collective: call on every rank.

        Examples:
            >>> trainer.end()
        """
        self.accelerator.end_training()

    # ---- for scripts and subclasses ----------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """Old name of ``processing_class``."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, processing_class: Any) -> None:
        self.processing_class = processing_class

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the parameter group that contains ``param``, or the parameters of all groups if ``param`` is None."""
        return find_param_group(self.optimizer, self.model, param)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in param_groups_of(self.optimizer, "get_learning_rates")]

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


def _set_log_level(level: int) -> None:
    """Set the level of echelon's loggers, and log to stderr if the program has no handler."""
    root = logging.getLogger("echelon")
    root.setLevel(level)
    if not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)


def _check_kinds(args: Any, callbacks: Any, optimizers: Any) -> None:
    """Check arguments of ``Trainer(...)`` that are easily given in another form.

    Raises:
        UsageError: one has the wrong type.
    """
    if isinstance(args, (Mapping, str, Path)):
        raise UsageError(
            f"args is a {type(args).__name__}, not TrainingArguments",
            where="Trainer(args=)",
            do="pass TrainingArguments(output_dir=..., ...)",
        )
    if callbacks is not None and not isinstance(callbacks, Iterable):
        raise UsageError(
            f"callbacks is a {type(callbacks).__name__}, not a list",
            where="Trainer(callbacks=)",
            do="pass a list of callbacks",
        )
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise UsageError(
            f"optimizers is a {type(optimizers).__name__}, not a pair",
            where="Trainer(optimizers=)",
            do="pass (optimizer, scheduler); with None as the scheduler, the one of lr_scheduler_type is made",
        )


def _check_model(model: nn.Module | None, model_init: Any) -> None:
    """Check that ``Trainer(...)`` received exactly one of ``model`` and ``model_init``.

    Raises:
        UsageError: both or neither were passed.
    """
    if (model is None) == (model_init is None):
        raise UsageError(
            "Trainer needs either model or model_init, but got " + ("neither" if model is None else "both"),
            where="Trainer(model=, model_init=)",
            do="pass one of them",
        )


def _choose_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """Return the processing class, which may have been passed under its old name ``tokenizer``.

    Raises:
        UsageError: ``tokenizer`` and ``processing_class`` were both passed and differ.
    """
    if tokenizer is None:
        return processing_class
    warn(_("Trainer(tokenizer=) was renamed to processing_class="))
    if processing_class is not None and processing_class is not tokenizer:
        raise UsageError(
            "tokenizer and processing_class conflict: tokenizer is the old name of processing_class",
            where="Trainer(processing_class=, tokenizer=)",
            do="pass only processing_class=",
        )
    return tokenizer
