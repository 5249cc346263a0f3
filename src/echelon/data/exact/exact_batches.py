"""``parity="exact"``: each of the loader's batches is one global batch, which can be split across any number of ranks.

The order of a pass depends only on (seed, epoch), and a position in it is a single integer. No sample is repeated or dropped.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.data.exact.permutation import ExplicitPermutation, FeistelPermutation, Permutation
from echelon.data.global_batch_slices import (
    Contribution,
    PassPlan,
    canonical_contributions,
    contributions,
    join_small_batches,
    num_micro_steps,
)
from echelon.data.rng.per_sample_rng import KeyedSamples
from echelon.data.sharding.order_check import OrderCheck
from echelon.data.sharding.sample_order import SampleOrder, SeedableRandomSampler
from echelon.distributed.checks.already_sharded import can_undo_sharding, set_epoch

OrderKind = Literal["randperm", "feistel"]
_MANY = 50_000_000
_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOptions:
    """Data options for the exact modes."""

    seed: int
    """The run's seed, which is the same on every rank."""
    order: OrderKind = "randperm"
    """Algorithm for shuffled orders: a permutation that is stored (``randperm``), or one that is computed on demand
    (``feistel``)."""
    max_micro_batch_size: int | None = None
    """Maximum number of samples on one rank in one forward pass; None means unlimited."""
    replays: bool = False
    """Whether to resume iterable data that has no state by reading the samples before the position again."""
    canonical_shards: int | None = None
    """Number of shards that an update is divided into, independent of the number of ranks (bitwise). If None, it is divided
    by rank (exact)."""
    by_sample: bool = False
    """Whether to read samples one by one even if whole batches could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSplitter:
    """Splits global batches into what one rank contributes in each micro-step."""

    rank: int
    world_size: int
    options: ExactOptions
    batch_size: int | None
    """The user's batch size, which is the total across all ranks; None if it varies."""

    def num_micro(self, num_samples: int, plan: PassPlan) -> int:
        """Return the number of micro-steps for a global batch of ``num_samples`` samples."""
        wanted = plan.num_micro_steps
        if self.options.canonical_shards is not None:
            return -(-self.options.canonical_shards // self.world_size)
        # A rank's part of a joined batch is not larger than its part of one of the user's batches, unless another rank would
        # have no samples.
        if not plan.trains:
            largest, usual = (-(-number // self.world_size) for number in (num_samples, self.batch_size or num_samples))
            wanted = max(min(-(-largest // usual), num_samples // self.world_size), 1)
        return num_micro_steps(
            num_samples,
            world_size=self.world_size,
            wanted=wanted,
            max_micro_batch_size=self.options.max_micro_batch_size,
        )

    def split(self, update: range, plan: PassPlan) -> Iterator[Contribution]:
        """Yield what the rank contributes to a global batch in each micro-step."""
        if self.options.canonical_shards is not None:
            return canonical_contributions(
                update,
                rank=self.rank,
                world_size=self.world_size,
                num_shards=self.options.canonical_shards,
                by_rank=plan.trains,
            )
        num_micro = self.num_micro(len(update), plan)
        return contributions(
            update, rank=self.rank, world_size=self.world_size, num_micro=num_micro, by_rank=plan.trains
        )

    def num_steps(self, plan: PassPlan, *, num_samples: int, num_batches: int) -> int:
        """Return the number of micro-steps in a pass over a number of samples, in a number of global batches; -1 means unknown.

        Raises:
            TypeError: the number depends on the batch sizes.
        """
        shards = self.options.canonical_shards
        if self.batch_size is not None and num_samples >= 0:
            least = shards or self.world_size
            size = joined_size(self.batch_size, plan, least=least)
            whole, rest = divmod(num_samples, size)
            if not plan.trains and whole and 0 < rest < least:
                whole, rest = whole - 1, size + rest
            return sum(
                count * self.num_micro(number, plan) for count, number in ((whole, size), (1, rest)) if count and number
            )
        if shards is not None and num_batches >= 0:
            return num_batches * -(-shards // self.world_size)
        varies = (plan.trains and plan.num_micro_steps > 1) or self.options.max_micro_batch_size is not None
        if num_batches < 0 or varies:
            raise TypeError(
                "the number of micro-steps is unknown until the batches are drawn, because their sizes vary and they "
                "are split according to gradient_accumulation_steps or max_micro_batch_size"
            )
        return num_batches


def joined_size(batch_size: int, plan: PassPlan, *, least: int) -> int:
    """Return the size of a global batch. Evaluation passes join batches until there are at least ``least`` samples."""
    return batch_size if plan.trains else batch_size * -(-least // batch_size)


class GlobalOrder(ABC):
    """The global batches in a pass, which can start at any position."""

    is_seekable: bool
    """Whether a pass can start at any position without drawing the indices before that position."""
    may_join: bool
    """Whether an evaluation pass may join batches: True if they are determined only by the batch size."""

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[tuple[range, Sequence[int]]]:
        """Yield the positions and indices of each global batch in pass ``epoch``, starting at position ``start``.

        Collective: call on every rank if the user's sampler determines the order.
        """

    @abstractmethod
    def num_samples(self) -> int:
        """Return the number of samples in a pass, excluding a dropped last batch, or -1 if unknown."""

    @abstractmethod
    def num_batches(self) -> int:
        """Return the number of global batches in a pass, or -1 if unknown."""

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """Return the RNG states used to draw the order of the latest pass, or None if (seed, epoch) determines the order."""

    @abstractmethod
    def pin(self, state: dict[str, Any] | None) -> None:
        """Make the next pass draw its order using ``state``."""


def make_order(
    batches: Any, dataset: Any, options: ExactOptions, *, alone: bool, check: OrderCheck | None = None
) -> GlobalOrder:
    """Return the order defined by the user's batch sampler.

    Args:
        alone: whether only this process reads the data.
        check: check to run on the first indices drawn by a custom sampler.
    """
    if type(batches) is BatchSampler:
        sampler: Any = batches.sampler
        if can_undo_sharding(sampler):  # its order before sharding depends only on (its seed, epoch)
            whole = replace(options, seed=sampler.seed) if sampler.shuffle else None
            return _FormulaOrder(sampler.dataset, batches.batch_size, batches.drop_last, whole)
        shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
        if type(sampler) is SequentialSampler or (type(sampler) in (RandomSampler, SeedableRandomSampler) and shuffles):
            return _FormulaOrder(
                sampler.data_source, batches.batch_size, batches.drop_last, options if shuffles else None
            )
    return _DrawnOrder(SampleOrder(batches, seed=options.seed, seedable=True, alone=alone, check=check), dataset)


class _FormulaOrder(GlobalOrder):
    """A sequential order, or a permutation given by (seed, epoch). Both can start at any position."""

    is_seekable = True
    may_join = True

    def __init__(self, data: Any, batch_size: int, drop_last: bool, options: ExactOptions | None) -> None:
        self._data = data
        self._num_samples = len(data)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._options = options
        self._held: tuple[int, Permutation] | None = None
        if options is not None and options.order == "randperm" and self._num_samples >= _MANY:
            _logger.log(
                logging.INFO,
                "shuffling %d samples with a stored permutation, which uses %.1f GB per process; order='feistel' "
                "uses no memory and seeks instantly",
                self._num_samples,
                4 * self._num_samples / 1e9,
            )

    def batches(self, epoch: int, start: int) -> Iterator[tuple[range, Sequence[int]]]:
        if len(self._data) != self._num_samples:
            raise UsageError(
                f"the dataset had {self._num_samples} samples when its loader was prepared, but now has "
                f"{len(self._data)}",
                where="the prepared DataLoader, parity='exact'",
                do="prepare a new loader after changing the dataset",
            )
        size = self._batch_size
        block = max(size, 4096 - 4096 % size)
        permutation = self._permutation(epoch)
        for first in range(start, self._num_samples, block):
            positions = range(first, min(first + block, self._num_samples))
            indices = positions if permutation is None else permutation.indices(positions)
            for at in range(0, len(positions), size):
                batch = positions[at : at + size]
                if len(batch) < size and self._drop_last:
                    return
                found = indices[at : at + size]
                yield batch, found.tolist() if isinstance(found, torch.Tensor) else found

    def _permutation(self, epoch: int) -> Permutation | None:
        if self._options is None:
            return None
        if self._held is None or self._held[0] != epoch:
            kind = FeistelPermutation if self._options.order == "feistel" else ExplicitPermutation
            self._held = (epoch, kind(self._num_samples, self._options.seed, epoch))
        return self._held[1]

    def num_samples(self) -> int:
        return self._num_samples - (self._num_samples % self._batch_size if self._drop_last else 0)

    def num_batches(self) -> int:
        return -(-self.num_samples() // self._batch_size)

    def state(self) -> dict[str, Any] | None:
        return None

    def pin(self, state: dict[str, Any] | None) -> None:
        assert state is None, state


class _DrawnOrder(GlobalOrder):
    """The order that the user's sampler or batch sampler draws on rank zero. Seeking to a position counts drawn samples."""

    is_seekable = False

    def __init__(self, order: SampleOrder, dataset: Any) -> None:
        self._order = order
        self.may_join = type(order.batches) is BatchSampler
        self._dataset = dataset
        self._may_repeat = bool(getattr(order.sampler, "replacement", False))

    def batches(self, epoch: int, start: int) -> Iterator[tuple[range, Sequence[int]]]:
        self._order.begin()
        set_epoch(epoch, self._order.batches, getattr(self._order.batches, "sampler", None))
        position, num_samples = 0, length_of(self._dataset)
        seen = torch.zeros(0 if self._may_repeat else max(num_samples, 0), dtype=torch.bool)
        num_repeated = 0
        for batch in self._order.batches:
            update = range(position, position + len(batch))
            position = update.stop
            if num_samples >= 0 and all(type(index) is int for index in batch):
                _check_indices(batch, num_samples)
                if not self._may_repeat:
                    num_repeated += len(batch) - len(set(batch)) + int(seen[list(set(batch))].sum())
                    seen[batch] = True
            if update.start >= start and batch:
                yield update, batch
        if num_repeated:
            warn(
                _(
                    "the sampler repeated {num_repeated} of {position} samples in one pass, so some samples are used "
                    "more often than others (if this is intended, set replacement=True on the sampler)",
                    num_repeated=num_repeated,
                    position=position,
                )
            )

    def num_samples(self) -> int:
        batches = self._order.batches
        num_samples = length_of(batches.sampler) if type(batches) is BatchSampler else -1
        return num_samples - (num_samples % batches.batch_size if num_samples > 0 and batches.drop_last else 0)

    def num_batches(self) -> int:
        return length_of(self._order.batches)

    def state(self) -> dict[str, Any] | None:
        return self._order.state()

    def pin(self, state: dict[str, Any] | None) -> None:
        self._order.pin(state)


def _check_indices(batch: Sequence[int], num_samples: int) -> None:
    for index in (min(batch), max(batch)) if batch else ():
        if not 0 <= index < num_samples:
            raise UsageError(
                f"the sampler yielded the index {index}, but the dataset has {num_samples} samples",
                where="the sampler of the prepared DataLoader",
                do="make it yield indices from 0 to len(dataset) - 1",
            )


class ExactBatches(Sampler[KeyedSamples]):
    """One rank's batch sampler. Yields the samples for each micro-step, and queues their contributions in ``ahead``.

    Args:
        smallest: minimum size to which batches in an evaluation pass are joined, so that every rank has samples.
    """

    def __init__(self, order: GlobalOrder, splitter: UpdateSplitter, *, smallest: int | None = None) -> None:
        self.order = order
        self.splitter = splitter
        self.smallest = splitter.options.canonical_shards or smallest or splitter.world_size
        self.epoch = 0
        self.start = 0
        """Position where the next pass starts."""
        self.skip = 0
        """Number of micro-steps that the next pass skips after ``start``."""
        self.plan = PassPlan()
        """The plan for the next pass."""
        self.ahead: deque[Contribution] = deque()
        """Contributions in the latest pass that were drawn but not yet consumed, because loaders with workers prefetch."""

    @property
    def batch_size(self) -> int | None:
        """The user's batch size, which is the total across all ranks; None if it varies."""
        return self.splitter.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next pass."""
        self.epoch = epoch

    def num_steps(self, plan: PassPlan) -> int:
        """Return the number of micro-steps in a pass.

        Raises:
            TypeError: the number is unknown.
        """
        return self.splitter.num_steps(plan, num_samples=self.order.num_samples(), num_batches=self.order.num_batches())

    def __len__(self) -> int:
        return self.num_steps(self.plan)

    def __iter__(self) -> Iterator[KeyedSamples]:
        # Not a generator function, so that nested passes have separate queues. A loader with workers calls this twice and
        # reads from the second iterator.
        self.ahead = deque()
        return self._pieces(self.ahead, self.plan, self.epoch, self.start, self.skip)

    def _pieces(
        self, ahead: deque[Contribution], plan: PassPlan, epoch: int, start: int, skip: int
    ) -> Iterator[KeyedSamples]:
        left, splitter = skip, self.splitter
        if self.order.is_seekable and splitter.batch_size is not None:
            size = joined_size(splitter.batch_size, plan, least=self.smallest)
            num_micro = splitter.num_micro(size, plan)
            # The last global batches may have a different size; the loop below skips them.
            whole = min(left // num_micro, max((self.order.num_samples() - start) // size - 1, 0))
            start, left = start + whole * size, left - whole * num_micro
        for update, indices in self._batches(plan, epoch, start):
            num_micro = splitter.num_micro(len(update), plan)
            if left >= num_micro:
                left -= num_micro
                continue
            if left:
                raise partial_update_error(skip)
            for one in splitter.split(update, plan):
                ahead.append(one)
                first = one.samples.start - update.start
                found = list(indices[first : first + len(one.samples)])
                yield KeyedSamples(found, seed=splitter.options.seed, epoch=epoch, start=one.samples.start)

    def _batches(self, plan: PassPlan, epoch: int, start: int) -> Iterator[tuple[range, Sequence[int]]]:
        batches = self.order.batches(epoch, start)
        if plan.trains or not self.order.may_join:
            return batches
        return join_small_batches(batches, _join, smallest=self.smallest, size=lambda batch: len(batch[0]))


def _join(batch: tuple[range, Sequence[int]], following: tuple[range, Sequence[int]]) -> tuple[range, Sequence[int]]:
    return range(batch[0].start, following[0].stop), [*batch[1], *following[1]]


def partial_update_error(num_steps: int) -> UsageError:
    """Return the error for skipping part of an update."""
    return UsageError(
        f"cannot skip the first {num_steps} micro-steps of a pass, because they do not make up a whole number "
        "of updates",
        where="skip_first_batches, parity='exact'",
        do="skip whole updates, or use save_state() and load_state(), which restore the position",
    )
