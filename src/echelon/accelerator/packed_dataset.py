"""Packs examples of tokens into rows of one length, in which no example sees another."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _

IGNORED = -100
"""Label that torch's cross entropy and the models of transformers ignore."""
_logger = get_logger(__name__)


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Rows of exactly ``length`` tokens, each with several whole examples of ``dataset``.

    A row has ``input_ids``, ``labels`` and ``position_ids``, which restart at 0 with each example, and the other columns that have a value
    for each token. The label of an example's first token is -100, because its prediction would be made from the example before it; so a row
    has the targets that its examples have alone. The rest of a row is filled with ``pad_token_id``, with labels of -100 and positions from 0.

    Which examples share a row depends on their lengths and on ``seed`` only. A loader shuffles rows, and shards, splits and resumes as with
    other samples, so with ``parity="exact"`` an update is the same on any number of ranks.

    The model must compute the attention of each example alone. Models of transformers (5.0 and later) do so with ``position_ids`` that restart
    and no attention mask; in your own model, use ``packed_attention_mask``.

    Args:
        dataset: samples are mappings with ``input_ids`` and optionally ``labels`` (default: the tokens) and ``attention_mask``, whose
            zeros mark tokens to leave out. Not an iterable dataset.
        length: tokens in a row; no example may have more.
        seed: chooses among examples of equal length; the same on every rank.
        shifts_labels: whether the loss compares position i with label i + 1, as the models of transformers do. False: the labels are
            shifted already, and all of them are kept.
        pad_token_id: token that fills up a row.

    Raises:
        UsageError: the dataset has no length, ``length`` is not a positive integer, an example is too long or has no tokens' column, or a column has another length.

    Source: best-fit decreasing; Ding et al., "Fewer truncations improve language modeling", 2024.
    """

    def __init__(
        self, dataset: Any, length: int, *, seed: int = 0, shifts_labels: bool = True, pad_token_id: int = 0
    ) -> None:
        if isinstance(dataset, IterableDataset) or length_of(dataset) < 0:
            raise UsageError(
                _("a {kind} cannot be packed, because it has no length", kind=type(dataset).__name__),
                do=_("use a dataset with a length, whose samples are read by number"),
            )
        if not isinstance(length, int) or length < 1:
            raise UsageError(
                _("rows cannot have length={length!r} tokens", length=length),
                where="PackedDataset(length=), or TrainingArguments.pack_to_length",
                do=_("set it to the number of tokens in a row, such as 2048"),
            )
        self.dataset = dataset
        self.length = length
        self.shifts_labels = shifts_labels
        self.pad_token_id = pad_token_id
        lengths = [len(_tokens_of(dataset[i], i)[0]) for i in range(len(dataset))]
        longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if longest is not None and lengths[longest] > length:
            raise UsageError(
                _(
                    "sample {number} has {num_tokens} tokens, but rows of {length} tokens hold only whole samples",
                    number=longest,
                    num_tokens=lengths[longest],
                    length=length,
                ),
                where="PackedDataset(length=), or TrainingArguments.pack_to_length",
                do=_("truncate or split the samples, or pack them into longer rows"),
            )
        self.rows = best_fit_rows(lengths, length, seed=seed)
        """The numbers of the examples in each row."""
        _logger.info(
            "packed %d samples into %d rows of %d tokens, of which %.1f %% are padding",
            len(lengths),
            len(self.rows),
            length,
            100 * (1 - sum(lengths) / max(1, len(self.rows) * length)),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        parts = [self._columns_of(number) for number in self.rows[row]]
        rest = self.length - sum(len(part["input_ids"]) for part in parts)
        columns: dict[str, torch.Tensor] = {}
        for name, first in parts[0].items():
            fill = {"input_ids": self.pad_token_id, "labels": IGNORED}.get(name, 0)
            values = [part[name] for part in parts]
            padding = first.new_full((rest, *first.shape[1:]), fill)
            columns[name] = torch.cat([*values, padding])
        columns["position_ids"][self.length - rest :] = torch.arange(rest)
        return columns

    def _columns_of(self, number: int) -> dict[str, torch.Tensor]:
        """Return the columns of one example, with its own positions."""
        sample = self.dataset[number]
        tokens, keep = _tokens_of(sample, number)
        columns: dict[str, torch.Tensor] = {"input_ids": tokens, "labels": tokens}
        for name, value in sample.items():
            if name in ("input_ids", "attention_mask", "position_ids") or value is None:
                continue
            column = torch.as_tensor(value)
            if not column.dim() or len(column) != len(sample["input_ids"]):
                raise UsageError(
                    _(
                        "column {name!r} of sample {number} does not have a value for each of its {num_tokens} tokens, so it cannot "
                        "be packed",
                        name=name,
                        number=number,
                        num_tokens=len(sample["input_ids"]),
                    ),
                    do=_("remove this column from the dataset"),
                )
            columns[name] = column if keep is None else column[keep]
        if self.shifts_labels:
            columns["labels"] = columns["labels"].clone()
            columns["labels"][:1] = IGNORED
        return {**columns, "position_ids": torch.arange(len(tokens))}


def _tokens_of(sample: Any, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a sample's tokens [tokens] without those that its attention mask leaves out, and which are kept; None: all."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        columns = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
        raise UsageError(
            _("sample {number} has no 'input_ids', only {columns}", number=number, columns=columns),
            do=_("tokenize the dataset before it is packed"),
        )
    tokens = torch.as_tensor(sample["input_ids"], dtype=torch.long)
    if tokens.dim() != 1:
        raise UsageError(
            _("the input_ids of sample {number} have shape {shape}", number=number, shape=list(tokens.shape)),
            do=_("return one list of tokens for each sample"),
        )
    mask = sample.get("attention_mask")
    if mask is None:
        return tokens, None
    keep = torch.as_tensor(mask).bool()
    return tokens[keep], keep


def best_fit_rows(lengths: Sequence[int], length: int, *, seed: int) -> list[list[int]]:
    """Return which samples share a row: each, from the longest on, joins the row in which it leaves the least space.

    Args:
        lengths: tokens of each sample, at most ``length``.
        length: tokens of a row.
        seed: orders samples of equal length.
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    order.sort(key=lengths.__getitem__, reverse=True)  # stable
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # free tokens -> rows
    spaces: list[int] = []  # the keys, sorted
    for sample in order:
        at = bisect_left(spaces, max(1, lengths[sample]))
        if at == len(spaces):
            row, space = len(rows), length
            rows.append([])
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        rows[row].append(sample)
        left = space - lengths[sample]
        if left:
            if left not in with_space:
                insort(spaces, left)
            with_space.setdefault(left, []).append(row)
    return rows


def packed_attention_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the causal mask of packed rows: a token attends to itself and to earlier tokens of its own example.

    Args:
        position_ids: [rows, tokens], which restart at 0 with each example.

    Returns:
        bool [rows, 1, tokens, tokens], as ``scaled_dot_product_attention`` takes it.

    Examples:
        >>> packed_attention_mask(torch.tensor([[0, 1, 0]]))[0, 0]
        tensor([[ True, False, False],
                [ True,  True, False],
                [False, False,  True]])
    """
    example = (position_ids == 0).cumsum(-1)
    same = example[:, None, :, None] == example[:, None, None, :]
    return same & torch.ones_like(same[:1]).tril()
