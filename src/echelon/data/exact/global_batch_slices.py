"""Which samples of a global batch belong to which rank and micro-step: index arithmetic, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

__all__ = [
    "Contribution",
    "LastStep",
    "canonical_contributions",
    "contributions",
    "joined",
    "num_micro_steps",
    "share",
    "shards_of",
]

T = TypeVar("T")


class LastStep:
    """What every rank has in a step, when the ranks do not all have the same real samples."""

    __slots__ = ("real", "sizes")

    def __init__(self, sizes: list[int], real: list[int]) -> None:
        self.sizes = sizes
        """By rank: samples in its batch."""
        self.real = real
        """By rank: how many of them come for the first time; the others are repeated to fill the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What this rank brings to an update in one micro-step, and what all of them bring together."""

    samples: range
    """Of this rank, as positions in the order of the pass. A rank without any has one of the same update on loan."""
    is_padding: bool
    """The samples are another contribution's: they weigh nothing."""
    update: range
    """All samples of the update, of all ranks and micro-steps."""
    micro_step: int
    """Its number in the update."""
    num_micro_steps: int
    """Of the update: the same on every rank."""
    step: LastStep | None
    """What every rank has in this micro-step; None when all have equally many."""
    shard: int | None = None
    """Which of the canonical shards it is (bitwise); None also for a rank that has fewer shards than others."""
    shards: tuple[int | None, ...] = ()
    """By rank: the shards of this micro-step that have samples (bitwise)."""

    @property
    def num_items(self) -> int:
        """The weight, in samples."""
        return 0 if self.is_padding else len(self.samples)

    @property
    def ends_update(self) -> bool:
        """Is this the last micro-step of the update?"""
        return self.micro_step == self.num_micro_steps - 1

    @property
    def next_position(self) -> int:
        """Where a pass goes on that stops here: half an update is not kept."""
        return self.update.stop if self.ends_update else self.update.start

    def shifted(self, by: int) -> Contribution:
        """Return it as one of a stream in which ``by`` samples came before."""
        return replace(
            self,
            samples=range(self.samples.start + by, self.samples.stop + by),
            update=range(self.update.start + by, self.update.stop + by),
        )


def share(samples: range, *, num_parts: int, part: int) -> range:
    """Return the contiguous piece ``part`` of ``samples``; sizes differ by one at most, and the first pieces are larger."""
    size, extra = divmod(len(samples), num_parts)
    start = samples.start + part * size + min(part, extra)
    return range(start, start + size + (part < extra))


def num_micro_steps(num_samples: int, *, world_size: int, wanted: int, max_micro_batch_size: int | None) -> int:
    """Return into how many micro-steps an update of ``num_samples`` is cut: the same number on every rank.

    Args:
        num_samples: of the global batch, at least 1.
        world_size: the number of ranks.
        wanted: the gradient accumulation steps that the user asked for.
        max_micro_batch_size: samples of one rank in one micro-step; None: any number.
    """
    largest = -(-num_samples // world_size)
    needed = 1 if max_micro_batch_size is None else -(-largest // max_micro_batch_size)
    return min(max(wanted, needed), largest)


def joined(batches: Iterator[T], join: Callable[[T, T], T], *, smallest: int, size: Callable[[T], int]) -> Iterator[T]:
    """Join neighbours among ``batches`` until each has ``smallest`` samples; a short rest goes to the one before it."""
    whole: list[T] = []  # at most one: a short rest may follow
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
    """Cut the global batch ``update`` for ``rank``: one entry for each micro-step.

    Args:
        update: the positions of its samples, at least one.
        rank: this one.
        world_size: the number of ranks.
        num_micro: micro-steps, at most ``ceil(len(update) / world_size)``.
        by_rank: each rank has one contiguous slice of the batch, cut again for the micro-steps, so that shares differ by
            one sample at most. False: each micro-step has one contiguous slice, cut for the ranks, so that results that
            are gathered step by step come in the order of the data.
    """
    for micro in range(num_micro):
        if by_rank:
            mine = share(share(update, num_parts=world_size, part=rank), num_parts=num_micro, part=micro)
            size, extra = divmod(len(update), world_size)  # `extra` ranks have one more
            counts = (_size(size + 1, num_micro, micro), _size(size, num_micro, micro))
        else:
            piece = share(update, num_parts=num_micro, part=micro)
            mine = share(piece, num_parts=world_size, part=rank)
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
    """Return the canonical shards of ``rank``."""
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def canonical_contributions(
    update: range, *, rank: int, world_size: int, num_shards: int, by_rank: bool = True
) -> Iterator[Contribution]:
    """Cut the global batch ``update`` into canonical shards, and yield those of ``rank``: one for each micro-step.

    The shards do not depend on the number of ranks. Every rank makes equally many micro-steps: one with fewer shards
    than others, or with one that has no samples, has a sample on loan.

    Args:
        update: the positions of its samples, at least one.
        rank: this one.
        world_size: the number of ranks.
        num_shards: at least ``world_size``.
        by_rank: each rank has neighbouring shards, which it can add up. False: each micro-step has neighbouring shards, so
            that results that are gathered step by step come in the order of the data.
    """
    owned: list[Sequence[int]] = [
        shards_of(r, world_size=world_size, num_shards=num_shards) if by_rank else range(r, num_shards, world_size)
        for r in range(world_size)
    ]
    num_micro = -(-num_shards // world_size)
    for micro in range(num_micro):
        real = [_size(len(update), num_shards, own[micro]) if micro < len(own) else 0 for own in owned]
        shard = owned[rank][micro] if micro < len(owned[rank]) else None
        mine = range(0) if shard is None else share(update, num_parts=num_shards, part=shard)
        yield Contribution(
            samples=mine or update[:1],
            is_padding=not mine,
            update=update,
            micro_step=micro,
            num_micro_steps=num_micro,
            step=None if len(set(real)) == 1 and real[0] else LastStep([count or 1 for count in real], real),
            shard=shard,
            shards=tuple(own[micro] if num else None for own, num in zip(owned, real)),
        )


def _size(num_samples: int, num_parts: int, part: int) -> int:
    return num_samples // num_parts + (part < num_samples % num_parts)
