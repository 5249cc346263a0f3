"""Finds the loss in the model's outputs, and computes the loss with label smoothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from echelon.accelerator.prepare.prepare_arguments import contents, is_record
from echelon.base.errors import UsageError
from echelon.trainer.data.columns import KeptColumns

_RETURN_LOSS = (
    "have forward accept the labels and return the loss, as outputs['loss'], outputs.loss or the first output; or pass "
    "compute_loss_func, or override compute_loss"
)


def loss_in(
    outputs: Any, inputs: Any, *, model: nn.Module, label_names: Sequence[str], num_devices: int = 1
) -> torch.Tensor:
    """Return the loss in ``outputs``: ``outputs["loss"]``, ``outputs.loss``, the first element of a tuple, or a scalar.

    With several devices per process, the loss has one element per device: [devices], or fewer for a short batch.

    Raises:
        UsageError: the outputs contain no loss.
    """
    loss = None
    if type(outputs) is dict:
        loss = outputs.get("loss")
    elif isinstance(outputs, (dict, Mapping)) or is_record(outputs):
        held: Any = contents(outputs) or {}
        loss = held.get("loss")
    elif isinstance(outputs, torch.Tensor):
        loss = outputs if not outputs.dim() or _has_element_per_device(outputs, num_devices) else None
    elif isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    if isinstance(loss, torch.Tensor) and (loss.numel() == 1 or _has_element_per_device(loss, num_devices)):
        return loss
    what = f"the model ({type(model).__name__}) returned no loss"
    if not isinstance(inputs, (dict, Mapping)):
        raise UsageError(
            f"{what}; the batch is a {type(inputs).__name__}, whose elements are passed to forward as positional "
            "arguments",
            where="Trainer.compute_loss",
            do=(
                "pass compute_loss_func, which receives the outputs and the batch's last element; override "
                "compute_loss; or have forward accept all elements and return the loss as its first output"
            ),
        )
    if getattr(model, "base_model", None) is model:  # a base model of transformers
        raise UsageError(
            f"{what}, because it is a transformers base model without a head",
            where="Trainer.compute_loss",
            do=f"use a model class with a head, such as {type(model).__name__.removesuffix('Model')}ForSequenceClassification, or "
            "override compute_loss",
        )
    missing = [name for name in label_names if name not in inputs] or ([] if label_names else ["labels"])
    if missing:
        what += f", and the batch has no {' or '.join(repr(name) for name in missing)}"
    raise UsageError(
        f"{what}; the batch has the columns {', '.join(map(str, inputs)) or 'none'} (label_names: "
        f"{', '.join(label_names) or 'none'})",
        where="Trainer.compute_loss",
        do="name the label column 'labels', or set label_names to its name"
        if missing and label_names
        else _RETURN_LOSS,
    )


def _has_element_per_device(loss: torch.Tensor, num_devices: int) -> bool:
    return num_devices > 1 and loss.dim() == 1 and loss.numel() <= num_devices


def missing_column(
    name: str, inputs: Mapping[str, Any], *, kept: KeptColumns | None, label_names: Sequence[str]
) -> UsageError:
    """Return the error for a ``compute_loss`` that reads column ``name``, which is missing from the batch."""
    hint = (
        "set remove_unused_columns=False to keep columns that the model's forward does not accept"
        if kept is not None and not kept.keeps(name)
        else "rename a dataset column, or set label_names"
    )
    return UsageError(
        f"compute_loss needs {name!r}, but the batch has only {', '.join(map(str, inputs)) or 'no columns'} "
        f"(label_names: {', '.join(label_names) or 'none'})",
        where="Trainer.compute_loss",
        do=hint,
    )


def without_labels(inputs: Any) -> tuple[Any, Any]:
    """Split a batch into inputs and labels (the column ``labels`` or the last element); labels are None if missing."""
    if isinstance(inputs, (dict, Mapping)):
        return {name: value for name, value in inputs.items() if name != "labels"}, inputs.get("labels")
    if isinstance(inputs, (tuple, list)) and len(inputs) > 1:
        return inputs[:-1], inputs[-1]
    return inputs, None


@dataclass(frozen=True)
class LabelSmoother:
    """Cross entropy with label smoothing."""

    epsilon: float = 0.1
    """Label smoothing factor."""
    ignore_index: int = -100
    """Label value that the loss ignores."""

    @classmethod
    def of(cls, factor: float) -> LabelSmoother | None:
        """Return the loss for ``label_smoothing_factor``, or None if it is 0."""
        return cls(factor) if factor else None

    def __call__(
        self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Compute the loss.

        Args:
            model_output: outputs with ``logits`` [..., classes], as a named field or as the first element of a tuple.
            labels: [...].
            shift_labels: whether position i predicts label i + 1.
            num_items_in_batch: number to divide the summed loss by (default: number of labels that are not ignored).
        """
        if isinstance(model_output, Mapping) or is_record(model_output):
            held: Any = contents(model_output) or {}
            logits = held["logits"]
        else:
            logits = model_output[0] if isinstance(model_output, (tuple, list)) else model_output
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        total: torch.Tensor = F.cross_entropy(
            logits, labels, ignore_index=self.ignore_index, label_smoothing=self.epsilon, reduction="sum"
        )
        if num_items_in_batch is None:
            return total / labels.ne(self.ignore_index).sum()
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        loss: torch.Tensor = total / num_items_in_batch
        return loss
