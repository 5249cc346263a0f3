"""Detects whether earlier micro-steps' gradients were cleared or changed before their update was complete."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.sharded import is_dtensor

_SMALL = 4096  # elements: copying them is cheap


class KeptGradients:
    """Checks one small gradient per model, which is cheap and is cleared or changed along with the others."""

    def __init__(self, parity: str) -> None:
        self._parity = parity
        self._kept: list[
            tuple[nn.Parameter, torch.Tensor, int, torch.Tensor]
        ] = []  # parameter, gradient, version, copy

    def clear(self) -> None:
        """Start a new update."""
        self._kept.clear()

    def record(self, models: Sequence[nn.Module]) -> None:
        """Record gradients after a backward pass."""
        self._kept = []
        for model in models:
            small = (p for p in model.parameters() if p.grad is not None and p.numel() <= _SMALL)
            parameter = next(small, None)
            if parameter is not None and parameter.grad is not None:
                gradient = parameter.grad
                self._kept.append((parameter, gradient, gradient._version, gradient.detach().clone()))

    def require_unchanged(self) -> None:
        """Compare the gradients with the recorded ones.

        Raises:
            UsageError: something other than the prepared optimizer cleared or changed the gradients.
        """
        for parameter, gradient, version, copy in self._kept:
            is_cleared = parameter.grad is None
            # A norm computation or a new bucket layout may have rewritten the same values.
            if is_cleared or (gradient._version != version and not _has_same_numbers(gradient, copy)):
                raise UsageError(
                    f"earlier micro-steps' gradients were {'cleared' if is_cleared else 'cleared or changed'} before "
                    "their update was complete, so the update would miss micro-steps or use changed gradients",
                    where=f"parity={self._parity!r}, update with several micro-steps",
                    do="replace model.zero_grad() with the prepared optimizer's zero_grad(), which waits for the end "
                    "of the update; clip with accelerator.clip_grad_norm_(); read gradients only when "
                    "accelerator.sync_gradients is true",
                )


def _has_same_numbers(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether both are equal; nan equals nan, because steps skipped by the fp16 scaler have nan gradients."""
    # Compare only the local shard: comparing full tensors is a collective, and the other ranks may not take part.
    ours, theirs = (each.to_local() if is_dtensor(each) else each for each in (tensor, copy))
    return torch.equal(ours, theirs) or bool(torch.isclose(ours, theirs, rtol=0, atol=0, equal_nan=True).all())
