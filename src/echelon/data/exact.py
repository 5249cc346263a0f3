"""``parity="exact"``: every batch of the user's loader is one global batch, cut for any number of ranks.

The order of a pass depends on (seed, epoch) only, a position in it is one integer, and nothing is repeated or dropped.
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
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsSetEpoch
from echelon.base.warnings import warn
from echelon.data.keyed import Piece
from echelon.data.lengths import length_of
from echelon.data.order import Order, SeedableRandomSampler
from echelon.data.permutation import ExplicitPermutation, FeistelPermutation, Permutation
from echelon.data.slices import Contribution, contributions, num_micro_steps

__all__ = ["ExactBatches", "ExactOptions", "GlobalOrder", "OrderKind", "PassPlan", "make_order"]

OrderKind = Literal["randperm", "feistel"]
_MANY = 50_000_000
_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOptions:
    """How the exact modes read."""

    seed: int
    """Of the run; the same on every rank."""
    order: OrderKind = "randperm"
    """How (seed, epoch) gives the order of shuffled data: an explicit permutation, or one without memory."""
    max_micro_batch_size: int | None = None
    """Samples of one rank in one forward pass; None: as many as there are."""
    replays: bool = False
    """Reach a position in iterable data without state by reading everything before it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """What a pass is for."""

    num_micro_steps: int = 1
    """Micro-steps of an update, as far as its samples go."""
    trains: bool = True
    """It is one of updates: shares are fair. Else an evaluation: results come in the order of the data."""

    def num_micro(self, num_samples: int, *, world_size: int, options: ExactOptions) -> int:
        """Return the micro-steps of a global batch of ``num_samples``."""
        return num_micro_steps(
            num_samples,
            world_size=world_size,
            wanted=self.num_micro_steps if self.trains else 1,
            max_micro_batch_size=options.max_micro_batch_size,
        )

    def num_steps(
        self, num_samples: int, batch_size: int, *, drop_last: bool, world_size: int, options: ExactOptions
    ) -> int:
        """Return the micro-steps of a pass over ``num_samples``."""
        whole, rest = divmod(num_samples, batch_size)
        steps = whole * self.num_micro(batch_size, world_size=world_size, options=options) if whole else 0
        return steps + (self.num_micro(rest, world_size=world_size, options=options) if rest and not drop_last else 0)


class GlobalOrder(ABC):
    """The global batches of a pass, from any position on."""

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[tuple[range, Sequence[int]]]:
        """Yield (positions, indices) of each global batch of pass ``epoch`` from position ``start`` on.

        Collective: where the order is drawn by a sampler of the user's.
        """

    @abstractmethod
    def num_steps(self, plan: PassPlan, *, world_size: int, options: ExactOptions) -> int:
        """Return the micro-steps of a pass.

        Raises:
            TypeError: nobody knows.
        """

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """Return what the order of the pass begun last was drawn from, beside (seed, epoch)."""

    @abstractmethod
    def pin(self, state: dict[str, Any] | None) -> None:
        """Let the next pass have the order of the one that ``state`` is of."""


def make_order(batches: Any, dataset: Any, options: ExactOptions, *, alone: bool) -> GlobalOrder:
    """Return the order that the user's batch sampler means.

    Args:
        batches: it.
        dataset: what it draws from.
        options: the seed and the kind of permutation.
        alone: one process draws for itself.
    """
    if type(batches) is BatchSampler:
        sampler: Any = batches.sampler
        shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
        if type(sampler) is SequentialSampler or (type(sampler) in (RandomSampler, SeedableRandomSampler) and shuffles):
            return _FormulaOrder(
                sampler.data_source, batches.batch_size, batches.drop_last, options if shuffles else None
            )
    return _DrawnOrder(Order(batches, seed=options.seed, seedable=True, alone=alone), dataset)


class _FormulaOrder(GlobalOrder):
    """In sequence, or ``randperm(n, generator=Generator().manual_seed(seed + epoch))``: any position is a seek away."""

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
                "%d samples are shuffled by an explicit permutation (%.1f GB a process): order='feistel' needs no memory "
                "and seeks at once",
                self._num_samples,
                4 * self._num_samples / 1e9,
            )

    def batches(self, epoch: int, start: int) -> Iterator[tuple[range, Sequence[int]]]:
        if len(self._data) != self._num_samples:
            raise UsageError(
                f"the dataset had {self._num_samples} samples when its loader was prepared, and has {len(self._data)} now",
                where="the prepared DataLoader, parity='exact'",
                do="prepare a new loader when the data changes",
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

    def num_steps(self, plan: PassPlan, *, world_size: int, options: ExactOptions) -> int:
        return plan.num_steps(
            self._num_samples, self._batch_size, drop_last=self._drop_last, world_size=world_size, options=options
        )

    def state(self) -> dict[str, Any] | None:
        return None

    def pin(self, state: dict[str, Any] | None) -> None:
        assert state is None, state


class _DrawnOrder(GlobalOrder):
    """What a sampler or batch sampler of the user's draws on rank zero; a position is found by counting."""

    def __init__(self, order: Order, dataset: Any) -> None:
        self._order = order
        self._dataset = dataset
        self._may_repeat = bool(getattr(order.sampler, "replacement", False))

    def batches(self, epoch: int, start: int) -> Iterator[tuple[range, Sequence[int]]]:
        self._order.begin()
        for owner in (self._order.batches, getattr(self._order.batches, "sampler", None)):
            if isinstance(owner, SupportsSetEpoch):
                owner.set_epoch(epoch)
        position, num_samples = 0, length_of(self._dataset)
        seen = torch.zeros(0 if self._may_repeat else max(num_samples, 0), dtype=torch.bool)
        num_repeated = 0
        for batch in self._order.batches:
            update = range(position, position + len(batch))
            position = update.stop
            if num_samples >= 0 and _are_integers(batch):
                _check_indices(batch, num_samples)
                if not self._may_repeat:
                    num_repeated += len(batch) - len(set(batch)) + int(seen[list(set(batch))].sum())
                    seen[batch] = True
            if update.start >= start and batch:
                yield update, batch
        if num_repeated:
            warn(
                f"the sampler gave {num_repeated} of {position} samples again in one pass, so the data is not used equally "
                "(set replacement=True on the sampler if that is meant)"
            )

    def num_steps(self, plan: PassPlan, *, world_size: int, options: ExactOptions) -> int:
        batches = self._order.batches
        if type(batches) is BatchSampler:
            return plan.num_steps(
                len(batches.sampler),  # type: ignore[arg-type]
                batches.batch_size,
                drop_last=batches.drop_last,
                world_size=world_size,
                options=options,
            )
        # The sizes of the user's own batches are not known before they are drawn; with fewer samples than micro-steps a
        # batch has fewer.
        size = getattr(batches, "batch_size", None) or 2**31
        return len(batches) * plan.num_micro(
            size, world_size=world_size, options=replace(options, max_micro_batch_size=None)
        )

    def state(self) -> dict[str, Any] | None:
        return self._order.state()

    def pin(self, state: dict[str, Any] | None) -> None:
        self._order.pin(state)


def _are_integers(batch: Sequence[Any]) -> bool:
    return all(type(index) is int for index in batch)


def _check_indices(batch: Sequence[int], num_samples: int) -> None:
    for index in (min(batch), max(batch)) if batch else ():
        if not 0 <= index < num_samples:
            raise UsageError(
                f"the sampler gave the index {index}, and the dataset has {num_samples} samples",
                where="the sampler of the prepared DataLoader",
                do="let it give indices from 0 to len(dataset) - 1",
            )


class ExactBatches(Sampler[Piece]):
    """The pieces of one rank, one for each micro-step, and (in ``ahead``) the contribution that each of them is."""

    def __init__(
        self, order: GlobalOrder, *, rank: int, world_size: int, options: ExactOptions, batch_size: int | None
    ) -> None:
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.options = options
        self.batch_size = batch_size
        """The user's: of all ranks together."""
        self.epoch = 0
        self.start = 0
        """The position at which the next pass begins."""
        self.plan = PassPlan()
        """Of the next pass."""
        self.ahead: deque[Contribution] = deque()
        """Of the pieces that were drawn and not yet taken: a loader with workers draws ahead."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def num_micro(self, num_samples: int, plan: PassPlan) -> int:
        """Return the micro-steps of a global batch of ``num_samples``."""
        return plan.num_micro(num_samples, world_size=self.world_size, options=self.options)

    def num_steps(self, plan: PassPlan) -> int:
        """Return the micro-steps of a pass.

        Raises:
            TypeError: nobody knows.
        """
        return self.order.num_steps(plan, world_size=self.world_size, options=self.options)

    def __len__(self) -> int:
        return self.num_steps(self.plan)

    def __iter__(self) -> Iterator[Piece]:
        self.ahead.clear()
        start, self.start = self.start, 0
        seed, epoch, plan = self.options.seed, self.epoch, self.plan
        for update, indices in self.order.batches(epoch, start):
            for one in contributions(
                update,
                rank=self.rank,
                world_size=self.world_size,
                num_micro=self.num_micro(len(update), plan),
                by_rank=plan.trains,
            ):
                self.ahead.append(one)
                first = one.samples.start - update.start
                found = list(indices[first : first + len(one.samples)])
                yield Piece(found, seed=seed, epoch=epoch, start=one.samples.start)
