"""Sketches of tensors of which this rank may hold only a shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np
import torch
from torch import nn

from echelon.base.sharded import is_dtensor
from echelon.distributed.checks.sketch import LatestSketches, Positions, Sketches, sketches_of

_PLAIN = (torch.Tensor, nn.Parameter)  # types that are no DTensor


class SketchedPart(TypedDict):
    """The fields that ``Gradients``, ``ModelWeights``, ``OptimizerState`` and ``SavedState`` share."""

    names: list[str]
    sketches: Sketches
    is_sharded: bool
    replica: int


@dataclass(frozen=True, slots=True)
class NamedSketches:
    """Sketches of tensors that this rank has whole, and of shards of others."""

    names: list[str]
    sketches: Sketches
    replicas: list[int | None]
    """Of which replica (hybrid sharding; else 0) each tensor's shard is; None: this rank has the whole tensor."""

    def parts(self) -> Iterator[SketchedPart]:
        """Yield the whole tensors, and the shards of each replica; at least one part."""
        if self.replicas.count(None) == len(self.replicas):
            yield SketchedPart(names=self.names, sketches=self.sketches, is_sharded=False, replica=0)
            return
        for replica in sorted(set(self.replicas), key=lambda one: -1 if one is None else one):
            places = [place for place, one in enumerate(self.replicas) if one == replica]
            yield SketchedPart(
                names=[self.names[place] for place in places],
                sketches=self.sketches[places],
                is_sharded=replica is not None,
                replica=replica or 0,
            )


def together(*parts: NamedSketches) -> NamedSketches:
    """Return the sketches of all ``parts``."""
    return NamedSketches(
        names=[name for part in parts for name in part.names],
        sketches=Sketches(
            np.concatenate([part.sketches.numbers for part in parts]),
            np.concatenate([part.sketches.counts for part in parts]),
        ),
        replicas=[replica for part in parts for replica in part.replicas],
    )


def as_shards(found: NamedSketches) -> NamedSketches:
    """Return the same sketches as those of shards: of tensors of which each rank has some."""
    return replace(found, replicas=[replica or 0 for replica in found.replicas])


def sketch_named(
    names: Sequence[str], tensors: Sequence[torch.Tensor], latest: LatestSketches | None = None
) -> NamedSketches:
    """Return the sketches of ``tensors``; those of the shards of one replica add up to the whole tensor.

    Args:
        latest: tensors that have the contents of their latest sketch are not sketched again.
    """
    own: list[torch.Tensor] = []
    positions: list[Positions] = []
    replicas: list[int | None] = []
    for tensor in tensors:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            own.append(tensor)
            positions.append(0)
            replicas.append(None)
            continue
        layout = None
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            layout = _layout(tuple(tensor.shape), tuple(tensor.placements), mesh, tuple(mesh.get_coordinate() or ()))
            tensor = tensor.to_local()
        own.append(tensor if tensor.layout is torch.strided else tensor.to_dense())
        positions.append(0 if layout is None else layout.positions)
        replicas.append(None if layout is None else layout.replica)
    found = sketches_of(own, positions) if latest is None else latest.sketches_of(names, own, positions)
    return NamedSketches(list(names), found, replicas)


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
