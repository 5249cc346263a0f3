"""One order of samples for all ranks: that of the user's own sampler, or a closed formula of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from echelon.base.protocols import SupportsSetEpoch
from echelon.distributed.collectives import broadcast, broadcast_object_list

__all__ = ["SeedableSampler", "SharedBatches", "SharedSampler"]


class SeedableSampler(Sampler[int]):
    """A permutation that depends on (seed, epoch) only: ``randperm(n, generator=Generator().manual_seed(seed + epoch))``.

    Source: the order of accelerate's seedable sampler and of the transformers Trainer.
    """

    def __init__(self, sampler: RandomSampler, *, seed: int | None) -> None:
        self._sampler = sampler
        self._seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        if self._seed is None:  # nobody gave one: the run's, which rank 0 decides
            self._seed = broadcast_object_list([torch.initial_seed()])[0]
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return iter(_with_generator(self._sampler, generator))


class SharedSampler(Sampler[int]):
    """A sampler of the user's that gives every rank the order that it gives rank 0 in the plain program.

    Collective: each pass.
    """

    def __init__(self, sampler: Sampler[int]) -> None:
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's sampler, if it wants to know."""
        if isinstance(self._sampler, SupportsSetEpoch):
            self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        sampler = self._sampler
        if isinstance(sampler, (SequentialSampler, SeedableSampler)):
            return iter(sampler)
        if type(sampler) is RandomSampler:
            if sampler.generator is None:
                # The draw that RandomSampler itself makes from the global generator; rank 0's counts.
                seed = torch.empty((), dtype=torch.int64).random_()
                generator = torch.Generator().manual_seed(int(broadcast(seed).item()))
                return iter(_with_generator(sampler, generator))
            state = broadcast(sampler.generator.get_state())
            sampler.generator.set_state(state)
            return iter(sampler)
        if _has_length(sampler):
            return iter(broadcast_object_list([list(sampler)])[0])
        return iter(sampler)  # endless: its author must make the ranks agree


class SharedBatches(Sampler[list[int]]):
    """A batch sampler of the user's whose batches are those of rank 0, on every rank.

    Collective: each pass.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's batch sampler, if it wants to know."""
        if isinstance(self._batches, SupportsSetEpoch):
            self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        if _has_length(self._batches):
            return iter(broadcast_object_list([list(self._batches)])[0])
        return iter(self._batches)


def _has_length(sampler: object) -> bool:
    return isinstance(sampler, Sized)


def _with_generator(sampler: RandomSampler, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,  # None: all of the data, also when its length changes
        generator=generator,
    )
