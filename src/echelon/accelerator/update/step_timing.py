"""What the time of a step goes to, for the launcher: forward pass, backward pass (this rank's own gradients), other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from echelon.status.board import StepPart
from echelon.status.notes import Notes, notes_of_process

__all__ = ["NOT_TIMED", "time_forward", "timed_backward"]

NOT_TIMED: AbstractContextManager[None] = nullcontext()
"""In the place of ``timed_backward``, where no launcher wants to know."""


def time_forward(model: nn.Module) -> None:
    """Note each forward pass of ``model``, where a launcher wants to know; elsewhere nothing is hooked, and nothing costs."""
    if notes_of_process() is not None:
        model.register_forward_pre_hook(_begin_forward, prepend=True)
        model.register_forward_hook(_end_forward, always_call=True)


# Functions of a module, and not methods: a model is copied and pickled with its hooks.
def _begin_forward(_model: nn.Module, _inputs: Any) -> None:
    # A user's torch.compile around the model traces its hooks, too.
    if not torch.compiler.is_compiling() and (notes := notes_of_process()) is not None:
        notes.begin_forward()


def _end_forward(_model: nn.Module, _inputs: Any, _outputs: Any) -> None:
    if not torch.compiler.is_compiling() and (notes := notes_of_process()) is not None:
        notes.end_forward()


@contextmanager
def timed_backward(loss: torch.Tensor, notes: Notes) -> Iterator[None]:
    """Note the time of the backward pass of ``loss``; what follows its own gradients is communication.

    DDP waits for the other ranks in a callback that autograd makes when all gradients are there. One that was asked for
    earlier, at the beginning of the pass, is made before it.
    """
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    before = notes.part(StepPart.BACKWARD)
    hook = loss.register_hook(lambda _: queue(lambda: notes.part(StepPart.COMMUNICATION)))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hook.remove()
        notes.part(before)
