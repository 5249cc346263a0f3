"""Sees the gradients that a backward pass computes on this rank, before any reduction between ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GradientHook:
    """Calls ``see`` with each gradient that autograd is about to add to ``parameter.grad``, after all hooks on the parameter.

    Engines reduce a gradient in place once it is in ``.grad``.
    """

    def __init__(self, parameter: torch.Tensor, see: Callable[[torch.Tensor], None]) -> None:
        self.parameter = parameter
        # torch keeps the node only while a graph needs it.
        self._node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._see = see
        self._handle = self._node.register_prehook(self._before)

    def _before(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            self._see(gradients[0].detach())

    def remove(self) -> None:
        """See no more gradients."""
        self._handle.remove()
