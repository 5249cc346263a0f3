"""Who this process is, under Accelerate's names: what the Accelerator and the states say alike."""

from __future__ import annotations

import torch

from echelon.world.world import World

__all__ = ["ProcessFacts"]


class ProcessFacts:
    """Views of a ``World``."""

    _world: World

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._world.device

    @property
    def num_processes(self) -> int:
        """The number of processes, on all machines."""
        return self._world.world_size

    @property
    def process_index(self) -> int:
        """The rank."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """The rank on this machine."""
        return self._world.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on rank zero."""
        return self._world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on one process of each machine."""
        return self._world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """True on the highest rank."""
        return self._world.rank == self._world.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Is there more than one process?"""
        return self._world.world_size > 1
