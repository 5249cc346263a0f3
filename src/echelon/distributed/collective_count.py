"""Counts the collectives that this process starts, to detect whether ranks may have exchanged data between two lines."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from echelon.distributed.uncompiled import uncompiled

__all__ = ["num_collectives", "num_collectives_of_all_groups"]


@uncompiled
def num_collectives() -> int | None:
    """Return the number of collectives this process has started in the default group, or None if unknown."""
    return _number_of(dist.group.WORLD) if dist.is_initialized() else None


@uncompiled
def num_collectives_of_all_groups() -> int | None:
    """Return the number of collectives this process has started in all groups, on all devices, or None if unknown.

    A GPU group has a second backend for CPU tensors, whose collectives the group's sequence number does not count.
    """
    if not dist.is_initialized():
        return None
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        devices = getattr(group, "_device_types", None)
        backends = {id(found): found for found in map(group._get_backend, devices)} if devices else {0: group}
        for backend in backends.values():
            num = _number_of(backend)
            if num is None:
                return None
            total += num
    return total


def _number_of(group: object) -> int | None:
    """Return the sequence number of the last collective in a group or backend, or None if it has no counter."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    if count is None:
        return None
    try:
        return int(count())
    except RuntimeError:  # raised by torch if the backend (MPI, many device backends) does not count
        return None
