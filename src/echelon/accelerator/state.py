"""``PartialState``: who this process is, as a view of the environment and the process group."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from echelon.accelerator.current import current_accelerator, has_accelerator
from echelon.accelerator.enums import DistributedType
from echelon.base.device import use_device
from echelon.base.errors import UsageError
from echelon.config.sources import current, from_code
from echelon.data.split import split_between_processes
from echelon.distributed import control
from echelon.distributed.setup import cleanup, setup
from echelon.world.environment import detect
from echelon.world.world import World

__all__ = ["AcceleratorState", "PartialState", "is_initialized", "only_if"]


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

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let one process of each machine run the block alone, then its others. Collective."""
        with control.main_first(scope="machine"):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its part of a list, tuple, dict, tensor or dataset; equal parts when ``apply_padding``."""
        with split_between_processes(
            inputs, apply_padding, rank=self.process_index, world_size=self.num_processes, device=self.device
        ) as part:
            yield part

    def on_main_process(self, function: Any = None) -> Any:
        """Make ``function`` run on rank zero only; elsewhere it returns None."""
        return only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Any = None) -> Any:
        """Make ``function`` run on one process of each machine only."""
        return only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Any) -> Any:
        """Make ``function`` run on the highest rank only."""
        return only_if(self.is_last_process, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Make ``function`` run on the rank ``process_index`` only."""
        return only_if(self.process_index == process_index, function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Make ``function`` run on the process ``local_process_index`` of each machine only."""
        return only_if(self.local_process_index == local_process_index, function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on one process of each machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    @property
    def initialized(self) -> bool:
        """Always: a view has nothing to initialise."""
        return True

    @property
    def default_device(self) -> torch.device:
        """The device of a process that runs alone."""
        return World.current().device

    def set_device(self) -> None:
        """Make the device of this process the current one."""
        use_device(self.device)

    def destroy_process_group(self) -> None:
        """End the process group."""
        cleanup()


class AcceleratorState(PartialState):
    """The facts of the Accelerator built last, under Accelerate's names.

    Raises:
        UsageError: there is none yet.
    """

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        self._accelerator = current_accelerator()
        if mixed_precision is not None and mixed_precision != self._accelerator.mixed_precision:
            raise UsageError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}) and an Accelerator with "
                f"{self._accelerator.mixed_precision!r}",
                do="choose it once, in Accelerator(mixed_precision=)",
            )
        super().__init__(cpu=cpu or self._accelerator.device.type == "cpu")

    @classmethod
    def of(cls, accelerator: Any) -> AcceleratorState:
        """Return the view of ``accelerator``, whichever was built last."""
        state = cls.__new__(cls)
        state._accelerator = accelerator
        state._world = accelerator.world
        return state

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16`` or ``bf16``."""
        return str(self._accelerator.mixed_precision)

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is spread, as the engine says."""
        kind: DistributedType = self._accelerator.distributed_type
        return kind


def is_initialized() -> bool:
    """Tell whether there is an Accelerator, so that ``AcceleratorState()`` works."""
    return has_accelerator()


def only_if(condition: bool, function: Any) -> Any:
    """Return ``function``, or one that does nothing where ``condition`` is false; without it, the decorator."""

    def decorate(function: Any) -> Any:
        if condition:
            return function

        @functools.wraps(function)
        def elsewhere(*_args: Any, **_kwargs: Any) -> None:
            return None

        return elsewhere

    return decorate if function is None else decorate(function)
