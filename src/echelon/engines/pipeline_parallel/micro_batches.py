"""Cuts a batch into micro-batches of one shape: ragged ones are padded, and the padding never reaches the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echelon.base.errors import UsageError

_TOKEN_ARGUMENTS = ("attention_mask", "position_ids", "token_type_ids")
_LABELS = ("labels", "shift_labels")
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of a micro-batch, and its tokens per row (0: not a batch of tokens)."""

    rows: int
    tokens: int = 0

    def covering(self, other: Shape | None) -> Shape:
        """Return the smallest shape that both fit into."""
        return self if other is None else Shape(max(self.rows, other.rows), max(self.tokens, other.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """The micro-batches of one batch."""

    batches: tuple[Any, ...]
    """The user's batch, cut into rows; without padding. Some may have no rows."""
    num_rows: tuple[int, ...]
    inputs: tuple[torch.Tensor, ...]
    """The first stage's inputs: the padded micro-batches, one after the other."""
    arguments: dict[str, Any]
    """Keyword arguments of all stages, alike."""
    shape: Shape
    """Of each padded micro-batch."""
    num_tokens: int
    """Tokens per row before padding."""
    index: torch.Tensor
    """For each row of the padded micro-batches, the row of the batch."""


def split_batch(batch: Any, number: int, *, is_decoder: bool, at_least: Shape | None) -> MicroBatches:
    """Cut ``batch`` into ``number`` micro-batches.

    Args:
        batch: for a decoder a dict with ``input_ids``; otherwise a tensor, a tuple that begins with the inputs, or a dict in which
            all but ``labels`` are inputs.
        number: the number of micro-batches.
        is_decoder: whether rows are token sequences, which may be padded on the right.
        at_least: the shape to pad to, unless the batch needs a larger one.

    Raises:
        UsageError: the batch has no inputs, or they have no rows.
    """
    inputs, arguments = _inputs(batch, is_decoder=is_decoder)
    rows = len(inputs[0]) if inputs and inputs[0].dim() else 0
    if not rows:
        raise UsageError(
            f"a batch of type {type(batch).__name__} has no rows to cut into micro-batches",
            where="pipeline.step()",
            do="pass a dict with input_ids, or a tensor or tuple whose first element has one row per sample",
        )
    per_batch, tokens = -(-rows // number), inputs[0].shape[1] if is_decoder else 0
    shape = Shape(per_batch, tokens).covering(at_least)
    bounds = [(min(i * per_batch, rows), min((i + 1) * per_batch, rows)) for i in range(number)]
    index = torch.cat([_padded_rows(begin, end, shape.rows) for begin, end in bounds])

    def pad(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() and len(value) == 1 and rows > 1:
            value = value.expand(rows, *value.shape[1:])
        if not value.dim() or len(value) != rows:
            raise UsageError(
                f"an input of shape {list(value.shape)} cannot be cut into micro-batches of a batch of {rows} rows",
                where="pipeline.step()",
                do="give it one row per sample",
            )
        value = value[index.to(value.device)]
        missing = shape.tokens - tokens
        if missing and is_decoder:
            if value.dim() != 2:
                raise UsageError(
                    f"an input of shape {list(value.shape)} cannot be padded from {tokens} to {shape.tokens} tokens",
                    where="pipeline.step()",
                    do="pad all batches to one length, or pass a mask of shape [rows, tokens]",
                )
            value = torch.nn.functional.pad(value, (0, missing))
        return value

    return MicroBatches(
        batches=tuple(_rows_of(batch, begin, end, rows) for begin, end in bounds),
        num_rows=tuple(end - begin for begin, end in bounds),
        inputs=tuple(pad(one) for one in inputs),
        arguments={name: pad(value) for name, value in arguments.items()},
        shape=shape,
        num_tokens=tokens,
        index=index,
    )


def _padded_rows(begin: int, end: int, wanted: int) -> torch.Tensor:
    """Return the rows of a micro-batch; the last one is repeated, because rows of zeros may compute NaN."""
    return torch.arange(begin, begin + wanted).clamp(max=max(end - 1, 0))


def _inputs(batch: Any, *, is_decoder: bool) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    if is_decoder:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
            raise UsageError(
                f"a pipeline of a transformers decoder expects a dict with input_ids, but got {type(batch).__name__}",
                where="pipeline.step()",
                do="let the collate function return {'input_ids': ..., 'labels': ...}",
            )
        known = {"input_ids", *_LABELS, *_TOKEN_ARGUMENTS}
        if strange := sorted(set(batch) - known):
            raise UsageError(
                f"the stages of a pipeline do not take {strange[0]!r}",
                where="pipeline.step()",
                do=f"remove it from the batch; known are {', '.join(sorted(known))}",
            )
        arguments = {name: batch[name] for name in _TOKEN_ARGUMENTS if batch.get(name) is not None}
        return (batch["input_ids"],), arguments
    if isinstance(batch, Mapping):
        return tuple(value for name, value in batch.items() if name != "labels"), {}
    if isinstance(batch, Sequence):
        return (batch[0],), {}
    return (batch,), {}


def _rows_of(value: Any, begin: int, end: int, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[begin:end] if value.dim() and len(value) == rows else value
    if isinstance(value, Mapping):
        return {name: _rows_of(one, begin, end, rows) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_rows_of(one, begin, end, rows) for one in value)
    return value


def num_tokens(batch: Mapping[str, Any]) -> float:
    """Return the number of next tokens that the labels of ``batch`` ask for."""
    shifted = batch.get("shift_labels")
    labels: torch.Tensor = batch["labels"][:, 1:] if shifted is None else shifted
    return float((labels != IGNORED_LABEL).sum())
