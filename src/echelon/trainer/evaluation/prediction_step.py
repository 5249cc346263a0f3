"""One batch of an evaluation: its loss, what the model says, and the labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.accelerator.prepare.prepare_arguments import contents, is_record
from echelon.base.errors import UsageError
from echelon.trainer.data import batches

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = ["predict_batch"]


def predict_batch(
    trainer: Trainer, model: nn.Module, inputs: Any, *, prediction_loss_only: bool, ignore_keys: list[str] | None
) -> tuple[torch.Tensor | None, Any, Any]:
    """Return (loss, logits, labels) of one batch; each may be None. See ``Trainer.prediction_step``."""
    if ignore_keys is None:
        config = getattr(trainer.model, "config", None)
        ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"])
    inputs = trainer._prepare_inputs(inputs)
    labels = _labels_in(trainer, inputs)
    if (dtype := trainer._dtype_of_evaluation()) is not None:
        inputs = batches.map_tensors(lambda part: part.to(dtype) if part.is_floating_point() else part, inputs)
    loss = None
    with torch.no_grad():
        if _has_loss(trainer, inputs):
            with trainer.compute_loss_context_manager():
                loss, outputs = _loss_and_outputs(trainer, model, inputs)
            loss = loss.detach().mean()
        else:
            outputs = trainer._call_model(model, inputs)
    if prediction_loss_only:
        return loss, None, None
    # What is None was not computed, and is no prediction: the loss of a model that an overridden compute_loss serves.
    if isinstance(outputs, Mapping):
        left_out = [*ignore_keys, *(["loss"] if loss is not None else [])]
        logits: Any = tuple(value for name, value in outputs.items() if name not in left_out and value is not None)
    elif is_record(outputs):
        left_out = [*ignore_keys, *(["loss"] if loss is not None else [])]
        held: Any = contents(outputs)
        logits = tuple(value for name, value in held.items() if name not in left_out and value is not None)
    elif isinstance(outputs, (tuple, list)):
        # A model of transformers returns its loss first; an overridden compute_loss need not.
        has_loss = loss is not None and isinstance(outputs[0], torch.Tensor) and not outputs[0].dim()
        logits = tuple(value for value in (outputs[1:] if has_loss else outputs) if value is not None)
    else:
        logits = (outputs,)
    logits = batches.detach(logits)
    return loss, logits[0] if len(logits) == 1 else logits, batches.detach(labels)


def _loss_and_outputs(trainer: Trainer, model: nn.Module, inputs: Any) -> tuple[torch.Tensor, Any]:
    num_items = trainer._get_num_items_in_batch([inputs], trainer.accelerator.device)
    result = trainer._call_compute_loss(model, inputs, num_items, return_outputs=True)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise UsageError(
            f"compute_loss(..., return_outputs=True) returned a {type(result).__name__}, not (loss, outputs)",
            where=f"{type(trainer).__name__}.compute_loss",
            do="end it with: return (loss, outputs) if return_outputs else loss",
        )
    loss, outputs = result
    return loss, outputs


def _has_loss(trainer: Trainer, inputs: Any) -> bool:
    """Tell whether a loss can be computed for a batch of an evaluation."""
    if not isinstance(inputs, Mapping):
        num_parts = len(inputs) if isinstance(inputs, (tuple, list)) else 1
        if not trainer._computes_own_loss:  # forward gets all parts, the labels too, and returns the loss first
            return num_parts > 1 and (trainer._num_positional is None or num_parts <= trainer._num_positional)
        return num_parts > 1 or not trainer._is_predicting
    if trainer.label_names and all(inputs.get(name) is not None for name in trainer.label_names):
        return True
    if trainer._guesses_labels:  # forward takes no labels: only compute_loss knows what it needs
        return not trainer._is_predicting
    return not trainer.label_names and trainer.can_return_loss


def _labels_in(trainer: Trainer, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        labels = tuple(inputs.get(name) for name in trainer.label_names)
        if not labels or any(label is None for label in labels):
            return None
        return labels[0] if len(labels) == 1 else labels
    # Tuples of a TensorDataset: the labels are last.
    return inputs[-1] if isinstance(inputs, (tuple, list)) and len(inputs) > 1 else None
