"""From any layout to any other, computed on integers only: what ranks hold, which rank writes it, and what other ranks read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.base.errors import CheckpointError, DesyncError
from echelon.checkpoint.plan import Gather, Planner
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import (
    Chunk,
    ChunkBounds,
    ChunkTable,
    LocalShard,
    ShardPart,
    TensorLayout,
    assign_writers,
    overlaps,
    uncovered,
)
from echelon.checkpoint.save import Content, save
from tests.checkpoint_ranks import on_threads

SHAPES = {"a": (13, 5), "b": (7,), "c": (2, 3, 4), "d": (1,), "e": (), "f": (0, 4), "g": (16, 2)}
# (rank, number of ranks, name of the tensor, shape) -> the box that the rank holds, or None
Layout = Callable[[int, int, str, tuple[int, ...]], ChunkBounds | None]


def _replicated(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> ChunkBounds | None:
    return ChunkBounds.whole(shape)


def _sharded(rank: int, world_size: int, shape: tuple[int, ...], dim: int) -> ChunkBounds:
    """Cut as torch.chunk does: every part as long as the first, but the last ones."""
    if len(shape) <= dim:
        return ChunkBounds.whole(shape)
    length = -(-shape[dim] // world_size)
    start = min(rank * length, shape[dim])
    offset, lengths = [0] * len(shape), list(shape)
    offset[dim], lengths[dim] = start, min(length, shape[dim] - start)
    return ChunkBounds(tuple(offset), tuple(lengths))


def _rows(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> ChunkBounds | None:
    return _sharded(rank, world_size, shape, 0)


def _columns(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> ChunkBounds | None:
    return _sharded(rank, world_size, shape, 1)


def _hybrid(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> ChunkBounds | None:
    replicas = 2 if world_size % 2 == 0 else 1
    return _sharded(rank % (world_size // replicas), world_size // replicas, shape, 0)


def _grid(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> ChunkBounds | None:
    if world_size % 2 or len(shape) < 2:
        return _rows(rank, world_size, name, shape)
    row = _sharded(rank // 2, world_size // 2, shape, 0)
    column = _sharded(rank % 2, 2, shape, 1)
    return ChunkBounds((row.offset[0], *column.offset[1:]), (row.lengths[0], *column.lengths[1:]))


def _owned(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> ChunkBounds | None:
    return ChunkBounds.whole(shape) if ord(name) % world_size == rank else None


LAYOUTS: list[Layout] = [_replicated, _rows, _columns, _hybrid, _grid, _owned]


def _global(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def _pieces(layout: Layout, world_size: int) -> dict[int, list[LocalShard]]:
    held = {
        rank: [(name, shape, layout(rank, world_size, name, shape)) for name, shape in SHAPES.items()]
        for rank in range(world_size)
    }
    return {
        rank: [LocalShard(name, "float64", shape, box) for name, shape, box in own if box is not None]
        for rank, own in held.items()
    }


def test_every_layout_of_1_to_8_ranks_can_be_read_by_every_other() -> None:
    layouts = [_pieces(layout, world_size) for layout in LAYOUTS for world_size in range(1, 9)]
    wanted = {piece for pieces in layouts for own in pieces.values() for piece in own}
    for pieces in layouts:
        stored = assign_writers(pieces)
        assert set(stored) == set(SHAPES)
        for piece in wanted:
            whole = _global(piece.shape)
            values = torch.full(piece.box.lengths, -1.0, dtype=torch.float64)
            for chunk, source, target in overlaps(stored[piece.name], piece.box):
                values[target] = whole[chunk.box.within(ChunkBounds.whole(piece.shape))][source]
            assert torch.equal(values, whole[piece.box.within(ChunkBounds.whole(piece.shape))]), (
                stored[piece.name],
                piece,
            )


def test_replicated_data_is_written_once_and_distributed_evenly() -> None:
    pieces = [LocalShard(f"layer{i}", "float32", (8, 8), ChunkBounds.whole((8, 8))) for i in range(12)]
    stored = assign_writers(dict.fromkeys(range(4), pieces))
    writers = [layout.chunks[0].rank for layout in stored.values()]
    assert all(len(layout.chunks) == 1 for layout in stored.values())
    assert [writers.count(rank) for rank in range(4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("size", [64, 2**18])
def test_data_that_may_differ_is_written_by_the_lowest_rank_that_holds_it(size: int) -> None:
    pieces = [LocalShard(f"bn{i}", "float32", (size,), ChunkBounds.whole((size,)), True) for i in range(12)]
    stored = assign_writers({0: pieces[:6], 1: pieces, 2: pieces})
    assert [stored[f"bn{i}"].chunks[0].rank for i in range(12)] == [0] * 6 + [1] * 6


def test_ranks_with_exclusive_data_write_less_replicated_data() -> None:
    shared = [LocalShard(f"s{i}", "float32", (4,), ChunkBounds.whole((4,))) for i in range(4)]
    own = LocalShard("own", "float32", (16,), ChunkBounds.whole((16,)))
    stored = assign_writers({0: [own, *shared], 1: shared})
    assert {name: layout.chunks[0].rank for name, layout in stored.items()} == {
        "own": 0,
        "s0": 1,
        "s1": 1,
        "s2": 1,
        "s3": 1,
    }


def test_ranks_that_disagree_are_named() -> None:
    with pytest.raises(DesyncError, match=r"w is float32 \[2\] on rank 0, but float32 \[3\] on rank 1"):
        assign_writers(
            {
                0: [LocalShard("w", "float32", (2,), ChunkBounds((0,), (2,)))],
                1: [LocalShard("w", "float32", (3,), ChunkBounds((0,), (3,)))],
            }
        )


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([((0,), (2,))], "its chunks contain only 2 of 4 elements"),
        ([((0,), (3,)), ((2,), (2,))], r"the chunk at \[2\] of size \[2\] overlaps another chunk"),
        ([((0,), (4,)), ((0,), (4,))], "overlaps another chunk"),
        ([((2,), (4,))], "extends beyond the tensor"),
    ],
)
def test_chunks_that_do_not_form_a_tensor_are_rejected(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], why: str
) -> None:
    chunks = [Chunk(0, ChunkBounds(offset, lengths)) for offset, lengths in boxes]
    layout = TensorLayout("float32", (4,), ChunkTable.of(chunks, 1))
    with pytest.raises(CheckpointError, match=why):
        raise CheckpointError(uncovered(layout) or "nothing wrong")


def _shard(rank: int, num_rows: int) -> ShardPart:
    return ShardPart((2 * num_rows, 2), (num_rows * rank, 0), torch.full((num_rows, 2), float(rank)))


def test_a_plan_is_made_again_only_if_some_rank_has_other_tensors(tmp_path: Path) -> None:
    """Four saves on two ranks: as before, as before, with another tensor on rank 1 alone, and that one again."""
    sent = [0] * 4  # by rank 0, by save

    def run(world: Any, gather: Gather) -> None:
        def counted(payload: bytes) -> list[bytes]:
            if world.rank == 0:
                sent[number] += 1
            return gather(payload)

        planner = Planner()
        for number in range(4):
            tensors: dict[str, Any] = {"w": _shard(world.rank, 3), "b": torch.full((2,), float(number))}
            if world.rank == 1 and number > 1:
                tensors["own"] = torch.full((1,), float(number))
            content = Content(tensors=tensors)
            save(tmp_path / str(number), content, world=world, gather=counted, planner=planner)

    on_threads(run, 2)
    assert [number - sent[1] for number in sent] == [
        2,
        0,
        2,
        0,
    ]  # the tensors are described to rank zero, which answers
    for number in range(4):
        checkpoint = Checkpoint(tmp_path / str(number))
        assert checkpoint.problems() == []
        assert checkpoint.names() == (["b", "own", "w"] if number > 1 else ["b", "w"])
        assert torch.equal(checkpoint.read("w"), torch.tensor([0.0, 1.0]).repeat_interleave(6).reshape(6, 2))
        assert all(checkpoint.read(name).unique().tolist() == [number] for name in checkpoint.names() if name != "w")


def test_after_a_plan_that_failed_the_next_one_is_made_anew(tmp_path: Path) -> None:
    def run(world: Any, gather: Gather) -> str:
        planner = Planner()
        for number, num_rows in enumerate((2, 2 + world.rank, 2)):
            content = Content(tensors={"w": _shard(world.rank, num_rows)})
            try:
                save(tmp_path / str(number), content, world=world, gather=gather, planner=planner)
            except DesyncError as error:
                told = error.what
        return told

    for told in on_threads(run, 2):
        assert told == "the tensor w is float32 [4, 2] on rank 0, but float32 [6, 2] on rank 1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]
    assert Checkpoint(tmp_path / "2").read("w").tolist() == [[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2
