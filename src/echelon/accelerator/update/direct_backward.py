"""Detects ``loss.backward()`` where ``accelerator.backward(loss)`` was needed to weigh the loss: a warning or an error."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from echelon.accelerator.gradient_state import GradientState
from echelon.base.errors import UsageError
from echelon.base.warnings import user_line, warn
from echelon.data.exact.global_batch_slices import Contribution

__all__ = ["DirectBackwardCheck"]

_DO = "call accelerator.backward(loss) instead of loss.backward()"


class DirectBackwardCheck:
    """Checks before each step of a prepared optimizer whether ``accelerator.backward`` computed its gradients.

    Args:
        state: counts the losses that ``accelerator.backward`` has backpropagated.
        parity: the run's parity mode.
        num_processes: the run's number of processes.
        contribution: returns the share of the current batch in its update; None outside the exact modes.
    """

    def __init__(
        self,
        *,
        state: GradientState,
        parity: str,
        num_processes: int,
        contribution: Callable[[], Contribution | None] | None,
    ) -> None:
        self._state = state
        self._parity = parity
        self._num_processes = num_processes
        self._contribution = contribution
        # For each optimizer: the number of losses at its last step, and one of the gradients that it used.
        self._steps: WeakKeyDictionary[Optimizer, tuple[int, ref[torch.Tensor] | None]] = WeakKeyDictionary()
        self._is_warned = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Warn once where the loss was not divided by the micro-steps of an accumulation window.

        Raises:
            UsageError: in an exact mode, where the loss needed a weight.
        """
        num_losses, stepped = self._steps.get(optimizer, (0, None))
        if num_losses != self._state.num_losses:
            return
        gradient = _first_gradient(optimizer)
        if gradient is None or (stepped is not None and stepped() is gradient):
            return  # nothing to step with, or a second step with the same gradients
        if (reason := self._missing_weight()) is not None:
            raise UsageError(
                f"{type(optimizer).__name__} steps with gradients that accelerator.backward() did not compute, and {reason}",
                where=f"step() at {user_line()}, parity={self._parity!r}",
                do=_DO,
            )
        if self._contribution is None and self._state.num_steps > 1 and not self._is_warned:
            self._is_warned = True
            warn(
                f"{type(optimizer).__name__} steps with gradients that accelerator.backward() did not compute: echelon has not divided "
                f"their losses by the {self._state.num_steps} micro-steps of gradient_accumulation_steps. {_DO.capitalize()}."
            )

    def _missing_weight(self) -> str | None:
        """Return why the losses of this update needed weights; None if they needed none."""
        contribution = None if self._contribution is None else self._contribution()
        if contribution is None:
            return None
        if self._parity == "bitwise":
            return "their sum over the shards was not taken"
        if contribution.num_micro_steps > 1:
            return f"their losses were not weighed: this update consists of {contribution.num_micro_steps} micro-steps"
        if contribution.num_items * self._num_processes != len(contribution.update):
            return (
                f"their losses were not weighed: this update consists of {len(contribution.update)} samples on "
                f"{self._num_processes} processes, which have different numbers of them"
            )
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Remember the gradients that ``optimizer`` has used."""
        gradient = _first_gradient(optimizer)
        self._steps[optimizer] = self._state.num_losses, None if gradient is None else ref(gradient)


def _first_gradient(optimizer: Optimizer) -> torch.Tensor | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient: torch.Tensor = parameter.grad
                return gradient
    return None
