"""Who this process is, and what it runs alone, under Accelerate's names: members that Accelerator and PartialState share.

Functions that take ``self`` are methods of both classes.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from echelon.accelerator.views import view
from echelon.data.sharding.split_between_processes import split_between_processes as split_inputs
from echelon.distributed import control

__all__ = [
    "device",
    "is_last_process",
    "is_local_main_process",
    "is_main_process",
    "local_main_process_first",
    "local_process_index",
    "main_process_first",
    "num_processes",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "print",
    "process_index",
    "split_between_processes",
    "use_distributed",
]

device: Any = view("_world.device", "The device of this process.")
num_processes: Any = view("_world.world_size", "The number of processes, on all machines.")
process_index: Any = view("_world.rank", "The rank.")
local_process_index: Any = view("_world.local_rank", "The rank on this machine.")
is_main_process: Any = view("_world.is_rank_zero", "True on rank zero.")
is_local_main_process: Any = view("_world.is_local_rank_zero", "True on one process of each machine.")
is_last_process: Any = property(
    lambda process: process.process_index == process.num_processes - 1, doc="True on the highest rank."
)
use_distributed: Any = property(lambda process: process.num_processes > 1, doc="Is there more than one process?")


class _Process(Protocol):
    device: torch.device
    num_processes: int
    process_index: int
    local_process_index: int
    is_main_process: bool
    is_local_main_process: bool
    is_last_process: bool
    use_distributed: bool


@contextmanager
def main_process_first(self: _Process) -> Iterator[None]:
    """Let rank zero run the block alone, then the others. Collective."""
    with control.main_first():
        yield


@contextmanager
def local_main_process_first(self: _Process) -> Iterator[None]:
    """Let one process of each machine run the block alone, then its others. Collective."""
    with control.main_first(scope="machine"):
        yield


@contextmanager
def split_between_processes(self: _Process, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
    """Give each process its part of a list, tuple, dict, tensor or dataset; equal parts when ``apply_padding``."""
    with split_inputs(
        inputs, apply_padding, rank=self.process_index, world_size=self.num_processes, device=self.device
    ) as part:
        yield part


def print(self: _Process, *args: Any, **kwargs: Any) -> None:
    """Print on one process of each machine."""
    if self.is_local_main_process:
        builtins.print(*args, **kwargs)


def on_main_process(self: _Process, function: Any = None) -> Any:
    """Make ``function`` run on rank zero only; elsewhere it returns None."""
    return _only_if(self.is_main_process, function)


def on_local_main_process(self: _Process, function: Any = None) -> Any:
    """Make ``function`` run on one process of each machine only."""
    return _only_if(self.is_local_main_process, function)


def on_last_process(self: _Process, function: Any) -> Any:
    """Make ``function`` run on the highest rank only."""
    return _only_if(self.is_last_process, function)


def on_process(self: _Process, function: Any = None, process_index: int | None = None) -> Any:
    """Make ``function`` run on the rank ``process_index`` only; a single process runs it in any case."""
    return _only_if(self.process_index == process_index or not self.use_distributed, function)


def on_local_process(self: _Process, function: Any = None, local_process_index: int | None = None) -> Any:
    """Make ``function`` run on the process ``local_process_index`` of each machine; a single process runs it in any case."""
    return _only_if(self.local_process_index == local_process_index or not self.use_distributed, function)


def _only_if(condition: bool, function: Any) -> Any:
    """Return ``function``, or one that does nothing where ``condition`` is false; without it, the decorator."""

    def decorate(function: Any) -> Any:
        if condition:
            return function

        @functools.wraps(function)
        def elsewhere(*_args: Any, **_kwargs: Any) -> None:
            return None

        return elsewhere

    return decorate if function is None else decorate(function)
