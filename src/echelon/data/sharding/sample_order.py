"""One order of samples for all ranks: that of the user's own sampler, or a closed formula of (seed, epoch)."""

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
        alone: one process draws for itself: nothing is exchanged.
        check: looks at the first draw of a sampler of the user's, before rank zero's is taken.
    """

    def __init__(
        self, batches: Any, *, seed: int | None, seedable: bool, alone: bool, check: OrderCheck | None = None
    ) -> None:
        self._alone = alone
        self._own: SharedSampler | SharedBatches | SeedableRandomSampler
        if type(batches) is not BatchSampler:
            self._own = SharedBatches(batches, alone=alone, check=check)
            self.batches: Any = self._own
            return
        sampler: Any = batches.sampler
        if seedable and type(sampler) is RandomSampler:
            self._own = SeedableRandomSampler(
                sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler._num_samples,
                generator=sampler.generator,
                data_seed=seed,
            )
        else:
            self._own = SharedSampler(sampler, alone=alone, check=check)
        self.batches = BatchSampler(self._own, batches.batch_size, batches.drop_last)

    def begin(self) -> None:
        """Make the ranks agree about the next pass, as far as that is not done while drawing. Collective."""
        if isinstance(self._own, SeedableRandomSampler) and not self._alone:
            self._own.agree_seed()

    @property
    def sampler(self) -> Any:
        """The user's sampler, or the seedable one in its place; None when a batch sampler has none."""
        if isinstance(self._own, SharedBatches):
            return getattr(self._own.batches, "sampler", None)
        return self._own.sampler if isinstance(self._own, SharedSampler) else self._own

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        if isinstance(self._own, SharedBatches):
            self._own.batches.sampler = sampler
            return
        self._own = sampler if isinstance(sampler, SeedableRandomSampler) else SharedSampler(sampler, alone=self._alone)
        self.batches.sampler = self._own

    @property
    def is_seedable(self) -> bool:
        """Does it depend on (seed, epoch) only?"""
        return isinstance(self._own, SeedableRandomSampler)

    def state(self) -> dict[str, Any] | None:
        """Return what the order of the pass begun last was drawn from."""
        if isinstance(self._own, SeedableRandomSampler):
            return {"seed": self._own.initial_seed}
        return self._own.draw.latest

    def pin(self, state: dict[str, Any] | None) -> None:
        """Let the next pass have the order of the one that ``state`` is of."""
        if state is None:
            return
        if isinstance(self._own, SeedableRandomSampler):
            self._own.data_seed = state["seed"]
        else:
            self._own.draw.pin(state)

    def unpin(self) -> None:
        """Let the next pass have an order of its own."""
        if not isinstance(self._own, SeedableRandomSampler):
            self._own.draw.pin(None)


class SeedableRandomSampler(RandomSampler):
    """A permutation that depends on (seed, epoch) only: ``randperm(n, generator=Generator().manual_seed(seed + epoch))``.

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
    """The random states that an order is drawn from, so that a resumed pass draws the same."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] | None = None
        """Of the pass begun last: ``torch`` and ``generator`` states."""
        self._pinned: dict[str, Any] | None = None

    def pin(self, state: dict[str, Any] | None) -> None:
        """Draw the next pass from ``state``; None: from what is there then."""
        self._pinned = state

    def begin(self, generator: torch.Generator | None) -> torch.Tensor | None:
        """Set the states that were pinned, if any, note those of this pass; return what ``end`` has to restore."""
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
        """Leave torch's own state as it was before a pinned pass."""
        if before is not None:
            torch.set_rng_state(before)


class SharedSampler(Sampler[int]):
    """A sampler of the user's that gives every rank the order that it gives rank 0 in the plain program.

    Collective: each pass, unless ``alone``.
    """

    def __init__(self, sampler: Any, *, alone: bool = False, check: OrderCheck | None = None) -> None:
        self.sampler = sampler
        self._check = check
        self.draw = _Draw()
        self._alone = alone

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's sampler, if it wants to know."""
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
                self._check.judge(order)
            return iter(order if self._alone else broadcast_object_list([order])[0])
        return iter(sampler)  # endless: its author must make the ranks agree


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
        """Tell the user's batch sampler and the sampler below it, if they want to know."""
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
                self._check.judge([index for batch in order for index in batch])
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
