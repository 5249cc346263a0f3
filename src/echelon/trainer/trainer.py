"""The Trainer: trains, evaluates and predicts with a model, data and TrainingArguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from echelon.accelerator import Accelerator
from echelon.accelerator.checkpoint.folders import require_folder
from echelon.base.keywords import suggest_keywords
from echelon.trainer.argument_conflicts import check_model, choose_processing_class
from echelon.trainer.arguments.devices import has_fixed_devices
from echelon.trainer.arguments.training_arguments import TrainingArguments, set_num_devices
from echelon.trainer.batch_loss import compute_loss, run_training_step
from echelon.trainer.build_accelerator import build_accelerator, set_seeds
from echelon.trainer.callbacks.built_in import built_in_callbacks, progress_callback
from echelon.trainer.callbacks.callback_handler import CallbackHandler, TrainerCallback
from echelon.trainer.checkpoint.checkpoint_folders import STATE_FILE
from echelon.trainer.checkpoint.save_model import save_model, save_model_and_wait
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data import data_loaders
from echelon.trainer.data.collators import PaddingCollator, Tokenizer, default_data_collator
from echelon.trainer.evaluation.evaluation_loop import evaluate, predict, run_evaluation
from echelon.trainer.evaluation.metric_reports import metrics_format, metrics_table, write_metrics
from echelon.trainer.evaluation.prediction_step import predict_batch
from echelon.trainer.features.hub import HubUpload, push, write_card
from echelon.trainer.features.hyperparameter_search import BestRun, default_compute_objective, search
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.hooks import notify, record_logs
from echelon.trainer.internals import TrainerInternals
from echelon.trainer.model_interface import flops_of, inspect_model, set_up_model
from echelon.trainer.model_loss import LabelSmoother
from echelon.trainer.optim.optimizers import decay_parameter_names, find_param_group, optimizer_class_and_arguments
from echelon.trainer.optim.prepared_optimizer import create_optimizer, create_scheduler
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
from echelon.trainer.session import TrainerSession, global_batch_size
from echelon.trainer.signatures import new_model
from echelon.trainer.state import TrainerControl, TrainerState
from echelon.trainer.training_run import TrainingRun
from echelon.trainer.unread_members import check_attributes, check_overrides
from echelon.trainer.verbosity import set_log_level

__all__ = ["Trainer"]

_NO_CONTEXT = nullcontext()  # has no state


@suggest_keywords
class Trainer(TrainerInternals):
    """Trains, evaluates and predicts, on one process or many.

    The arguments' names, order and defaults match transformers' Trainer. Every method can be overridden, including
    transformers' private methods (``TrainerInternals``). An override of ``compute_loss`` may have three or four
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

    loss_is_scaled_for_ga: bool | None = None
    """Whether an overridden ``compute_loss`` divides by the whole update's number of labels. If False, the
    loss is a mean over its batch, and the Trainer divides it by the update's number of batches. None means True if
    ``compute_loss`` receives the number of labels."""

    label_names: list[str]
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    hub_model_id: str | None

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
        self._session = TrainerSession(base=Trainer, internals=TrainerInternals)
        set_seeds(self.args)  # before model_init creates a model
        if has_fixed_devices(model):
            set_num_devices(self.args, min(self.args.n_gpu, 1))
        check_model(model, model_init)
        if model is not None:
            self.model: nn.Module = model
        self.create_accelerator_and_postprocess()
        memory = self._session.memory = MemoryMeter(self.accelerator.device, is_on=not self.args.skip_memory_metrics)
        if self.args.log_level != "passive":
            set_log_level(self.args.get_process_log_level())

        self.train_dataset = data_loaders.as_dataset(train_dataset)
        self.eval_dataset = data_loaders.as_dataset(eval_dataset)
        self.processing_class = choose_processing_class(processing_class, tokenizer)
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer: Any = optimizers[0]  # the prepared optimizer during training
        self.lr_scheduler: Any = optimizers[1]
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
        self.model_wrapped: nn.Module = self.model
        self._session.interface = inspect_model(self, base=Trainer)
        padding = PaddingCollator(self.processing_class) if isinstance(self.processing_class, Tokenizer) else None
        self.data_collator: Callable[[Any], Any] = data_collator or padding or default_data_collator
        self._validate_args()

        self.is_in_train, self.current_flos = False, 0.0
        self._signature_columns: list[str] | None = None
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

    def create_accelerator_and_postprocess(self) -> None:
        """Create ``self.accelerator`` from the arguments. Collective: call on every rank."""
        self.accelerator: Accelerator = build_accelerator(self.args, self._build_accelerator_args)
        self.gather_function: Callable[..., Any] = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.accelerator.state.deepspeed_plugin is not None
        self.is_fsdp_enabled = self.accelerator.state.fsdp_plugin is not None
        self.accelerator.preemption.is_driven = True
        self._session.cursor = TrainCursor()
        self.accelerator.register_for_checkpointing(self._session.cursor)

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
        """
        check_attributes(self, Trainer, self._session.own_attributes)
        self._session.own_attributes = frozenset(vars(self))  # each is named once
        run = TrainingRun(self, self._session, trial=trial, ignore_keys=ignore_keys_for_eval)
        return run.start(resume_from_checkpoint, kwargs)

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
        return run_training_step(self, self._session, model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return a batch's loss and, if ``return_outputs``, the model's outputs.

        Called during training and evaluation. Override it if the model does not compute the loss.

        Raises:
            UsageError: the model returned no loss, for example because the batch has no labels.
        """
        loss, outputs = compute_loss(self, self._session, model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context around ``compute_loss``; the model's forward applies autocast itself."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return an empty context; kept because subclasses call it."""
        return _NO_CONTEXT

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return one update's batches and their number of labels (None if the loss is not divided by this number).

        Collective: call on every rank if labels are counted across ranks.
        """
        samples = list(islice(epoch_iterator, num_batches))
        return samples, self._get_num_items_in_batch(samples, device)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create ``self.optimizer`` and ``self.lr_scheduler``, unless they were given."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create ``self.optimizer`` from the arguments, unless it was given, and return it."""
        if self.optimizer is None:
            self.optimizer = create_optimizer(self, model if model is not None else self.model)
        return self.optimizer  # type: ignore[no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Create ``self.lr_scheduler`` from the arguments, unless it was given, and return it."""
        if self.lr_scheduler is None:
            chosen = optimizer if optimizer is not None else self.optimizer
            assert chosen is not None
            self.lr_scheduler = create_scheduler(self, chosen, num_training_steps)
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

    # ---- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training data loader, sharded across ranks."""
        data_loaders.require_train_dataset(self.train_dataset)
        size = self._train_batch_size
        if self.accelerator.parity != "off":
            size = global_batch_size(self.args, self.accelerator.session.num_readers)
        return self._get_dataloader(
            dataset=self.train_dataset,
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
        """
        return evaluate(self, self._session, eval_dataset, ignore_keys=ignore_keys, prefix=metric_key_prefix)

    def predict(
        self, test_dataset: Dataset[Any] | Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return predictions, labels (if any) and metrics for ``test_dataset``. Collective: call on every rank."""
        return predict(self, self._session, test_dataset, ignore_keys=ignore_keys, prefix=metric_key_prefix)

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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch to ``logs``, append them to the history, and notify the callbacks."""
        record_logs(self, logs, start_time, num_tokens_before=self._session.initial_num_tokens)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, given as an instance or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove and return a callback or, given a class, its first instance."""
        found: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return found

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback or, given a class, its first instance."""
        self.callback_handler.remove_callback(callback)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print ``metrics`` as a table, on rank zero."""
        if self.is_world_process_zero():
            print(metrics_table(split, self.metrics_format(metrics)), flush=True)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Format ``metrics`` for display."""
        return metrics_format(metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``metrics`` to ``<split>_results.json`` and, if ``combined``, add them to ``all_results.json``, on rank zero."""
        if self.is_world_process_zero():
            write_metrics(self._session.output_dir(self.args), split, metrics, combined=combined)

    # ---- files and search --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the weights, the tokenizer and the arguments to ``output_dir``; any rank's next line may read them.

        Collective: call on every rank, or on rank zero alone if each rank has the whole model.
        """
        folder = Path(output_dir) if output_dir is not None else self._session.output_dir(self.args)
        save = save_model if _internal_call else save_model_and_wait
        save(self, folder, write_files=self._save)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_state(self) -> None:
        """Write the Trainer's state to ``trainer_state.json`` in the output directory."""
        if self.args.should_save:
            self.state.save_to_json(self._session.output_dir(self.args) / STATE_FILE)

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
        """
        hub = self._session.hub
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        wait = self._finish_current_push
        return push(
            self, hub, commit_message, blocking=blocking, token=token, revision=revision, card=kwargs, wait=wait
        )

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
        """Write README.md with metadata, results, settings and versions, on rank zero."""
        if self.is_world_process_zero():
            metadata = {"language": language, "license": license, "base_model": finetuned_from, "tags": tags}
            metadata |= {"datasets": dataset_tags, "pipeline_tag": tasks, "dataset_args": dataset_args}
            data = dataset if dataset is not None else dataset_tags
            write_card(self, self._session.output_dir(self.args), metadata, name=model_name, data=data)

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
        """
        return search(
            self,
            self._session.search,
            space=hp_space,
            objective=compute_objective or default_compute_objective,
            num_trials=n_trials,
            direction=direction,
            backend=backend,
            name_of=hp_name,
            options=kwargs,
        )

    def end(self) -> None:
        """Close the trackers and the process group at the end of the program. Collective: call on every rank."""
        self.accelerator.end_training()

    # ---- for scripts and subclasses ----------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """Old name of ``processing_class``."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, processing_class: Any) -> None:
        self.processing_class = processing_class

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model from ``model_init``, which takes no argument or takes the trial."""
        return new_model(self.model_init, trial)

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process on its machine."""
        return self.accelerator.is_local_main_process

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank zero."""
        return self.accelerator.is_main_process

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the floating-point operations in a forward and backward pass; 0 if the model does not count them."""
        return flops_of(self.model, self._session.interface, inputs)

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the parameter group that contains ``param``, or the parameters of all groups if ``param`` is None."""
        return find_param_group(self.optimizer, self.model, param)
