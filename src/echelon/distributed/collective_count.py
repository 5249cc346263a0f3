"""How many collectives this process has started: whether ranks can have exchanged anything between two lines of a program."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["num_collectives", "num_collectives_of_all_groups"]


def num_collectives() -> int | None:
    """Return how many collectives this process has started in the default group; None: unknown."""
    return _number_of(dist.group.WORLD) if dist.is_initialized() else None


def num_collectives_of_all_groups() -> int | None:
    """Return how many collectives this process has started in all its groups, on every device; None: unknown.

    A group for GPUs has a second backend for CPU tensors, whose collectives the group's own number leaves out.
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
    """Return the number that ``group`` (or a backend of it) gave to its last collective; None: it gives none."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    if count is None:
        return None
    try:
        return int(count())
    except RuntimeError:  # torch's way of saying that the backend (MPI, many of other devices) does not count
        return None
