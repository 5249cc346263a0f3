"""Checkpoints of real ranks: sharded by torch, read by another number of ranks, and written in the background."""

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
from echelon.checkpoint.background_save import BackgroundSaver
from echelon.checkpoint.read import open_verified
from echelon.checkpoint.save import Content, begin_save, save
from echelon.checkpoint.storage import LocalStorage
from echelon.world.world import World
from tests.checkpoint_ranks import no_code_and_no_other_files
from tests.harness import run_on_ranks

Whole = dict[str, torch.Tensor]


def _trained(shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer, Whole]:
    """Return a sharded model after two steps (sizes that no number of ranks divides), and its state by name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7), nn.Linear(7, 2)).double()
    if len(shape) == 1:
        mesh = init_device_mesh("cpu", shape)
    else:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 5, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors: Whole = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return model, optimizer, tensors


def _whole(tensors: Whole) -> Whole:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def _save(folder: str, shape: tuple[int, ...]) -> Whole:
    _, _, tensors = _trained(shape)
    with no_code_and_no_other_files(Path(folder)):
        save(Path(folder) / "c", Content(tensors=tensors, objects={"shape": shape}), world=World.current())
    return _whole(tensors)


def _load(folder: str, shape: tuple[int, ...]) -> Whole:
    _, _, tensors = _trained(shape)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(-1)
    with no_code_and_no_other_files(Path(folder)):
        open_verified(Path(folder) / "c", world=World.current()).read_into(tensors)
    return _whole(tensors)


@pytest.mark.parametrize(
    "saved", [pytest.param((1,), marks=pytest.mark.soak), pytest.param((3,), marks=pytest.mark.soak), (2, 2)], ids=str
)
def test_what_some_ranks_have_saved_is_read_by_others(saved: tuple[int, ...], tmp_path: Path) -> None:
    def size(shape: tuple[int, ...]) -> int:
        return shape[0] * (shape[1] if len(shape) == 2 else 1)

    wholes = run_on_ranks(_save, str(tmp_path), saved, world_size=size(saved))
    assert len(wholes[0]) == 6 + 18
    for loaded in [(1,), (2,), (4,), (2, 2)]:
        for found in run_on_ranks(_load, str(tmp_path), loaded, world_size=size(loaded)):
            assert found.keys() == wholes[0].keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, wholes[0][name]), (loaded, name)


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
    with pytest.raises(CheckpointError, match="this rank's part of it is not a box"):
        save(Path(folder) / "d", Content(tensors={"w": own}), world=World.current())
    files = sorted(os.listdir(folder_of))
    assert files == ["manifest.json", "objects.json", *(f"rank_0000{rank}.safetensors" for rank in range(4))]
    return [facts.size for name, facts in sorted(checkpoint.manifest.files.items()) if name.endswith("safetensors")]


def test_every_placement_of_a_tensor_is_saved_once(tmp_path: Path) -> None:
    ((sizes), *_) = run_on_ranks(_placed, str(tmp_path), world_size=4)
    assert sum(sizes) < 4 * 35 * 4 + 4 * 400  # four tensors, and the headers; every rank's copies would be 8 tensors


class _FailsAt(LocalStorage):
    """A disk that is full when the tensors are written."""

    def write(self, handle: int, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _in_background(folder: str) -> tuple[list[float], str]:
    world, rank = World.current(), dist.get_rank()
    saver, w = BackgroundSaver(), torch.zeros(4)
    for step in range(3):
        w.fill_(step)
        content = Content(tensors={"w": w, f"of_{rank}": w + rank}, objects={"step": step}, rank_objects={"r": rank})
        saver.start(begin_save(Path(folder) / "c", content, world=world))
        for _ in range(20):  # what the training sends meanwhile
            dist.all_reduce(w)
    saver.wait()
    content = Content(tensors={"w": w}, objects={"step": 9})
    saver.start(begin_save(Path(folder) / "c", content, world=world, storage=_FailsAt() if rank == 0 else None))
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


def test_ranks_with_other_models_are_told_which_tensor(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the tensor w is float32 \[2\] on rank 0 and float32 \[3\] on rank 1"):
        run_on_ranks(_unequal, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
