"""The mean of the losses between two logs, without waiting for the device at any step."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LossWindow", "mean_loss", "no_losses"]

# Losses that are kept on the device before they are added up on the CPU, where float64 is: a wait once in so many steps.
_PENDING = 512


def no_losses() -> torch.Tensor:
    """Return the sums of no loss at all: of the finite ones, how many are finite, how many there are, and of all of them."""
    return torch.zeros(4, dtype=torch.float64)


class LossWindow:
    """Losses of the steps since the last log, summed in float64."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Updates that are complete, also those before a checkpoint that the training went on from."""
        self._num_open = 0  # losses of the update that is not complete
        self._pending: list[torch.Tensor] = []
        self._sums, self._before = no_losses(), no_losses()

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
        """Return the sums (see ``no_losses``) of the window, and of what ``add`` was given of it, [2, 4]; and begin anew."""
        self._fold()
        result = torch.stack([self._before + self._sums, self._sums])
        self._sums, self._before, self.num_steps = no_losses(), no_losses(), 0
        return result

    def state(self) -> tuple[torch.Tensor, int]:
        """Return the sums of the window, and its steps, without beginning anew."""
        self._fold()
        return self._before + self._sums, self.num_steps

    def restore(self, sums: torch.Tensor, num_steps: int) -> None:
        """Go on from what ``state`` gave."""
        if sums.numel() == 3:  # of an older version, which did not add up what is not finite
            sums = torch.cat([sums, sums[:1] if sums[1] == sums[2] else sums.new_full((1,), float("nan"))])
        self._before, self.num_steps = sums, num_steps

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
        sums = (torch.where(finite, losses, 0.0).sum(), finite.sum(), losses.numel(), losses.sum())
        self._sums += torch.tensor([float(part) for part in sums], dtype=torch.float64)


def mean_loss(sums: torch.Tensor, *, num_steps: int, filtered: bool) -> float:
    """Return the mean loss of a step.

    Args:
        sums: of ``LossWindow.take``, summed over the ranks.
        num_steps: updates of all ranks in the window.
        filtered: leave losses out that are not finite (nan only when none is finite); else they are in the sum.
    """
    total, finite, count, everything = sums.tolist()  # waits for the device: only when something is logged
    if finite == count or not filtered:
        return _ratio(everything, num_steps)
    return _ratio(total * count / finite, num_steps) if finite else float("nan")


def _ratio(total: Any, num_steps: int) -> float:
    return float(total) / num_steps if num_steps else 0.0
