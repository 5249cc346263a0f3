"""How many tokens a batch holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError

__all__ = ["num_tokens"]


def num_tokens(inputs: Any, *, model: nn.Module, with_padding: bool, tokenizer: Any) -> int:
    """Return the tokens in the column that ``model`` reads first (``main_input_name``, else ``input_ids``).

    Args:
        inputs: a batch.
        model: says which column.
        with_padding: count all; else not those that the attention mask leaves out, or that are the padding token.
        tokenizer: knows ``pad_token_id``; needed where there is no attention mask.

    Raises:
        UsageError: the batch has no such column, or nothing says what padding is.
    """
    name = getattr(model, "main_input_name", "input_ids")
    if not isinstance(inputs, Mapping) or name not in inputs:
        columns = (
            ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"the parts of a {type(inputs).__name__}"
        )
        raise UsageError(
            f"tokens cannot be counted: the batch has no {name!r}, only {columns}",
            where="TrainingArguments.include_num_input_tokens_seen",
            do=f"set main_input_name of {type(model).__name__} to the name of one of them",
        )
    tokens: torch.Tensor = inputs[name]
    if with_padding:
        return tokens.numel()
    if "attention_mask" in inputs:
        return int(inputs["attention_mask"].sum())
    token = getattr(tokenizer, "pad_token_id", None)
    if token is None:
        raise UsageError(
            "tokens without padding cannot be counted: there is no attention_mask, and no pad_token_id",
            where="TrainingArguments.include_num_input_tokens_seen",
            do="set it to 'all', or give the Trainer the tokenizer as processing_class",
        )
    return int((tokens != token).sum())
