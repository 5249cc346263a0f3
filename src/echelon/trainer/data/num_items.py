"""Counts a batch's labels and tokens, and detects whether a loss is divided by the number of labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError

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


def items_of(inputs: Any, *, shifts: bool) -> int | None:
    """Return the number of labels that a batch's loss averages over, or None if it averages over samples.

    Integer labels count unless they are -100, as in torch's cross entropy. ``shifts``: see ``count_items``.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    count = count_items(inputs, shifts=shifts)
    return None if count is None else int(count)


def num_tokens(inputs: Any, *, model: nn.Module, with_padding: bool, tokenizer: Any) -> int:
    """Return the number of tokens in the main input column of ``model`` (``main_input_name``, default ``input_ids``).

    Args:
        with_padding: count all tokens; otherwise, exclude padding by the attention mask or the padding token.
        tokenizer: its ``pad_token_id`` is used if there is no attention mask.

    Raises:
        UsageError: the batch has no such column, or padding cannot be identified.
    """
    name = getattr(model, "main_input_name", "input_ids")
    if not isinstance(inputs, Mapping) or name not in inputs:
        columns = (
            ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"the elements of a {type(inputs).__name__}"
        )
        raise UsageError(
            f"cannot count tokens: the batch has no {name!r}, only {columns}",
            where="TrainingArguments.include_num_input_tokens_seen",
            do=f"set {type(model).__name__}.main_input_name to the column that holds the tokens",
        )
    tokens: torch.Tensor = inputs[name]
    if with_padding:
        return tokens.numel()
    if "attention_mask" in inputs:
        return int(inputs["attention_mask"].sum())
    token = getattr(tokenizer, "pad_token_id", None)
    if token is None:
        raise UsageError(
            "cannot exclude padding from the token count, because there is neither an attention_mask nor a "
            "pad_token_id",
            where="TrainingArguments.include_num_input_tokens_seen",
            do="set include_num_input_tokens_seen='all', or pass the tokenizer to the Trainer as processing_class",
        )
    return int((tokens != token).sum())


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
