"""Operations that one rank executes without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

__all__ = ["alone", "is_alone"]

_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


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
