"""Let schedulers go on with the optimizer that an engine put in the place of theirs."""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import ref

from torch.optim import Optimizer

__all__ = ["follow"]


def follow(scheduler: Any, *, old: Optimizer, new: Optimizer) -> None:
    """Make ``scheduler``, and the schedulers inside it, drive ``new`` where they drove ``old``."""
    for inner in getattr(scheduler, "_schedulers", ()):  # ChainedScheduler, SequentialLR
        follow(inner, old=old, new=new)
    if scheduler.optimizer is old:
        scheduler.optimizer = new
        _note_steps(new)
        new._opt_called = getattr(old, "_opt_called", False)  # type: ignore[attr-defined]


def _note_steps(optimizer: Optimizer) -> None:
    """Mark ``optimizer.step`` as the constructor of a scheduler does, which otherwise warns that it was never called.

    Source: torch.optim.lr_scheduler.LRScheduler (torch 2.7 to 2.13).
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    function: Any = optimizer.step.__func__  # type: ignore[attr-defined]
    owner = ref(optimizer)  # the optimizer holds its step: without a cycle

    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        self: Any = owner()
        self._opt_called = True
        return function(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
