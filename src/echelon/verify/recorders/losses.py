"""Records the losses on which the script calls ``backward``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from echelon.verify.recorders.user_code import line_of_loss
from echelon.verify.recording import Recording
from echelon.verify.trace import Loss


class Losses:
    """Records each loss with the weight that the script gives to ``Accelerator.backward(loss, num_items=)``."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._weight: float | None = None
        recording.wrap_when_imported("echelon.accelerator.accelerator", "Accelerator", "backward", self._backward)
        recording.on_backward.append(self._record)

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
