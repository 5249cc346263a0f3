"""Batches of samples of about the same length: less padding, and still a random order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from echelon.base.errors import UsageError

__all__ = ["LengthGroupedSampler", "length_grouped_order", "lengths_of"]


def length_grouped_order(lengths: Sequence[int], *, batch_size: int, generator: torch.Generator) -> list[int]:
    """Return an order in which ``batch_size`` neighbours are of similar length.

    A random permutation is cut into pieces of at most 50 batches (fewer where there would be less than four pieces), and
    each piece is sorted, longest first; the longest sample of all comes first, so that memory runs out at once, if it
    does.

    Source: the rule of transformers' sampler of this name.
    """
    size = batch_size * max(1, min(len(lengths) // (batch_size * 4), 50))
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pieces = [
        sorted(order[start : start + size], key=lambda i: lengths[i], reverse=True)
        for start in range(0, len(order), size)
    ]
    longest = max(range(len(pieces)), key=lambda piece: lengths[pieces[piece][0]])
    pieces[0][0], pieces[longest][0] = pieces[longest][0], pieces[0][0]
    return [i for piece in pieces for i in piece]


class LengthGroupedSampler(Sampler[int]):
    """The order of ``length_grouped_order``, another one in each pass; it depends on the seed and the pass only.

    Args:
        batch_size: samples of one optimizer step.
        lengths: of every sample.
        seed: pass e is drawn by a generator of the seed ``seed + e``.
    """

    def __init__(self, batch_size: int, *, lengths: Sequence[int], seed: int) -> None:
        self.batch_size = batch_size
        self.lengths = lengths
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(length_grouped_order(self.lengths, batch_size=self.batch_size, generator=generator))


def lengths_of(dataset: Any, *, column: str, name: str) -> list[int]:
    """Return the length of every sample: the column ``column`` where there is one, else that of ``name`` in each sample.

    Raises:
        UsageError: the samples have neither.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    first = dataset[0]
    if isinstance(first, Mapping):
        if column in first:
            return [int(dataset[i][column]) for i in range(len(dataset))]
        if isinstance(first.get(name), Sized):
            return [len(dataset[i][name]) for i in range(len(dataset))]
    columns = ", ".join(map(str, first)) if isinstance(first, Mapping) else f"a {type(first).__name__}"
    raise UsageError(
        f"this train_sampling_strategy needs the length of each sample, and a sample has {columns}",
        where="TrainingArguments.length_column_name",
        do=f"add a column {column!r}, set length_column_name to the one that holds it, or let samples have {name!r}",
    )
