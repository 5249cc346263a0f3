"""A loader that has been cut for the ranks already: each rank reads its own, and the ends are made to agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.data.exact.batch_slices import LastStep
from echelon.data.loader_agreement import Agreement
from echelon.data.sharding.batch_source import BatchSource, PlainSource, Steps, batches_of
from echelon.data.sharding.sharded_stream import read_own_shards
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World

__all__ = ["OwnPartsSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank gives in a pass: samples in batches of one size, the last one shorter or dropped."""

    num_samples: int
    batch_size: int
    drop_last: bool
    num_repeated: int
    """Of the samples, at the end, that come for the second time."""

    @property
    def num_batches(self) -> int:
        """Return the number of batches."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    def size(self, batch: int) -> int:
        """Return the number of samples of a batch; 0 after the last one."""
        if batch >= self.num_batches:
            return 0
        return min(self.batch_size, self.num_samples - batch * self.batch_size)

    def num_new(self, batch: int) -> int:
        """Return how many of them come for the first time."""
        is_last = (batch + 1) * self.batch_size >= self.num_samples
        return max(self.size(batch) - (self.num_repeated if is_last else 0), 0)


class OwnPartsSource(BatchSource):
    """A loader whose sampler, batch sampler or dataset gives this rank its own part.

    Where the ranks' samplers say how many samples they give, the ranks tell each other once a pass; else they tell the size
    of each batch (``read_own_shards``). A rank that has fewer batches than others repeats its first one if ``even``.

    Collective: each pass, and each step where nobody knows how much a rank has.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World,
        agreement: Agreement,
        even: bool,
        seed: int | None,
        seedable: bool,
        stateful: bool,
    ) -> None:
        self._plain = PlainSource(loader, seed=seed, seedable=seedable, stateful=stateful)
        self.inner, self.order, self.workers = self._plain.inner, self._plain.order, self._plain.workers
        self.even = even
        self._world = world
        self._processes = agreement.processes
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self.drop_last = any(facts.drop_last for facts in agreement.parts)
        self._parts: list[_Part] | None = None
        """As far as it is known how much each rank gives."""
        if self._processes and all(min(facts.num_drawn, facts.batch_size) >= 0 for facts in agreement.parts):
            self._parts = [
                _Part(
                    num_samples=facts.num_drawn,
                    batch_size=facts.batch_size,
                    drop_last=facts.drop_last,
                    num_repeated=facts.num_repeated,
                )
                for facts in agreement.parts
            ]

    @property
    def total_samples(self) -> int:
        """The samples of all ranks, each once; -1 when nobody knows."""
        return -1 if self._parts is None else sum(part.num_samples - part.num_repeated for part in self._parts)

    def steps(self, skip: int) -> Steps:
        self._plain.goes_on, self.goes_on = self.goes_on, False
        if not self._processes:  # nobody else is there
            return self._plain.steps(skip)
        if self._parts is None:
            num_unused = skip if self._is_iterable else 0
            batches = (batch for batch, _ in self._plain.steps(skip - num_unused))
            return islice(self._unknown_steps(batches), num_unused, None)
        return self._known_steps(skip)

    def _unknown_steps(self, batches: Iterator[Any]) -> Steps:
        self.ended_early = yield from read_own_shards(batches, even=self.even, drop_last=self.drop_last)

    def _known_steps(self, skip: int) -> Iterator[tuple[Any, LastStep | None]]:
        parts = self._parts = self._agree_again()
        me = parts[self._world.rank]
        behind, self.num_behind = self.num_behind, 0
        skip += behind
        # A rank that repeats a batch repeats the first that it reads.
        first_read = [max(min(skip, part.num_batches - 1), 0) for part in parts]
        batches = (batch for batch, _ in self._plain.steps(0 if behind else first_read[self._world.rank]))
        first: Any = _NONE
        if behind and behind >= me.num_batches:
            raise UsageError(
                f"the pass was saved after {behind} steps, in which rank {self._world.rank} had read all of its own data: it "
                "cannot begin to read there",
                where="use_stateful_dataloader=True",
                do="save earlier in the pass, or at its end, or give every rank equally many samples",
            )
        end = self._num_steps(parts)
        for step in range(first_read[self._world.rank], end):
            batch = next(batches, _NONE)
            first = batch if first is _NONE else first
            if batch is _NONE and step < me.num_batches:
                raise UsageError(
                    f"the sampler of rank {self._world.rank} gave {step} batches in this pass, and its length says {me.num_batches}",
                    where="the prepared DataLoader",
                    do="let the sampler's __len__ be the number of samples that it gives",
                )
            if step < skip:
                continue
            real = [part.num_new(step) for part in parts]
            sizes = [
                part.size(step) or (part.size(again) if self.even else 0) for part, again in zip(parts, first_read)
            ]
            is_full = len(set(sizes)) == 1 and sizes == real
            yield first if batch is _NONE else batch, None if is_full else LastStep(sizes, real)
        self.ended_early = not self.drop_last and end < max(part.num_batches for part in parts)
        if end == me.num_batches and next(batches, _NONE) is not _NONE:
            warn(
                f"the sampler of rank {self._world.rank} has more samples than its length says: they are left out, because the "
                "ranks count on it"
            )

    def _agree_again(self) -> list[_Part]:
        """Return what each rank gives in this pass: lengths may change. Collective."""
        assert self._parts is not None
        (numbers,) = gather_counts(len(batches_of(self.inner).sampler))
        return [
            _Part(
                num_samples=numbers[process],
                batch_size=part.batch_size,
                drop_last=part.drop_last,
                num_repeated=part.num_repeated,
            )
            for process, part in zip(self._processes, self._parts)
        ]

    def _num_steps(self, parts: list[_Part]) -> int:
        """Return how many steps this rank makes.

        Raises:
            UsageError: a rank has no batch at all, and ``even`` asks it to make steps.
        """
        counts = [part.num_batches for part in parts]
        if self.drop_last:
            return min(counts)
        if not self.even:
            return counts[self._world.rank]
        if min(counts) == 0 < max(counts):
            raise UsageError(
                f"rank {counts.index(0)} has no samples at all in its part of the data, and other ranks have some",
                where="the prepared DataLoader",
                do="give every rank samples, or let echelon cut the loader: leave its own cut out",
            )
        return max(counts)

    def at_end(self) -> LastStep | None:
        return None

    def num_steps(self) -> int:
        return len(self.inner) if self._parts is None else self._num_steps(self._parts)

    def set_even(self, even: bool) -> None:
        self.even = even


_NONE: Any = object()
