"""Changes each weight of a new model by one rounding: runs that differ only in this show how far rounding errors grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from echelon.verify.recording import Recording

__all__ = ["Perturbation"]


class Perturbation:
    """Multiplies each weight by ``1 + eps`` or ``1 - eps`` of its dtype, at random, before the first forward pass.

    Args:
        seed: of the random signs; 0: no weight is changed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def install(self, recording: Recording) -> Callable[[], None]:
        """Register the callback."""
        if self._seed:
            recording.on_model(self._perturb)
        return lambda: None

    def _perturb(self, root: nn.Module) -> None:
        generator = torch.Generator().manual_seed(self._seed)  # the script's own generator is left as it is
        with torch.no_grad():
            for parameter in root.parameters():
                weights: Any = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
                if weights.is_floating_point():
                    signs = torch.randint(0, 2, weights.shape, generator=generator).to(weights) * 2 - 1
                    weights.mul_(1 + torch.finfo(weights.dtype).eps * signs)
