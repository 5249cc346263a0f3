"""``parity="off"``: Accelerate's update, in which the batch grows with the number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.accelerator.update.update_policy import UpdatePolicy, checked_loss
from echelon.base.errors import UsageError

__all__ = ["PlainUpdate"]


class PlainUpdate(UpdatePolicy):
    """Weights every process and micro-step equally, unless losses are passed with ``num_items``."""

    drives = False
    is_unfinished = False

    def backward(self, loss: torch.Tensor, num_items: float | None, kwargs: Mapping[str, Any]) -> None:
        """See ``Accelerator.backward``."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or (loss.dim() > 0 and loss.numel() != 1):
            loss = checked_loss(loss, kwargs, num_devices=self.engine.capabilities.num_devices)
        if self.unprepared.is_pending:
            self.check_unprepared()
        state, inside = self.state, self.accumulating is not None
        if state.sync_gradients and self.data_world.world_size > 1:
            self.require_every_rank("backward()")
        if num_items is None:
            num_steps = state.plugin.num_steps or 1
            scale, factor = self.window.plain(num_steps=num_steps, inside=inside, sync=state.sync_gradients)
        else:
            trained = frozenset(map(id, self.trained_models()))
            scale, factor = self.window.weighted(num_items, inside=inside, sync=state.sync_gradients, trained=trained)
        self._backpropagate(loss, scale, kwargs, num_items)
        if factor != 1.0:
            self._finish_gradients(factor)

    def update_loss(self) -> float:
        """Raise, because this mode does not record every loss's weight."""
        raise UsageError(
            "update_loss() requires every loss's weight, which parity='off' does not record",
            where=f"parity={self.config.value.parity} (from {self.config.origins['parity']})",
            do="use Accelerator(parity='exact'), or accelerator.reduce(loss, 'mean')",
        )
