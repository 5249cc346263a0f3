"""Checkpoints on real ranks: sharded by torch, read on another number of ranks, and written in the background."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from echelon.base.errors import CheckpointError
from echelon.base.sharded import is_strided, local_shape_and_offset
from echelon.checkpoint import storage
from echelon.checkpoint.background_save import BackgroundSaver
from echelon.checkpoint.read import open_verified
from echelon.checkpoint.save import Content, begin_save, save
from echelon.world.world import World
from tests.harness import run_on_ranks


def _placed(folder: str) -> list[int]:
    """Save tensors of every placement; return the sizes of the files."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    values = torch.arange(35.0).reshape(5, 7)
    placements = [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Replicate()], [Replicate(), Shard(0)]]
    tensors = {str(i): distribute_tensor(values, mesh, placement) for i, placement in enumerate(placements)}
    folder_of = save(Path(folder) / "c", Content(tensors=tensors), world=World.current())
    checkpoint = open_verified(folder_of, world=World.current())
    for name in tensors:
        assert torch.equal(checkpoint.read(name), values), name
    own = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    with pytest.raises(CheckpointError, match="this rank's shard is not a contiguous box"):
        save(Path(folder) / "d", Content(tensors={"w": own}), world=World.current())
    files = sorted(os.listdir(folder_of))
    assert files == ["manifest.json", "objects.json", *(f"rank_0000{rank}.safetensors" for rank in range(4))]
    return [facts.size for name, facts in sorted(checkpoint.manifest.files.items()) if name.endswith("safetensors")]


def test_every_placement_of_a_tensor_is_saved_once(tmp_path: Path) -> None:
    ((sizes), *_) = run_on_ranks(_placed, str(tmp_path), world_size=4)
    assert sum(sizes) < 4 * 35 * 4 + 4 * 400  # four tensors and the headers; copies of every rank would be 8 tensors


def _nested(num_rows: int) -> None:
    """fully_shard divides the rows that another axis has divided; compare shape and offset with the rows that are there."""
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = torch.arange(num_rows * 3.0).reshape(num_rows, 3)
    model = nn.Linear(3, num_rows, bias=False)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["inner"], [Shard(0)]))
    fully_shard(model, mesh=mesh["outer"])
    held: Any = model.weight
    assert any(map(is_strided, held.placements))
    shape, (row, column) = local_shape_and_offset(held)
    local = held.to_local().detach()
    assert shape == tuple(local.shape)
    assert column == 0
    assert torch.equal(local, whole[row : row + shape[0]])


@pytest.mark.parametrize("num_rows", [8, 6])
def test_a_shard_of_a_shard_is_contiguous(num_rows: int) -> None:
    run_on_ranks(_nested, num_rows, world_size=4)


def _full(handle: int, data: bytes | memoryview) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _in_background(folder: str) -> tuple[list[float], str]:
    world, rank = World.current(), dist.get_rank()
    saver, w = BackgroundSaver(), torch.zeros(4)
    for step in range(3):
        w.fill_(step)
        content = Content(tensors={"w": w, f"of_{rank}": w + rank}, objects={"step": step}, rank_objects={"r": rank})
        saver.start(begin_save(Path(folder) / "c", content, world=world))
        for _ in range(20):  # communication of the training loop in the meantime
            dist.all_reduce(w)
    saver.wait()
    content = Content(tensors={"w": w}, objects={"step": 9})
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(storage, "write", _full)
        saver.start(begin_save(Path(folder) / "c", content, world=world))
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
    checkpoint = open_verified(Path(folder) / "c", world=world)
    assert checkpoint.objects() == {"step": 2}
    assert checkpoint.rank_objects(rank) == {"r": rank}
    assert os.listdir(folder) == ["c"]
    return [checkpoint.read(name)[0].item() for name in checkpoint.names()], str(caught.value)


def test_ranks_write_in_the_background_while_they_communicate(tmp_path: Path) -> None:
    (values, own), (other_values, other) = run_on_ranks(_in_background, str(tmp_path))
    assert values == other_values == [2.0, 3.0, 2.0]
    assert "No space left on device (rank 0 writes " in own
    assert "failed on other ranks\n    rank 0: " in other


def _unequal(folder: str) -> Any:
    content = Content(tensors={"w": torch.zeros(2 + dist.get_rank())})
    return save(Path(folder) / "c", content, world=World.current())


def test_the_error_for_different_models_names_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the tensor w is float32 \[2\] on rank 0, but float32 \[3\] on rank 1"):
        run_on_ranks(_unequal, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
