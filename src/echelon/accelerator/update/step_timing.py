"""Times the parts of a step for the launcher: forward pass, backward pass (local gradients) and communication."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.status.board import StepPart
from echelon.status.notes import Notes, notes_of_process


def record_planned_steps(number: int) -> None:
    """Record on the status board the number of optimizer steps of the whole run, including those before a restart."""
    notes = notes_of_process()
    if notes is not None:
        notes.plan(number)


def time_forward(model: nn.Module) -> None:
    """Time each forward pass of ``model``; if the process records nothing, no hook is registered."""
    notes = notes_of_process()
    if notes is not None:
        model.register_forward_pre_hook(_TimingHook(notes.begin_forward), prepend=True)
        model.register_forward_hook(_TimingHook(notes.end_forward), always_call=True)


class _TimingHook:
    """A hook of the user's model. It is copied with the model; a pickle of the model can be read without echelon."""

    def __init__(self, record: Callable[[], object]) -> None:
        self._record = record

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():  # a torch.compile around the model also traces its hooks
            self._record()

    def __deepcopy__(self, _memo: dict[int, Any]) -> _TimingHook:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, and does nothing


def begin_backward(loss: torch.Tensor, notes: Notes, *, communicates: bool) -> Callable[[], object]:
    """Record that the backward pass of ``loss`` starts, and return a function that records its end.

    If it ``communicates``, the time after the local gradients are computed counts as communication. DDP waits for the other
    ranks in a callback that autograd runs after all gradients are computed. A callback that was queued earlier, at the start of
    the backward pass, runs before it.
    """
    before = notes.part(StepPart.BACKWARD)
    if before is StepPart.FORWARD:  # on one process, it lasts until the backward pass
        before = StepPart.OTHER
    if not communicates:
        return partial(notes.part, before)
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    hook = loss.register_hook(lambda _: queue(lambda: notes.part(StepPart.COMMUNICATION)))  # type: ignore[no-untyped-call]

    def end() -> None:
        hook.remove()
        notes.part(before)

    return end
