"""One rank's batch sampler, which yields every ``world_size``-th batch or a slice of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler

from echelon.data.batch import require_divisible
from echelon.data.global_batch_slices import LastStep
from echelon.data.sharding.sample_order import SharedBatches
from echelon.distributed.checks.already_sharded import set_epoch
from echelon.distributed.division import real_sizes, share_sizes


class RankBatchSampler(BatchSampler):
    """Yields one rank's batches. The arguments are those of Accelerate's ``BatchSamplerShard``.

    Whole batches (``split_batches=False``): rank ``r`` gets batches ``r``, ``r + W``, ``r + 2 * W``, ... With
    ``even_batches``, the last step is filled with the first samples of the pass; otherwise, some ranks get no batch in it.
    Split batches: each rank gets a slice of each batch. With ``even_batches``, a short last batch is filled in the same way;
    otherwise, it is split as evenly as possible.

    Only the end of the pass shows which step is the last. Earlier batches of a different size (such as the short
    batch at the end of each bucket) are yielded as they are. If a batch is split and a rank's share is one sample short, the share
    repeats a sample of the same batch (with ``even_batches``, or if the share would be empty).

    Source: accelerate's BatchSamplerShard, which splits a short last batch differently: it fills the first ranks' slices.

    Args:
        batch_sampler: the batches for all ranks. Its ``batch_size`` is None or missing if batch sizes vary.
        even_batches: whether to fill the last step.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        # BatchSampler.__init__ is not called, because another batch sampler draws the batches.
        batch_size: int | None = getattr(batch_sampler, "batch_size", None)
        if split_batches:
            require_divisible(batch_size, num_processes)
        self.batches = batch_sampler
        """Batches of all ranks."""
        self.batch_size = batch_size  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.num_processes = num_processes
        self.process_index = process_index
        self.even_batches = even_batches
        self.split_batches = split_batches
        self.last_step: LastStep | None = None
        """Batch sizes in the last step of a completed pass, or None if every rank had a full batch of new samples."""
        self.uneven: dict[int, LastStep] = {}
        """Batch sizes in those steps of the latest pass, except the last, that have not one full batch of new samples per rank.

        They are known before the step's batch is read. Each pass has its own."""
        self.divides_last_step = False
        """Whether to divide the samples in an incomplete last step evenly, so that no batch mixes new and repeated samples."""

    @property
    def batch_sampler(self) -> Any:
        """The user's batch sampler."""
        return self.batches.batches if isinstance(self.batches, SharedBatches) else self.batches

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler that the user's batch sampler wraps, or None if it has no sampler."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """Number of batches across all ranks."""
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler."""
        set_epoch(epoch, self.batches, getattr(self.batches, "sampler", None))

    def __len__(self) -> int:
        total = len(self.batches)
        if self.divides_last_step:
            return self._num_divided_steps()
        if self.split_batches:
            # If the last batch, whose size is unknown here, has fewer samples than ranks, the last ranks make one step fewer.
            return total
        whole, rest = divmod(total, self.num_processes)
        if rest == 0 or self.drop_last:
            return whole
        return whole + 1 if self.even_batches or self.process_index < rest else whole

    def step_sizes(self, start: int) -> Iterator[LastStep | None]:
        """Yield all ranks' batch sizes in each step from step ``start`` of a pass on, if they are in ``uneven``.

        The first ones may be read once the pass has begun, each of them after its step's batch.
        """
        uneven = self.uneven
        for number in count(start):
            yield uneven.get(number)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator function, so that nested passes have separate facts.
        self.last_step, self.uneven = None, {}
        return self._split(self.uneven) if self.split_batches else self._steps(self.uneven)

    def _steps(self, uneven: dict[int, LastStep]) -> Iterator[list[int]]:
        first: list[list[int]] = []
        step: list[list[int]] = []
        number = 0
        for batch in self.batches:
            if len(step) == self.num_processes:  # a step with a short batch was not the last one
                yield self._own_batch(step, number, uneven)
                number, step = number + 1, []
            if len(first) < self.num_processes:
                first.append(batch)
            step.append(batch)
            if len(step) == self.num_processes and all(map(self._is_full, step)):
                yield self._own_batch(step, number, uneven)
                number, step = number + 1, []
        if not step or (self.drop_last and len(step) < self.num_processes):
            return
        if self.divides_last_step:
            yield from self._divided(list(chain.from_iterable(step)), first)
            return
        real = [len(batch) for batch in step] + [0] * (self.num_processes - len(step))
        if self.even_batches:
            step = self._fill(step, first)
        self.last_step = LastStep([len(batch) for batch in step] + [0] * (self.num_processes - len(step)), real)
        if self.process_index < len(step):
            yield step[self.process_index]

    def _own_batch(self, step: list[list[int]], number: int, uneven: dict[int, LastStep]) -> list[int]:
        sizes = [len(batch) for batch in step]
        if len({*sizes, self.batch_size or sizes[0]}) > 1:
            uneven[number] = LastStep(sizes, sizes)
        return step[self.process_index]

    def _is_full(self, batch: list[int]) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size

    def _fill(self, step: list[list[int]], first: list[list[int]]) -> list[list[int]]:
        """Fill the last step with the first samples or, if there is no batch size, with the first batches."""
        if self.batch_size is None:
            return [*step, *islice(cycle(first), self.num_processes - len(step))]
        again = cycle([index for batch in first for index in batch])
        filled = [[*batch, *islice(again, max(self.batch_size - len(batch), 0))] for batch in step]
        return filled + [list(islice(again, self.batch_size)) for _ in range(self.num_processes - len(step))]

    def _divided(self, samples: list[int], first: list[list[int]]) -> Iterator[list[int]]:
        """Yield equal parts of ``samples``, then a step of one sample for each of the first ranks.

        In the second step, the other ranks get a repeated sample, because each rank must have a batch.
        """
        ranks = self.num_processes
        size, rest = divmod(len(samples), ranks)
        if size:
            self.last_step = LastStep([size] * ranks, [size] * ranks)
            yield samples[self.process_index * size :][:size]
        if rest:
            self.last_step = LastStep([1] * ranks, [1] * rest + [0] * (ranks - rest))
            yield [[*samples[-rest:], *([first[0][0]] * ranks)][self.process_index]]

    def divide_last_step(self) -> bool:
        """Set ``divides_last_step``. Return whether this changes the next pass."""
        if self.divides_last_step or self.drop_last or not self.even_batches or self._last_step_size() in (None, 0):
            return False
        self.divides_last_step = True
        return True

    def _last_step_size(self) -> int | None:
        """Return the number of samples in an incomplete last step, or None if it is unknown."""
        try:
            # others may have short batches
            is_known = self.batch_size is not None and type(self.batches) is BatchSampler
            return len(self.sampler) % self._samples_per_step() if is_known else None
        except TypeError:
            return None

    def _samples_per_step(self) -> int:
        return self.batch_size * (1 if self.split_batches else self.num_processes)

    def _num_divided_steps(self) -> int:
        size, rest = divmod(self._last_step_size() or 0, self.num_processes)
        return len(self.sampler) // self._samples_per_step() + bool(size) + bool(rest)

    def _split(self, uneven: dict[int, LastStep]) -> Iterator[list[int]]:
        assert self.batch_size is not None
        piece = self.batch_size // self.num_processes
        first: list[int] = []
        other: list[int] | None = None  # a batch of another size: the next one shows that it was not the last
        number = 0
        for batch in self.batches:
            first = first or batch
            if other is not None:
                uneven[number] = self._shares(other, fills=self.even_batches or len(other) < self.num_processes)
                yield self._own(other, uneven[number].sizes)
                number, other = number + 1, None
            if len(batch) != self.batch_size:
                other = batch
                continue
            yield batch[self.process_index * piece : (self.process_index + 1) * piece]
            number += 1
        if other is None:
            return
        if self.divides_last_step:
            yield from self._divided(other, [first])
            return
        if self.even_batches and len(other) < self.batch_size:
            self.last_step = LastStep([piece] * self.num_processes, real_sizes(len(other), piece, self.num_processes))
            other = [*other, *islice(cycle(first), self.batch_size - len(other))]
        else:
            self.last_step = self._shares(other, fills=False)
        own = self._own(other, self.last_step.sizes)
        if own:
            yield own

    def _shares(self, batch: list[int], *, fills: bool) -> LastStep:
        """Return all ranks' shares of a ``batch``, which are equal if it ``fills`` short ones, so that no rank has none."""
        real = share_sizes(len(batch), self.num_processes)
        if not fills or len(set(real)) == 1:
            return LastStep(real, real)
        return LastStep([real[0]] * self.num_processes, real_sizes(len(batch), real[0], self.num_processes))

    def _own(self, batch: list[int], sizes: list[int]) -> list[int]:
        """Return this rank's share of a ``batch``, of which the first samples are repeated if it has too few."""
        start = sum(sizes[: self.process_index])
        return [batch[at % len(batch)] for at in range(start, start + sizes[self.process_index])]
