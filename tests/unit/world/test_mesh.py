"""MeshLayout: coordinates, groups and indices of the ranks, compared with numpy's row-major order and torch's DeviceMesh."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.base.errors import ConfigError
from echelon.world.mesh import AXES, DATA_AXES, LOSS_AXES, MeshLayout

SIZES = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 1, "sp": 1, "tp": 2}


def _layout(rank: int = 0) -> MeshLayout:
    return MeshLayout.of(SIZES, rank=rank, world_size=24)


def test_coordinates_are_the_row_major_ones() -> None:
    grid = np.arange(24).reshape([SIZES[axis] for axis in AXES])
    for rank in range(24):
        (place,) = np.argwhere(grid == rank)
        assert list(_layout(rank).coordinates().values()) == place.tolist()


@pytest.mark.parametrize("axes", [DATA_AXES, LOSS_AXES, ("tp",), ("pp", "tp"), AXES, ()])
def test_groups_are_the_slices_of_the_grid(axes: tuple[str, ...]) -> None:
    grid = np.arange(24).reshape([SIZES[axis] for axis in AXES])
    order = [n for n, axis in enumerate(AXES) if axis not in axes] + [n for n, axis in enumerate(AXES) if axis in axes]
    slices = grid.transpose(order).reshape(-1, _layout().size(axes))
    assert _layout().groups(axes) == sorted(tuple(part.tolist()) for part in slices)
    for part in slices.tolist():
        assert [_layout(rank).index(axes) for rank in part] == list(range(len(part)))


def test_a_rank_is_named_with_the_axes_that_are_used() -> None:
    layout = MeshLayout.of({"dp_shard": 2, "tp": 2}, rank=0, world_size=4)
    assert layout.describe(3) == "rank 3 (dp_shard 1, tp 1)"
    assert MeshLayout.of({"dp_shard": 4}, rank=0, world_size=4).describe(3) == "rank 3"
    assert str(layout) == "dp_shard 2 x tp 2"


def test_a_mesh_of_another_size_is_an_error() -> None:
    with pytest.raises(ConfigError) as raised:
        MeshLayout.of({"dp_shard": 2, "tp": 2}, rank=0, world_size=6)
    assert raised.value.what == "the mesh dp_shard 2 x tp 2 has 4 ranks, but 6 processes are running"
    assert raised.value.do == "start 4 processes, or change the sizes"
