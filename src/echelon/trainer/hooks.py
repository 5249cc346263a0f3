"""The interface that a Trainer offers its components: attributes, and methods that subclasses may override."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator import Accelerator
from echelon.accelerator.tracking import record_values
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.callbacks.callback_handler import CLEARED_FLAGS, CallbackHandler
from echelon.trainer.callbacks.flag_agreement import require_agreement, usual_flags
from echelon.trainer.model_loss import LabelSmoother
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, TrainOutput, speed_metrics
from echelon.trainer.signatures import takes
from echelon.trainer.state import TrainerControl, TrainerState

__all__ = ["TrainerHooks", "log", "notify", "record_logs"]


class TrainerHooks(Protocol):
    """A Trainer's attributes and methods, as used by its components.

    Scripts may replace attributes and override methods, so components look them up on every use.
    """

    args: TrainingArguments
    accelerator: Accelerator
    model: nn.Module
    model_wrapped: nn.Module
    model_init: Callable[[], nn.Module] | None
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[Any], Any]
    processing_class: Any
    compute_loss_func: Any
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    label_smoother: LabelSmoother | None
    label_names: list[str]
    can_return_loss: bool
    deepspeed: Any
    is_deepspeed_enabled: bool
    is_model_parallel: bool
    model_preparation_time: float
    model_accepts_loss_kwargs: bool
    loss_is_scaled_for_ga: bool | None
    neftune_noise_alpha: float | None
    place_model_on_device: bool
    current_gradient_accumulation_steps: int
    current_flos: float
    gather_function: Callable[..., Any]
    is_in_train: bool

    @property
    def compute_loss(self) -> Callable[..., Any]: ...
    @property
    def training_step(self) -> Callable[..., torch.Tensor]: ...
    @property
    def log(self) -> Callable[..., None]: ...
    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...
    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]: ...
    def floating_point_ops(self, inputs: Any) -> float: ...
    def store_flos(self) -> None: ...
    def num_examples(self, dataloader: Any) -> int: ...
    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int: ...
    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int, int]: ...
    def get_num_trainable_parameters(self) -> int: ...

    def train(self, *, trial: Any) -> TrainOutput: ...
    def call_model_init(self, trial: Any = None) -> nn.Module: ...
    def create_accelerator_and_postprocess(self) -> None: ...
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None: ...
    def get_optimizer_cls_and_kwargs(
        self, args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]: ...
    def get_decay_parameter_names(self, model: nn.Module) -> list[str]: ...

    def get_train_dataloader(self) -> Any: ...
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any: ...
    def get_test_dataloader(self, test_dataset: Any) -> Any: ...
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]: ...
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput: ...
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]: ...

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...
    def init_hf_repo(self, token: str | None = None) -> None: ...
    @property
    def create_model_card(self) -> Callable[..., None]: ...
    def is_local_process_zero(self) -> bool: ...
    def is_world_process_zero(self) -> bool: ...

    # transformers' private methods, which libraries override
    def _hp_search_setup(self, trial: Any) -> None: ...
    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput: ...
    def _update_auto_batch_size(self, batch_size: int) -> None: ...
    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]: ...
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]: ...
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None: ...
    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module: ...
    def _run_epoch(self, model: nn.Module, epoch: int, train_dataloader: Any, **position: Any) -> None: ...
    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput: ...
    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any: ...
    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[Any], Any], description: str | None = None
    ) -> Callable[[Any], Any]: ...

    def _prepare_input(self, data: Any) -> Any: ...
    def _prepare_inputs(self, inputs: Any) -> Any: ...
    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[[], AbstractContextManager[Any]], Any]: ...
    def _track_num_input_tokens(self, inputs: Any) -> None: ...
    def _clip_grad_norm(self, model: nn.Module) -> Any: ...
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any: ...
    def _get_learning_rate(self) -> float: ...
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
    ) -> None: ...
    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float] | None: ...
    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool: ...
    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None: ...

    def _get_output_dir(self, trial: Any) -> str: ...
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None: ...
    def _save_checkpoint(self, model: Any = None, trial: Any = None) -> None: ...
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...
    def _save_scaler(self, output_dir: str) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None: ...
    def _load_best_model(self) -> None: ...
    def _load_callback_state(self) -> None: ...
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None: ...
    def _load_scaler(self, checkpoint: str | None) -> None: ...
    def _load_rng_state(self, checkpoint: str | None) -> None: ...
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...
    def _finish_current_push(self) -> None: ...


def notify(hooks: TrainerHooks, event: str, **more: Any) -> TrainerControl:
    """Dispatch ``event`` to the callbacks, and return the resulting control."""
    handler, control = hooks.callback_handler, hooks.control
    if type(handler) is CallbackHandler:
        if handler.callbacks != handler.listed:
            handler.find_listeners()
        own = vars(handler)
        if not (handler.listeners[event] or event in own or "call_event" in own):
            # Most events of a step change at most the control, which takes fewer calls here than in the handler.
            for flag in CLEARED_FLAGS.get(event, ()):
                setattr(control, flag, False)
            return control
    usual = None
    if hooks.accelerator.num_processes > 1:
        usual = usual_flags(handler.listeners[event], event, hooks.args, hooks.state, control)
    hooks.control = getattr(handler, event)(hooks.args, hooks.state, control, **more)
    if usual is not None:
        require_agreement(event, usual, hooks.control)
    return hooks.control


def log(hooks: TrainerHooks, logs: dict[str, Any], start_time: float | None = None) -> None:
    """Call ``Trainer.log``; ``start_time`` is dropped if an override does not accept it."""
    if takes(hooks.log, "start_time"):
        hooks.log(logs, start_time=start_time)
    else:
        hooks.log(logs)


def record_logs(hooks: TrainerHooks, logs: dict[str, Any], start_time: float | None, *, num_tokens_before: int) -> None:
    """Add the epoch and the token count to ``logs``, append them to the history, and notify the callbacks.

    ``num_tokens_before``: the tokens that were counted before ``start_time``, in the run that this one resumes.
    """
    state = hooks.state
    if state.epoch is not None:
        logs["epoch"] = state.epoch
    if hooks.args.include_num_input_tokens_seen != "no":
        logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        if start_time is not None:
            num_tokens = state.num_input_tokens_seen - num_tokens_before
            logs |= speed_metrics("train", start_time, num_tokens=num_tokens)
    state.log_history.append({**logs, "step": state.global_step})
    values = {name: value for name, value in logs.items() if name != "epoch"}
    record_values(values, step=state.global_step, epoch=state.epoch)
    notify(hooks, "on_log", logs=logs)
