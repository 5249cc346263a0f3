"""One order of samples for all ranks: drawn by the user's sampler, or computed from (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from echelon.base.protocols import SupportsSetEpoch
from echelon.data.sharding.order_check import OrderCheck
from echelon.distributed.collectives import broadcast, broadcast_object_list

__all__ = ["SampleOrder", "SeedableRandomSampler", "SharedBatches", "SharedSampler"]


class SampleOrder:
    """The batches of all ranks in one order.

    Args:
        batches: the user's batch sampler.
        seed: of a seedable order; None: the run's, which rank zero decides.
        seedable: shuffle by (seed, epoch) instead of by the sampler's generator.
        alone: there is one process: nothing is exchanged.
        check: of the first draw of a sampler of the user's.
    """

    def __init__(
        self, batches: Any, *, seed: int | None, seedable: bool, alone: bool, check: OrderCheck | None = None
    ) -> None:
        self._alone = alone
        self._drawn_by: SharedSampler | SharedBatches | SeedableRandomSampler
        if type(batches) is not BatchSampler:
            self._drawn_by = SharedBatches(batches, alone=alone, check=check)
            self.batches: Any = self._drawn_by
            return
        sampler: Any = batches.sampler
        if seedable and type(sampler) is RandomSampler:
            self._drawn_by = SeedableRandomSampler(
                sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler._num_samples,
                generator=sampler.generator,
                data_seed=seed,
            )
        else:
            self._drawn_by = SharedSampler(sampler, alone=alone, check=check)
        self.batches = BatchSampler(self._drawn_by, batches.batch_size, batches.drop_last)

    def begin(self) -> None:
        """Agree on the seed of the next pass. Collective."""
        if isinstance(self._drawn_by, SeedableRandomSampler) and not self._alone:
            self._drawn_by.agree_seed()

    @property
    def sampler(self) -> Any:
        """The user's sampler, or the seedable one in its place; None when a batch sampler has none."""
        if isinstance(self._drawn_by, SharedBatches):
            return getattr(self._drawn_by.batches, "sampler", None)
        return self._drawn_by.sampler if isinstance(self._drawn_by, SharedSampler) else self._drawn_by

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        if isinstance(self._drawn_by, SharedBatches):
            self._drawn_by.batches.sampler = sampler
            return
        self._drawn_by = (
            sampler if isinstance(sampler, SeedableRandomSampler) else SharedSampler(sampler, alone=self._alone)
        )
        self.batches.sampler = self._drawn_by

    @property
    def is_seedable(self) -> bool:
        """Does it depend only on (seed, epoch)?"""
        return isinstance(self._drawn_by, SeedableRandomSampler)

    def state(self) -> dict[str, Any] | None:
        """Return what the order of the pass that started last was drawn from."""
        if isinstance(self._drawn_by, SeedableRandomSampler):
            return {"seed": self._drawn_by.initial_seed}
        return self._drawn_by.draw.latest

    def pin(self, state: dict[str, Any] | None) -> None:
        """Make the next pass draw the order of ``state``."""
        if state is None:
            return
        if isinstance(self._drawn_by, SeedableRandomSampler):
            self._drawn_by.data_seed = state["seed"]
        else:
            self._drawn_by.draw.pin(state)

    def unpin(self) -> None:
        """Make the next pass draw a new order."""
        if not isinstance(self._drawn_by, SeedableRandomSampler):
            self._drawn_by.draw.pin(None)


class SeedableRandomSampler(RandomSampler):
    """A permutation that depends only on (seed, epoch): ``randperm(n, generator=Generator().manual_seed(seed + epoch))``.

    Args:
        args: of ``RandomSampler``; its generator is not drawn from.
        data_seed: the seed; None: torch's initial one.
        kwargs: as ``args``.

    Each pass is followed by that of the next epoch.

    Source: the order of accelerate's seedable sampler and of the transformers Trainer.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data_seed = data_seed
        self.epoch = 0

    @property
    def initial_seed(self) -> int:
        """The seed of epoch 0."""
        return torch.initial_seed() if self.data_seed is None else self.data_seed

    def agree_seed(self) -> None:
        """Take rank zero's seed. Collective."""
        if self.data_seed is None:
            self.data_seed = broadcast_object_list([torch.initial_seed()])[0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.initial_seed + self.epoch)
        yield from _with_generator(self, generator)
        self.epoch += 1


class _Draw:
    """The RNG states that an order is drawn from, so that a resumed pass draws the same order."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] | None = None
        """Of the pass that started last: ``torch`` and ``generator`` states."""
        self._pinned: dict[str, Any] | None = None

    def pin(self, state: dict[str, Any] | None) -> None:
        """Draw the next pass from ``state``; None: from the state at that time."""
        self._pinned = state

    def begin(self, generator: torch.Generator | None) -> torch.Tensor | None:
        """Set the pinned states, if any, and record those of this pass; return what ``end`` restores."""
        pinned, self._pinned = self._pinned, None
        before = None
        if pinned is not None:
            before = torch.get_rng_state()
            torch.set_rng_state(pinned["torch"])
            if generator is not None and pinned["generator"] is not None:
                generator.set_state(pinned["generator"])
        self.latest = {
            "torch": torch.get_rng_state(),
            "generator": None if generator is None else generator.get_state(),
        }
        return before

    def end(self, before: torch.Tensor | None) -> None:
        """Restore torch's own state after a pinned draw."""
        if before is not None:
            torch.set_rng_state(before)


class SharedSampler(Sampler[int]):
    """A sampler of the user's whose order on every rank is that of rank 0.

    Collective: each pass, unless ``alone``.
    """

    def __init__(self, sampler: Any, *, alone: bool = False, check: OrderCheck | None = None) -> None:
        self.sampler = sampler
        self._check = check
        self.draw = _Draw()
        self._alone = alone

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's sampler, if it has one."""
        if isinstance(self.sampler, SupportsSetEpoch):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        sampler = self.sampler
        if isinstance(sampler, SequentialSampler):
            return iter(sampler)
        generator = getattr(sampler, "generator", None)
        before = self.draw.begin(generator if isinstance(generator, torch.Generator) else None)
        try:
            return self._order()
        finally:
            self.draw.end(before)

    def _order(self) -> Iterator[int]:
        sampler = self.sampler
        if type(sampler) is RandomSampler:
            if sampler.generator is None:
                # The draw that RandomSampler itself makes from the global generator; rank 0's counts.
                seed = torch.empty((), dtype=torch.int64).random_()
                generator = torch.Generator().manual_seed(int((seed if self._alone else broadcast(seed)).item()))
                return iter(_with_generator(sampler, generator))
            if not self._alone:
                sampler.generator.set_state(broadcast(sampler.generator.get_state()))
            return iter(sampler)
        if _has_length(sampler):
            order = list(sampler)
            if self._check is not None and not self._alone:
                self._check.check_order(order)
            return iter(order if self._alone else broadcast_object_list([order])[0])
        return iter(sampler)  # endless: its author must make it equal on all ranks


class SharedBatches(Sampler[list[int]]):
    """A batch sampler of the user's whose batches are those of rank 0, on every rank.

    Collective: each pass, unless ``alone``.
    """

    def __init__(self, batches: Any, *, alone: bool = False, check: OrderCheck | None = None) -> None:
        self.batches = batches
        self._check = check
        self.draw = _Draw()
        self._alone = alone

    @property
    def batch_size(self) -> int | None:
        """The user's."""
        size: int | None = getattr(self.batches, "batch_size", None)
        return size

    @property
    def drop_last(self) -> bool:
        """The user's."""
        return bool(getattr(self.batches, "drop_last", False))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's batch sampler and of its sampler, if they have one."""
        for owner in (self.batches, getattr(self.batches, "sampler", None)):
            if isinstance(owner, SupportsSetEpoch):
                owner.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        generator = getattr(getattr(self.batches, "sampler", None), "generator", None)
        before = self.draw.begin(generator if isinstance(generator, torch.Generator) else None)
        try:
            if not _has_length(self.batches):
                return iter(self.batches)
            order = list(self.batches)
            if self._check is not None and not self._alone:
                self._check.check_order([index for batch in order for index in batch])
            return iter(order if self._alone else broadcast_object_list([order])[0])
        finally:
            self.draw.end(before)


def _has_length(sampler: object) -> bool:
    return isinstance(sampler, Sized)


def _with_generator(sampler: RandomSampler, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,  # None: all of the data, also when its length changes
        generator=generator,
    )
