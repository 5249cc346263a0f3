"""Knows by which factor a loss scaler has multiplied gradients, so that they are recorded without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["LossScales", "OnScalerStep"]

OnScalerStep = Callable[[torch.amp.GradScaler, Optimizer, Callable[[], Any]], Any]


class LossScales:
    """Watches ``torch.amp.GradScaler``."""

    def __init__(self) -> None:
        self.on_step: OnScalerStep = lambda _scaler, _optimizer, step: step()
        """What runs in place of ``GradScaler.step``."""
        self._scale = 1.0
        self._of_backward = 1.0
        self._unscaled: set[int] = set()  # ids of parameters

    def take(self) -> float:
        """Return the scale of the loss of the backward pass that has just ended."""
        scale, self._of_backward = self._of_backward, 1.0
        return scale

    def of(self, parameters: Sequence[torch.Tensor]) -> float:
        """Return the factor that the gradients of ``parameters`` still have."""
        return 1.0 if any(id(one) in self._unscaled for one in parameters) else self._scale

    def install(self) -> Callable[[], None]:
        """Patch the scaler; return the removal."""
        kind: Any = torch.amp.GradScaler
        scale, unscale, step, update = kind.scale, kind.unscale_, kind.step, kind.update

        def new_scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            if scaler.is_enabled():
                self._scale = self._of_backward = float(scaler.get_scale())
            return scaled

        def new_unscale(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
            unscale(scaler, optimizer)
            if scaler.is_enabled():
                self._unscaled.update(id(one) for group in optimizer.param_groups for one in group["params"])

        def new_step(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return step(scaler, optimizer, *args, **kwargs)
            return self.on_step(scaler, optimizer, lambda: step(scaler, optimizer, *args, **kwargs))

        def new_update(scaler: torch.amp.GradScaler, new_scale: Any = None) -> None:
            update(scaler, new_scale)
            self._scale = 1.0
            self._unscaled.clear()

        kind.scale, kind.unscale_, kind.step, kind.update = new_scale, new_unscale, new_step, new_update

        def remove() -> None:
            kind.scale, kind.unscale_, kind.step, kind.update = scale, unscale, step, update

        return remove
