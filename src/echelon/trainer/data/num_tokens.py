"""Counts a batch's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.trainer.hooks import TrainerHooks

__all__ = ["count_tokens", "num_tokens"]


def count_tokens(hooks: TrainerHooks, group: list[Any]) -> None:
    """Add the number of tokens in ``group``'s batches across all ranks to the state. Collective: call on every rank."""
    options = {
        "with_padding": hooks.args.include_num_input_tokens_seen == "all",
        "tokenizer": hooks.processing_class,
    }
    count = sum(num_tokens(inputs, model=hooks.model, **options) for inputs in group)
    total = torch.tensor(count, dtype=torch.int64, device=hooks.accelerator.device)
    if hooks.accelerator.session.num_readers > 1:
        total = hooks.accelerator.reduce(total, "sum")
    hooks.state.num_input_tokens_seen += int(total)


def num_tokens(inputs: Any, *, model: nn.Module, with_padding: bool, tokenizer: Any) -> int:
    """Return the number of tokens in the main input column of ``model`` (``main_input_name``, default ``input_ids``).

    Args:
        inputs: a batch.
        model: defines the column.
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
