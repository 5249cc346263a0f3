"""Operations that one rank executes without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch.distributed as dist

_ALONE: ContextVar[bool] = ContextVar("alone", default=False)
_AWAITED: ContextVar[bool] = ContextVar("awaited", default=False)


def alone() -> AbstractContextManager[None]:
    """Within the block, let echelon's collectives in this thread treat this process as the only rank."""
    return _true_within(_ALONE)


def is_alone(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ``group`` has no other rank to communicate with."""
    return not dist.is_initialized() or _ALONE.get() or dist.get_world_size(group) == 1


def while_others_wait() -> AbstractContextManager[None]:
    """Run the block on this rank alone, while the other ranks wait for it: operations inside it do not wait for them."""
    return _true_within(_AWAITED)


def is_awaited() -> bool:
    """Return whether this thread is in a block that the other ranks wait for."""
    return _AWAITED.get()


@contextmanager
def _true_within(variable: ContextVar[bool]) -> Iterator[None]:
    token = variable.set(True)
    try:
        yield
    finally:
        variable.reset(token)
