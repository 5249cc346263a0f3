"""In an update of several micro-steps: were the gradients of the earlier ones cleared, or changed, before it was whole?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.sharded import is_dtensor

__all__ = ["KeptGradients"]


_SMALL = 4096  # numbers: a copy costs nothing


class KeptGradients:
    """Looks at one small gradient of each model, which is cheap, and is cleared or changed with the others."""

    def __init__(self, parity: str) -> None:
        self._parity = parity
        self._kept: list[tuple[nn.Parameter, torch.Tensor, int, torch.Tensor]] = []  # a gradient, its version, a copy

    def forget(self) -> None:
        """Begin another update."""
        self._kept.clear()

    def note(self, models: Sequence[nn.Module]) -> None:
        """Remember gradients as a backward pass has left them."""
        self._kept = []
        for model in models:
            small = (p for p in model.parameters() if p.grad is not None and p.numel() <= _SMALL)
            parameter = next(small, None)
            if parameter is not None and parameter.grad is not None:
                gradient = parameter.grad
                self._kept.append((parameter, gradient, gradient._version, gradient.detach().clone()))

    def require(self) -> None:
        """Compare with what was remembered.

        Raises:
            UsageError: somebody else than the prepared optimizer cleared or changed them.
        """
        for parameter, gradient, version, copy in self._kept:
            is_cleared = parameter.grad is None
            # Something may have written the same numbers: a norm that was asked for, a bucket that was laid out anew.
            if is_cleared or (gradient._version != version and not _has_same_numbers(gradient, copy)):
                raise UsageError(
                    f"the gradients of earlier micro-steps were {'cleared' if is_cleared else 'cleared or changed'} before their "
                    "update was whole: it would be one of the last micro-steps alone, or of changed gradients",
                    where=f"parity={self._parity!r}, an update of several micro-steps",
                    do="call zero_grad() of the prepared optimizer, which waits for the end of the update, in the place of "
                    "model.zero_grad(); clip by accelerator.clip_grad_norm_; look at gradients where accelerator.sync_gradients",
                )


def _has_same_numbers(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Tell whether they are equal, where nan is equal to nan: a step that fp16 skips has such gradients."""
    # Of a sharded one this rank's part: comparing the whole would wait for the other ranks, which may not compare.
    ours, theirs = (each.to_local() if is_dtensor(each) else each for each in (tensor, copy))
    return torch.equal(ours, theirs) or bool(torch.isclose(ours, theirs, rtol=0, atol=0, equal_nan=True).all())
