"""Inspects the signatures of a model and of the methods that compute its loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.base.warnings import warn
from echelon.trainer.data.columns import KeptColumns, find_labels, forward_of, kept_columns
from echelon.trainer.data.num_items import shifts_labels
from echelon.trainer.features.model_changes import apply_liger_kernel
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.model_loss import is_causal
from echelon.trainer.signatures import num_positional, takes, takes_anything

__all__ = [
    "DerivedAttributes",
    "ModelInterface",
    "columns_of",
    "flops_of",
    "inspect_model",
    "set_up_model",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedAttributes:
    """Attributes of a Trainer that are derived from its model."""

    model_accepts_loss_kwargs: bool
    label_names: tuple[str, ...]
    can_return_loss: bool

    def apply(self, hooks: TrainerHooks, before: DerivedAttributes | None) -> None:
        """Set the attributes, except those that have been changed since ``before`` was applied."""
        if before is None or hooks.model_accepts_loss_kwargs == before.model_accepts_loss_kwargs:
            hooks.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs
        if before is None or self._has_names(hooks, before):
            hooks.label_names = list(self.label_names)
        if before is None or hooks.can_return_loss == before.can_return_loss:
            hooks.can_return_loss = self.can_return_loss

    @staticmethod
    def _has_names(hooks: TrainerHooks, before: DerivedAttributes) -> bool:
        return hooks.label_names is not None and tuple(hooks.label_names) == before.label_names


@dataclass(kw_only=True)
class ModelInterface:
    """How the model and the loss functions are called."""

    overrides_compute_loss: bool
    computes_own_loss: bool
    """Whether the loss is computed outside the model."""
    num_positional: int | None
    """Number of positional parameters that forward takes; None for any number."""
    is_causal: bool
    shifts_labels: bool
    """Whether the loss shifts the labels; a subclass may have set it."""
    derived_shifts_labels: bool
    derived: DerivedAttributes
    """The values that the inspection gave to the Trainer's attributes; a subclass or a script may have set others."""
    infers_labels: bool
    """Whether the label column is assumed to be ``labels``: True if forward takes no labels and ``label_names`` is not
    set."""
    compute_loss_takes_items: bool
    loss_func_takes_items: bool
    watches_items: bool
    """Whether to check that computing the next loss uses the update's number of labels, if it is counted."""
    may_miss_items: bool = True
    """Whether to warn when ``compute_loss_func`` gets no number of labels."""
    counts_flops: bool
    num_parameters: int | None
    """Number of parameters excluding embeddings, or None for models that do not count them."""
    overrides_save_model: bool


def inspect_model(hooks: TrainerHooks, *, base: type[Any], before: ModelInterface | None = None) -> ModelInterface:
    """Set the hooks' model-dependent attributes, and return the model's interface.

    Args:
        hooks: sets ``label_names``, ``can_return_loss`` and ``model_accepts_loss_kwargs``.
        base: the class whose methods do not count as overridden.
        before: the last inspection's result; an attribute that has been changed since keeps its value.
    """
    model, args = hooks.model, hooks.args
    forward = forward_of(model)
    declared = getattr(model, "accepts_loss_kwargs", None)
    kind, func = type(hooks), hooks.compute_loss_func
    overrides_compute_loss = kind.compute_loss is not base.compute_loss or "compute_loss" in vars(hooks)
    computes_own_loss = overrides_compute_loss or func is not None or hooks.label_smoother is not None
    found = find_labels(forward)
    infers_labels = args.label_names is None and not found and computes_own_loss
    return_loss = inspect.signature(forward).parameters.get("return_loss")
    derived = DerivedAttributes(
        model_accepts_loss_kwargs=takes_anything(forward) if declared is None else bool(declared),
        label_names=tuple(args.label_names or found or (["labels"] if infers_labels else [])),
        can_return_loss=return_loss is not None and return_loss.default is True,
    )
    derived.apply(hooks, None if before is None else before.derived)
    shifts = shifts_labels(model)
    count = getattr(model, "num_parameters", None)  # of transformers; walks through all modules
    num_parameters = count(exclude_embeddings=True) if callable(count) else None
    compiles = args.torch_compile or any(hasattr(part, "_orig_mod") for part in model.modules())
    return ModelInterface(
        overrides_compute_loss=overrides_compute_loss,
        computes_own_loss=computes_own_loss,
        num_positional=num_positional(model.forward),
        is_causal=is_causal(model),
        shifts_labels=shifts
        if before is None or before.shifts_labels == before.derived_shifts_labels
        else before.shifts_labels,
        derived_shifts_labels=shifts,
        derived=derived,
        infers_labels=infers_labels and tuple(hooks.label_names) == derived.label_names,
        compute_loss_takes_items=takes(hooks.compute_loss, "num_items_in_batch"),
        loss_func_takes_items=callable(func) and takes(func, "num_items_in_batch"),
        watches_items=not compiles,  # the check would trigger a recompilation
        counts_flops=kind.floating_point_ops is not base.floating_point_ops
        or "floating_point_ops" in vars(hooks)
        or hasattr(model, "floating_point_ops")
        or num_parameters is not None,
        num_parameters=num_parameters,
        overrides_save_model=kind.save_model is not base.save_model,
    )


def set_up_model(hooks: TrainerHooks) -> None:
    """Move a new model to its device, apply the arguments that change it, and drop a ``label_smoother`` that it cannot use."""
    model, args = hooks.model, hooks.args
    layout = hooks.accelerator.parallelism_config
    # Of a pipeline's model, each rank moves only its stages.
    if hooks.place_model_on_device and (layout is None or not layout.pp_enabled):
        hooks._move_model_to_device(model, hooks.accelerator.device)
    device_map: Any = getattr(model, "hf_device_map", None) or {}
    hooks.is_model_parallel = len({*device_map.values()} - {"cpu", "disk"}) > 1
    if args.use_liger_kernel:
        apply_liger_kernel(model, args.liger_kernel_config)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = args.use_cache
    if hooks.label_smoother is not None and getattr(config, "problem_type", None) == "multi_label_classification":
        warn(
            f"label_smoothing_factor={args.label_smoothing_factor} is ignored: label smoothing needs one label per "
            f"sample, but {type(model).__name__} is set up for multi_label_classification"
        )
        hooks.label_smoother = None


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
