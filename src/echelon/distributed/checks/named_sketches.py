"""Sketches of tensors of which this rank may hold only a shard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypedDict

import numpy as np
import torch
from torch import nn

from echelon.base.sharded import is_dtensor, local_shape_and_offset
from echelon.distributed.checks.sketch import LatestSketches, Positions, Sketches, sketches_of

_PLAIN = (torch.Tensor, nn.Parameter)  # types that are no DTensor


class SketchedPart(TypedDict):
    """Names and sketches of tensors that are all whole, or all shards of one replica."""

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


def concat_sketches(*parts: NamedSketches) -> NamedSketches:
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
    layouts = [None if type(tensor) in _PLAIN else shard_layout(tensor) for tensor in tensors]
    own = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]
    own = [tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in own]
    positions = [0 if layout is None else layout.positions() for layout in layouts]
    found = sketches_of(own, positions) if latest is None else latest.sketches_of(names, own, positions)
    return NamedSketches(list(names), found, [None if layout is None else layout.replica for layout in layouts])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Where this rank's part of a DTensor is in the whole tensor."""

    whole_shape: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    shard: int
    """Number of this rank's shard."""
    replica: int | None
    """Under hybrid sharding, which copy of the shards it is part of; None: each rank has the whole tensor."""
    num_replicas: int
    """Number of ranks that have the same shard."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the shard's elements follow one another in the flattened whole tensor."""
        return self.shape[1:] == self.whole_shape[1:]

    def positions(self) -> Positions:
        """Return where the shard's elements are in the flattened whole tensor."""
        if self.is_contiguous:
            return self.offset[0] * math.prod(self.shape[1:])
        return _positions(self.whole_shape, self.shape, self.offset)


def shard_layout(tensor: torch.Tensor) -> ShardLayout | None:
    """Return where this rank's part of ``tensor`` is; None if it is no DTensor."""
    if not is_dtensor(tensor):
        return None
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    shard, replica, num_replicas = 0, 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            replica = replica * mesh.size(axis) + coordinates[axis]
            num_replicas *= mesh.size(axis)
        else:
            shard = shard * mesh.size(axis) + coordinates[axis]
    shape, offset = local_shape_and_offset(tensor)
    return ShardLayout(
        whole_shape=tuple(tensor.shape),
        shape=tuple(shape),
        offset=tuple(offset),
        shard=shard,
        replica=None if all(placement.is_replicate() for placement in tensor.placements) else replica,
        num_replicas=num_replicas,
    )


@lru_cache(maxsize=4096)
def _positions(whole_shape: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...]) -> Positions:
    index = np.arange(math.prod(whole_shape)).reshape(whole_shape)
    return index[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape))].reshape(-1)
