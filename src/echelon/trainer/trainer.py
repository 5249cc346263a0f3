"""The Trainer: a model, data and TrainingArguments in, a trained model out; every method can be overridden."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from echelon.accelerator import Accelerator
from echelon.accelerator.checkpoint.folders import require_folder
from echelon.base.lengths import length_of
from echelon.trainer.argument_conflicts import check_arguments, choose_processing_class
from echelon.trainer.arguments.devices import has_fixed_devices
from echelon.trainer.arguments.training_arguments import TrainingArguments, set_num_devices
from echelon.trainer.batch_loss import compute_loss, count_update_items, run_training_step
from echelon.trainer.build_accelerator import make_accelerator, set_seeds
from echelon.trainer.callbacks.built_in import built_in_callbacks, progress_callback
from echelon.trainer.callbacks.callback_handler import CallbackHandler, TrainerCallback
from echelon.trainer.checkpoint.checkpoint_folders import STATE_FILE
from echelon.trainer.checkpoint.save import CheckpointWriter
from echelon.trainer.checkpoint.save_model import save_model, write_model_files
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data import batches, data_loaders
from echelon.trainer.data.collators import PaddingCollator, Tokenizer, default_data_collator
from echelon.trainer.evaluation.evaluation_loop import evaluate, predict, run_evaluation
from echelon.trainer.evaluation.metric_reports import metrics_format, metrics_table, write_metrics
from echelon.trainer.evaluation.prediction_step import predict_batch
from echelon.trainer.features.hub import HubUpload, push, write_card
from echelon.trainer.features.hyperparameter_search import BestRun, default_compute_objective, search
from echelon.trainer.features.memory_metrics import MemoryMeter
from echelon.trainer.features.model_changes import apply_liger_kernel
from echelon.trainer.hooks import BoundMethods, notify, record_logs
from echelon.trainer.model_interface import inspect_model
from echelon.trainer.model_loss import LabelSmoother
from echelon.trainer.optim.optimizers import (
    decay_parameter_names,
    find_param_group,
    optimizer_class_and_arguments,
    param_groups_of,
)
from echelon.trainer.optim.prepared_optimizer import create_optimizer, create_scheduler
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
from echelon.trainer.session import TrainerSession, UpdateSize, global_batch_size
from echelon.trainer.signatures import new_model, parameters_of
from echelon.trainer.state import TrainerControl, TrainerState
from echelon.trainer.training_plan import num_examples_of
from echelon.trainer.training_run import TrainingRun, plan_training
from echelon.trainer.verbosity import speak_at

__all__ = ["Trainer"]


class Trainer:
    """Trains, evaluates and predicts, on one process or many.

    The interface is that of transformers' Trainer: same names, same order, same defaults. ``compute_loss`` may be
    overridden with three or four parameters, ``training_step`` with two or three, ``log`` with one or two.

    Args:
        model: a module whose forward returns the loss first (or as ``loss``), or any module with ``compute_loss``
            overridden or ``compute_loss_func`` given.
        args: the settings; None: the defaults, and the folder tmp_trainer.
        data_collator: a list of samples -> a batch; None: padding where ``processing_class`` pads, else stacking.
        train_dataset: what to train on.
        eval_dataset: what to evaluate on; a dict of several.
        processing_class: a tokenizer or the like; it is saved beside the model.
        model_init: returns a new model for each training, instead of ``model``.
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

    label_names: list[str]
    can_return_loss: bool
    model_accepts_loss_kwargs: bool

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
        self._session = TrainerSession(base=Trainer)
        set_seeds(self.args)  # before model_init makes a model
        if has_fixed_devices(model):
            set_num_devices(self.args, min(self.args.n_gpu, 1))
        self.create_accelerator_and_postprocess()
        memory = self._session.memory = MemoryMeter(self.accelerator.device, is_on=not self.args.skip_memory_metrics)
        if self.args.log_level != "passive":
            speak_at(self.args.get_process_log_level())

        self.train_dataset = data_loaders.as_dataset(train_dataset)
        self.eval_dataset = data_loaders.as_dataset(eval_dataset)
        self.processing_class = choose_processing_class(processing_class, tokenizer)
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer: Any = optimizers[0]  # once training, the prepared one
        self.lr_scheduler: Any = optimizers[1]
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.label_smoother = LabelSmoother.of(self.args.label_smoothing_factor)
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        check_arguments(self, model, optimizers)
        memory.begin("init")

        self.model: nn.Module = model if model is not None else self.call_model_init()
        if model is None and self.args.n_gpu > 1 and has_fixed_devices(self.model):
            set_num_devices(self.args, 1)
            self.create_accelerator_and_postprocess()
        self.model_wrapped: nn.Module = self.model
        if self.args.use_liger_kernel:
            apply_liger_kernel(self.model, self.args.liger_kernel_config)
        self._session.interface = inspect_model(self, base=Trainer)
        padding = PaddingCollator(self.processing_class) if isinstance(self.processing_class, Tokenizer) else None
        self.data_collator: Callable[[Any], Any] = data_collator or padding or default_data_collator

        self.is_in_train = False
        self.current_gradient_accumulation_steps = 1
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        self.control = TrainerControl()
        own = [*built_in_callbacks(self.args, lambda: self.accelerator), *(callbacks or [])]
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        self.callback_handler = CallbackHandler(own, self.model, self.processing_class, optimizer, scheduler)
        self.add_callback(progress_callback(self.args))
        output_dir = self._session.output_dir(self.args)
        self._session.hub = HubUpload(self.args, output_dir)
        require_folder(output_dir, makes=self.args.should_save)
        memory.keep(memory.end("init"))
        notify(self, "on_init_end")

    def create_accelerator_and_postprocess(self) -> None:
        """Create ``self.accelerator`` by the arguments. Collective: every rank."""
        self.accelerator: Accelerator = make_accelerator(self.args)
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
        """Train, as ``args`` say.

        Args:
            resume_from_checkpoint: a checkpoint; True: the newest of ``output_dir`` that is whole; ``auto``: the same, or a
                new training if none exists; False: a new training; None: as ``args.resume_from_checkpoint`` says.
            trial: of a search: settings as a dict, or the trial of ``hyperparameter_search``.
            ignore_keys_for_eval: outputs of the model that evaluations leave out.
            kwargs: ``allow_changed_data``, as of the arguments: resume from the middle of an epoch although the data have
                changed. Old programs pass ``model_path``.

        Collective: every rank.

        Raises:
            UsageError: there is no checkpoint.
            CheckpointError: it is damaged, another model's, or means nothing here (docs/checkpoints.md); or another process
                trains in ``output_dir``.
        """
        methods = BoundMethods(self._prepare_inputs, self._save_checkpoint)
        run = TrainingRun(self, self._session, methods, trial=trial, ignore_keys=ignore_keys_for_eval)
        return run.start(resume_from_checkpoint, kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the loss of a batch and backpropagate it.

        Args:
            model: the wrapped model.
            inputs: a batch.
            num_items_in_batch: labels of the whole update, over all ranks; None: the loss is not divided by them.

        Returns:
            The loss, detached, divided by the number of batches of the update.

        Collective: at the last batch of an update.
        """
        return run_training_step(self, self._session, model, self._prepare_inputs(inputs), num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the loss of a batch; with ``return_outputs`` also what the model returned.

        Called in training and in evaluation. Override it for a model that does not compute its own loss.

        Raises:
            UsageError: the model gives no loss, for example because the batch holds no labels.
        """
        loss, outputs = compute_loss(self, self._session, model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context around ``compute_loss``; the model's forward has its autocast by itself."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return an empty context; kept because subclasses call it."""
        return nullcontext()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return ``inputs`` on the device."""
        return batches.to_device(inputs, self.accelerator.device)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the batches of one update, and the number of their labels where the loss is divided by it.

        Collective: where labels are counted over all ranks.
        """
        samples = list(itertools.islice(epoch_iterator, num_batches))
        return samples, self._get_num_items_in_batch(samples, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        return count_update_items(self, self._session, batch_samples, device)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create what was not given: ``self.optimizer`` and ``self.lr_scheduler``."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create ``self.optimizer`` by the arguments, if none was given, and return it."""
        if self.optimizer is None:
            self.optimizer = create_optimizer(self, model if model is not None else self.model)
        return self.optimizer  # type: ignore[no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Create ``self.lr_scheduler`` by the arguments, if none was given, and return it."""
        if self.lr_scheduler is None:
            chosen = optimizer if optimizer is not None else self.optimizer
            assert chosen is not None
            self.lr_scheduler = create_scheduler(self, chosen, num_training_steps)
        return self.lr_scheduler  # type: ignore[no-any-return]

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
        """Return the loader of the training data, sharded over the ranks."""
        data_loaders.require_train_dataset(self.train_dataset)
        takes_dataset = bool(parameters_of(self._get_train_sampler))
        sampler = self._get_train_sampler(self.train_dataset) if takes_dataset else self._get_train_sampler()
        size = self._session.update_size(self.args).batch_size
        if self.accelerator.parity != "off":
            size = global_batch_size(self.args, self.accelerator.num_processes)
        return data_loaders.build_loader(
            self, self._session.interface, self.train_dataset, sampler, size, purpose="train"
        )

    def get_eval_dataloader(self, eval_dataset: str | Any | None = None) -> DataLoader[Any]:
        """Return the loader of ``eval_dataset`` (also the name of one of several), sharded over the ranks."""
        dataset = data_loaders.choose_eval_dataset(eval_dataset, self.eval_dataset)
        sampler, size = self._get_eval_sampler(dataset), self.args.eval_batch_size
        return data_loaders.build_loader(self, self._session.interface, dataset, sampler, size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of ``test_dataset``, sharded over the ranks."""
        dataset = data_loaders.as_dataset(test_dataset)
        sampler, size = self._get_eval_sampler(dataset), self.args.eval_batch_size
        return data_loaders.build_loader(self, self._session.interface, dataset, sampler, size)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        size = self._session.update_size(self.args)
        return data_loaders.train_sampler(
            self.args,
            train_dataset if train_dataset is not None else self.train_dataset,
            batch_size=size.batch_size,
            accumulation=size.accumulation_steps,
            num_ranks=self.accelerator.num_processes,
            tokenizer=self.processing_class,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        return None if length_of(eval_dataset) < 0 else SequentialSampler(eval_dataset)

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
        return evaluate(self, self._session, eval_dataset, ignore_keys=ignore_keys, prefix=metric_key_prefix)

    def predict(
        self, test_dataset: Dataset[Any] | Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return the predictions for ``test_dataset``, its labels if any, and the metrics. Collective: every rank."""
        return predict(self, self._session, test_dataset, ignore_keys=ignore_keys, prefix=metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over ``dataloader``; ``evaluate`` and ``predict`` both end here. Collective: every rank."""
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
        """Return (loss, logits, labels) of one batch; each may be None."""
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
        """Add the epoch to ``logs``, append them to the history, and pass them to the callbacks."""
        record_logs(self, logs, start_time)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, or create one of a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback (or the first of a class) and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback (or the first of a class)."""
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
            write_metrics(self._session.output_dir(self.args), split, metrics, combined=combined)

    # ---- files and search --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the weights, the tokenizer and the arguments to ``output_dir``. Collective: every rank."""
        folder = Path(output_dir) if output_dir is not None else self._session.output_dir(self.args)
        save_model(self, folder, write_files=self._save)
        if not _internal_call:
            self.accelerator.wait_for_everyone()  # the next line of any rank may read the files
            if self.args.push_to_hub:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the files of ``save_model``, on the one rank that writes; a sharded model needs its ``state_dict``."""
        folder = Path(output_dir) if output_dir is not None else self._session.output_dir(self.args)
        write_model_files(self, folder, state_dict)

    def save_state(self) -> None:
        """Write the state of the training to ``trainer_state.json`` in the output folder."""
        if self.args.should_save:
            self.state.save_to_json(self._session.output_dir(self.args) / STATE_FILE)

    def _save_checkpoint(self, model: Any = None, trial: Any = None) -> None:
        """Write ``checkpoint-<step>``, then delete surplus ones; the parameters are for overrides. Collective: every rank."""
        CheckpointWriter(self, self._session, self._save).save()

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, write its card (``kwargs``: as ``create_model_card``), and upload both; not ``blocking``: in the background.

        Returns:
            What huggingface_hub returns (of the commit; not blocking: of the upload that runs); None on other ranks.

        Collective: every rank.

        Raises:
            MissingExtraError: huggingface_hub is not installed.
        """
        hub = self._session.hub
        return push(self, hub, commit_message, blocking=blocking, token=token, revision=revision, card=kwargs)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository of the upload, on rank zero."""
        if self.is_world_process_zero():
            self.args.hub_model_id = self._session.hub.open(token)

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
            metadata = {"language": language, "license": license, "base_model": finetuned_from, "tags": tags}
            metadata |= {"datasets": dataset_tags, "pipeline_tag": tasks}
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
        """Train with different settings, and return the best run, on every rank.

        Args:
            hp_space: optuna's trial -> settings; None: learning rate, epochs, seed and batch size.
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
        """Close the trackers and the process group: the last line of a program. Collective: every rank."""
        self.accelerator.end_training()

    # ---- what scripts and subclasses read ----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The old name of ``processing_class``."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, processing_class: Any) -> None:
        self.processing_class = processing_class

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model of ``model_init``, which takes nothing or the trial."""
        return new_model(self.model_init, trial)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.accelerator.is_local_main_process

    def is_world_process_zero(self) -> bool:
        """Whether this is rank zero."""
        return self.accelerator.is_main_process

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the samples of ``dataloader``, over all ranks; an estimate where its data set has no length."""
        known = num_examples_of(dataloader)
        return known if known is not None else len(dataloader) * self.args.per_device_train_batch_size

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the operations of one forward and backward pass, if the model can tell."""
        count = getattr(self.model, "floating_point_ops", None)
        return float(count(inputs)) if callable(count) else 0.0

    def get_num_trainable_parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in param_groups_of(self.optimizer, "get_learning_rates")]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the group of the optimizer that holds ``param``; the parameters of all groups, if none is given."""
        return find_param_group(self.optimizer, self.model, param)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return the numbers of the training's length, in transformers' order. Collective: every rank."""
        return plan_training(self, self._session, dataloader).initial_values()

    def store_flos(self) -> None:
        """Do nothing: the operations are added to ``state.total_flos`` by the loop; kept because scripts call it."""

    def get_tp_size(self) -> int:
        """Return over how many ranks a layer or a sequence is split: none is."""
        return 1

    get_cp_size = get_sp_size = get_tp_size

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Return the samples of one optimizer step, over all ranks."""
        size = self._session.update_size(self.args)
        if args is not None and args is not self.args:
            size = UpdateSize(args.train_batch_size, args.gradient_accumulation_steps)
        return size.batch_size * size.accumulation_steps * self.accelerator.num_processes
