"""The inputs of a model whose sequences are cut over ranks (``cp_size``, ``sp_size``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.accelerator.sequences import shift_labels
from echelon.base.errors import ConfigError
from echelon.trainer.data.num_items import shifts_labels
from echelon.trainer.hooks import TrainerHooks

__all__ = ["sequence_inputs"]


def sequence_inputs(hooks: TrainerHooks, model: nn.Module, inputs: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a batch with labels shifted over whole sequences and with position ids, and its tensors with the sequence.

    Args:
        hooks: the Trainer's hooks.
        model: the model, not wrapped.
        inputs: a batch on the device.

    Raises:
        ConfigError: the batch has no ``input_ids``, or the loss is computed outside the model.
    """
    setting = "TrainingArguments.parallelism_config (cp_size or sp_size)"
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), torch.Tensor):
        raise ConfigError(
            "the batch has no input_ids whose sequence could be cut", where=setting, do="set the size to 1"
        )
    for name, function in {
        "compute_loss_func": hooks.compute_loss_func,
        "label_smoothing_factor": hooks.label_smoother,
    }.items():
        if function is not None:
            raise ConfigError(
                f"{name} shifts labels inside this rank's piece of the sequence",
                where=setting,
                do="override compute_loss, which gets the batch with shift_labels, or set the size to 1",
            )
    batch = dict(inputs)
    shape = batch["input_ids"].shape[:2]
    if isinstance(batch.get("labels"), torch.Tensor) and "shift_labels" not in batch and shifts_labels(model):
        batch["shift_labels"] = shift_labels(batch["labels"])
    if "position_ids" not in batch:
        positions = torch.arange(shape[1], device=batch["input_ids"].device)
        batch["position_ids"] = positions.expand(shape[0], -1)
    # Copies of the objects, because the block changes them in place, and the loop may use the batch again.
    batch = {k: v.detach() if isinstance(v, torch.Tensor) and v.shape[:2] == shape else v for k, v in batch.items()}
    return batch, [v for v in batch.values() if isinstance(v, torch.Tensor) and v.shape[:2] == shape]
