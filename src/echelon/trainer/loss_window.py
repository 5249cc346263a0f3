"""Mean losses between two logs and of a whole run, without synchronizing with the device at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.accelerator import Accelerator

# Number of losses kept on the device before they are summed on the CPU in float64, which synchronizes.
_PENDING = 512


def _no_losses() -> torch.Tensor:
    """Return four zeros: the sum and number of finite losses, then the number and sum of all losses."""
    return torch.zeros(4, dtype=torch.float64)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, list) else value


class MeanLoss:
    """The mean loss across all ranks, both since the last log (the window) and since training started.

    Args:
        accelerator: reduces the losses across ranks; in the exact modes, each rank already has the global mean.
        filtered: ignore nonfinite losses, unless all are nonfinite.
    """

    def __init__(self, accelerator: Accelerator, *, filtered: bool) -> None:
        self.last_logged_step = 0
        """The step at which metrics were last logged."""
        self._num_steps = (
            0  # complete updates in the window, also those before the checkpoint that the run resumed from
        )
        self._num_open = 0  # losses of the incomplete update
        self._pending: list[torch.Tensor] = []
        self._sums = _no_losses()  # of the window, in this run, on this rank
        self._before = _no_losses()  # of the window, before the checkpoint that the run resumed from
        self._final_window: float | None = None  # the sum of the window that ``end`` has ended
        self._total = _no_losses()  # of the windows that ``take`` has returned, or as set
        self._uncounted = _no_losses()  # of the windows that were ended without a log; set_sum may include them
        self._num_steps_counted = 0  # steps of the current window when set_sum was called
        self._accelerator = accelerator
        self._num_ranks = 1 if accelerator.parity != "off" else accelerator.session.num_readers
        self._filtered = filtered

    def add(self, loss: torch.Tensor) -> None:
        """Add one forward pass's loss, already divided by its update's number of forward passes."""
        self._pending.append(loss)
        self._num_open += 1

    def end_step(self) -> None:
        """Count a complete update."""
        self._num_steps += 1
        self._num_open = 0
        if len(self._pending) >= _PENDING:
            self._fold()

    def last(self, count: int) -> list[torch.Tensor]:
        """Return the incomplete update's last ``count`` losses."""
        return self._pending[-count:]

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this object, for ``return_to``."""
        return {name: _copied(value) for name, value in vars(self).items()}

    def return_to(self, snapshot: Mapping[str, Any]) -> None:
        """Restore what ``snapshot`` returned."""
        for name, value in snapshot.items():
            setattr(self, name, _copied(value))

    def drop_open_step(self) -> None:
        """Drop the losses of an incomplete update that will not be completed."""
        del self._pending[len(self._pending) - self._num_open :]
        self._num_open = 0

    def take(self) -> float:
        """Return the mean loss over the steps since the last call, and start a new window.

        Collective: call on every rank.
        """
        num_steps, sums = self._num_steps, self._take_window()
        self._total += sums[1] + self._uncounted
        self._uncounted, self._num_steps_counted = _no_losses(), 0
        return self._mean(sums[0], num_steps=num_steps)

    def end(self) -> None:
        """Add the steps since the last log to the sum, at the end of training.

        Collective: call on every rank.
        """
        self._final_window = self.window_sum()
        self.take()

    def window_sum(self) -> float:
        """Return the sum of this rank's losses since the last log, also after the end of training."""
        if self._final_window is not None:
            return self._final_window
        self._fold()
        return float((self._before + self._sums)[3])

    def set_last_logged_step(self, step: int) -> None:
        """Set the step at which metrics were last logged, for an override that logs.

        A new window starts; the old one's losses are added to the sum unless ``set_sum`` has included or will include
        them.

        Collective: call on every rank.
        """
        if step == self.last_logged_step:
            return
        self.last_logged_step = step
        is_counted = self._num_steps > 0 and self._num_steps == self._num_steps_counted
        sums = self._take_window()
        self._uncounted += 0 if is_counted else sums[1]
        self._num_steps_counted = 0

    def sum(self) -> float:
        """Return the sum of the logged losses, averaged over ranks."""
        return float(self._total[3]) / self._num_ranks

    def set_sum(self, value: float) -> None:
        """Set the value that ``sum`` returns, which then includes all steps so far."""
        self._fold()
        total, window = value * self._num_ranks, self._before + self._sums
        count = float((self._total + self._uncounted + self._num_ranks * window)[2])
        self._total = torch.tensor([total, count, count, total], dtype=torch.float64)
        self._uncounted, self._num_steps_counted = _no_losses(), self._num_steps

    def total(self, *, num_steps: int) -> float:
        """Return the mean loss over all ``num_steps`` steps since training started."""
        return self._mean(self._total, num_steps=num_steps)

    def state(self) -> dict[str, Any]:
        """Return the window to save, averaged over ranks so that any number of ranks can restore it.

        Collective: call on every rank.
        """
        self._fold()
        sums = self._before + self._sums
        if self._num_ranks > 1:
            sums = self._sum_over_ranks(sums) / self._num_ranks
        return {"sums": sums, "num_steps": self._num_steps}

    def restore(self, sums: torch.Tensor, num_steps: int) -> None:
        """Restore what ``state`` returned."""
        if sums.numel() == 3:  # saved by an older version, which summed only finite losses
            sums = torch.cat([sums, sums[:1] if sums[1] == sums[2] else sums.new_full((1,), float("nan"))])
        self._before, self._num_steps = sums, num_steps

    def _take_window(self) -> torch.Tensor:
        """Return and reset the window's sums [2, 4]: over all losses, and over those not restored from a checkpoint."""
        self._fold()
        sums = torch.stack([self._before + self._sums, self._sums])
        self._sums, self._before, self._num_steps = _no_losses(), _no_losses(), 0
        return self._sum_over_ranks(sums)

    def _fold(self) -> None:
        if not self._pending:
            return
        losses = torch.stack(self._pending).cpu().double()
        self._pending.clear()
        finite = torch.isfinite(losses)
        sums = (torch.where(finite, losses, 0.0).sum(), finite.sum(), losses.numel(), losses.sum())
        self._sums += torch.tensor([float(part) for part in sums], dtype=torch.float64)

    def _sum_over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        if self._num_ranks == 1:
            return sums
        total: torch.Tensor = self._accelerator.reduce(sums.to(self._accelerator.device), "sum")
        return total.cpu()

    def _mean(self, sums: torch.Tensor, *, num_steps: int) -> float:
        total, finite, count, everything = sums.tolist()
        if finite != count and self._filtered:
            if not finite:
                return float("nan")
            everything = total * count / finite
        return float(everything) / (num_steps * self._num_ranks) if num_steps else 0.0
