"""Operations that one rank executes without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

__all__ = ["alone", "is_alone", "is_awaited", "while_others_wait"]

_ALONE: ContextVar[bool] = ContextVar("alone", default=False)
_AWAITED: ContextVar[bool] = ContextVar("awaited", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Within the block, let echelon's collectives in this thread treat this process as the only rank."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def is_alone(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ``group`` has no other rank to communicate with."""
    return not dist.is_initialized() or _ALONE.get() or dist.get_world_size(group) == 1


@contextmanager
def while_others_wait() -> Iterator[None]:
    """Within the block, which the other ranks wait for, let echelon expect none of them in an operation of all ranks."""
    token = _AWAITED.set(True)
    try:
        yield
    finally:
        _AWAITED.reset(token)


def is_awaited() -> bool:
    """Return whether this thread is in a block that the other ranks wait for."""
    return _AWAITED.get()
