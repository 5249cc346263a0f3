"""A Trainer's exact modes: checks for unsupported settings, the loader's batches, and the weight of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import warn
from echelon.trainer.arguments.training_arguments import building_loader
from echelon.trainer.data.num_items import count_items
from echelon.trainer.hooks import TrainerHooks

__all__ = ["check_exact", "exact_train_loader", "items_of"]


def check_exact(hooks: TrainerHooks) -> None:
    """Check for settings that an exact mode does not support.

    Raises:
        ConfigError: ``auto_find_batch_size`` is set.
        UsageError: ``compute_loss`` divides by the whole update's item count, which is not known for a micro-batch.
    """
    parity = hooks.accelerator.parity
    if hooks.args.auto_find_batch_size:
        raise ConfigError(
            f"auto_find_batch_size does not work with parity={parity!r}",
            where="TrainingArguments.auto_find_batch_size",
            do="set max_micro_batch_size instead, which does not change the updates",
        )
    if hooks.loss_is_scaled_for_ga:
        raise UsageError(
            f"loss_is_scaled_for_ga=True does not work with parity={parity!r}, which weights the loss of each micro-batch by "
            "its labels",
            where=f"{type(hooks).__name__}.loss_is_scaled_for_ga",
            do="remove loss_is_scaled_for_ga and return the mean over the batch from compute_loss",
        )


def exact_train_loader(hooks: TrainerHooks, batch_size: int) -> Any:
    """Return the loader from ``get_train_dataloader``; each of its batches is one update across all processes.

    An override reads ``batch_size`` from ``args.train_batch_size``. Warns if the loader's batch size differs.
    """
    with building_loader(hooks.args, batch_size):
        loader = hooks.get_train_dataloader()
    whole = getattr(loader, "original", loader)
    size = getattr(whole, "batch_size", None) or getattr(getattr(whole, "batch_sampler", None), "batch_size", None)
    if isinstance(size, int) and size != batch_size:
        parity = hooks.accelerator.parity
        warn(
            f"{type(hooks).__name__}.get_train_dataloader returned a loader with batches of {size} samples, but "
            f"global_batch_size is {batch_size}. With parity={parity!r}, each batch from the loader is one update "
            "across all processes, so "
            f"updates have {size} samples. Build the loader with args.train_batch_size, which is global_batch_size inside "
            f"get_train_dataloader, or set global_batch_size={size}"
        )
    return loader


def items_of(inputs: Any, *, shifts: bool) -> int | None:
    """Return the number of labels that a batch's loss averages over, or None if it averages over samples.

    Integer labels count unless they are -100, as in torch's cross entropy. ``shifts``: see ``count_items``.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    count = count_items(inputs, shifts=shifts)
    return None if count is None else int(count)
