"""Checks that this machine can run the requested number of processes; an overloaded machine becomes unresponsive."""

from __future__ import annotations

import os

from echelon.base.cores import usable_cores
from echelon.base.errors import ConfigError
from echelon.base.limits import Room, room_for_files, room_for_memory, room_for_tasks
from echelon.base.messages.translation import gettext as _

# Tests often use 8 ranks on 2 cores, or 16 on a laptop. Many more are a mistake, such as the count of another machine.
_ALWAYS = 16
_PER_CORE = 8
# Private memory of a process after `import torch`, without a model (142 MiB measured on torch 2.13; 210 with an optimizer).
_BYTES_OF_TORCH = 140 << 20
# The main thread, the reporter's thread, and threads of the store and gloo.
_TASKS_OF_TORCH = 5
_FILES_OF_RANK, _FILES_OF_LAUNCHER = 5, 64


def check_capacity(num_processes: int, *, origin: str, imports_torch: bool, uses_cpu: bool) -> None:
    """Raise an error if this machine cannot run ``num_processes`` processes.

    Args:
        num_processes: number of processes on this machine.
        origin: where the number was set, for the error message.
        imports_torch: whether the processes are Python programs; other programs' memory needs are unknown.
        uses_cpu: whether the processes run computations on the CPU.

    Raises:
        ConfigError: there are too few cores, there is too little memory, or a user or container limit is too low.
    """
    cores = usable_cores()
    most = max(_ALWAYS, _PER_CORE * cores, os.cpu_count() or 1)
    if uses_cpu and num_processes > most:
        raise _refusal(
            _(
                "{num_processes} processes on {cores} cores: the limit is {per_core} per core",
                num_processes=num_processes,
                cores=cores,
                per_core=_PER_CORE,
            ),
            most,
            origin,
        )
    if imports_torch and num_processes > 1:  # a single process reports the problem itself
        _check_room(room_for_memory(), _BYTES_OF_TORCH, num_processes, _("of memory to import torch"), origin)
    tasks = _TASKS_OF_TORCH if imports_torch else 1
    _check_room(room_for_tasks(), tasks, num_processes, _("processes and threads"), origin)
    files = room_for_files()
    if files is not None:
        files = Room(left=max(0, files.left - _FILES_OF_LAUNCHER), source=files.source)
    _check_room(files, _FILES_OF_RANK, num_processes, _("open files in the launcher"), origin)


def _check_room(room: Room | None, each: int, num_processes: int, resource: str, origin: str) -> None:
    if room is None or each * num_processes <= room.left:
        return
    needed, left = (
        f"{number / 2**30:.1f} GiB" if each >= 1 << 20 else str(number) for number in (each * num_processes, room.left)
    )
    what = _(
        "{num_processes} processes need {needed} {resource}, but only {left} are available ({source})",
        num_processes=num_processes,
        needed=needed,
        resource=resource,
        left=left,
        source=room.source,
    )
    raise _refusal(what, room.left // each, origin)


def _refusal(what: str, most: int, origin: str) -> ConfigError:
    do = _("free resources or raise the limit, or add --oversubscribe to start them anyway")
    if most:
        do = _("use --num_processes {most} or fewer, or add --oversubscribe to start them anyway", most=most)
    return ConfigError(what, where=origin, do=do)
