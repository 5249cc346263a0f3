"""Represents tensor chunks as boxes in the global shape, and determines which rank writes each box and which boxes a rank
reads.

Ranks and checkpoints both hold boxes, regardless of the engine and the number of ranks. The planners in
``torch.distributed.checkpoint`` do the same with pickled metadata. Here, boxes consist of plain integers, so ranks can
exchange them as JSON and tests can check them in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.base.errors import CheckpointError, DesyncError
from echelon.base.sharded import is_dtensor, is_strided, local_shape_and_offset
from echelon.checkpoint.tensor_file import itemsize

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """A part of a tensor: the elements with ``offset[d] <= index[d] < offset[d] + lengths[d]`` in every dimension ``d``."""

    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @staticmethod
    def whole(shape: Sequence[int]) -> ChunkBounds:
        """Return the box that covers a whole tensor."""
        return ChunkBounds((0,) * len(shape), tuple(shape))

    def common(self, other: ChunkBounds) -> ChunkBounds | None:
        """Return the intersection, or None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.lengths, other.offset, other.lengths)]
        lengths = tuple(end - start for start, end in zip(offset, ends))
        return None if any(length <= 0 for length in lengths) else ChunkBounds(offset, lengths)

    def within(self, outer: ChunkBounds) -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that contains ``outer``."""
        starts = [own - base for own, base in zip(self.offset, outer.offset)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.lengths))


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One rank's part of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: ChunkBounds
    may_differ: bool = False
    """Whether ranks that hold this box may have other values in it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box in a tensor, and the rank whose file contains it."""

    rank: int
    box: ChunkBounds


class ChunkTable(Sequence[Chunk]):
    """The chunks of a tensor. They are kept in arrays, because thousands of ranks write millions of chunks.

    Args:
        numbers: a row for each chunk: its rank, its offset and its lengths.
    """

    def __init__(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        num_dims = numbers.shape[1] // 2
        self.ranks = numbers[:, 0]
        self.offsets, self.lengths = numbers[:, 1 : 1 + num_dims], numbers[:, 1 + num_dims :]

    @staticmethod
    def of(chunks: Iterable[Chunk], num_dims: int) -> ChunkTable:
        """Return the table of ``chunks`` of a tensor with ``num_dims`` dimensions."""
        rows = [(chunk.rank, *chunk.box.offset, *chunk.box.lengths) for chunk in chunks]
        return ChunkTable(np.array(rows, dtype=np.int64).reshape(len(rows), 1 + 2 * num_dims))

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks(slice(None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkTable) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def overlapping(self, box: ChunkBounds) -> Iterator[Chunk]:
        """Yield the chunks that have elements of ``box``."""
        start, end = np.array(box.offset, np.int64), np.array(box.offset, np.int64) + np.array(box.lengths, np.int64)
        near = (self.offsets < end) & (start < self.offsets + self.lengths)
        return self._chunks(near.all(axis=1))

    def of_rank(self, rank: int) -> Iterator[Chunk]:
        """Yield the chunks in the file of ``rank``."""
        return self._chunks(self.ranks == rank)

    def rows(self, wanted: Any = slice(None)) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield the rank, the offset and the lengths of the chunks that the index ``wanted`` selects."""
        return zip(*(column[wanted].tolist() for column in (self.ranks, self.offsets, self.lengths)))

    def _chunks(self, wanted: Any) -> Iterator[Chunk]:
        for rank, offset, lengths in self.rows(wanted):
            yield Chunk(rank, ChunkBounds(tuple(offset), tuple(lengths)))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor's chunks in a checkpoint. Every element is in exactly one chunk."""

    dtype: str
    shape: tuple[int, ...]
    chunks: ChunkTable


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The part of a tensor that this rank holds, if the tensor is not a DTensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor


def box_of(tensor: torch.Tensor | ShardPart) -> tuple[tuple[int, ...], ChunkBounds, torch.Tensor]:
    """Return the global shape of ``tensor``, this rank's box, and the local values, which share memory with ``tensor``.

    Raises:
        CheckpointError: ``tensor`` is a DTensor whose local shard is not a box.
    """
    if isinstance(tensor, ShardPart):
        return tensor.shape, ChunkBounds(tensor.offset, tuple(tensor.values.shape)), tensor.values.detach()
    if not is_dtensor(tensor):
        return tuple(tensor.shape), ChunkBounds.whole(tensor.shape), tensor.detach()
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - already loaded if there is a DTensor

    others = [p for p in tensor.placements if type(p) not in (Shard, Replicate) and not is_strided(p)]
    try:
        if others:
            raise ValueError(others[0])
        lengths, offset = local_shape_and_offset(tensor)
    except ValueError as error:
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} has the placements {tensor.placements}, so this rank's shard is not "
            "a contiguous box",
            do="redistribute it to Shard or Replicate placements before saving",
        ) from error
    local = tensor.to_local().detach()
    assert tuple(local.shape) == lengths, (local.shape, lengths)
    return tuple(tensor.shape), ChunkBounds(offset, lengths), local


def assign_writers(pieces: Mapping[int, Iterable[LocalShard]]) -> dict[str, TensorLayout]:
    """Assign each box to one of the ranks that hold it, so that all ranks write similar amounts of data.

    A box that several ranks hold, and that may differ between them (buffers such as the statistics of BatchNorm), is the lowest rank's.

    Args:
        pieces: each rank's shards. Must be the same on all ranks, so that they compute the same assignment.

    Raises:
        DesyncError: ranks disagree on a tensor's shape or dtype.
        CheckpointError: a tensor's boxes overlap, or do not cover it.
    """
    first: dict[str, tuple[int, LocalShard]] = {}
    holders: dict[tuple[str, ChunkBounds], list[int]] = {}
    differing: set[str] = set()
    for rank, own in sorted(pieces.items()):
        for piece in own:
            known_rank, known = first.setdefault(piece.name, (rank, piece))
            if (known.dtype, known.shape) != (piece.dtype, piece.shape):
                raise DesyncError(
                    f"the tensor {piece.name} is {known.dtype} {list(known.shape)} on rank {known_rank}, but "
                    f"{piece.dtype} {list(piece.shape)} on rank {rank}",
                    do="create the same model and optimizer on every rank",
                )
            if piece.may_differ:
                differing.add(piece.name)
            if piece.box.volume:  # a rank with an empty part has nothing to write
                holders.setdefault((piece.name, piece.box), []).append(rank)

    def num_bytes(item: tuple[tuple[str, ChunkBounds], list[int]]) -> int:
        (name, box), _ = item
        return box.volume * itemsize(first[name][1].dtype)

    load = dict.fromkeys(pieces, 0)
    chunks: dict[str, list[Chunk]] = {name: [] for name in first}

    def is_shared(item: tuple[tuple[str, ChunkBounds], list[int]]) -> bool:
        (name, _), ranks = item
        return len(ranks) > 1 and name not in differing

    # Boxes that only one rank can write come first, then large before small. The others balance the load.
    for item in sorted(holders.items(), key=lambda item: (is_shared(item), -num_bytes(item))):
        (name, box), ranks = item
        writer = min(ranks, key=lambda rank: (load[rank], rank)) if is_shared(item) else ranks[0]
        load[writer] += num_bytes(item)
        chunks[name].append(Chunk(writer, box))
    layouts = {}
    for name, (_, piece) in sorted(first.items()):
        ordered = sorted(chunks[name], key=lambda chunk: (chunk.box.offset, chunk.rank))
        layouts[name] = TensorLayout(piece.dtype, piece.shape, ChunkTable.of(ordered, len(piece.shape)))
        problem = uncovered(layouts[name])
        if problem is not None:
            raise CheckpointError(
                f"the tensor {name} of shape {list(piece.shape)} cannot be saved: {problem}",
                do="save the same state on all ranks; if each machine saves separately, every machine must have the "
                "whole state",
            )
    return layouts


def uncovered(layout: TensorLayout) -> str | None:
    """Return None if the chunks contain every element exactly once, else a description of the problem."""
    table, shape = layout.chunks, np.array(layout.shape, np.int64)
    outside = ((table.offsets < 0) | (table.lengths <= 0) | (table.offsets + table.lengths > shape)).any(axis=1)
    if outside.any():
        return f"the chunk at {_described(table, int(outside.argmax()))} extends beyond the tensor"
    twice = _overlapping(table.offsets, table.lengths)
    if twice is not None:
        return f"the chunk at {_described(table, twice)} overlaps another chunk"
    held = sum(math.prod(lengths) for lengths in table.lengths.tolist())
    volume = math.prod(layout.shape)
    return None if held == volume else f"its chunks contain only {held} of {volume} elements"


def _described(table: ChunkTable, index: int) -> str:
    return f"{table.offsets[index].tolist()} of size {table.lengths[index].tolist()}"


def _overlapping(offsets: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> int | None:
    """Return the index of a box that overlaps another one, if there is one.

    The boxes are split where no box crosses a plane: first along the dimension with the most cuts, then each part in the same way.
    """
    num_boxes, num_dims = offsets.shape
    if num_boxes < 2:
        return None
    for dim in sorted(range(num_dims), key=lambda dim: -len(np.unique(offsets[:, dim]))):
        order = np.argsort(offsets[:, dim], kind="stable")
        ends = np.maximum.accumulate((offsets[:, dim] + lengths[:, dim])[order])
        cuts = np.flatnonzero(offsets[order[1:], dim] >= ends[:-1]) + 1
        if len(cuts) == num_boxes - 1:
            return None
        if len(cuts):
            for part in np.split(order, cuts):
                found = _overlapping(offsets[part], lengths[part])
                if found is not None:
                    return int(part[found])
            return None
    # No plane separates them, which boxes without an overlap allow, too: five of them can lie like a pinwheel.
    for i in range(1, num_boxes):
        common = (offsets[:i] < offsets[i] + lengths[i]) & (offsets[i] < offsets[:i] + lengths[:i])
        if common.all(axis=1).any():
            return i
    return None


def overlaps(layout: TensorLayout, box: ChunkBounds) -> Iterator[tuple[Chunk, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield each chunk that intersects ``box``, and which of its slices to copy to which slices of the box.

    The intersections together cover the box.
    """
    for chunk in layout.chunks.overlapping(box):
        common = chunk.box.common(box)
        if common is not None:
            yield chunk, common.within(chunk.box), common.within(box)
