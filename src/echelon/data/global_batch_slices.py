"""Index arithmetic that assigns a global batch's samples to ranks and micro-steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from echelon.distributed.division import slice_range

T = TypeVar("T")


class LastStep:
    """All ranks' batch sizes in a step where they differ, or differ from the loader's, or not all samples are new."""

    __slots__ = ("batch_size", "real", "sizes")

    def __init__(self, sizes: list[int], real: list[int], batch_size: int | None = None) -> None:
        self.sizes = sizes
        """Number of samples in each rank's batch."""
        self.real = real
        """Number of new samples in each rank's batch. The remaining samples are repeated to fill the batch."""
        self.batch_size = batch_size
        """Batch size of the user's loader, if it matters to who reads this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """The plan for a pass, in the exact modes."""

    num_micro_steps: int = 1
    """Number of micro-steps per update, if the update has enough samples."""
    trains: bool = True
    """Whether this is a training pass, which balances samples across ranks. In other passes, gathered results keep the data's
    order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one rank contributes to an update in one micro-step."""

    samples: range
    """Positions of this rank's samples in the order of the pass. A rank without samples gets one padding sample."""
    is_padding: bool
    """Whether ``samples`` are padding: they belong to another contribution and have weight 0 here."""
    update: range
    """All samples in the update, across all ranks and micro-steps."""
    micro_step: int
    """Index of this micro-step in the update."""
    num_micro_steps: int
    """Number of micro-steps in the update, which is the same on every rank."""
    step: LastStep | None
    """All ranks' batch sizes in this micro-step, or None if they are equal."""
    shard: int | None = None
    """Index of the canonical shard (bitwise); None for a rank that has no shard in this micro-step, and in other modes."""
    shards: tuple[int | None, ...] = ()
    """Each rank's shard in this micro-step (bitwise); None for ranks without samples."""

    @property
    def num_items(self) -> int:
        """Weight, in samples."""
        return 0 if self.is_padding else len(self.samples)

    @property
    def ends_update(self) -> bool:
        """Whether this is the last micro-step of the update."""
        return self.micro_step == self.num_micro_steps - 1

    @property
    def next_position(self) -> int:
        """Position where a pass that stops here resumes. An incomplete update is repeated."""
        return self.update.stop if self.ends_update else self.update.start

    def shifted(self, by: int) -> Contribution:
        """Return a copy whose positions are shifted by ``by``."""
        return replace(
            self,
            samples=range(self.samples.start + by, self.samples.stop + by),
            update=range(self.update.start + by, self.update.stop + by),
        )


def num_micro_steps(num_samples: int, *, world_size: int, wanted: int, max_micro_batch_size: int | None) -> int:
    """Return the number of micro-steps for an update of ``num_samples`` samples, which is the same on every rank.

    Args:
        num_samples: size of the global batch, at least 1.
        wanted: the requested number of gradient accumulation steps.
        max_micro_batch_size: maximum number of samples on one rank in one micro-step; None means unlimited.
    """
    largest = -(-num_samples // world_size)
    needed = 1 if max_micro_batch_size is None else -(-largest // max_micro_batch_size)
    return min(max(wanted, needed), largest)


def join_small_batches(
    batches: Iterator[T], join: Callable[[T, T], T], *, smallest: int, size: Callable[[T], int]
) -> Iterator[T]:
    """Join adjacent ``batches`` until each has at least ``smallest`` samples. A short remainder joins the previous batch."""
    whole: list[T] = []  # at most one batch, held back because a short rest may follow
    short: list[T] = []
    for batch in batches:
        batch = join(short.pop(), batch) if short else batch
        if size(batch) < smallest:
            short = [batch]
            continue
        yield from whole
        whole = [batch]
    if whole and short:
        yield join(whole[0], short[0])
    else:
        yield from whole or short


def contributions(
    update: range, *, rank: int, world_size: int, num_micro: int, by_rank: bool = True
) -> Iterator[Contribution]:
    """Split the global batch ``update``, and yield what ``rank`` contributes in each micro-step.

    Args:
        update: the positions of its samples, at least one.
        num_micro: number of micro-steps, at most ``ceil(len(update) / world_size)``.
        by_rank: whether to split the batch across ranks first and then into micro-steps, so that the ranks' totals differ by
            at most one sample. Otherwise, it is split into micro-steps first, so that results gathered after each step keep
            the data's order.
    """
    for micro in range(num_micro):
        if by_rank:
            mine = slice_range(slice_range(update, num_parts=world_size, part=rank), num_parts=num_micro, part=micro)
            size, extra = divmod(len(update), world_size)  # the first `extra` ranks have one more sample
            counts = tuple(len(slice_range(range(n), num_parts=num_micro, part=micro)) for n in (size + 1, size))
        else:
            piece = slice_range(update, num_parts=num_micro, part=micro)
            mine = slice_range(piece, num_parts=world_size, part=rank)
            size, extra = divmod(len(piece), world_size)
            counts = (size + 1, size)
        step = None
        if extra and counts[0] != counts[1]:
            real = [counts[0]] * extra + [counts[1]] * (world_size - extra)
            step = LastStep([count or 1 for count in real], real)
        yield Contribution(
            samples=mine or update[:1],
            is_padding=not mine,
            update=update,
            micro_step=micro,
            num_micro_steps=num_micro,
            step=step,
        )


def shards_of(rank: int, *, world_size: int, num_shards: int) -> range:
    """Return the canonical shards assigned to ``rank``."""
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def canonical_contributions(
    update: range, *, rank: int, world_size: int, num_shards: int, by_rank: bool = True
) -> Iterator[Contribution]:
    """Split the global batch ``update`` into canonical shards, and yield the shard that ``rank`` processes in each micro-step.

    The shards do not depend on the number of ranks. Every rank runs the same number of micro-steps. If a rank has no shard in
    a micro-step, or an empty shard, it gets a padding sample.

    Args:
        num_shards: at least ``world_size``.
        by_rank: whether each rank gets adjacent shards, which it can add up. Otherwise, each micro-step gets adjacent shards,
            so that results gathered after each step keep the data's order.
    """
    owned: list[Sequence[int]] = [
        shards_of(r, world_size=world_size, num_shards=num_shards) if by_rank else range(r, num_shards, world_size)
        for r in range(world_size)
    ]
    num_micro = -(-num_shards // world_size)
    for micro in range(num_micro):
        shards = [own[micro] if micro < len(own) else None for own in owned]
        pieces = [
            range(0) if shard is None else slice_range(update, num_parts=num_shards, part=shard) for shard in shards
        ]
        mine, real = pieces[rank], list(map(len, pieces))
        yield Contribution(
            samples=mine or update[:1],
            is_padding=not mine,
            update=update,
            micro_step=micro,
            num_micro_steps=num_micro,
            step=None if len(set(real)) == 1 and real[0] else LastStep([count or 1 for count in real], real),
            shard=shards[rank],
            shards=tuple(shard if num else None for shard, num in zip(shards, real)),
        )
