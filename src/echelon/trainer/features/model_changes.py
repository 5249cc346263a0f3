"""Sets up a model: its device, kernels, activation checkpointing, noise (NEFTune) and stages; inspects its calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from echelon.accelerator.sequences import is_causal
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import require
from echelon.base.warnings import warn
from echelon.trainer.data.columns import find_labels, forward_of
from echelon.trainer.data.num_items import shifts_labels
from echelon.trainer.session import DerivedAttributes, ModelInterface, PreparedOptimizer
from echelon.trainer.signatures import num_positional, takes, takes_anything
from echelon.trainer.trainer_methods import TrainerMethods, is_overridden


@runtime_checkable
class _Enables(Protocol):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **more: Any) -> Any:
        """Enable activation checkpointing."""
        ...


@runtime_checkable
class _EnablesByOldName(Protocol):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> Any:
        """Enable activation checkpointing."""
        ...


# Options of activation_checkpointing_enable, not of torch.utils.checkpoint.
_METHOD_OPTIONS = ("every_n_layers", "offload")


def enable_activation_checkpointing(model: nn.Module, options: Any) -> None:
    """Enable activation checkpointing by calling the model's own method.

    Args:
        model: a transformers model, or any model with ``gradient_checkpointing_enable``.
        options: options for ``torch.utils.checkpoint.checkpoint``, ``every_n_layers`` and ``offload``; None for the
            model's defaults.

    Raises:
        UsageError: the model has no such method, or its method does not support the options.
    """
    given = dict(options or {})
    more = {name: given.pop(name) for name in _METHOD_OPTIONS if name in given}
    if isinstance(model, _Enables):
        model.activation_checkpointing_enable(given or None, **more)
        return
    if isinstance(model, _EnablesByOldName) and not more:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given or None)
        return
    raise UsageError(
        f"activation_checkpointing=True, but {type(model).__name__} does not support it"
        + (f" with {', '.join(more)}" if more else ""),
        where="TrainingArguments.activation_checkpointing",
        do="set activation_checkpointing='full' and activation_checkpointing_blocks to the class names of its blocks, or add a "
        "gradient_checkpointing_enable method to it",
    )


def inspect_model(trainer: TrainerMethods, *, before: ModelInterface | None = None) -> ModelInterface:
    """Set ``label_names``, ``can_return_loss`` and ``model_accepts_loss_kwargs``, and return the model's interface.

    ``before``: the last inspection's result; an attribute that has been changed since keeps its value.
    """
    model, args = trainer.model, trainer.args
    forward = forward_of(model)
    declared = getattr(model, "accepts_loss_kwargs", None)
    func, overrides_compute_loss = trainer.compute_loss_func, is_overridden(trainer, "compute_loss")
    computes_own_loss = overrides_compute_loss or func is not None or trainer.label_smoother is not None
    found = find_labels(forward)
    infers_labels = args.label_names is None and not found and computes_own_loss
    return_loss = inspect.signature(forward).parameters.get("return_loss")
    derived = DerivedAttributes(
        model_accepts_loss_kwargs=takes_anything(forward) if declared is None else bool(declared),
        label_names=tuple(args.label_names or found or (["labels"] if infers_labels else [])),
        can_return_loss=return_loss is not None and return_loss.default is True,
    )
    old = None if before is None else before.derived
    if old is None or trainer.model_accepts_loss_kwargs == old.model_accepts_loss_kwargs:
        trainer.model_accepts_loss_kwargs = derived.model_accepts_loss_kwargs
    if old is None or (trainer.label_names is not None and tuple(trainer.label_names) == old.label_names):
        trainer.label_names = list(derived.label_names)
    if old is None or trainer.can_return_loss == old.can_return_loss:
        trainer.can_return_loss = derived.can_return_loss
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
        infers_labels=infers_labels and tuple(trainer.label_names) == derived.label_names,
        compute_loss_takes_items=takes(trainer.compute_loss, "num_items_in_batch"),
        loss_func_takes_items=callable(func) and takes(func, "num_items_in_batch"),
        watches_items=not compiles,  # the check would trigger a recompilation
        counts_flops=is_overridden(trainer, "floating_point_ops")
        or hasattr(model, "floating_point_ops")
        or num_parameters is not None,
        num_parameters=num_parameters,
        overrides_save_model=is_overridden(trainer, "save_model"),
    )


def set_up_model(trainer: TrainerMethods) -> None:
    """Move a new model to its device, apply the arguments that change it, and drop a ``label_smoother`` that it cannot use."""
    model, args = trainer.model, trainer.args
    layout = trainer.accelerator.parallelism_config
    # Of a pipeline's model, each rank moves only its stages.
    if trainer.place_model_on_device and (layout is None or not layout.pp_enabled):
        trainer._move_model_to_device(model, trainer.accelerator.device)
    device_map: Any = getattr(model, "hf_device_map", None) or {}
    trainer.is_model_parallel = len({*device_map.values()} - {"cpu", "disk"}) > 1
    if args.use_liger_kernel:
        package: Any = require("liger_kernel.transformers", extra="liger", purpose="use_liger_kernel=True")
        package._apply_liger_kernel_to_instance(model=model, **(args.liger_kernel_config or {}))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = args.use_cache
    if trainer.label_smoother is not None and getattr(config, "problem_type", None) == "multi_label_classification":
        warn(
            _(
                "label_smoothing_factor={label_smoothing_factor} is ignored: label smoothing needs one label per "
                "sample, but {name} is set up for multi_label_classification",
                label_smoothing_factor=args.label_smoothing_factor,
                name=type(model).__name__,
            )
        )
        trainer.label_smoother = None


@runtime_checkable
class _HasEmbeddings(Protocol):
    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding module."""
        ...


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Add uniform noise from [-m, m], m = alpha / sqrt(length * size), to the embeddings in training mode.

    Args:
        alpha: None disables the noise.

    Raises:
        UsageError: the model has no ``get_input_embeddings``.

    Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, algorithm 1.
    """
    if alpha is None:
        yield
        return
    if not isinstance(model, _HasEmbeddings):
        raise UsageError(
            f"neftune_noise_alpha={alpha}, but {type(model).__name__} has no method get_input_embeddings()",
            where="TrainingArguments.neftune_noise_alpha",
            do="give the model a get_input_embeddings() method that returns its embedding module",
        )

    def _add_noise(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not module.training:
            return None
        bound = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.zeros_like(output).uniform_(-bound, bound)

    handle = model.get_input_embeddings().register_forward_hook(_add_noise)
    try:
        yield
    finally:
        handle.remove()


def splits_layers(trainer: TrainerMethods) -> bool:
    """Return whether the model's layers are divided among ranks."""
    config = trainer.accelerator.parallelism_config
    return config is not None and config.pp_enabled


def prepare_pipeline(trainer: TrainerMethods, optimizer: PreparedOptimizer) -> None:
    """Divide the model into stages, unless it is already.

    Collective: call on every rank.

    Raises:
        ConfigError: the loss is not the model's own, which the schedule computes.
    """
    args, own = trainer.args, optimizer.pipeline
    if own is None or own.model is not trainer.model:
        elsewhere = {
            "compute_loss_func": trainer.compute_loss_func is not None,
            "label_smoothing_factor": bool(args.label_smoothing_factor),
            "auto_find_batch_size": args.auto_find_batch_size,
        }
        for name in (name for name, is_set in elsewhere.items() if is_set):
            raise ConfigError(
                f"{name} does not work with pp_size above 1, because the schedule of the pipeline computes the model's own loss",
                where="TrainingArguments.parallelism_config",
                do=f"remove {name}, or write the loop with accelerator.prepare_pipeline(model, loss_fn=...)",
            )
        optimizer.pipeline = trainer.accelerator.prepare_pipeline(
            trainer.model, schedule=args.pipeline_schedule, num_micro_batches=args.pipeline_num_micro_batches
        )
    trainer.model_wrapped = trainer.model
