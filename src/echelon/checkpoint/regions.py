"""Parts of tensors as boxes in a global shape: which rank writes each, and which to read to fill another box.

A rank holds boxes, a checkpoint holds boxes, and a loading rank reads boxes, whatever engine and number of ranks made them.
``torch.distributed.checkpoint``'s planners compute the same on objects with file formats and pickled metadata; here it is
arithmetic on integers, which are exchanged as JSON and tested without processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.base.errors import CheckpointError, DesyncError
from echelon.base.sharded import is_dtensor, local_shape_and_offset
from echelon.checkpoint.tensor_file import itemsize

__all__ = [
    "ChunkBounds",
    "Chunk",
    "Overlap",
    "ShardPart",
    "LocalShard",
    "TensorLayout",
    "box_of",
    "overlaps",
    "assign_writers",
    "uncovered",
]


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """A part of a tensor: ``offset[d] <= index < offset[d] + lengths[d]`` in every dimension."""

    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Return the number of elements."""
        return math.prod(self.lengths)

    @staticmethod
    def whole(shape: Sequence[int]) -> ChunkBounds:
        """Return the box of a whole tensor."""
        return ChunkBounds((0,) * len(shape), tuple(shape))

    def common(self, other: ChunkBounds) -> ChunkBounds | None:
        """Return the intersection; None when it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.lengths, other.offset, other.lengths)]
        lengths = tuple(end - start for start, end in zip(offset, ends))
        return None if any(length <= 0 for length in lengths) else ChunkBounds(offset, lengths)

    def within(self, outer: ChunkBounds) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds ``outer``."""
        starts = [own - base for own, base in zip(self.offset, outer.offset)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.lengths))


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One rank's part of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: ChunkBounds


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the rank whose file holds it."""

    rank: int
    box: ChunkBounds


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor in a checkpoint: every element is in one chunk."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The intersection of a chunk and a wanted box: copy ``source`` of the chunk to ``target`` of the box."""

    chunk: Chunk
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A rank's part of a tensor, for state that is not a DTensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor


def box_of(tensor: torch.Tensor | ShardPart) -> tuple[tuple[int, ...], ChunkBounds, torch.Tensor]:
    """Return the global shape of ``tensor``, this rank's box of it, and its values (sharing their memory).

    Raises:
        CheckpointError: a DTensor that is neither sharded into boxes nor replicated.
    """
    if isinstance(tensor, ShardPart):
        return tensor.shape, ChunkBounds(tensor.offset, tuple(tensor.values.shape)), tensor.values.detach()
    if not is_dtensor(tensor):
        return tuple(tensor.shape), ChunkBounds.whole(tensor.shape), tensor.detach()
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - who has a DTensor has loaded it

    others = [placement for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
    if others:
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} is placed as {others[0]}: this rank's part of it is not a box",
            do="redistribute it to Shard or Replicate before saving",
        )
    local = tensor.to_local().detach()
    lengths, offset = local_shape_and_offset(tensor)
    assert tuple(local.shape) == lengths, (local.shape, lengths)
    return tuple(tensor.shape), ChunkBounds(offset, lengths), local


def assign_writers(pieces: Mapping[int, Iterable[LocalShard]]) -> dict[str, TensorLayout]:
    """Decide which rank writes which box, each once: of replicas, the rank with the least to write.

    Args:
        pieces: of each rank; equal on all ranks, so that all decide the same.

    Raises:
        DesyncError: ranks disagree about the shape or dtype of a tensor.
        CheckpointError: the boxes of a tensor overlap, or do not cover it.
    """
    first: dict[str, tuple[int, LocalShard]] = {}
    holders: dict[tuple[str, ChunkBounds], list[int]] = {}
    for rank, own in sorted(pieces.items()):
        for piece in own:
            known_rank, known = first.setdefault(piece.name, (rank, piece))
            if (known.dtype, known.shape) != (piece.dtype, piece.shape):
                raise DesyncError(
                    f"the tensor {piece.name} is {known.dtype} {list(known.shape)} on rank {known_rank} and "
                    f"{piece.dtype} {list(piece.shape)} on rank {rank}",
                    do="give every rank the same model and optimizer",
                )
            if piece.box.volume:  # ranks with an empty part do not hold it
                holders.setdefault((piece.name, piece.box), []).append(rank)

    def num_bytes(item: tuple[tuple[str, ChunkBounds], list[int]]) -> int:
        (name, box), _ = item
        return box.volume * itemsize(first[name][1].dtype)

    load = dict.fromkeys(pieces, 0)
    chunks: dict[str, list[Chunk]] = {name: [] for name in first}
    # First the boxes of a single rank, then the largest: the rest balances the load.
    for item in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -num_bytes(item))):
        (name, box), ranks = item
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += num_bytes(item)
        chunks[name].append(Chunk(writer, box))
    layouts = {}
    for name, (_, piece) in sorted(first.items()):
        ordered = tuple(sorted(chunks[name], key=lambda chunk: (chunk.box.offset, chunk.rank)))
        layouts[name] = TensorLayout(piece.dtype, piece.shape, ordered)
        problem = uncovered(layouts[name])
        if problem is not None:
            raise CheckpointError(
                f"the tensor {name} of shape {list(piece.shape)} cannot be saved: {problem}",
                do="save on all ranks, the same state on each; to save on each machine, every machine must have all of it",
            )
    return layouts


def uncovered(layout: TensorLayout) -> str | None:
    """Return the problem if the chunks do not hold every element exactly once, else None."""
    shape = ChunkBounds.whole(layout.shape)
    boxes = [chunk.box for chunk in layout.chunks]
    for box in boxes:
        if len(box.offset) != len(layout.shape) or box.common(shape) != box:
            return f"the box at {list(box.offset)} of {list(box.lengths)} is not inside it"
    # A sweep along the dimension with the most cuts: only boxes crossed at the same time can overlap.
    dims = range(len(layout.shape))
    cut = max(dims, key=lambda dim: len({box.offset[dim] for box in boxes}), default=None)
    crossed: list[ChunkBounds] = []
    for box in boxes if cut is None else sorted(boxes, key=lambda box: box.offset[cut]):
        if cut is not None:
            crossed = [other for other in crossed if other.offset[cut] + other.lengths[cut] > box.offset[cut]]
        if any(other.common(box) is not None for other in crossed):
            return f"the box at {list(box.offset)} of {list(box.lengths)} overlaps another one"
        crossed.append(box)
    held = sum(box.volume for box in boxes)
    return None if held == shape.volume else f"{held} of its {shape.volume} elements are covered"


def overlaps(layout: TensorLayout, box: ChunkBounds) -> Iterator[Overlap]:
    """Yield the intersection of each chunk with ``box``; together they cover it."""
    for chunk in layout.chunks:
        common = chunk.box.common(box)
        if common is not None:
            yield Overlap(chunk, common.within(chunk.box), common.within(box))
