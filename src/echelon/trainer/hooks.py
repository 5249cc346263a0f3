"""The interface that a Trainer offers its components: public attributes, and methods that subclasses may override."""

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
from echelon.trainer.override_points import OverridePoints
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, TrainOutput, speed_metrics
from echelon.trainer.signatures import takes
from echelon.trainer.state import TrainerControl, TrainerState

__all__ = ["TrainerHooks", "bind_log", "bind_training_step", "notify", "record_logs"]


class TrainerHooks(Protocol):
    """A Trainer's public attributes and methods, as used by its components.

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


def bind_training_step(
    hooks: TrainerHooks, points: OverridePoints, *, before: Callable[[], None]
) -> Callable[[nn.Module, Any, Any], torch.Tensor]:
    """Return ``training_step`` as a function of three arguments; the third is dropped if an override does not accept it.

    Args:
        hooks: the Trainer's hooks.
        points: provides the override of ``_track_num_input_tokens``, which receives every batch after its step.
        before: called before a step if the model is in eval mode, for example after an evaluation.
    """
    takes_items = takes(hooks.training_step, "num_items_in_batch")
    track = points.choose("_track_num_input_tokens", None)

    def _step(model: nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        if not (model.training and hooks.model.training):
            before()
        if takes_items:
            loss = hooks.training_step(model, inputs, num_items)
        else:
            loss = hooks.training_step(model, inputs)
        if track is not None:
            track(inputs)
        return loss

    return _step


def bind_log(hooks: TrainerHooks) -> Callable[[dict[str, Any], float | None], None]:
    """Return ``log`` as a function of two arguments; ``start_time`` is dropped if an override does not accept it."""
    if takes(hooks.log, "start_time"):
        return lambda logs, start_time: hooks.log(logs, start_time=start_time)
    return lambda logs, _: hooks.log(logs)


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
