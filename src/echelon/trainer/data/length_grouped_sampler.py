"""Batches of samples of similar length in random order, to reduce padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from echelon.base.errors import UsageError

__all__ = ["LengthGroupedSampler", "length_grouped_order", "lengths_of"]


def length_grouped_order(lengths: Sequence[int], *, batch_size: int, generator: torch.Generator) -> list[int]:
    """Return an order in which groups of ``batch_size`` samples have similar lengths.

    A random permutation is split into chunks of at most 50 batches, at least four chunks if possible, and each chunk is
    sorted, longest first. The longest sample comes first, so that an out-of-memory error occurs right away.

    Source: the transformers sampler of the same name.
    """
    size = batch_size * max(1, min(len(lengths) // (batch_size * 4), 50))
    order = torch.randperm(len(lengths), generator=generator).tolist()
    chunks = [
        sorted(order[start : start + size], key=lambda i: lengths[i], reverse=True)
        for start in range(0, len(order), size)
    ]
    longest = max(range(len(chunks)), key=lambda chunk: lengths[chunks[chunk][0]])
    chunks[0][0], chunks[longest][0] = chunks[longest][0], chunks[0][0]
    return [i for chunk in chunks for i in chunk]


class LengthGroupedSampler(Sampler[int]):
    """Yields a new ``length_grouped_order`` in each epoch; it depends only on the seed and the epoch.

    Args:
        batch_size: samples per optimizer step.
        lengths: length of every sample.
        seed: epoch e uses a generator seeded with ``seed + e``.
    """

    def __init__(self, batch_size: int, *, lengths: Sequence[int], seed: int) -> None:
        self.batch_size = batch_size
        self.lengths = lengths
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(length_grouped_order(self.lengths, batch_size=self.batch_size, generator=generator))


def lengths_of(dataset: Any, *, column: str, name: str) -> list[int]:
    """Return every sample's length: the value of ``column`` if it exists, otherwise ``len()`` of the value of ``name``.

    Raises:
        UsageError: the samples have neither column.
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
        f"this train_sampling_strategy needs the length of each sample, but a sample has only {columns}",
        where="TrainingArguments.length_column_name",
        do=(
            f"add a column {column!r}, set length_column_name to the column that holds the length, or add {name!r} to "
            "the samples"
        ),
    )
