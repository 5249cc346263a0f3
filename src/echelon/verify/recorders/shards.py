"""Sketches of tensors of which this rank may hold only a shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np
import torch

from echelon.base.sharded import is_dtensor
from echelon.distributed.checks.sketch import Positions, Sketches, sketches_of

__all__ = ["NamedSketches", "SketchedPart", "as_shards", "sketch_named", "together"]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class SketchedPart(TypedDict):
    """The fields that ``Gradients``, ``ModelWeights``, ``OptimizerState`` and ``SavedState`` share."""

    names: list[str]
    sketches: Sketches
    is_sharded: bool
    replica: int


@dataclass(frozen=True, slots=True)
class NamedSketches:
    """Sketches of tensors that this rank has whole, and of shards of others."""

    whole_names: list[str]
    whole: Sketches
    shard_names: list[str]
    shards: Sketches
    replicas: dict[str, int] = field(default_factory=dict)
    """Shards that are not of the first replica (hybrid sharding), and of which replica they are."""

    def parts(self) -> Iterable[SketchedPart]:
        """Yield those that are not empty; at least one."""
        if self.whole_names or not self.shard_names:
            yield SketchedPart(names=self.whole_names, sketches=self.whole, is_sharded=False, replica=0)
        for replica in sorted({self.replicas.get(name, 0) for name in self.shard_names}):
            places = [place for place, name in enumerate(self.shard_names) if self.replicas.get(name, 0) == replica]
            yield SketchedPart(
                names=[self.shard_names[place] for place in places],
                sketches=self.shards[places],
                is_sharded=True,
                replica=replica,
            )


def together(*parts: NamedSketches) -> NamedSketches:
    """Return the sketches of all ``parts``."""
    return NamedSketches(
        whole_names=[name for part in parts for name in part.whole_names],
        whole=_joined([part.whole for part in parts]),
        shard_names=[name for part in parts for name in part.shard_names],
        shards=_joined([part.shards for part in parts]),
        replicas={name: replica for part in parts for name, replica in part.replicas.items()},
    )


def as_shards(found: NamedSketches) -> NamedSketches:
    """Return the same sketches as those of shards: of tensors of which each rank has some."""
    return NamedSketches(
        whole_names=[],
        whole=Sketches.empty(),
        shard_names=[*found.whole_names, *found.shard_names],
        shards=_joined([found.whole, found.shards]),
        replicas=found.replicas,
    )


def sketch_named(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> NamedSketches:
    """Return the sketches of ``tensors``; those of the shards of one replica add up to the whole tensor."""
    if all(type(one) in _PLAIN and one.layout is torch.strided for one in tensors):
        return NamedSketches(list(names), sketches_of(tensors), [], Sketches.empty())
    whole: list[str] = []
    shards: list[str] = []
    whole_tensors: list[torch.Tensor] = []
    local_tensors: list[torch.Tensor] = []
    positions: list[Positions] = []
    replicas: dict[str, int] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if type(tensor) in _PLAIN or not is_dtensor(tensor):
            whole.append(name)
            whole_tensors.append(tensor if tensor.layout is torch.strided else tensor.to_dense())
            continue
        local, mesh = tensor.to_local().detach(), tensor.device_mesh
        layout = _layout(tuple(tensor.shape), tuple(tensor.placements), mesh, tuple(mesh.get_coordinate() or ()))
        if layout is None:
            whole.append(name)
            whole_tensors.append(local)
        else:
            if layout.replica:
                replicas[name] = layout.replica
            shards.append(name)
            local_tensors.append(local)
            positions.append(layout.positions)
    return NamedSketches(whole, sketches_of(whole_tensors), shards, sketches_of(local_tensors, positions), replicas)


def _joined(parts: Sequence[Sketches]) -> Sketches:
    return Sketches(np.concatenate([part.numbers for part in parts]), np.concatenate([part.counts for part in parts]))


@dataclass(frozen=True, slots=True)
class _ShardLayout:
    positions: Positions
    replica: int
    """Index of this copy of the shards; 0 if there is one copy only."""


@lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh: Any, coordinate: tuple[int, ...]
) -> _ShardLayout | None:
    """Return where this rank's shard is in the whole tensor; None if each rank has the whole."""
    if all(placement.is_replicate() for placement in placements):
        return None
    replica = 0
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            replica = replica * mesh.size(axis) + coordinate[axis]
    # Each axis cuts the indices of the whole tensor as it cuts the tensor.
    index = torch.arange(int(np.prod(shape)), dtype=torch.int64).view(shape)
    for axis, placement in _in_order_of_cutting(placements):
        chunks = torch.chunk(index, mesh.size(axis), dim=placement.dim)
        place = coordinate[axis]
        index = chunks[place] if place < len(chunks) else index.narrow(placement.dim, 0, 0)
    flat = index.reshape(-1)
    if not flat.numel():
        return _ShardLayout(positions=0, replica=replica)
    first = int(flat[0])
    if bool((flat == torch.arange(first, first + flat.numel())).all()):
        return _ShardLayout(positions=first, replica=replica)
    return _ShardLayout(positions=flat.numpy().copy(), replica=replica)


def _in_order_of_cutting(placements: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """Return the axes that shard, and their placements, in the order in which they cut the tensor.

    ``fully_shard`` cuts tensors that tensor parallelism has already cut: its axis comes first in the mesh, but cuts last, which its
    placement (``_StridedShard``) says.
    """
    sharding = [(axis, one) for axis, one in enumerate(placements) if not one.is_replicate()]
    late = [(axis, one) for axis, one in sharding if getattr(one, "split_factor", 1) > 1]
    return [pair for pair in sharding if pair not in late] + late
