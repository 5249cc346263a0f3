"""Sketches of tensors of which this rank may hold only a shard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from echelon.base.sharded import is_dtensor
from echelon.verify.sketch import Positions, Sketch, sketches_of

__all__ = ["NamedSketches", "sketch_named"]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class NamedSketches:
    """Sketches of tensors that this rank has whole, and of shards of others."""

    whole: dict[str, Sketch] = field(default_factory=dict)
    shards: dict[str, Sketch] = field(default_factory=dict)

    def parts(self) -> Iterable[tuple[list[str], list[Sketch], bool]]:
        """Yield names, sketches and ``is_sharded`` of those that are not empty; at least one."""
        if self.whole or not self.shards:
            yield list(self.whole), list(self.whole.values()), False
        if self.shards:
            yield list(self.shards), list(self.shards.values()), True


def sketch_named(tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedSketches:
    """Return the sketches of ``tensors``. A replica of a shard is left out on all ranks but the first, so that shards add up."""
    whole: list[str] = []
    shards: list[str] = []
    whole_tensors: list[torch.Tensor] = []
    local_tensors: list[torch.Tensor] = []
    positions: list[Positions] = []
    for name, tensor in tensors:
        if type(tensor) in _PLAIN or not is_dtensor(tensor):
            whole.append(name)
            whole_tensors.append(tensor if tensor.layout is torch.strided else tensor.to_dense())
            continue
        local, mesh = tensor.to_local().detach(), tensor.device_mesh
        layout = _layout(tuple(tensor.shape), tuple(tensor.placements), mesh, tuple(mesh.get_coordinate() or ()))
        if layout is None:
            whole.append(name)
            whole_tensors.append(local)
        elif not layout.is_replica:
            shards.append(name)
            local_tensors.append(local)
            positions.append(layout.positions)
    return NamedSketches(
        whole=dict(zip(whole, sketches_of(whole_tensors), strict=True)),
        shards=dict(zip(shards, sketches_of(local_tensors, positions), strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _ShardLayout:
    positions: Positions
    is_replica: bool


@lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh: Any, coordinate: tuple[int, ...]
) -> _ShardLayout | None:
    """Return where this rank's shard is in the whole tensor; None if each rank has the whole."""
    if all(placement.is_replicate() for placement in placements):
        return None
    is_replica = any(place and one.is_replicate() for place, one in zip(coordinate, placements, strict=True))
    # Each axis cuts the indices of the whole tensor as it cuts the tensor.
    index = torch.arange(int(np.prod(shape)), dtype=torch.int64).view(shape)
    for axis, placement in _in_order_of_cutting(placements):
        chunks = torch.chunk(index, mesh.size(axis), dim=placement.dim)
        place = coordinate[axis]
        index = chunks[place] if place < len(chunks) else index.narrow(placement.dim, 0, 0)
    flat = index.reshape(-1)
    if not flat.numel():
        return _ShardLayout(positions=0, is_replica=is_replica)
    first = int(flat[0])
    if bool((flat == torch.arange(first, first + flat.numel())).all()):
        return _ShardLayout(positions=first, is_replica=is_replica)
    return _ShardLayout(positions=flat.numpy().copy(), is_replica=is_replica)


def _in_order_of_cutting(placements: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """Return the axes that shard, and their placements, in the order in which they cut the tensor.

    ``fully_shard`` cuts tensors that tensor parallelism has already cut: its axis comes first in the mesh, but cuts last, which its
    placement (``_StridedShard``) says.
    """
    sharding = [(axis, one) for axis, one in enumerate(placements) if not one.is_replicate()]
    late = [(axis, one) for axis, one in sharding if getattr(one, "split_factor", 1) > 1]
    return [pair for pair in sharding if pair not in late] + late
