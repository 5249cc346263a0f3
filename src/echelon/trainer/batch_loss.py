"""Computes a batch's loss: calls the model and the loss function, and normalizes the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from echelon.accelerator.pipeline import Pipeline
from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import warn
from echelon.trainer.data.num_items import WatchedNumber, count_items, ignored_number
from echelon.trainer.features.pipeline_steps import run_pipeline_step
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.model_interface import ModelInterface, columns_of
from echelon.trainer.model_loss import loss_in, missing_column, without_labels
from echelon.trainer.parity import items_of
from echelon.trainer.session import TrainerSession

__all__ = [
    "call_compute_loss",
    "call_model",
    "compute_loss",
    "count_update_items",
    "run_training_step",
]


def run_training_step(
    hooks: TrainerHooks, session: TrainerSession, model: nn.Module, inputs: Any, num_items: Any
) -> torch.Tensor:
    """Implement ``Trainer.training_step``."""
    accelerator, pipeline = hooks.accelerator, session.optimizer.pipeline
    context, inputs = hooks._prepare_context_parallel_inputs(model, inputs)
    with context():
        inputs = hooks._prepare_inputs(inputs)
        if pipeline is not None and model is pipeline.model:
            return _pipeline_step(hooks, session, pipeline, inputs, num_items)
        watches_items = session.interface.watches_items and isinstance(num_items, torch.Tensor)
        session.loss_func_result = "unused"
        with hooks.compute_loss_context_manager():
            if watches_items:
                loss = _watched_loss(hooks, session, model, inputs, num_items)
            else:
                loss = call_compute_loss(hooks, session, model, inputs, num_items)
        if loss.dim() and accelerator.capabilities.num_devices > 1:
            loss = loss.mean()  # one element per device
        if accelerator.parity != "off":
            accelerator.backward(loss, num_items=items_of(inputs, shifts=session.interface.shifts_labels))
            return loss.detach()
        num_steps = hooks.current_gradient_accumulation_steps
        if num_steps != 1 and not _is_scaled(hooks, session, num_items):
            loss = loss / num_steps
        elif num_steps != 1 and num_items is None and hooks.loss_is_scaled_for_ga is None:
            _warn_of_missing_items(session, num_steps)
        accelerator.backward(loss)
        return loss.detach()


def _pipeline_step(
    hooks: TrainerHooks, session: TrainerSession, pipeline: Pipeline, inputs: Any, num_items: Any
) -> torch.Tensor:
    if session.interface.overrides_compute_loss:
        raise ConfigError(
            f"{type(hooks).__name__}.compute_loss is overridden, but the schedule of a pipeline computes the model's own loss",
            where="TrainingArguments.parallelism_config (pp_size)",
            do="write the loop with accelerator.prepare_pipeline(model, loss_fn=...)",
        )
    session.interface.watches_items = False
    return run_pipeline_step(hooks, pipeline, inputs, num_items)


def _is_scaled(hooks: TrainerHooks, session: TrainerSession, num_items: Any) -> bool:
    """Return whether a batch's loss is its share of the update's mean, which need not be divided by the number of batches.

    Source: transformers' rule. It also calls only functions that accept ``num_items_in_batch``, and only batches that are
    mappings exist there; what other functions return is a mean over their batch.
    """
    if hooks.loss_is_scaled_for_ga is not None:
        return hooks.loss_is_scaled_for_ga
    if hooks.compute_loss_func is not None:
        return session.loss_func_result != "mean"
    return num_items is not None and hooks.model_accepts_loss_kwargs


def _watched_loss(
    hooks: TrainerHooks, session: TrainerSession, model: nn.Module, inputs: Any, num_items: torch.Tensor
) -> torch.Tensor:
    """Return a batch's loss; warn if it was computed without using ``num_items``."""
    watched = WatchedNumber.of(num_items)
    loss: torch.Tensor = call_compute_loss(hooks, session, model, inputs, watched)
    session.interface.watches_items = False
    if not watched.is_used:
        _warn_of_ignored_items(hooks, session)
    return loss


def call_compute_loss(
    hooks: TrainerHooks,
    session: TrainerSession,
    model: nn.Module,
    inputs: Any,
    num_items: Any,
    *,
    return_outputs: bool = False,
) -> Any:
    """Call ``compute_loss`` with the arguments that it accepts."""
    options: dict[str, Any] = {"return_outputs": True} if return_outputs else {}
    if session.interface.compute_loss_takes_items:
        options["num_items_in_batch"] = num_items
    try:
        return hooks.compute_loss(model, inputs, **options)
    except KeyError as error:
        if not isinstance(inputs, (dict, Mapping)) or not error.args or error.args[0] in inputs:
            raise
        kept = columns_of(hooks, session.interface)
        raise missing_column(str(error.args[0]), inputs, kept=kept, label_names=hooks.label_names) from error


def compute_loss(
    hooks: TrainerHooks, session: TrainerSession, model: nn.Module, inputs: Any, num_items: Any
) -> tuple[torch.Tensor, Any]:
    """Return a batch's loss and the model's outputs, for ``Trainer.compute_loss``."""
    func, smoother, accelerator = hooks.compute_loss_func, hooks.label_smoother, hooks.accelerator
    batch = inputs
    inputs, labels = without_labels(inputs) if func is not None or smoother is not None else (inputs, None)
    outputs = call_model(hooks, session, model, inputs, num_items)
    if labels is None and not (func is not None and isinstance(inputs, (dict, Mapping))):
        num_devices = accelerator.capabilities.num_devices
        loss = loss_in(outputs, inputs, model=hooks.model, label_names=hooks.label_names, num_devices=num_devices)
        if num_items is not None and loss.dim():
            loss = loss * loss.numel()  # each device divided by all items, and the mean over devices follows
    elif func is None:
        assert smoother is not None
        assert labels is not None
        loss = smoother(outputs, labels, session.interface.is_causal, num_items)
    elif session.interface.loss_func_takes_items:
        session.loss_func_result = "scaled" if isinstance(inputs, (dict, Mapping)) else "mean"
        if num_items is None and accelerator.parity != "off":
            # The items of this batch only: an exact mode weights the loss itself.
            loss = func(outputs, labels, num_items_in_batch=count_items(batch, shifts=session.interface.shifts_labels))
        else:
            loss = func(outputs, labels, num_items_in_batch=num_items)
    else:
        session.loss_func_result = "mean"
        loss = _called(func, type(hooks).__name__)(outputs, labels)
    is_mean = func is not None and session.loss_func_result == "mean"  # of the batch, not divided by num_items
    if num_items is not None and hooks.args.average_tokens_across_devices and not is_mean:
        loss = loss * _rank_weight(hooks, session)
    return loss, outputs


def _called(func: Any, trainer: str) -> Callable[..., Any]:
    """Return ``func``, unless it is a value that only stands for a loss that an overridden ``compute_loss`` scales.

    Raises:
        UsageError: ``func`` cannot be called.
    """
    if callable(func):
        return func  # type: ignore[no-any-return]
    raise UsageError(
        f"compute_loss_func={func!r} cannot be called",
        where=f"{trainer}.compute_loss",
        do="pass a function of the outputs and the labels, or override compute_loss without calling super().compute_loss",
    )


def call_model(hooks: TrainerHooks, session: TrainerSession, model: nn.Module, inputs: Any, num_items: Any) -> Any:
    """Call ``model`` with a batch's columns by name or, for a tuple, with as many elements as forward accepts."""
    if isinstance(inputs, (dict, Mapping)):
        if num_items is not None and hooks.model_accepts_loss_kwargs:
            return model(**inputs, num_items_in_batch=num_items)
        return model(**inputs)
    parts, num_positional = inputs if isinstance(inputs, (tuple, list)) else (inputs,), session.interface.num_positional
    return model(*(parts if num_positional is None else parts[:num_positional]))


def count_update_items(hooks: TrainerHooks, session: TrainerSession, samples: list[Any], device: torch.device) -> Any:
    """Return the number of labels in ``samples`` across all ranks, or None if the loss is not divided by it.

    Collective: call on every rank if ``average_tokens_across_devices`` is set and labels are counted.
    """
    accelerator = hooks.accelerator
    is_exact = accelerator.parity != "off"  # then each loss is weighted by its own items
    first = samples[0] if samples else None
    if (
        not _needs_item_count(hooks, session.interface)
        or is_exact
        or not isinstance(first, (dict, Mapping))
        or "labels" not in first
    ):
        return None
    counts = [count_items(batch, shifts=session.interface.shifts_labels) for batch in samples]
    if any(count is None for count in counts):
        return None
    num_items: Any = sum(count for count in counts if count is not None)
    real = session.evaluation.real_samples
    if real is not None and not real[0]:
        num_items = num_items * 0  # the whole batch is padding
    if hooks.args.average_tokens_across_devices and accelerator.session.num_readers > 1:
        num_items = accelerator.reduce(num_items.to(device), "sum")
    return num_items


def _needs_item_count(hooks: TrainerHooks, interface: ModelInterface) -> bool:
    """Return whether an update's labels are counted, so that its loss can be divided by their number."""
    if not interface.compute_loss_takes_items:
        return False
    if hooks.compute_loss_func is None:
        return hooks.model_accepts_loss_kwargs
    # An overridden compute_loss may divide by the number although compute_loss_func does not take it.
    return interface.loss_func_takes_items or interface.overrides_compute_loss


def _rank_weight(hooks: TrainerHooks, session: TrainerSession) -> float:
    """Return the factor that cancels averaging over ranks, for a loss that is already a global mean."""
    real = session.evaluation.real_samples
    if real is None:
        return hooks.accelerator.session.num_readers
    mine, of_all = real  # an evaluation weights each rank by its number of samples
    return of_all / mine if mine else 1


def _warn_of_missing_items(session: TrainerSession, num_steps: int) -> None:
    """Warn once if ``compute_loss_func`` gets no number of labels, so that it cannot divide its loss by it."""
    if session.loss_func_result == "scaled" and session.interface.may_miss_items:
        session.interface.may_miss_items = False
        warn(
            "compute_loss_func gets num_items_in_batch=None, because the batches have no column 'labels' that is a tensor. "
            f"Its loss is not divided by the {num_steps} batches of an update either, as in transformers, so a mean over the "
            f"batch counts {num_steps} times. Name the label column 'labels', or set loss_is_scaled_for_ga = False on the "
            "Trainer, which then divides the loss"
        )


def _warn_of_ignored_items(hooks: TrainerHooks, session: TrainerSession) -> None:
    """Warn if the loss is not divided by the update's item count and this changes the result."""
    is_overridden, args = session.interface.overrides_compute_loss, hooks.args
    is_stated = hooks.loss_is_scaled_for_ga is not None or (
        hooks.compute_loss_func is not None and session.loss_func_result != "scaled"
    )
    num_batches = 1 if is_stated else session.update_size(args).accumulation_steps
    averages = args.average_tokens_across_devices and not is_overridden
    num_ranks = hooks.accelerator.session.num_readers if averages else 1
    if num_batches * num_ranks == 1:
        return
    if hooks.compute_loss_func is not None and not is_overridden:
        who, do = "compute_loss_func", "Divide the sum of its losses by num_items_in_batch, or remove this parameter."
    else:
        model = type(hooks.model).__name__
        who = f"{type(hooks).__name__}.compute_loss" if is_overridden else f"{model}.forward"
        do = (
            f"Divide the sum of its losses by num_items_in_batch, or set {model}.accepts_loss_kwargs = False if it returns "
            "a mean."
        )
    parts = [f"{num_batches} batches of an update"] if num_batches > 1 else []
    parts += [f"{num_ranks} processes"] if num_ranks > 1 else []
    warn(ignored_number(who=who, factor=num_batches * num_ranks, of=" x ".join(parts), do=do))
