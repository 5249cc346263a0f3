"""Records the losses on which the script calls ``backward``, and follows loss scalers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.verify.recorders.user_code import line_of_loss
from echelon.verify.recording import Recording
from echelon.verify.trace import Loss


class Losses:
    """Records each loss with the weight that the script gives to ``Accelerator.backward(loss, num_items=)``."""

    def __init__(self) -> None:
        self._recording: Recording
        self._weight: float | None = None
        self._is_patched = False

    def install(self, recording: Recording) -> None:
        """Register the callbacks."""
        self._recording = recording
        recording.on_training_forward.append(self._find_accelerator)
        recording.on_backward.append(self._record)

    def _find_accelerator(self, model: int, root: nn.Module, args: Any, kwargs: Any) -> None:
        """Patch echelon's Accelerator as soon as the script has imported it."""
        module = sys.modules.get("echelon.accelerator.accelerator")
        kind: Any = None if module is None else vars(module).get("Accelerator")  # None while it is being imported
        if kind is not None and not self._is_patched:
            self._is_patched = True
            self._recording.wrap(kind, "backward", self._backward)

    def _backward(
        self, backward: Any, accelerator: Any, loss: Any, *args: Any, num_items: Any = None, **kwargs: Any
    ) -> Any:
        before, self._weight = self._weight, None if num_items is None else float(num_items)
        try:
            return backward(accelerator, loss, *args, num_items=num_items, **kwargs)
        finally:
            self._weight = before

    def _record(self, losses: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        recording = self._recording
        line, code = line_of_loss()
        for loss, gradient in zip(losses, gradients):
            if not isinstance(loss, torch.Tensor):  # an edge of the graph
                continue
            value, scale = loss.detach(), 1.0
            if gradient is not None and gradient.numel() == 1:
                scale = float(gradient)
            elif gradient is not None:
                value = value * gradient.detach()
            recording.add(
                Loss(
                    update=recording.update,
                    micro_step=recording.micro_step,
                    value=float(value if value.dim() == 0 else value.double().sum()),
                    weight=self._weight,
                    gradient_scale=scale,
                    line=line,
                    trainer_code=code,
                    is_in_evaluation_mode=recording.is_in_evaluation_mode,
                )
            )


class LossScales:
    """Knows by which factor ``torch.amp.GradScaler`` has multiplied gradients, so that they are recorded without it."""

    def __init__(self) -> None:
        self.on_step: Callable[[Optimizer, Callable[[], Any]], Any] = lambda _, step: step()
        """What runs in place of ``GradScaler.step``."""
        self._current = 1.0
        self._of_backward = 1.0
        self._unscaled: set[int] = set()  # ids of parameters

    def take(self) -> float:
        """Return the scale of the loss of the backward pass that has just ended."""
        scale, self._of_backward = self._of_backward, 1.0
        return scale

    def of(self, parameters: Sequence[torch.Tensor]) -> float:
        """Return the factor that the gradients of ``parameters`` still have."""
        return 1.0 if any(id(one) in self._unscaled for one in parameters) else self._current

    def install(self, recording: Recording) -> None:
        """Patch the scaler."""
        recording.wrap(torch.amp.GradScaler, "scale", self._scale)
        recording.wrap(torch.amp.GradScaler, "unscale_", self._unscale)
        recording.wrap(torch.amp.GradScaler, "step", self._step)
        recording.wrap(torch.amp.GradScaler, "update", self._update)

    def _scale(self, scale: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled():
            self._current = self._of_backward = float(scaler.get_scale())
        return scaled

    def _unscale(self, unscale: Callable[..., None], scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        unscale(scaler, optimizer)
        if scaler.is_enabled():
            self._unscaled.update(map(id, parameters_of(optimizer)))

    def _step(
        self, step: Callable[..., Any], scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        run = partial(step, scaler, optimizer, *args, **kwargs)
        return self.on_step(optimizer, run) if scaler.is_enabled() else run()

    def _update(self, update: Callable[..., None], scaler: torch.amp.GradScaler, new_scale: Any = None) -> None:
        update(scaler, new_scale)
        self._current = 1.0
        self._unscaled.clear()


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]
