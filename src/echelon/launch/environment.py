"""The environment variables that programs get from the process that starts them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from echelon.base import environ
from echelon.base.cores import threads_of_each
from echelon.config.library_variables import for_accelerate
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import CHOSEN_THREADS, CONFIG_VARIABLE, encode

_OF_A_RANK = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "NODE_RANK")
)
_OF_A_JOB = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "MV2_")
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def inherited(*, without: Callable[[str], bool] = lambda name: False) -> dict[str, str]:
    """Return this process's environment for a program that it starts, without the variables that ``without`` accepts.

    Never log it, because it contains secrets.
    """
    return {name: value for name, value in environ.snapshot().items() if not without(name)}


def is_of_rank(name: str) -> bool:
    """Return whether ``name`` is a variable of a rank, or of the job in which a launcher runs."""
    return name in _OF_A_RANK or name.startswith(_OF_A_JOB)


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables that bind gloo and NCCL to the interface that the user chose, or else to ``interface`` if it is known."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: value for name in names if (value := environ.get(name) or interface)}


def rank_variables(
    resolved: Resolved[RunConfig],
    *,
    num_processes: int,
    num_threads: int | None,
    has_accelerator: bool,
    interface: str | None = LOOPBACK_INTERFACE,
) -> dict[str, str]:
    """Return the variables that are the same for all ranks on this machine.

    Args:
        resolved: settings to pass to the ranks as JSON.
        num_processes: number of processes on this machine.
        num_threads: OMP_NUM_THREADS for each process; None keeps the user's value or, if unset, divides the cores
            equally.
        has_accelerator: whether this machine has an accelerator.
        interface: the network interface to the other machines; None if it is unknown.
    """
    variables = {**interface_variables(interface), CONFIG_VARIABLE: encode(resolved), **for_accelerate(resolved)}
    if num_processes > 1 and not has_accelerator:
        # Without this variable and without accelerators, accelerate runs every process as a separate run.
        variables["ACCELERATE_USE_CPU"] = "true"
    if num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    elif num_processes > 1 and environ.get("OMP_NUM_THREADS") is None:
        # Ranks that each use all cores slow each other down; one thread each, as in torchrun, leaves most cores idle.
        variables["OMP_NUM_THREADS"] = variables[CHOSEN_THREADS] = str(threads_of_each(num_processes))
    return variables
