"""A common order of samples for all ranks, drawn by the user's sampler or computed from (seed, epoch)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from echelon.data.sharding.order_check import OrderCheck
from echelon.distributed.checks.already_sharded import set_epoch
from echelon.distributed.collectives import broadcast, broadcast_object_list


class SampleOrder:
    """The batches for all ranks in a common order.

    Args:
        seed: seed for a seedable order. If None, rank zero's torch seed is used.
        seedable: whether to derive the shuffled order from (seed, epoch) instead of from the sampler's generator.
        alone: whether there is only one process, so that nothing is exchanged.
    """

    def __init__(
        self, batches: Any, *, seed: int | None, seedable: bool, alone: bool, check: OrderCheck | None = None
    ) -> None:
        self._alone = alone
        self._drawn_by: SharedSampler | SharedBatches | SeedableRandomSampler
        if type(batches) is not BatchSampler:
            if seedable and type(getattr(batches, "sampler", None)) is RandomSampler:
                batches = copy.copy(batches)  # as accelerate does, but without changing the user's object
                batches.sampler = _seedable(batches.sampler, seed)
            self._drawn_by = SharedBatches(batches, alone=alone, check=check)
            self.batches: Any = self._drawn_by
            return
        sampler: Any = batches.sampler
        if seedable and type(sampler) is RandomSampler:
            self._drawn_by = _seedable(sampler, seed)
        else:
            self._drawn_by = SharedSampler(sampler, alone=alone, check=check)
        self.batches = BatchSampler(self._drawn_by, batches.batch_size, batches.drop_last)

    def begin(self) -> None:
        """Agree on the seed for the next pass. Collective."""
        if isinstance(self._drawn_by, SeedableRandomSampler) and not self._alone:
            self._drawn_by.agree_seed()

    @property
    def sampler(self) -> Any:
        """The user's sampler or the seedable sampler that replaces it, or None if the batch sampler has no sampler."""
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
        """Whether the order depends only on (seed, epoch)."""
        return isinstance(self._drawn_by, SeedableRandomSampler)

    def state(self) -> dict[str, Any] | None:
        """Return the seed or RNG states used to draw the order of the latest pass."""
        if isinstance(self._drawn_by, SeedableRandomSampler):
            return {"seed": self._drawn_by.initial_seed}
        latest = self._drawn_by.draw.latest
        if latest is not None and isinstance(self.sampler, SeedableRandomSampler):  # that of the user's batch sampler
            return {**latest, "seed": self.sampler.initial_seed}
        return latest

    def pin(self, state: dict[str, Any] | None) -> None:
        """Make the next pass draw its order using ``state``."""
        if state is None:
            return
        if isinstance(self._drawn_by, SeedableRandomSampler):
            self._drawn_by.data_seed = state["seed"]
            return
        if "seed" in state and isinstance(self.sampler, SeedableRandomSampler):
            self.sampler.data_seed = state["seed"]
        self._drawn_by.draw.pin(state)

    def unpin(self) -> None:
        """Make the next pass draw a new order."""
        if not isinstance(self._drawn_by, SeedableRandomSampler):
            self._drawn_by.draw.pin(None)


class SeedableRandomSampler(RandomSampler):
    """A permutation that depends only on (seed, epoch): ``randperm(n, generator=Generator().manual_seed(seed + epoch))``.

    Each pass increments the epoch.

    Args:
        args: arguments for ``RandomSampler``, whose generator is not used.
        data_seed: the seed. If None, ``torch.initial_seed()`` is used.

    Source: the order used by accelerate's seedable sampler and the transformers Trainer.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data_seed = data_seed
        self.epoch = 0

    @property
    def initial_seed(self) -> int:
        """Seed of epoch 0."""
        return torch.initial_seed() if self.data_seed is None else self.data_seed

    def agree_seed(self) -> None:
        """Set the seed to rank zero's, unless a seed was given. Collective."""
        if self.data_seed is None:
            self.data_seed = broadcast_object_list([torch.initial_seed()])[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from _with_generator(self, torch.Generator().manual_seed(self.initial_seed + self.epoch))
        self.epoch += 1


class _Draw:
    """Draws an order for all ranks, and records and restores the RNG states, so that a resumed pass draws the same order."""

    def __init__(self, *, alone: bool, check: OrderCheck | None) -> None:
        self.alone = alone
        self._check = check
        self.latest: dict[str, Any] | None = None
        """RNG states (``torch`` and ``generator``) at the start of the latest pass."""
        self._pinned: dict[str, Any] | None = None

    def pin(self, state: dict[str, Any] | None) -> None:
        """Draw the order of the next pass using ``state`` or, if it is None, the current RNG state."""
        self._pinned = state

    @contextmanager
    def of_pass(self, sampler: Any) -> Iterator[None]:
        """Draw the order of a pass in the block, with the pinned states if there are any, after which torch's is restored."""
        generator = getattr(sampler, "generator", None)
        generator = generator if isinstance(generator, torch.Generator) else None
        pinned, self._pinned = self._pinned, None
        before = torch.get_rng_state()
        if pinned is not None:
            torch.set_rng_state(pinned["torch"])
            if generator is not None and pinned["generator"] is not None:
                generator.set_state(pinned["generator"])
        self.latest = {
            "torch": torch.get_rng_state(),
            "generator": None if generator is None else generator.get_state(),
        }
        try:
            yield
        finally:
            if pinned is not None:
                torch.set_rng_state(before)

    def shared(self, drawn: Any, *, are_batches: bool) -> Iterator[Any]:
        """Return what the sampler or batch sampler ``drawn`` draws on rank zero, or here if it has no length."""
        if not _has_length(drawn):
            return iter(drawn)  # infinite, so it cannot be broadcast: the user must make it equal on all ranks
        order = list(drawn)
        if self.alone:
            return iter(order)
        if self._check is not None:
            self._check.check_order([index for batch in order for index in batch] if are_batches else order)
        return iter(broadcast_object_list([order])[0])


class SharedSampler(Sampler[int]):
    """Wraps the user's sampler so that every rank uses rank 0's order.

    Collective: call on every rank in each pass, unless ``alone``.
    """

    def __init__(self, sampler: Any, *, alone: bool = False, check: OrderCheck | None = None) -> None:
        self.sampler = sampler
        self.draw = _Draw(alone=alone, check=check)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's sampler, if it supports epochs."""
        set_epoch(epoch, self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        sampler = self.sampler
        if isinstance(sampler, SequentialSampler):
            return iter(sampler)
        with self.draw.of_pass(sampler):
            return self._order()

    def _order(self) -> Iterator[int]:
        sampler = self.sampler
        if type(sampler) is RandomSampler:
            if sampler.generator is None:
                # RandomSampler makes the same draw from the global generator. Rank 0's value is used.
                seed = torch.empty((), dtype=torch.int64).random_()
                seed = seed if self.draw.alone else broadcast(seed)
                return iter(_with_generator(sampler, torch.Generator().manual_seed(int(seed.item()))))
            if not self.draw.alone:
                sampler.generator.set_state(broadcast(sampler.generator.get_state()))
            return iter(sampler)
        return self.draw.shared(sampler, are_batches=False)


class SharedBatches(Sampler[list[int]]):
    """Wraps the user's batch sampler so that every rank uses rank 0's batches.

    Collective: call on every rank in each pass, unless ``alone``.
    """

    def __init__(self, batches: Any, *, alone: bool = False, check: OrderCheck | None = None) -> None:
        self.batches = batches
        self.draw = _Draw(alone=alone, check=check)

    @property
    def batch_size(self) -> int | None:
        """Batch size of the user's batch sampler."""
        size: int | None = getattr(self.batches, "batch_size", None)
        return size

    @property
    def drop_last(self) -> bool:
        """``drop_last`` of the user's batch sampler."""
        return bool(getattr(self.batches, "drop_last", False))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's batch sampler and its sampler, if they support epochs."""
        set_epoch(epoch, self.batches, getattr(self.batches, "sampler", None))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        with self.draw.of_pass(getattr(self.batches, "sampler", None)):
            return self.draw.shared(self.batches, are_batches=True)


def _has_length(sampler: object) -> bool:
    return isinstance(sampler, Sized)


def _seedable(sampler: RandomSampler, seed: int | None) -> SeedableRandomSampler:
    return SeedableRandomSampler(**_options(sampler), generator=sampler.generator, data_seed=seed)


def _with_generator(sampler: RandomSampler, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(**_options(sampler), generator=generator)


def _options(sampler: RandomSampler) -> dict[str, Any]:
    # A number of samples of None is the length of the data, also if it changes.
    return {
        "data_source": sampler.data_source,
        "replacement": sampler.replacement,
        "num_samples": sampler._num_samples,
    }
