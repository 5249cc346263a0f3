"""Warns or raises if ``loss.backward()`` was called, which, unlike ``accelerator.backward``, does not weight losses."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
from torch.optim import Optimizer

from echelon.accelerator.gradient_state import GradientState
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import user_line, warn
from echelon.data.global_batch_slices import Contribution

_DO = "call accelerator.backward(loss) instead of loss.backward()"


UsedGradients = tuple[int, "ref[torch.Tensor] | None"]
"""The gradients that an optimizer's last step used: the number of losses at that step, and one of the gradients."""
NO_STEP: UsedGradients = (0, None)
"""Before the first step."""


class DirectBackwardCheck:
    """Checks before each prepared optimizer step whether ``accelerator.backward`` computed the gradients.

    Args:
        state: counts the backward passes that ``accelerator.backward`` has run.
        parity: the run's parity mode.
        spike_guard: the run's mode of ``spike_guard``, which needs the loss of each update.
        num_processes: the run's number of processes.
        contribution: returns the current batch's share of its update. None outside the exact modes.
    """

    def __init__(
        self,
        *,
        state: GradientState,
        parity: str,
        spike_guard: str | None,
        num_processes: int,
        contribution: Callable[[], Contribution | None] | None,
    ) -> None:
        self._state = state
        self._parity = parity
        self._spike_guard = spike_guard
        self._num_processes = num_processes
        self._contribution = contribution
        self._is_warned = False

    def before_step(self, optimizer: Optimizer, used: UsedGradients) -> None:
        """Warn once if the loss was not divided by the number of accumulation steps.

        Args:
            optimizer: optimizer that is about to step.
            used: ``gradients_of`` it after its last step. If there have been losses since then, this does nothing.

        Raises:
            UsageError: the loss needed a weight (in an exact mode), or ``spike_guard`` needed the loss.
        """
        num_losses, stepped = used
        if num_losses != self._state.num_losses:
            return
        found = self.gradients_of(optimizer)[1]
        gradient = None if found is None else found()
        if gradient is None or (stepped is not None and stepped() is gradient):
            return  # nothing to step with, or a second step with the same gradients
        if (reason := self._missing_weight()) is not None:
            raise UsageError(
                f"{type(optimizer).__name__}.step() would apply gradients that accelerator.backward() did not compute, and {reason}",
                where=f"step() at {user_line()}, parity={self._parity!r}",
                do=_DO,
            )
        if self._spike_guard is not None:
            raise UsageError(
                _(
                    "{name}.step() would apply gradients that accelerator.backward() did not compute, so spike_guard does not know "
                    "their loss",
                    name=type(optimizer).__name__,
                ),
                where=f"step() at {user_line()}, spike_guard={self._spike_guard!r}",
                do=_("{advice}, or remove spike_guard", advice=_DO),
            )
        if self._contribution is None and self._state.num_steps > 1 and not self._is_warned:
            self._is_warned = True
            warn(
                _(
                    "{name}.step() would apply gradients that accelerator.backward() did not compute, so echelon did "
                    "not divide their losses by gradient_accumulation_steps={num_steps}. {advice}.",
                    name=type(optimizer).__name__,
                    num_steps=self._state.num_steps,
                    advice=_DO.capitalize(),
                )
            )

    def _missing_weight(self) -> str | None:
        """Return why this update's losses needed weights; None if they did not."""
        contribution = None if self._contribution is None else self._contribution()
        if contribution is None:
            return None
        if self._parity == "bitwise":
            return "they were not summed across shards"
        if contribution.num_micro_steps > 1:
            return (
                f"their losses were not weighted, even though this update has {contribution.num_micro_steps} "
                "micro-steps"
            )
        if contribution.num_items * self._num_processes != len(contribution.update):
            return (
                f"their losses were not weighted, even though this update's {len(contribution.update)} samples are "
                f"unevenly split across {self._num_processes} processes"
            )
        return None

    def gradients_of(self, optimizer: Optimizer) -> UsedGradients:
        """Return a record of the gradients that ``optimizer`` has just used."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    return self._state.num_losses, ref(gradient)
        return self._state.num_losses, None
