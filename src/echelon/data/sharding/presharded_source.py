"""A loader of one rank's shard. Each rank reads its own, and the ranks agree on when a pass ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.data.active_loaders import LoaderOptions
from echelon.data.batch import num_samples
from echelon.data.data_facts import DataFacts
from echelon.data.global_batch_slices import LastStep, PassPlan
from echelon.data.sharding.batch_source import BatchSource, PlainSource, Steps, batches_of
from echelon.distributed.checks.already_sharded import SamplerEpochs, samplers_of
from echelon.distributed.checks.loader_agreement import LoaderAgreement, LoaderFacts
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World


class PreshardedSource(BatchSource):
    """A loader whose sampler, batch sampler or dataset yields this rank's own shard, by itself or by the dataset's ``shard``.

    The ranks exchange the lengths of their samplers once per pass, or the size of each batch if the lengths are unknown. With ``even``, a rank that has fewer batches than others repeats its first batch.

    Collective: call on every rank in each pass, and in each step if lengths are unknown.
    """

    reads_own_shard = True

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World,
        agreement: LoaderAgreement,
        options: LoaderOptions,
    ) -> None:
        self._plain = PlainSource(loader, options=options)
        self.inner, self.order, self.workers = self._plain.inner, self._plain.order, self._plain.workers
        self.batch_size = self._plain.batch_size
        self._samplers_with_epoch = SamplerEpochs(loader).samplers
        self.even = options.even_batches
        self._world = world
        self._processes = agreement.processes
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self.drop_last = any(facts.drop_last for facts in agreement.parts)
        are_known = all(min(facts.num_drawn, facts.batch_size) >= 0 for facts in agreement.parts)
        self._shards = agreement.parts if self._processes and are_known else None
        """All ranks' shards in a pass, in batches of equal size of which the last may be shorter or dropped; None if unknown."""

    def dataset_length(self, dataset: Any) -> int:
        """Return the number of distinct samples across all ranks if the shards are known, else in this rank's dataset."""
        if self._shards is None:
            return len(dataset)
        return sum(shard.num_drawn - shard.num_repeated for shard in self._shards)

    def facts_elsewhere(self) -> DataFacts | None:
        # rank zero has another shard
        return None if self._world.is_rank_zero else DataFacts(batch_size=self.batch_size)

    def owners_of_epoch(self, original: DataLoader[Any]) -> tuple[Any, ...]:
        return (*samplers_of(self.inner), *self._samplers_with_epoch, self.inner.dataset)

    def steps(self, skip: int) -> Steps:
        self._plain.resumes, self.resumes = self.resumes, False
        if not self._processes:  # there are no other ranks
            return self._plain.steps(skip)
        if self._shards is None:
            num_unused = skip if self._is_iterable else 0
            batches = (batch for batch, _ in self._plain.steps(skip - num_unused))
            return islice(self._unknown_steps(batches), num_unused, None)
        return self._known_steps(skip)

    def _unknown_steps(self, batches: Iterator[Any]) -> Steps:
        """Yield the steps of a pass in which the number of batches on other ranks is unknown.

        In each step, ranks exchange the sizes of their next batches, which takes a few bytes. With ``drop_last``, all ranks end
        when the first rank runs out of batches. With ``even``, a rank that runs out of batches repeats its first batch until all
        ranks have run out. Otherwise, each rank ends separately, and only the first ones to end have ``ended_early``.

        Collective: call on every rank in each step, until a rank has ended.

        Raises:
            UsageError: with ``even``, a rank has no batch to repeat.
        """
        self.ended_early = False
        rank, num_ranks = self._world.rank, self._world.world_size
        first: Any = _NONE
        all_read = True
        while True:
            batch = next(batches, _NONE)
            if first is _NONE:
                first = batch
            size = _num_samples(batch)
            if not all_read:
                if batch is _NONE:
                    return
                own = [size if other == rank else 0 for other in range(num_ranks)]  # every other rank has ended
                yield batch, LastStep(own, own)
                continue
            real, again = gather_counts(size, _num_samples(first), group=self._world.group)
            if max(real) == 0 or (self.drop_last and min(real) == 0):
                return
            if min(real) > 0 or not self.even:
                all_read = min(real) > 0
                if batch is _NONE:
                    self.ended_early = True
                    return
                is_full = len(set(real)) == 1 and real[0] == (self.batch_size or real[0])
                yield batch, None if is_full else LastStep(real, real)
                continue
            if min(again) == 0:
                raise UsageError(
                    f"rank {again.index(0)} has no samples in its shards of the dataset, but other ranks do",
                    do="pass DataLoaderConfiguration(dispatch_batches=True), or use a dataset without empty shards",
                )
            sizes = [have or repeat for have, repeat in zip(real, again)]
            yield first if batch is _NONE else batch, LastStep(sizes, real)

    def _known_steps(self, skip: int) -> Iterator[tuple[Any, LastStep | None]]:
        shards = self._shards = self._agree_on_lengths()
        behind, self.num_behind = self.num_behind, 0
        skip += behind
        # A rank that repeats a batch repeats the first one that it reads.
        counts = list(map(_num_batches, shards))
        own_count = counts[self._world.rank]
        first_read = [max(min(skip, count - 1), 0) for count in counts]
        batches = (batch for batch, _ in self._plain.steps(0 if behind else first_read[self._world.rank]))
        first: Any = _NONE
        if behind and behind >= own_count:
            raise UsageError(
                f"cannot resume the pass after {behind} steps, because rank {self._world.rank} had already read its "
                "entire shard",
                where="use_stateful_dataloader=True",
                do="save earlier in the pass or at its end, or give every rank the same number of samples",
            )
        end = self._num_steps(shards)
        for step in range(first_read[self._world.rank], end):
            batch = next(batches, _NONE)
            first = batch if first is _NONE else first
            if batch is _NONE and step < own_count:
                raise UsageError(
                    f"the sampler of rank {self._world.rank} yielded {step} batches in this pass, but its length implies "
                    f"{own_count}",
                    where="the prepared DataLoader",
                    do="make the sampler's __len__ return the number of samples that it yields",
                )
            if step < skip:
                continue
            real = [_num_new(shard, step) for shard in shards]
            sizes = [
                _size(shard, step) or (_size(shard, again) if self.even else 0)
                for shard, again in zip(shards, first_read)
            ]
            is_full = sizes == real == [shard.batch_size for shard in shards]
            yield first if batch is _NONE else batch, None if is_full else LastStep(sizes, real)
        self.ended_early = not self.drop_last and end < max(counts)
        if end == own_count and next(batches, _NONE) is not _NONE:
            warn(
                _(
                    "the sampler of rank {rank} yields more samples than its length; the extra samples are dropped, "
                    "because the ranks have agreed on the length",
                    rank=self._world.rank,
                )
            )

    def _agree_on_lengths(self) -> list[LoaderFacts]:
        """Return the shards for this pass, whose lengths may differ from those in the previous pass. Collective."""
        assert self._shards is not None
        (numbers,) = gather_counts(len(batches_of(self.inner).sampler))
        return [replace(shard, num_drawn=numbers[process]) for process, shard in zip(self._processes, self._shards)]

    def _num_steps(self, shards: list[LoaderFacts]) -> int:
        """Return the number of steps on this rank.

        Raises:
            UsageError: with ``even``, a rank has no batch to repeat.
        """
        counts = list(map(_num_batches, shards))
        if self.drop_last:
            return min(counts)
        if not self.even:
            return counts[self._world.rank]
        if min(counts) == 0 < max(counts):
            raise UsageError(
                f"rank {counts.index(0)} has no samples in its shard, but other ranks do",
                where="the prepared DataLoader",
                do="make sure that every rank has samples, or pass already_sharded=False to let echelon shard the "
                "loader",
            )
        return max(counts)

    def num_steps(self, plan: PassPlan) -> int:
        return len(self.inner) if self._shards is None else self._num_steps(self._shards)


def _num_batches(shard: LoaderFacts) -> int:
    whole, rest = divmod(shard.num_drawn, shard.batch_size)
    return whole + (rest > 0 and not shard.drop_last)


def _size(shard: LoaderFacts, batch: int) -> int:
    """Return the number of samples in a batch, or 0 after the last batch."""
    if batch >= _num_batches(shard):
        return 0
    return min(shard.batch_size, shard.num_drawn - batch * shard.batch_size)


def _num_new(shard: LoaderFacts, batch: int) -> int:
    """Return the number of samples in a batch that are not repeated."""
    is_last = (batch + 1) * shard.batch_size >= shard.num_drawn
    return max(_size(shard, batch) - (shard.num_repeated if is_last else 0), 0)


def _num_samples(batch: Any) -> int:
    return 0 if batch is _NONE else (num_samples(batch) or 1)


_NONE: Any = object()
