"""Loader workers are forked in a process in which the collectives have threads of their own."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

__all__ = ["settle_before_fork"]

_SETTLE_S = 0.005
_REPAIRED = {(3, 10): (3, 10, 15), (3, 11): (3, 11, 8)}


def settle_before_fork() -> None:
    """Give the threads of the last collectives the time to leave the interpreter, where forking beside them is unsafe.

    When a collective is over, gloo's thread lets go of the tensors, and enters the interpreter for that. A child that is
    forked in this moment hangs in ``os.fork`` for ever, and the loader waits for it: https://github.com/python/cpython/issues/112275,
    in Python 3.10 before 3.10.15 and 3.11 before 3.11.8. Without the pause, one in about 600 passes hangs
    (tests/ranks/test_data_iterable.py: test_loader_workers_with_a_rest_each_keep_it_exact, repeated).
    """
    if dist.is_initialized() and sys.version_info[:3] < _REPAIRED.get(sys.version_info[:2], (0,)):
        time.sleep(_SETTLE_S)
