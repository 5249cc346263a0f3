"""Pages of memory-mapped files: given back to the system, which reads them again where somebody still wants them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch

__all__ = ["release_pages"]

_PAGEOUT = 21  # MADV_PAGEOUT, Linux 5.4: unlike MADV_DONTNEED it keeps what was changed in memory

_LEAST = 2**16  # bytes: below it the look-up costs more than the pages


def release_pages(tensor: torch.Tensor) -> None:
    """Let the system take the pages of ``tensor`` out of this process's resident memory, where a file is behind them.

    Files of weights are often memory-mapped (safetensors, transformers): a page that was read stays resident for as long
    as the mapping lives, that of the whole file. Values do not change. Elsewhere than on Linux nothing happens.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.numel():
        return
    start = tensor.data_ptr()
    size = mmap.PAGESIZE
    first, last = -(-start // size) * size, (start + tensor.numel() * tensor.element_size()) // size * size
    if last - first >= _LEAST and _is_file(first):
        # Advice only: a kernel or a sandbox may refuse it, and the pages stay.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _PAGEOUT)


def _is_file(address: int) -> bool:
    """Is a file mapped at ``address``? Anonymous memory would be written to swap."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, _, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high:
            return inode != "0"
    return False
