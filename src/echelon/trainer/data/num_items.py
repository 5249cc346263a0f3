"""The items of a batch: how many labels a loss is a mean over, and whether it is divided by their number at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["WatchedNumber", "count_items", "ignored_number"]

# Losses of transformers that predict the next token: their first label is nobody's target.
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")


def count_items(batch: Any, *, model: nn.Module) -> torch.Tensor | None:
    """Return how many labels of ``batch`` count: those that are not -100; None: its labels are no tensor."""
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return None
    if "shift_labels" not in batch and _shifts_labels(model):
        labels = labels[..., 1:]  # the model predicts the next token: the first one is nobody's target
    count: torch.Tensor = labels.ne(-100).sum()
    return count


def _shifts_labels(model: nn.Module) -> bool:
    """Tell whether the loss of ``model`` compares position i with label i + 1; one with an encoder shifts its inputs."""
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) in _SHIFTED and not has_encoder


class WatchedNumber(torch.Tensor):
    """A number that notes whether somebody computes with it. What is computed of it is a plain tensor."""

    is_used: bool

    @staticmethod
    def of(number: torch.Tensor) -> WatchedNumber:
        """Return ``number``, watched."""
        watched = number.as_subclass(WatchedNumber)
        watched.is_used = False
        return watched

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute with the plain numbers, and note it."""
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
    """Return the warning for a loss that is not divided by the number of items which it was given.

    Args:
        who: computes it.
        factor: how many times it counts.
        of: what the factor is made of.
        do: what to do.
    """
    return (
        f"{who} was given num_items_in_batch, the labels of the whole update, and does not compute with it: its loss counts "
        f"{factor} times, in the gradients and in the logs ({of}), as with transformers. {do}"
    )
