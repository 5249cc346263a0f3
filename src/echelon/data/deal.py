"""Batches dealt to ranks: whole ones in turn, or each one cut into as many pieces as there are ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Sampler

from echelon.base.errors import UsageError
from echelon.base.protocols import SupportsSetEpoch
from echelon.data.order import SharedBatches

__all__ = ["DealtBatches", "LastStep"]


class LastStep:
    """What every rank has in the last step of a pass, when the ranks do not all have the same real samples."""

    __slots__ = ("real", "sizes")

    def __init__(self, sizes: list[int], real: list[int]) -> None:
        self.sizes = sizes
        """By rank: samples in its batch."""
        self.real = real
        """By rank: how many of them come for the first time; the others are repeated to fill the batch."""


class DealtBatches(Sampler[list[int]]):
    """The batches of one rank.

    Whole batches (``split=False``): rank r gets the batches r, r + W, r + 2 W, ...; the last round is completed with
    samples from the beginning of the pass if ``even``, else some ranks get none.
    Split batches: each batch gives every rank a piece; a short last batch is filled in the same way if ``even``, else
    cut as evenly as it goes.

    Source: accelerate's BatchSamplerShard, but for the even cut (it gives the first ranks all they can take).
    """

    def __init__(
        self, batches: Any, *, batch_size: int | None, rank: int, world_size: int, even: bool, split: bool
    ) -> None:
        if split and (batch_size is None or batch_size % world_size):
            raise UsageError(
                f"split_batches cuts every batch for {world_size} processes, and batch_size={batch_size} is not divisible",
                where="DataLoaderConfiguration(split_batches=)",
                do=f"choose a batch size that is a multiple of {world_size}, or leave split_batches out",
            )
        self.batches = batches
        """Of all ranks, in one order."""
        self.batch_size = batch_size
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self.rank = rank
        self.world_size = world_size
        self.even_batches = even
        self.split_batches = split
        self.last_step: LastStep | None = None
        """Of the pass that was read to its end; None when every rank had a batch of new samples."""

    @property
    def batch_sampler(self) -> Any:
        """The user's batch sampler."""
        return self.batches.batches if isinstance(self.batches, SharedBatches) else self.batches

    @property
    def sampler(self) -> Any:
        """The sampler below it; None when there is none."""
        return getattr(self.batch_sampler, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler below."""
        for owner in (self.batches, getattr(self.batches, "sampler", None)):
            if isinstance(owner, SupportsSetEpoch):
                owner.set_epoch(epoch)

    def __len__(self) -> int:
        total = len(self.batches)
        if self.split_batches:
            # A last batch with fewer samples than ranks leaves the last ranks a step short; its size is not known here.
            return total
        whole, rest = divmod(total, self.world_size)
        if rest == 0 or self.drop_last:
            return whole
        return whole + 1 if self.even_batches or self.rank < rest else whole

    def __iter__(self) -> Iterator[list[int]]:
        return self._pieces() if self.split_batches else self._rounds()

    def _rounds(self) -> Iterator[list[int]]:
        self.last_step = None
        first: list[list[int]] = []
        round_: list[list[int]] = []
        for batch in self.batches:
            if len(first) < self.world_size:
                first.append(batch)
            round_.append(batch)
            if len(round_) == self.world_size and self._is_full(batch):
                yield round_[self.rank]
                round_ = []
        if not round_ or (self.drop_last and len(round_) < self.world_size):
            return
        real = [len(batch) for batch in round_] + [0] * (self.world_size - len(round_))
        if self.even_batches:
            round_ = self._fill(round_, first)
        self.last_step = LastStep([len(batch) for batch in round_] + [0] * (self.world_size - len(round_)), real)
        if self.rank < len(round_):
            yield round_[self.rank]

    def _is_full(self, batch: list[int]) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size

    def _fill(self, round_: list[list[int]], first: list[list[int]]) -> list[list[int]]:
        """Complete the last round with samples (or, without a batch size, whole batches) from the beginning."""
        if self.batch_size is None:
            return [*round_, *islice(cycle(first), self.world_size - len(round_))]
        again = cycle([index for batch in first for index in batch])
        filled = [[*batch, *islice(again, self.batch_size - len(batch))] for batch in round_]
        return filled + [list(islice(again, self.batch_size)) for _ in range(self.world_size - len(round_))]

    def _pieces(self) -> Iterator[list[int]]:
        assert self.batch_size is not None
        self.last_step = None
        ranks = range(self.world_size)
        piece = self.batch_size // self.world_size
        first: list[int] = []
        for batch in self.batches:
            first = first or batch
            if len(batch) == self.batch_size:
                yield batch[self.rank * piece : (self.rank + 1) * piece]
            elif self.even_batches:
                filled = [*batch, *islice(cycle(first), self.batch_size - len(batch))]
                real = [min(max(len(batch) - r * piece, 0), piece) for r in ranks]
                self.last_step = LastStep([piece] * self.world_size, real)
                yield filled[self.rank * piece : (self.rank + 1) * piece]
            else:
                share, extra = divmod(len(batch), self.world_size)
                sizes = [share + (r < extra) for r in ranks]
                self.last_step = LastStep(sizes, sizes)
                start = sum(sizes[: self.rank])
                if sizes[self.rank]:
                    yield batch[start : start + sizes[self.rank]]
