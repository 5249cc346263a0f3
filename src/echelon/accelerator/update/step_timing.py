"""Times the parts of a step for the launcher: forward pass, backward pass (local gradients) and communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from echelon.status.board import StepPart
from echelon.status.notes import Notes, TimingObserver, notes_of_process

__all__ = ["begin_backward", "record_planned_steps", "time_forward"]


def record_planned_steps(number: int) -> None:
    """Record on the status board the number of optimizer steps of the whole run, including those before a restart."""
    notes = notes_of_process()
    if notes is not None:
        notes.plan(number)


def time_forward(model: nn.Module) -> None:
    """Time each forward pass of ``model``; if the process records nothing, no hook is registered."""
    notes = notes_of_process()
    if notes is not None:
        _ForwardTimer(notes, model).set_timed(notes.is_timed)


class _ForwardTimer(TimingObserver):
    """Two hooks of a model, which are removed while steps are not timed, because they take 10 to 20 microseconds.

    They are copied and pickled with the model; a copy is not timed.
    """

    def __init__(self, notes: Notes | None, model: nn.Module | None) -> None:
        self._notes = notes
        self._model = None if model is None else ref(model)
        self._handles: list[Any] = []
        if notes is not None and model is not None:
            notes.observe_timing(self, owner=model)

    def __reduce__(self) -> tuple[Callable[[], _ForwardTimer], tuple[()]]:
        return _no_timer, ()

    def set_timed(self, is_timed: bool) -> None:
        """See ``TimingObserver``."""
        model = None if self._model is None else self._model()
        if is_timed and model is not None and not self._handles:
            self._handles = [
                model.register_forward_pre_hook(self.begin, prepend=True),
                model.register_forward_hook(self.end, always_call=True),
            ]
        elif not is_timed:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def begin(self, _model: nn.Module, _inputs: Any) -> None:
        # A torch.compile around the model also traces its hooks.
        if not torch.compiler.is_compiling() and self._notes is not None:
            self._notes.begin_forward()

    def end(self, _model: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if not torch.compiler.is_compiling() and self._notes is not None:
            self._notes.end_forward()


def _no_timer() -> _ForwardTimer:
    return _ForwardTimer(None, None)


def begin_backward(loss: torch.Tensor, notes: Notes, *, communicates: bool) -> Callable[[], object]:
    """Record that the backward pass of ``loss`` starts, and return a function that records its end.

    If it ``communicates``, the time after the local gradients are computed counts as communication. DDP waits for the other
    ranks in a callback that autograd runs after all gradients are computed. A callback that was queued earlier, at the start of
    the backward pass, runs before it.
    """
    before = notes.part(StepPart.BACKWARD)
    if not communicates:
        return partial(notes.part, before)
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    hook = loss.register_hook(lambda _: queue(lambda: notes.part(StepPart.COMMUNICATION)))  # type: ignore[no-untyped-call]

    def end() -> None:
        hook.remove()
        notes.part(before)

    return end
