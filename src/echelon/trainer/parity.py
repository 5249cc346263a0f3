"""The exact modes of a Trainer: what its batch sizes mean there, and the weight of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.base.errors import ConfigError, UsageError
from echelon.trainer.checkpoint.resume import saved_arguments
from echelon.trainer.data.num_items import count_items
from echelon.trainer.training_plan import TrainingPlan, make_plan

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = ["check_exact", "items_of", "keep_global_batch", "plan_of_updates"]


def check_exact(trainer: Trainer) -> None:
    """Raise for what an exact mode cannot do.

    Raises:
        ConfigError: ``auto_find_batch_size``.
        UsageError: a loss that is divided by the items of the whole update, which is not known when a part of it runs.
    """
    parity = trainer.accelerator.parity
    if trainer.args.auto_find_batch_size:
        raise ConfigError(
            f"auto_find_batch_size changes what fits into memory, and parity={parity!r} needs to know it before",
            where="TrainingArguments.auto_find_batch_size",
            do="set max_micro_batch_size by hand: the updates do not depend on it",
        )
    if trainer.loss_is_scaled_for_ga:
        raise UsageError(
            f"loss_is_scaled_for_ga=True: compute_loss divides by the labels of the whole update, and parity={parity!r} weighs "
            "each part of it by its own",
            where=f"{type(trainer).__name__}.loss_is_scaled_for_ga",
            do="leave it out, and let compute_loss return the mean over its batch",
        )


def keep_global_batch(trainer: Trainer, folder: Path | None) -> None:
    """Settle ``global_batch_size``: as given, else that of the checkpoint, else what these processes make together."""
    if trainer.args.global_batch_size is None and folder is not None:
        trainer.args.global_batch_size = saved_arguments(folder).get("global_batch_size")
    trainer.args.global_batch_size = trainer._global_batch_size


def plan_of_updates(trainer: Trainer, loader: Any) -> TrainingPlan:
    """Return the plan of a training over ``loader``, whose batches are those of all ranks: each is one update."""
    whole = getattr(loader, "original", loader)
    return make_plan(
        trainer.args,
        whole,
        num_examples=trainer._num_examples(whole),
        batch_size=getattr(whole, "batch_size", None) or trainer._global_batch_size,
        accumulation=1,
        world_size=1,
    )


def items_of(inputs: Any, *, model: nn.Module) -> int | None:
    """Return of how many labels the loss of a batch is the mean; None: of its samples.

    Class numbers are labels where they are not -100, as torch's cross entropy counts.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    count = count_items(inputs, model=model)
    return None if count is None else int(count)
