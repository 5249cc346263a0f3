"""Counts a batch's labels, and detects whether a loss is divided by their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["WatchedNumber", "count_items", "ignored_number", "shifts_labels"]

# Values of ``loss_type`` in transformers whose loss shifts the labels.
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")


def count_items(batch: Any, *, shifts: bool) -> torch.Tensor | None:
    """Return the number of labels in ``batch`` that are not -100, or None if the labels are not a tensor.

    ``shifts``: whether the loss shifts the labels, so that the first one is not a target.
    """
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return None
    if "shift_labels" not in batch and shifts:
        labels = labels[..., 1:]
    count: torch.Tensor = labels.ne(-100).sum()
    return count


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the loss compares position i with label i + 1; encoder-decoders shift the inputs instead."""
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) in _SHIFTED and not has_encoder


class WatchedNumber(torch.Tensor):
    """A tensor that records whether a computation uses it; the results are plain tensors."""

    is_used: bool

    @staticmethod
    def of(number: torch.Tensor) -> WatchedNumber:
        """Return ``number`` as a watched tensor."""
        watched = number.as_subclass(WatchedNumber)
        watched.is_used = False
        return watched

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record that the tensor was used, and compute with plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            plain, named = _plain(args), _plain(kwargs or {})
            return func(*plain, **named)


def _plain(value: Any) -> Any:
    if isinstance(value, WatchedNumber):
        value.is_used = True
        return value.as_subclass(torch.Tensor)
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_plain(part) for part in value)
    return value


def ignored_number(*, who: str, factor: int, of: str, do: str) -> str:
    """Return the warning for a loss that is not divided by the number of items.

    Args:
        who: the function that computes the loss.
        factor: factor by which the loss is too large.
        of: what the factor consists of.
        do: advice to the user.
    """
    return (
        f"{who} accepts num_items_in_batch, the number of labels in the whole update, but does not use it, so its loss "
        "counts "
        f"{factor} times in the gradients and in the logs ({of}), as in transformers. {do}"
    )
