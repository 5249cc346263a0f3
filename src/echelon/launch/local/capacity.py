"""Check before the start that this machine can run so many processes: an overloaded machine responds to nobody."""

from __future__ import annotations

import os

from echelon.base.cores import usable_cores
from echelon.base.errors import ConfigError
from echelon.base.limits import Room, room_for_files, room_for_memory, room_for_tasks

__all__ = ["check_capacity"]

# 8 ranks on 2 cores, or 16 on a laptop, are usual for tests. Far more is a mistake (the count of another machine).
_ALWAYS = 16
_PER_CORE = 8
# Private memory of a process after `import torch` (measured: 142 MiB on torch 2.13, 210 with an optimizer), without a model.
_BYTES_OF_TORCH = 140 << 20
# The main thread, the reporter, and threads of the store and gloo.
_TASKS_OF_TORCH = 5
_FILES_OF_RANK, _FILES_OF_LAUNCHER = 5, 64


def check_capacity(num_processes: int, *, origin: str, imports_torch: bool, uses_cpu: bool) -> None:
    """Refuse more processes than this machine can run.

    Args:
        num_processes: on this machine.
        origin: of that number, for the message.
        imports_torch: they are Python programs; False: their needs are unknown.
        uses_cpu: they compute on the CPU.

    Raises:
        ConfigError: the cores, the memory, or a limit of the user or the container do not suffice.
    """
    cores = usable_cores()
    most = max(_ALWAYS, _PER_CORE * cores, os.cpu_count() or 1)
    if uses_cpu and num_processes > most:
        raise _refusal(f"{num_processes} processes on {cores} cores: the limit is {_PER_CORE} per core", most, origin)
    if imports_torch and num_processes > 1:  # a single process reports the lack itself
        _check_room(room_for_memory(), _BYTES_OF_TORCH, num_processes, "memory to import torch", origin)
    tasks = _TASKS_OF_TORCH if imports_torch else 1
    _check_room(room_for_tasks(), tasks, num_processes, "processes and threads", origin)
    files = room_for_files()
    if files is not None:
        files = Room(left=max(0, files.left - _FILES_OF_LAUNCHER), source=files.source)
    _check_room(files, _FILES_OF_RANK, num_processes, "open files in the launcher", origin)


def _check_room(room: Room | None, each: int, num_processes: int, of_what: str, origin: str) -> None:
    if room is None or each * num_processes <= room.left:
        return
    needed, left = (_format_amount(number, is_bytes=each >= 1 << 20) for number in (each * num_processes, room.left))
    what = f"{num_processes} processes need {needed} of {of_what}, and {left} are left ({room.source})"
    raise _refusal(what, room.left // each, origin)


def _refusal(what: str, most: int, origin: str) -> ConfigError:
    instead = f"give --num_processes {most} or fewer, or add" if most else "free some or raise the limit, or add"
    return ConfigError(what, where=origin, do=f"{instead} --oversubscribe to start them anyway")


def _format_amount(number: int, *, is_bytes: bool) -> str:
    return f"{number / 2**30:.1f} GiB" if is_bytes else str(number)
