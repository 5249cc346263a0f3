"""The mean of the losses between two logs, without waiting for the device at any step."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LossWindow", "mean_loss"]

# Losses that are kept on the device before they are added up on the CPU, where float64 is: a wait once in so many steps.
_PENDING = 512


class LossWindow:
    """Losses of the steps since the last log, summed in float64."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Updates that are complete."""
        self._num_open = 0  # losses of the update that is not complete
        self._pending: list[torch.Tensor] = []
        self._sums = torch.zeros(3, dtype=torch.float64)

    def add(self, loss: torch.Tensor) -> None:
        """Note the loss of one forward pass, already divided by the passes of its update."""
        self._pending.append(loss)
        self._num_open += 1

    def end_step(self) -> None:
        """Count an update that is complete."""
        self.num_steps += 1
        self._num_open = 0
        if len(self._pending) >= _PENDING:
            self._fold()

    def last(self, count: int) -> list[torch.Tensor]:
        """Return the last ``count`` losses, of the update that is not complete yet."""
        return self._pending[-count:]

    def take(self) -> torch.Tensor:
        """Return [sum of the finite losses, how many are finite, how many there are], float64 [3], and begin anew."""
        self._fold()
        result = self._sums
        self._sums, self.num_steps = torch.zeros(3, dtype=torch.float64), 0
        return result

    def state(self) -> tuple[torch.Tensor, int]:
        """Return what ``take`` would, and the steps, without beginning anew."""
        self._fold()
        return self._sums.clone(), self.num_steps

    def restore(self, sums: torch.Tensor, num_steps: int) -> None:
        """Go on from what ``state`` gave."""
        self._sums, self.num_steps = sums, num_steps

    def drop_open_step(self) -> None:
        """Forget the losses of an update that is not complete: it is not made."""
        del self._pending[len(self._pending) - self._num_open :]
        self._num_open = 0

    def _fold(self) -> None:
        if not self._pending:
            return
        losses = torch.stack(self._pending).cpu().double()
        self._pending.clear()
        finite = torch.isfinite(losses)
        sums = (float(torch.where(finite, losses, 0.0).sum()), float(finite.sum()), float(losses.numel()))
        self._sums += torch.tensor(sums, dtype=torch.float64)


def mean_loss(sums: torch.Tensor, *, num_steps: int, filtered: bool) -> float:
    """Return the mean loss of a step.

    Args:
        sums: of ``LossWindow.take``, summed over the ranks.
        num_steps: updates of all ranks in the window.
        filtered: leave infinite losses out (nan only when none is finite); else one of them makes the mean nan.
    """
    total, finite, count = sums.tolist()  # waits for the device: only when something is logged
    if finite == count:
        return _ratio(total, num_steps)
    if not filtered or not finite:
        return float("nan")
    return _ratio(total * count / finite, num_steps)


def _ratio(total: Any, num_steps: int) -> float:
    return float(total) / num_steps if num_steps else 0.0
