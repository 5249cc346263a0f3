"""The exact modes of a Trainer: what they cannot do, and the weight of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import ConfigError, UsageError
from echelon.trainer.data.num_items import count_items
from echelon.trainer.hooks import TrainerHooks

__all__ = ["check_exact", "items_of"]


def check_exact(hooks: TrainerHooks) -> None:
    """Raise for what an exact mode cannot do.

    Raises:
        ConfigError: ``auto_find_batch_size``.
        UsageError: a loss that is divided by the items of the whole update, which is not known when a part of it runs.
    """
    parity = hooks.accelerator.parity
    if hooks.args.auto_find_batch_size:
        raise ConfigError(
            f"auto_find_batch_size changes what fits into memory, and parity={parity!r} needs to know it before",
            where="TrainingArguments.auto_find_batch_size",
            do="set max_micro_batch_size by hand: the updates do not depend on it",
        )
    if hooks.loss_is_scaled_for_ga:
        raise UsageError(
            f"loss_is_scaled_for_ga=True: compute_loss divides by the labels of the whole update, and parity={parity!r} weighs "
            "each part of it by its own",
            where=f"{type(hooks).__name__}.loss_is_scaled_for_ga",
            do="leave it out, and let compute_loss return the mean over its batch",
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
