"""Inspects the signatures of a model and of the methods that compute its loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.base.warnings import warn
from echelon.trainer.data.columns import KeptColumns, find_labels, forward_of, kept_columns
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.model_loss import is_causal
from echelon.trainer.override_points import OverridePoints
from echelon.trainer.signatures import num_positional, takes, takes_anything

__all__ = ["ModelInterface", "columns_of", "flops_of", "inspect_model", "place_model"]


@dataclass(kw_only=True)
class ModelInterface:
    """How the model and the loss functions are called."""

    overrides_compute_loss: bool
    computes_own_loss: bool
    """Whether the loss is computed outside the model."""
    num_positional: int | None
    """Number of positional parameters that forward takes; None for any number."""
    is_causal: bool
    infers_labels: bool
    """Whether the label column is assumed to be ``labels``: True if forward takes no labels and ``label_names`` is not
    set."""
    compute_loss_takes_items: bool
    loss_func_takes_items: bool
    counts_items: bool
    """Whether the loss is divided by the number of labels in the whole update."""
    watches_items: bool
    """Whether to check that computing the next loss uses the update's number of labels."""
    counts_flops: bool
    num_parameters: int | None
    """Number of parameters excluding embeddings, or None for models that do not count them."""
    overrides_save_model: bool


def inspect_model(hooks: TrainerHooks, *, base: type[Any]) -> ModelInterface:
    """Set the hooks' model-dependent attributes, and return the model's interface.

    Args:
        hooks: sets ``label_names``, ``can_return_loss`` and ``model_accepts_loss_kwargs``; may clear ``label_smoother``.
        base: the class whose methods do not count as overridden.
    """
    model, args = hooks.model, hooks.args
    config: Any = getattr(model, "config", None)
    if hooks.label_smoother is not None and getattr(config, "problem_type", None) == "multi_label_classification":
        warn(
            f"label_smoothing_factor={args.label_smoothing_factor} is ignored: label smoothing needs one label per "
            f"sample, but {type(model).__name__} is set up for multi_label_classification"
        )
        hooks.label_smoother = None
    if hasattr(config, "use_cache"):
        config.use_cache = args.use_cache
    forward = forward_of(model)
    declared = getattr(model, "accepts_loss_kwargs", None)
    hooks.model_accepts_loss_kwargs = takes_anything(forward) if declared is None else bool(declared)
    kind, func = type(hooks), hooks.compute_loss_func
    overrides_compute_loss = kind.compute_loss is not base.compute_loss or "compute_loss" in vars(hooks)
    computes_own_loss = overrides_compute_loss or func is not None or hooks.label_smoother is not None
    found = find_labels(forward)
    infers_labels = args.label_names is None and not found and computes_own_loss
    hooks.label_names = list(args.label_names or found or (["labels"] if infers_labels else []))
    return_loss = inspect.signature(forward).parameters.get("return_loss")
    hooks.can_return_loss = return_loss is not None and return_loss.default is True
    compute_loss_takes_items = takes(hooks.compute_loss, "num_items_in_batch")
    loss_func_takes_items = func is not None and takes(func, "num_items_in_batch")
    counts_items = compute_loss_takes_items and (
        hooks.model_accepts_loss_kwargs if func is None else loss_func_takes_items
    )
    count = getattr(model, "num_parameters", None)  # of transformers; walks through all modules
    num_parameters = count(exclude_embeddings=True) if callable(count) else None
    compiles = args.torch_compile or any(hasattr(part, "_orig_mod") for part in model.modules())
    return ModelInterface(
        overrides_compute_loss=overrides_compute_loss,
        computes_own_loss=computes_own_loss,
        num_positional=num_positional(model.forward),
        is_causal=is_causal(model),
        infers_labels=infers_labels,
        compute_loss_takes_items=compute_loss_takes_items,
        loss_func_takes_items=loss_func_takes_items,
        counts_items=counts_items,
        watches_items=counts_items and not compiles,  # the check would trigger a recompilation
        counts_flops=kind.floating_point_ops is not base.floating_point_ops
        or "floating_point_ops" in vars(hooks)
        or hasattr(model, "floating_point_ops")
        or num_parameters is not None,
        num_parameters=num_parameters,
        overrides_save_model=kind.save_model is not base.save_model,
    )


def place_model(hooks: TrainerHooks, points: OverridePoints) -> None:
    """Move the model to the device, unless ``args.place_model_on_device`` is false."""
    config = hooks.accelerator.parallelism_config
    # Of a pipeline's model, each rank moves only its stages.
    if hooks.args.place_model_on_device is not False and (config is None or not config.pp_enabled):
        points.method("_move_model_to_device")(hooks.model, hooks.accelerator.device)


def columns_of(hooks: TrainerHooks, interface: ModelInterface) -> KeptColumns | None:
    """Return the columns to keep, or None for all."""
    if not hooks.args.remove_unused_columns:
        return None
    return kept_columns(hooks.model, label_names=hooks.label_names, own_loss=interface.computes_own_loss)


def flops_of(model: Any, interface: ModelInterface, inputs: Any) -> float:
    """Return the number of floating-point operations in a forward and backward pass, or 0 if the model does not count
    them.

    Source: transformers' estimate of 6 operations per token and parameter.
    """
    count = getattr(model, "floating_point_ops", None)
    if callable(count):
        return float(count(inputs))
    name = getattr(model, "main_input_name", "input_ids")
    if interface.num_parameters is None or not isinstance(inputs, Mapping) or name not in inputs:
        return 0.0
    return float(6 * inputs[name].numel() * interface.num_parameters)
