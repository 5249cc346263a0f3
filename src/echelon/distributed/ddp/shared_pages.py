"""Memory that two processes of one machine share."""

from __future__ import annotations

import json
import mmap
import os
from contextlib import suppress

import torch
import torch.distributed as dist

from echelon.distributed.small_messages import gather_bytes

__all__ = ["share_pages"]

_NAME = "echelon-gradients"  # as shown in /proc/PID/maps
_TOKEN = 16  # random bytes at the start, by which a process recognizes the other one's memory


def share_pages(num_bytes: int, *, wanted: bool, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Return uint8 [num_bytes] that both ranks of ``group`` share, or None on both if it cannot be had or one does not want it.

    The memory has no file name (memfd_create), so that nothing is left behind when the processes end, however they end. It is allocated
    here, so that a later write cannot fail. The first rank creates it; the other one opens it in /proc.

    Collective: call on both ranks.
    """
    rank, handle, token = dist.get_rank(group), -1, b""
    pages: mmap.mmap | None = None
    try:
        if wanted and rank == 0:
            token = os.urandom(_TOKEN)
            with suppress(OSError, AttributeError):  # not Linux, an old kernel, or no memory left
                handle = os.memfd_create(_NAME, os.MFD_CLOEXEC)
                os.posix_fallocate(handle, 0, max(num_bytes, _TOKEN))
                pages = mmap.mmap(handle, max(num_bytes, _TOKEN))
                pages[:_TOKEN] = token
        place = [os.getpid(), handle, token.hex()] if pages is not None else None
        theirs = json.loads(gather_bytes(json.dumps(place).encode(), group=group)[0])
        if wanted and rank == 1 and theirs is not None:
            pages = _open(*theirs, num_bytes=max(num_bytes, _TOKEN))
        has_pages = [answer == b"1" for answer in gather_bytes(b"1" if pages is not None else b"0", group=group)]
    finally:
        if handle >= 0:
            os.close(handle)  # the mapping remains
    if pages is None or not all(has_pages):
        return None
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]


def _open(pid: int, handle: int, token: str, *, num_bytes: int) -> mmap.mmap | None:
    """Return the memory of another process, or None if this process may not open it or ``pid`` is another process here (containers)."""
    path = f"/proc/{pid}/fd/{handle}"
    with suppress(OSError):
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(own).st_size == num_bytes:
                pages = mmap.mmap(own, num_bytes)
                if pages[:_TOKEN] == bytes.fromhex(token):
                    return pages
        finally:
            os.close(own)
    return None
