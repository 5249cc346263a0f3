"""What the time of a backward pass goes to, for the launcher: this rank's own gradients, then the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from echelon.status.board import Part
from echelon.status.notes import Notes, notes_of_process

__all__ = ["timed_backward"]


def timed_backward(loss: torch.Tensor) -> AbstractContextManager[None]:
    """Return the context of the backward pass of ``loss``; what comes after its own gradients is communication.

    DDP waits for the other ranks in a callback that autograd makes when all gradients are there. One that was asked for
    earlier, at the beginning of the pass, is made before it.
    """
    notes = notes_of_process()
    return _NOTHING if notes is None else _timed(loss, notes)


@contextmanager
def _timed(loss: torch.Tensor, notes: Notes) -> Iterator[None]:
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    before = notes.part(Part.BACKWARD)
    hook = loss.register_hook(lambda _: queue(lambda: notes.part(Part.COMMUNICATION)))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hook.remove()
        notes.part(before)


_NOTHING = nullcontext()
