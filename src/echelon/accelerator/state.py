"""``PartialState``: who this process is, as a view of the environment and the process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from echelon.accelerator.enums import DistributedType
from echelon.config.sources import current, from_code
from echelon.distributed import control
from echelon.distributed.setup import cleanup, setup
from echelon.world.environment import detect
from echelon.world.world import World

__all__ = ["PartialState"]


class PartialState:
    """The process facts under Accelerate's names; two of them are equal, there is nothing to reset.

    Args:
        cpu: use the CPU even where accelerators are present.
        kwargs: ``backend``, ``timeout``, ``init_method`` of the process group, if it is not there yet.

    Collective: the first one makes the process group.
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        use_cpu = current(from_code("PartialState", {"cpu": cpu or None})).value.cpu
        if not dist.is_initialized() and detect().world_size > 1:
            setup(**kwargs)
        self._world = World.current(cpu=use_cpu)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._world.device

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None without one."""
        return self._world.backend if self.use_distributed else None

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

    @property
    def distributed_type(self) -> DistributedType:
        """Many processes or one, and on what; an engine may know better (``Accelerator.distributed_type``)."""
        return DistributedType.of(self._world.device, distributed=self.use_distributed)

    def wait_for_everyone(self) -> None:
        """Wait until every process is here. Collective."""
        control.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let rank zero run the block alone, then the others. Collective."""
        with control.main_first():
            yield

    def destroy_process_group(self) -> None:
        """End the process group."""
        cleanup()
