"""Records the losses on which the script calls ``backward``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from echelon.verify.recorders.user_code import line_of_loss
from echelon.verify.recording import Recording
from echelon.verify.trace import Loss

__all__ = ["Losses"]


class Losses:
    """Records each loss with the weight that the script gives to ``Accelerator.backward(loss, num_items=)``."""

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._weight: float | None = None
        self._unpatch: Callable[[], None] | None = None

    def install(self, recording: Recording) -> Callable[[], None]:
        """Register the callbacks."""
        self._recording = recording
        recording.on_training_forward(self._find_accelerator)
        recording.on_backward(self._record)

        def remove() -> None:
            if self._unpatch is not None:
                self._unpatch()
                self._unpatch = None

        return remove

    def _find_accelerator(self, model: int, root: nn.Module, args: Any, kwargs: Any) -> None:
        """Patch echelon's Accelerator as soon as the script has imported it."""
        module = sys.modules.get("echelon.accelerator.accelerator")
        if self._unpatch is not None or module is None:
            return
        kind: Any = vars(module).get("Accelerator")
        if kind is None:  # it is being imported
            return
        backward = kind.backward

        @wraps(backward)
        def weighted(accelerator: Any, loss: Any, *args: Any, num_items: Any = None, **kwargs: Any) -> Any:
            before, self._weight = self._weight, None if num_items is None else float(num_items)
            try:
                return backward(accelerator, loss, *args, num_items=num_items, **kwargs)
            finally:
                self._weight = before

        kind.backward = weighted

        def unpatch() -> None:
            kind.backward = backward

        self._unpatch = unpatch

    def _record(self, losses: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        recording = self._recording
        assert recording is not None
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
