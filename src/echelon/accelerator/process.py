"""Rank-related members with Accelerate's names, shared by Accelerator and PartialState."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from echelon.accelerator.views import view
from echelon.data.sharding.split_between_processes import split_between_processes as split_inputs
from echelon.distributed import control
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.distributed.uncompiled import uncompiled_methods
from echelon.world.world import World


@uncompiled_methods()
class ProcessMembers:
    """The rank-related members of ``Accelerator`` and ``PartialState``, under Accelerate's names."""

    _world: World

    device: torch.device = view("_world.device", "The device of this process.")
    num_processes: int = view("_world.world_size", "The number of processes across all machines.")
    process_index: int = view("_world.rank", "The global rank.")
    local_process_index: int = view("_world.local_rank", "The rank within this machine.")
    is_main_process: bool = view("_world.is_rank_zero", "Whether this is rank zero.")
    is_local_main_process: bool = view("_world.is_local_rank_zero", "Whether this is the first process on its machine.")

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on rank zero first, then on the other ranks. Collective.

        Examples:
            >>> with accelerator.main_process_first():
            ...     dataset = download()  # the other processes then find the files
        """
        with control.main_first():
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on one process per machine first, then on the others. Collective.

        Examples:
            >>> with accelerator.local_main_process_first():
            ...     dataset = download()
        """
        with control.main_first(scope="machine"):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of a list, tuple, dict, tensor or dataset; equal parts with ``apply_padding``.

        Examples:
            >>> with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
            ...     print(len(prompts))  # on 2 processes: 2 and 1
            3
        """
        with split_inputs(
            inputs, apply_padding, rank=self.process_index, world_size=self.num_processes, device=self.device
        ) as part:
            yield part

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on one process per machine.

        Examples:
            >>> accelerator.print("starting")
            starting
        """
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def on_main_process(self, function: Any = None) -> Any:
        """Run ``function`` only on rank zero; on other ranks, it returns None.

        Examples:
            >>> @accelerator.on_main_process
            ... def report(loss):
            ...     print(f"loss {loss:.1f}")
            >>> report(0.5)
            loss 0.5
        """
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Any = None) -> Any:
        """Run ``function`` only on one process per machine.

        Examples:
            >>> accelerator.on_local_main_process(print)("once on each machine")
            once on each machine
        """
        return _only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Any) -> Any:
        """Run ``function`` only on the highest rank.

        Examples:
            >>> accelerator.on_last_process(print)("from the last process")
            from the last process
        """
        return _only_if(self.is_last_process, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Run ``function`` only on rank ``process_index``; a single process always runs it.

        Examples:
            >>> accelerator.on_process(print, process_index=1)("from process 1")
            from process 1
        """
        return _only_if(self.process_index == process_index or not self.use_distributed, function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Run ``function`` only on process ``local_process_index`` on each machine; a single process always runs it.

        Examples:
            >>> accelerator.on_local_process(print, local_process_index=1)("from process 1 of each machine")
            from process 1 of each machine
        """
        return _only_if(self.local_process_index == local_process_index or not self.use_distributed, function)


@contextmanager
def first_rank_saves(name: str, *, on_each_machine: bool) -> Iterator[None]:
    """Run the block on the rank that saves, then on the others; the first rank may also enter it alone, and does not wait.

    Args:
        name: name of what is saved; only calls with the same name wait for each other.
        on_each_machine: whether one rank of each machine saves.

    Collective: enter the context on every rank, except for a context of the first rank alone.

    Raises:
        DesyncError: raised on the other ranks if the block failed on the first rank.
    """
    with control.main_first(scope="machine" if on_each_machine else "run", name=name):
        yield


def require_all_ranks(operation: str, *, advice: str) -> None:
    """Return when every rank has come to ``operation``; raise if one never will.

    Args:
        operation: name of the operation in error messages; must be the same on all ranks.
        advice: a sentence for error messages on how to use the operation.

    Collective: call on every rank.

    Raises:
        DesyncError: a rank is at another operation, in a collective, or has exited.
    """
    monitored_barrier(operation, advice=advice)


def _only_if(condition: bool, function: Any) -> Any:
    """Return ``function``, or a no-op if ``condition`` is false; without ``function``, return the decorator."""

    def decorate(function: Any) -> Any:
        if condition:
            return function

        @functools.wraps(function)
        def elsewhere(*_args: Any, **_kwargs: Any) -> None:
            return None

        return elsewhere

    return decorate if function is None else decorate(function)
