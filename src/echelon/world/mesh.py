"""The layout of the ranks on the axes of the device mesh. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""All axes, outermost first: neighbouring ranks differ on the last one, which communicates most."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes on which ranks read different samples."""
LOSS_AXES = ("dp_replicate", "dp_shard", "cp", "sp")
"""The axes over which losses and gradients are averaged: ranks have different samples, or pieces of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """Sizes of the axes, and the rank of this process.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks.
    """

    sizes: tuple[int, ...]
    """One per axis, in the order of ``AXES``."""
    rank: int = 0

    @staticmethod
    def of(sizes: Mapping[str, int], *, rank: int, world_size: int) -> MeshLayout:
        """Return the layout with these ``sizes``; an axis that is not given has size 1."""
        assert set(sizes) <= set(AXES), sizes
        layout = MeshLayout(sizes=tuple(sizes.get(axis, 1) for axis in AXES), rank=rank)
        if layout.size() != world_size:
            raise ConfigError(
                _(
                    "the mesh {layout} has {size} ranks, but {world_size} processes are running",
                    layout=layout,
                    size=layout.size(),
                    world_size=world_size,
                ),
                where="parallelism_config",
                do=_("start {size} processes, or change the sizes", size=layout.size()),
            )
        return layout

    def size(self, axes: Collection[str] = AXES) -> int:
        """Return the number of ranks that differ at most on ``axes``."""
        return math.prod(size for axis, size in zip(AXES, self.sizes) if axis in axes)

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Return the index of ``rank`` (default: this one) on each axis."""
        rest = self.rank if rank is None else rank
        found = {}
        for axis, size in reversed(list(zip(AXES, self.sizes))):
            rest, found[axis] = divmod(rest, size)
        return {axis: found[axis] for axis in AXES}

    def index(self, axes: Collection[str], rank: int | None = None) -> int:
        """Return the index of ``rank`` among the ranks that differ from it at most on ``axes``."""
        coordinates, index = self.coordinates(rank), 0
        for axis, size in zip(AXES, self.sizes):
            if axis in axes:
                index = index * size + coordinates[axis]
        return index

    def groups(self, axes: Collection[str]) -> list[tuple[int, ...]]:
        """Return all groups of ranks that differ at most on ``axes``, each in the order of ``index``; each rank is in one of them."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size()):
            coordinates = self.coordinates(rank)
            found.setdefault(tuple(coordinates[axis] for axis in AXES if axis not in axes), []).append(rank)
        return sorted(map(tuple, found.values()))

    def describe(self, rank: int) -> str:
        """Return ``rank 5 (dp_shard 1, tp 1)``, with the axes larger than 1; only the rank if at most one is."""
        shown = [axis for axis, size in zip(AXES, self.sizes) if size > 1]
        if len(shown) < 2:
            return _("rank {rank}", rank=rank)
        coordinates = self.coordinates(rank)
        return f"rank {rank} ({', '.join(f'{axis} {coordinates[axis]}' for axis in shown)})"

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.sizes) if size > 1) or "of one rank"
