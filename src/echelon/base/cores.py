"""The machine's CPU cores: how many a run may use, and which of them each process is bound to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from echelon.base.errors import ConfigError
from echelon.base.limits import group_folders

_NODES = "sys/devices/system/node"
_CORES = "sys/devices/system/cpu"


def threads_of_each(num_processes: int) -> int:
    """Return the number of threads per process if ``num_processes`` processes share this machine's cores."""
    return max(1, usable_cores() // num_processes)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, given its affinity mask and its container's CPU quota."""
    # os.cpu_count() considers neither: in a container with 2 cores on a machine with 64 it returns 64.
    return max(1, min([len(_affinity_mask()), *_quotas(root)]))


def bind(cores: frozenset[int]) -> None:
    """Bind this process and any children that it starts later to ``cores``.

    Raises:
        ConfigError: the operating system does not support CPU affinity.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            "this operating system cannot bind processes to cores", where="enable_cpu_affinity", do="remove the setting"
        )
    os.sched_setaffinity(0, cores)


def cores_of_node(node: int, root: Path = Path("/")) -> frozenset[int]:
    """Return the cores on a NUMA node that this process may use; empty if there are none or they cannot be determined."""
    return _affinity_mask() & _read_core_list(root / _NODES / f"node{node}/cpulist")


def share_of(local_rank: int, local_world_size: int, root: Path = Path("/")) -> frozenset[int]:
    """Return one process's share of the usable cores, which are divided among the processes on this machine.

    Each process gets adjacent cores, including their hyperthreads, on a single NUMA node if possible.
    """
    nodes = {
        core: int(path.parent.name[4:])
        for path in root.glob(f"{_NODES}/node*/cpulist")
        for core in _read_core_list(path)
    }

    def place(core: int) -> tuple[int, int, int]:
        siblings = _read_core_list(root / _CORES / f"cpu{core}/topology/thread_siblings_list")
        return nodes.get(core, 0), min(siblings, default=core), core

    cores = sorted(_affinity_mask(), key=place)
    begin = local_rank * len(cores) // local_world_size
    return frozenset(cores[begin : max(begin + 1, (local_rank + 1) * len(cores) // local_world_size)])


def _affinity_mask() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def _read_core_list(path: Path) -> frozenset[int]:
    """Parse a list in the kernel's format, such as ``0-3,8``."""
    try:
        parts = [part.split("-") for part in path.read_text(encoding="ascii").strip().split(",") if part]
    except OSError:
        return frozenset()
    return frozenset(core for part in parts for core in range(int(part[0]), int(part[-1]) + 1))


def _quotas(root: Path) -> Iterator[int]:
    for folder, version in group_folders("cpu", root):
        quota = _quota(folder) if version == 2 else _quota_of_version_1(folder)
        if quota is not None:
            yield quota


def _quota(folder: Path) -> int | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError, ZeroDivisionError):  # the root group has no such file
        return None


def _quota_of_version_1(folder: Path) -> int | None:
    try:
        quota, period = (
            int((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii")) for name in ("quota", "period")
        )
        return None if quota <= 0 else quota // period
    except (OSError, ValueError, ZeroDivisionError):
        return None
