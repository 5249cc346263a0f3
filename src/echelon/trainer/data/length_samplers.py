"""Samplers that look at the samples' lengths: similar lengths reduce padding, and batches of similar cost reduce waiting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from echelon.base.errors import UsageError

_QUADRATIC = 0.001
"""Cost of attention per squared token, relative to the cost of everything else per token."""


class BalancedBatchSampler(Sampler[list[int]]):
    """Yields batches for each rank in turn, balanced by cost within each update.

    A batch's cost is computed with all samples padded to the longest one. Every update has the same number of random
    samples, but its batches differ in size. An update's most expensive batches come first, one per rank.

    Args:
        num_ranks: number of ranks; consecutive batches go to consecutive ranks.
        num_rounds: number of batches per rank in one update.
        seed: epoch e uses a generator seeded with ``seed + e``.
        drop_last: drop an incomplete last update. Otherwise, that update has fewer batches per rank, and if it has
            fewer samples than ranks, samples from the start of the epoch are repeated.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        samples_per_update: int,
        num_ranks: int,
        num_rounds: int,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.lengths = lengths
        self.samples_per_update = samples_per_update
        self.num_ranks = num_ranks
        self.num_rounds = num_rounds
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.lengths), self.samples_per_update)
        return self.num_ranks * (whole * self.num_rounds + (0 if self.drop_last else self._rounds_of(rest)))

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        for start in range(0, len(order), self.samples_per_update):
            samples = order[start : start + self.samples_per_update]
            if len(samples) < self.samples_per_update and self.drop_last:
                return
            missing = max(0, self.num_ranks - len(samples))
            samples += (order * (-(-missing // len(order))))[:missing]
            yield from self._batches(samples)

    def _rounds_of(self, num_samples: int) -> int:
        return min(self.num_rounds, max(1, num_samples // self.num_ranks)) if num_samples else 0

    def _batches(self, samples: list[int]) -> list[list[int]]:
        samples = sorted(samples, key=self.lengths.__getitem__, reverse=True)
        rounds = self.num_rounds if len(samples) == self.samples_per_update else self._rounds_of(len(samples))
        batches, start = [], 0
        for size in balanced_sizes([self.lengths[i] for i in samples], num_batches=rounds * self.num_ranks):
            batches.append(samples[start : start + size])
            start += size
        return sorted(batches, key=lambda batch: len(batch) * _cost(self.lengths[batch[0]]), reverse=True)


def balanced_sizes(lengths: Sequence[int], *, num_batches: int) -> list[int]:
    """Return the sizes of ``num_batches`` nonempty, contiguous batches that minimize the cost of the most expensive one.

    Args:
        lengths: lengths of the samples, longest first; at least ``num_batches``.
    """
    costs = [_cost(length) for length in lengths]
    # A batch that starts at sample i costs size * costs[i]; bisect for the lowest cost limit that all batches respect.
    low, high = costs[0], len(costs) * costs[0]
    best = [len(costs)]
    while high > low * (1 + 1e-12):
        middle = (low + high) / 2
        sizes = _sizes_within(middle, costs)
        if len(sizes) <= num_batches:
            high, best = middle, sizes
        else:
            low = middle
    if len(low_sizes := _sizes_within(low, costs)) <= num_batches:
        best = low_sizes
    while len(best) < num_batches:  # splitting a batch does not increase the maximum
        widest = max(range(len(best)), key=best.__getitem__)
        best[widest : widest + 1] = [-(-best[widest] // 2), best[widest] // 2]
    return best


def _sizes_within(limit: float, costs: Sequence[float]) -> list[int]:
    sizes, start = [], 0
    while start < len(costs):
        sizes.append(min(len(costs) - start, max(1, int(limit / costs[start]))))
        start += sizes[-1]
    return sizes


def _cost(length: int) -> float:
    return max(1, length) * (1 + _QUADRATIC * length)


class LengthGroupedSampler(Sampler[int]):
    """Yields an order in which groups of ``batch_size`` samples have similar lengths, a new one in each epoch.

    A random permutation is split into chunks of at most 50 batches, at least four chunks if possible, and each chunk is
    sorted, longest first. The longest sample comes first, so that an out-of-memory error occurs right away.

    Source: the transformers sampler of the same name.

    Args:
        batch_size: samples per optimizer step.
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
        size = self.batch_size * max(1, min(len(self.lengths) // (self.batch_size * 4), 50))
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        chunks = [
            sorted(order[start : start + size], key=self.lengths.__getitem__, reverse=True)
            for start in range(0, len(order), size)
        ]
        longest = max(range(len(chunks)), key=lambda chunk: self.lengths[chunks[chunk][0]])
        chunks[0][0], chunks[longest][0] = chunks[longest][0], chunks[0][0]
        return (i for chunk in chunks for i in chunk)


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
