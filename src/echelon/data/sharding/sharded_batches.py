"""One rank's batch sampler, which yields every ``world_size``-th batch or a slice of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler

from echelon.base.protocols import SupportsSetEpoch
from echelon.data.batch import require_divisible
from echelon.data.exact.global_batch_slices import LastStep
from echelon.data.sharding.sample_order import SharedBatches

__all__ = ["RankBatchSampler"]


class RankBatchSampler(BatchSampler):
    """Yields one rank's batches. The arguments are those of Accelerate's ``BatchSamplerShard``.

    Whole batches (``split_batches=False``): rank ``r`` gets batches ``r``, ``r + W``, ``r + 2 * W``, ... With
    ``even_batches``, the last step is filled with the first samples of the pass; otherwise, some ranks get no batch in it.
    Split batches: each rank gets a slice of each batch. With ``even_batches``, a short last batch is filled in the same way;
    otherwise, it is split as evenly as possible.

    Source: accelerate's BatchSamplerShard, which splits a short last batch differently: it fills the first ranks' slices.

    Args:
        batch_sampler: the batches for all ranks. Its ``batch_size`` is None or missing if batch sizes vary.
        num_processes: the number of ranks.
        process_index: the rank.
        split_batches: split each batch.
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
        for owner in (self.batches, getattr(self.batches, "sampler", None)):
            if isinstance(owner, SupportsSetEpoch):
                owner.set_epoch(epoch)

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

    def __iter__(self) -> Iterator[list[int]]:
        return self._split() if self.split_batches else self._steps()

    def _steps(self) -> Iterator[list[int]]:
        self.last_step = None
        first: list[list[int]] = []
        step: list[list[int]] = []
        for batch in self.batches:
            if len(first) < self.num_processes:
                first.append(batch)
            step.append(batch)
            if len(step) == self.num_processes and self._is_full(batch):
                yield step[self.process_index]
                step = []
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

    def _is_full(self, batch: list[int]) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size

    def _fill(self, step: list[list[int]], first: list[list[int]]) -> list[list[int]]:
        """Fill the last step with the first samples or, if there is no batch size, with the first batches."""
        if self.batch_size is None:
            return [*step, *islice(cycle(first), self.num_processes - len(step))]
        again = cycle([index for batch in first for index in batch])
        filled = [[*batch, *islice(again, self.batch_size - len(batch))] for batch in step]
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
            return None if self.batch_size is None else len(self.sampler) % self._samples_per_step()
        except TypeError:
            return None

    def _samples_per_step(self) -> int:
        return self.batch_size * (1 if self.split_batches else self.num_processes)

    def _num_divided_steps(self) -> int:
        size, rest = divmod(self._last_step_size() or 0, self.num_processes)
        return len(self.sampler) // self._samples_per_step() + bool(size) + bool(rest)

    def _split(self) -> Iterator[list[int]]:
        assert self.batch_size is not None
        self.last_step = None
        ranks = range(self.num_processes)
        piece = self.batch_size // self.num_processes
        first: list[int] = []
        for batch in self.batches:
            first = first or batch
            if len(batch) == self.batch_size:
                yield batch[self.process_index * piece : (self.process_index + 1) * piece]
            elif self.divides_last_step:
                yield from self._divided(batch, [first])
            elif self.even_batches:
                filled = [*batch, *islice(cycle(first), self.batch_size - len(batch))]
                real = [min(max(len(batch) - r * piece, 0), piece) for r in ranks]
                self.last_step = LastStep([piece] * self.num_processes, real)
                yield filled[self.process_index * piece : (self.process_index + 1) * piece]
            else:
                share, extra = divmod(len(batch), self.num_processes)
                sizes = [share + (r < extra) for r in ranks]
                self.last_step = LastStep(sizes, sizes)
                start = sum(sizes[: self.process_index])
                if sizes[self.process_index]:
                    yield batch[start : start + sizes[self.process_index]]
