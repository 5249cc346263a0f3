"""Backward passes that start with zeros at the models' outputs, for ranks without items that compute for other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.distributed.uncompiled import uncompiled
from echelon.engines.output_hooks import output_tensors

__all__ = ["ZeroOutputGradients"]


class ZeroOutputGradients:
    """Removes nan from the gradients of watched models' outputs during certain backward passes, in which the loss has the weight 0.

    If ranks exchange activations (context, sequence or expert parallelism), the gradients of a rank's parameters also come from the other
    ranks' losses. On a rank without items they must not become zero, whereas those of its own loss, which may be nan (0 / 0), must.
    """

    def __init__(self) -> None:
        self._is_on = False

    def watch(self, model: nn.Module) -> Any:
        """Watch the outputs of ``model`` from its next forward pass; return the hook's handle."""
        return model.register_forward_hook(self._after_forward)

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in output_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._gradient)  # type: ignore[no-untyped-call]

    @uncompiled
    def _gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        # Of this rank's own loss, only nan is left (its weight is 0); of the others' losses, what they computed from this tensor.
        return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0) if self._is_on else None

    @contextmanager
    def zeros(self) -> Iterator[None]:
        """Return a context in which the loss of backward passes has the weight 0."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
