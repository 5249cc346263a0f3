"""Forking loader workers in a process in which collectives have threads of their own."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

__all__ = ["wait_before_fork"]

_PAUSE_S = 0.005
_REPAIRED = {(3, 10): (3, 10, 15), (3, 11): (3, 11, 8)}


def wait_before_fork() -> None:
    """Wait until the threads of the last collectives have left the interpreter, where forking beside them is unsafe.

    After a collective, gloo's thread enters the interpreter to release the tensors. A child that is forked at that moment
    hangs in ``os.fork``, and the loader with it: https://github.com/python/cpython/issues/112275,
    in Python 3.10 before 3.10.15 and 3.11 before 3.11.8. Without the pause, one in about 600 passes hangs
    (tests/ranks/test_data_iterable.py: test_loader_workers_with_a_rest_each_keep_it_exact, repeated).
    """
    if dist.is_initialized() and sys.version_info[:3] < _REPAIRED.get(sys.version_info[:2], (0,)):
        time.sleep(_PAUSE_S)
