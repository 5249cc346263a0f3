"""Makes the C library keep the memory that this process frees, instead of giving it back to the kernel."""

from __future__ import annotations

import ctypes
import os

from echelon.base import environ

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt: malloc.h of glibc
_MOST = 2**31 - 1  # mallopt takes an int
_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
)


def keep_freed_memory(most: int) -> bool:
    """Keep up to ``most`` bytes of freed memory at the end of the heap; return whether that was set.

    A training step frees its activations and gradients, and the next one allocates as many again. By default, glibc gives most of them
    back to the kernel in between, which must then clear each page again when it is first written (a page fault).

    Nothing is set if the user has chosen such settings, or where the C library is another one. Source: mallopt(3).
    """
    if any(map(environ.get, _SETTINGS)) or "glibc.malloc" in (environ.get("GLIBC_TUNABLES") or ""):
        return False
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim = min(most, _MOST)
    # As glibc adapts them: what is mapped on its own is at most half of what is kept.
    return bool(mallopt(_MMAP_THRESHOLD, trim // 2)) and bool(mallopt(_TRIM_THRESHOLD, trim))
