"""Detects the launcher of this process (torchrun, DeepSpeed, Slurm, MPI or none) from the environment, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _

Starter = Literal["torchrun", "slurm", "mpi", "single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """A process's rank, world size and rendezvous address, as set by its launcher."""

    starter: Starter
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    """Address of rank 0; None if unknown."""
    master_port: int | None = None


def detect() -> LaunchEnvironment:
    """Read the variables set by torchrun, Slurm or MPI, in this order; if none is set, describe a single process.

    Raises:
        ConfigError: a variable is not an integer, only one of RANK and WORLD_SIZE is set, or the rank is outside the world.
    """
    if environ.get("RANK") is not None or environ.get("WORLD_SIZE") is not None:
        return _from_torchrun()
    # sbatch and salloc also set SLURM_NTASKS for the shell; only a step started by srun has one process per task.
    if environ.get("SLURM_STEP_ID") is not None and environ.get("SLURM_PROCID") is not None:
        return _from_slurm()
    for names in _MPI:
        if environ.get(names[0]) is not None and environ.get(names[1]) is not None:
            return _from_mpi(*names)
    return LaunchEnvironment(
        starter="single",
        master_addr=environ.get("MASTER_ADDR"),
        master_port=integer("MASTER_PORT") if environ.get("MASTER_PORT") else None,
    )


def check_rank(rank: int, world_size: int, *, rank_from: str, world_size_from: str) -> None:
    """Check that ``rank`` is in ``0 .. world_size - 1``; the error message gives the origin of both values.

    Raises:
        ConfigError: ``world_size`` is below 1, or the rank is outside the world.
    """
    if world_size < 1:
        raise ConfigError(
            _(
                "world_size={world_size} (from {world_size_from}) is below 1",
                world_size=world_size,
                world_size_from=world_size_from,
            ),
            do=_("start at least one process"),
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            _(
                "rank={rank} (from {rank_from}) is outside 0..{most}, world_size={world_size} (from {world_size_from})",
                rank=rank,
                rank_from=rank_from,
                most=world_size - 1,
                world_size=world_size,
                world_size_from=world_size_from,
            ),
            do=_("number the processes 0..{most}, or start more processes", most=world_size - 1),
        )


def _from_torchrun() -> LaunchEnvironment:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if environ.get(name) is None:
            raise ConfigError(
                _("{other}={value} is set, but {name} is not", other=other, value=environ.get(other), name=name),
                where=_("env {name}", name=name),
                do=_("start the program with echelon launch or torchrun, which set both, or set both yourself"),
            )
    rank, world_size = integer("RANK"), integer("WORLD_SIZE")
    check_rank(rank, world_size, rank_from="env RANK", world_size_from="env WORLD_SIZE")
    local_rank = integer("LOCAL_RANK", rank)
    # DeepSpeed's launcher has other names for these two variables. CROSS_SIZE shows that it set them.
    deepspeed = environ.get("CROSS_SIZE") is not None
    local_size, node = ("LOCAL_SIZE", "CROSS_RANK") if deepspeed else ("LOCAL_WORLD_SIZE", "NODE_RANK")
    local_world_size = integer("LOCAL_WORLD_SIZE", integer(local_size, world_size))
    check_rank(local_rank, local_world_size, rank_from="env LOCAL_RANK", world_size_from="env LOCAL_WORLD_SIZE")
    return LaunchEnvironment(
        starter="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=integer("GROUP_RANK", integer(node, rank // local_world_size)),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=integer("MASTER_PORT") if environ.get("MASTER_PORT") else None,
    )


def _from_slurm() -> LaunchEnvironment:
    rank = integer("SLURM_PROCID")
    size = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = integer(size, 1)
    check_rank(rank, world_size, rank_from="env SLURM_PROCID", world_size_from=_("env {name}", name=size))
    node_rank = integer("SLURM_NODEID", 0)
    tasks = slurm_tasks_by_node()
    first = slurm_first_host() or "127.0.0.1"
    return LaunchEnvironment(
        starter="slurm",
        rank=rank,
        world_size=world_size,
        local_rank=integer("SLURM_LOCALID", 0),
        local_world_size=tasks[node_rank] if node_rank < len(tasks) else world_size,
        node_rank=node_rank,
        master_addr=environ.get("MASTER_ADDR") or ("127.0.0.1" if len(tasks) == 1 else first),
        master_port=slurm_port(),
    )


def slurm_tasks_by_node() -> list[int]:
    """Return this Slurm step's number of tasks on each machine, or an empty list if Slurm does not set it."""
    return _expand_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE"))


def slurm_first_host() -> str | None:
    """Return the name of this Slurm step's first machine, or None if Slurm does not set it."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    return None if nodes is None else _first_host(nodes)


def slurm_port() -> int:
    """Return MASTER_PORT if set, otherwise a port that all tasks derive from the job and step without communication."""
    # Above the privileged and below the ephemeral ports.
    return integer("MASTER_PORT", 15000 + (integer("SLURM_JOB_ID", 0) * 16 + integer("SLURM_STEP_ID", 0)) % 15000)


# (rank, size, local rank, local size) of Open MPI, of MPICH and Intel MPI (hydra), and of MVAPICH2.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)


def _from_mpi(rank_name: str, size_name: str, local_name: str, local_size_name: str) -> LaunchEnvironment:
    rank, world_size = integer(rank_name), integer(size_name)
    check_rank(
        rank,
        world_size,
        rank_from=_("env {name}", name=rank_name),
        world_size_from=_("env {name}", name=size_name),
    )
    local_world_size = integer(local_size_name, world_size)
    one_machine = local_world_size == world_size
    return LaunchEnvironment(
        starter="mpi",
        rank=rank,
        world_size=world_size,
        local_rank=integer(local_name, rank % local_world_size),
        local_world_size=local_world_size,
        # Open MPI's NODE_RANK counts processes, not nodes. This assumes mpirun's default placement by slot.
        node_rank=rank // local_world_size,
        master_addr=environ.get("MASTER_ADDR") or ("127.0.0.1" if one_machine else None),
        master_port=integer("MASTER_PORT", 29500),
    )


@dataclass
class CPUInformation:
    """Rank and world size, read from the environment variables set by the launcher, as accelerate shows them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return rank and world size from the environment."""
    place = detect()
    return CPUInformation(place.rank, place.world_size, place.local_rank, place.local_world_size)


def integer(name: str, default: int | None = None) -> int:
    """Return the variable ``name`` as an integer, or ``default`` if it is not set.

    Raises:
        ConfigError: the variable is not an integer, or it is not set and there is no default.
    """
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(
                _("{name} is not set", name=name),
                where=_("env {name}", name=name),
                do=_("set {name} to an integer", name=name),
            )
        return default
    try:
        return int(text)
    except ValueError:
        do = _("set {name} to an integer", name=name)
        if "$" in text:
            do += " (the value was not expanded by a shell; check the quotes in the command that sets it)"
        raise ConfigError(
            _("{name}={text!r} is not an integer", name=name, text=text), where=_("env {name}", name=name), do=do
        ) from None


def _expand_tasks(text: str | None) -> list[int]:
    """Expand Slurm's ``2(x3),1`` into ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in (text or "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list such as ``gpu[03-05,9],cpu1`` or ``r[1-2]n[1-4]``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert match is not None, nodes
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])
