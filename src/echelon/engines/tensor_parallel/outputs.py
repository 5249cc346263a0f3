"""Outputs of units whose last layer is split: torch returns the gathered tensor as a view of a DTensor.

``fully_shard`` attaches a backward hook to the outputs of each unit. An in-place operation on a view (``logits /= temperature``)
would silently drop it, and with it the gather of the parameters in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.engines.output_hooks import output_tensors, replace_output_tensors

__all__ = ["return_no_views"]


def return_no_views(unit: nn.Module) -> None:
    """Make ``unit`` return tensors that are no views; call this before ``fully_shard``."""
    unit.register_forward_hook(_replace_views)


def _replace_views(_unit: nn.Module, _args: Any, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    tensors = output_tensors(output)
    if not any(map(_is_dtensor_view, tensors)):
        return None
    without_view: Any = _NoView.apply  # untyped
    return replace_output_tensors(output, [without_view(t) if _is_dtensor_view(t) else t for t in tensors])


def _is_dtensor_view(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor._is_view() and not isinstance(tensor, DTensor)


class _NoView(torch.autograd.Function):
    """The identity, whose result shares the memory of its input without being a view of it."""

    @staticmethod
    def forward(_context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(0).set_(tensor.detach())  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]
