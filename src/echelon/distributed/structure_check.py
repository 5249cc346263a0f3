"""Checks before a collective that all ranks pass the same structure; on a mismatch, gloo may abort the process."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError, UsageError
from echelon.config.sources import is_debug
from echelon.status.notes import notes_of_process

__all__ = ["check_same", "ranks_of", "wire_device"]


def check_same(operation: str, description: str, *, group: dist.ProcessGroup | None) -> None:
    """Raise an error on every rank if ``description`` differs between ranks; the error lists each rank's description.

    If gloo is the only backend, the check always runs and costs one gather of 16 bytes, because on a mismatch gloo would
    abort the process (SIGABRT) or mix up data. With other backends, it would synchronize the host and therefore runs only in
    debug mode (ECHELON_DEBUG=1).

    Collective: call on every rank of ``group``.

    Raises:
        DesyncError: the descriptions differ.
    """
    notes = notes_of_process()
    if notes is not None:
        notes.operation(operation, description)
    backends = _backends(group)
    if set(backends.values()) != {"gloo"} and not is_debug():
        return
    digest = hashlib.blake2b(f"{operation} {description}".encode(), digest_size=16).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(wire_device(torch.device("cpu"), group))
    world_size = dist.get_world_size(group)
    theirs = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(theirs, mine, group=group)
    if all(torch.equal(other, theirs[0]) for other in theirs):
        return
    texts: list[Any] = [None] * world_size
    dist.all_gather_object(texts, f"{operation} {description}", group=group)
    listing = "\n".join(f"    rank {rank}: {text}" for rank, text in zip(ranks_of(group), texts))
    raise DesyncError(
        f"{operation}: the ranks do not pass the same structure\n{listing}",
        do="pass the same shapes, dtypes and structures on every rank (use pad_across_processes for unequal sizes and "
        "gather_object for other data), and call collectives in the same order on every rank",
    )


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks in ``group``, in group order."""
    if group is None:
        group = dist.group.WORLD  # torch 2.7 does not accept None here
        assert group is not None
    return dist.get_process_group_ranks(group)


def wire_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Return the device to move a tensor to for a collective, which is ``device`` itself if a backend supports it.

    Raises:
        UsageError: there is no process group.
    """
    backends = _backends(group)
    if device.type in backends:
        return device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type in backends:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend for each device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    if not dist.is_initialized():
        raise UsageError("there is no process group", do="call echelon.distributed.setup() first")
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)
