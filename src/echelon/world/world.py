"""Immutable facts about this process: its ranks, device and backend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.base.device import backend_of, choose_device
from echelon.world.environment import LaunchEnvironment, detect
from echelon.world.mesh import MeshLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A process's rank, device and backend."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str
    """The ``torch.distributed`` backend for each device type, such as ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    mesh: DeviceMesh | None = None
    """The 1-D mesh of these ranks, if they are a part of all ranks (see ``along``)."""

    def along(self, mesh: DeviceMesh | None) -> World:
        """Return the world of the ranks in the 1-D ``mesh``, with the rank and size in it; None is this world itself."""
        if mesh is None:
            return self
        return replace(self, rank=mesh.get_local_rank(), world_size=mesh.size(), mesh=mesh)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of these ranks; None is the default group."""
        return None if self.mesh is None else self.mesh.get_group()

    @property
    def is_alone(self) -> bool:
        """Whether no other process takes part in the run; a group of one rank may have neighbours on other axes."""
        return self.world_size == 1 and self.mesh is None

    @property
    def is_source(self) -> bool:
        """Whether this process is rank zero of all ranks, whose order of samples the others follow."""
        return self.rank == 0 if self.mesh is None else dist.get_rank() == 0

    @property
    def is_rank_zero(self) -> bool:
        """True on the process that prints and writes files."""
        return self.rank == 0

    @property
    def is_local_rank_zero(self) -> bool:
        """True on the first process of each machine."""
        return self.local_rank == 0

    @staticmethod
    def current(*, cpu: bool = False) -> World:
        """Return the current world, read from the default process group if there is one, otherwise from the
        environment.

        A group created without a launcher's variables is assumed to run on one machine, so that each local rank equals
        the rank.

        Args:
            cpu: use the CPU even if accelerators are available.

        Examples:
            >>> World.current(cpu=True).device
            device(type='cpu')
        """
        environment = detect()
        if not dist.is_initialized():
            return world_of(environment, cpu=cpu)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if (rank, world_size) == (environment.rank, environment.world_size):
            return world_of(environment, cpu=cpu)
        one_machine = LaunchEnvironment(
            starter="single", rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
        )
        return world_of(one_machine, cpu=cpu)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size} (local rank {self.local_rank} of {self.local_world_size}, "
            f"node {self.node_rank}) on {self.device} with {self.backend}"
        )


def mesh_along(layout: MeshLayout, axes: Collection[str], *, device_type: str) -> DeviceMesh | None:
    """Return the 1-D mesh of the ranks that differ from this one at most on ``axes``; None if these are all ranks.

    Collective: call on every rank, unless it returns None.
    """
    if layout.size(axes) == layout.size():
        return None
    enumerate_groups: Any = dist.new_subgroups_by_enumeration  # untyped
    group, _ = enumerate_groups([list(ranks) for ranks in layout.groups(axes)])
    return DeviceMesh.from_group(group, device_type)


def world_of(environment: LaunchEnvironment, *, cpu: bool, backend: str | None = None) -> World:
    """Return the world that ``environment`` describes, with a device and its backend."""
    device = choose_device(
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        cpu=cpu or backend == "gloo",  # backend="gloo" means that tensors are on the CPU
    )
    return World(
        rank=environment.rank,
        local_rank=environment.local_rank,
        world_size=environment.world_size,
        local_world_size=environment.local_world_size,
        node_rank=environment.node_rank,
        device=device,
        backend=backend or backend_of(device),
    )
