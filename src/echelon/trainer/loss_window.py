"""Mean losses between two logs, without synchronizing with the device at every step."""

from __future__ import annotations

from typing import Any

import torch

from echelon.accelerator import Accelerator

__all__ = ["LossWindow", "MeanLoss"]

# Number of losses kept on the device before they are summed on the CPU in float64, which synchronizes.
_PENDING = 512


def _no_losses() -> torch.Tensor:
    """Return zero sums: sum of the finite losses, number of finite losses, number of losses, sum of all losses."""
    return torch.zeros(4, dtype=torch.float64)


class LossWindow:
    """Losses of this rank since the last log, summed in float64."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Number of complete updates, including those before the checkpoint of a resumed run."""
        self._num_open = 0  # losses of the incomplete update
        self._pending: list[torch.Tensor] = []
        self._sums, self._before = _no_losses(), _no_losses()

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of one forward pass, already divided by the number of passes of its update."""
        self._pending.append(loss)
        self._num_open += 1

    def end_step(self) -> None:
        """Count a complete update."""
        self.num_steps += 1
        self._num_open = 0
        if len(self._pending) >= _PENDING:
            self._fold()

    def last(self, count: int) -> list[torch.Tensor]:
        """Return the last ``count`` losses of the incomplete update."""
        return self._pending[-count:]

    def take(self) -> torch.Tensor:
        """Return and reset the sums [2, 4] of the window: all its losses, and those not restored from a checkpoint."""
        self._fold()
        result = torch.stack([self._before + self._sums, self._sums])
        self._sums, self._before, self.num_steps = _no_losses(), _no_losses(), 0
        return result

    def total(self) -> float:
        """Return the sum of the losses in the window, without resetting it."""
        self._fold()
        return float((self._before + self._sums)[3])

    def state(self) -> tuple[torch.Tensor, int]:
        """Return the sums and the number of steps of the window, without resetting them."""
        self._fold()
        return self._before + self._sums, self.num_steps

    def restore(self, sums: torch.Tensor, num_steps: int) -> None:
        """Restore the result of ``state``."""
        if sums.numel() == 3:  # saved by an older version, which summed only finite losses
            sums = torch.cat([sums, sums[:1] if sums[1] == sums[2] else sums.new_full((1,), float("nan"))])
        self._before, self.num_steps = sums, num_steps

    def drop_open_step(self) -> None:
        """Drop the losses of an incomplete update that will not be made."""
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


class MeanLoss:
    """The mean loss over all ranks since the last log, and since training started.

    Args:
        accelerator: reduces the losses over the ranks; in the exact modes each rank already has the mean of all.
        filtered: ignore nonfinite losses, unless none is finite.
    """

    def __init__(self, accelerator: Accelerator, *, filtered: bool) -> None:
        self.window = LossWindow()
        self._total = _no_losses()  # of the windows that ``take`` has returned
        self._accelerator = accelerator
        self._num_ranks = 1 if accelerator.parity != "off" else accelerator.num_processes
        self._filtered = filtered

    def take(self) -> float:
        """Return the mean loss of the steps since the last call.

        Collective: every rank.
        """
        num_steps, sums = self.window.num_steps, self._sum_over_ranks(self.window.take())
        self._total += sums[1]
        return self._mean(sums[0], num_steps=num_steps)

    def sum(self) -> float:
        """Return the sum of the losses that ``take`` has returned, as a mean over the ranks."""
        return float(self._total[3]) / self._num_ranks

    def total(self, *, num_steps: int) -> float:
        """Return the mean loss of all ``num_steps`` steps since training started."""
        return self._mean(self._total, num_steps=num_steps)

    def state(self) -> dict[str, Any]:
        """Return the window to save: the mean over the ranks, so that any number of ranks can restore it.

        Collective: every rank.
        """
        sums, num_steps = self.window.state()
        if self._num_ranks > 1:
            sums = self._sum_over_ranks(sums) / self._num_ranks
        return {"sums": sums, "num_steps": num_steps}

    def _sum_over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        if self._num_ranks == 1:
            return sums
        total: torch.Tensor = self._accelerator.reduce(sums.to(self._accelerator.device), "sum")
        return total.cpu()

    def _mean(self, sums: torch.Tensor, *, num_steps: int) -> float:
        return _mean_loss(sums, num_steps=num_steps * self._num_ranks, filtered=self._filtered)


def _mean_loss(sums: torch.Tensor, *, num_steps: int, filtered: bool) -> float:
    total, finite, count, everything = sums.tolist()
    if finite == count or not filtered:
        return _ratio(everything, num_steps)
    return _ratio(total * count / finite, num_steps) if finite else float("nan")


def _ratio(total: Any, num_steps: int) -> float:
    return float(total) / num_steps if num_steps else 0.0
