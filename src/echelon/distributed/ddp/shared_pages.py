"""Memory that two processes of one machine share."""

from __future__ import annotations

import ctypes
import json
import os
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.distributed.small_messages import gather_bytes

__all__ = ["SharedPages", "share_pages"]

_NAME = "echelon-gradients"  # as shown in /proc/PID/maps
_NUM_TOKEN_BYTES = 7  # random bytes at the start, the identity: twice their number is an int64
_MADV_DONTFORK = 10  # Linux


class SharedPages(NamedTuple):
    """Memory that this process shares with another one."""

    memory: torch.Tensor
    """uint8 [number of bytes]"""
    identity: int
    """The same on both ranks, and another one for any other memory."""


def share_pages(num_bytes: int, *, wanted: bool, group: dist.ProcessGroup) -> SharedPages | None:
    """Return memory that both ranks of ``group`` share, or None on both if it cannot be had or one does not want it.

    The memory has no file name (memfd_create), so that nothing is left behind when the processes end, however they end. It is allocated
    here, so that a later write cannot fail. The first rank creates it; the other one opens it in /proc.

    Args:
        num_bytes: size of the memory, at least 7.
        wanted: whether this rank wants it.
        group: two ranks of one machine.

    Collective: call on both ranks.
    """
    rank, handle, pages = dist.get_rank(group), -1, None
    try:
        if wanted and rank == 0:
            with suppress(OSError, AttributeError, RuntimeError):  # not Linux, an old kernel, or no memory left
                handle = os.memfd_create(_NAME, os.MFD_CLOEXEC)
                os.posix_fallocate(handle, 0, num_bytes)
                token = os.urandom(_NUM_TOKEN_BYTES)
                memory = _map(f"/proc/self/fd/{handle}", num_bytes)
                memory[:_NUM_TOKEN_BYTES] = torch.tensor(list(token))
                pages = SharedPages(memory, int.from_bytes(token, "little"))
        place = None if pages is None else [os.getpid(), handle, pages.identity]
        theirs = json.loads(gather_bytes(json.dumps(place).encode(), group=group)[0])
        if wanted and rank == 1 and theirs is not None:
            pages = _open(*theirs, num_bytes=num_bytes)
        has_pages = [answer == b"1" for answer in gather_bytes(b"0" if pages is None else b"1", group=group)]
    finally:
        if handle >= 0:
            os.close(handle)  # the mapping remains
    return pages if all(has_pages) else None


def _open(pid: int, handle: int, identity: int, *, num_bytes: int) -> SharedPages | None:
    """Return the memory of another process, or None if this process may not open it or ``pid`` is another process here (containers)."""
    path = f"/proc/{pid}/fd/{handle}"
    with suppress(OSError, RuntimeError):
        if os.readlink(path).startswith(f"/memfd:{_NAME}") and os.stat(path).st_size == num_bytes:
            memory = _map(path, num_bytes)
            if int.from_bytes(memory[:_NUM_TOKEN_BYTES].tolist(), "little") == identity:
                return SharedPages(memory, identity)
    return None


def _map(path: str, num_bytes: int) -> torch.Tensor:
    """Map a file into memory that forked processes do not get: a worker of a DataLoader would keep it after both ranks have freed it."""
    memory = torch.from_file(
        path, shared=True, size=num_bytes, dtype=torch.uint8
    )  # closes the file; Python's mmap does not
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(num_bytes), _MADV_DONTFORK)
    return memory
