"""Changes each weight of a new model by one rounding, and gradients by their rounding errors.

Runs that differ only in this show how far rounding errors grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.verify.recorders.optimizers import parameters_of
from echelon.verify.recording import Recording


class Perturbation:
    """Multiplies each weight by ``1 + eps`` or ``1 - eps`` of its dtype, at random, before the first forward pass.

    Each element of each gradient whose error is known changes by as much as rounding may change it, before an optimizer step. It shows what
    the optimizer makes of rounding errors: where a gradient is close to zero, a step of Adam has the sign of the error.

    The runs of an odd seed and the next even one are changed in opposite directions.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._signs = _Signs(recording.run.perturbation)
        recording.on_model.append(self._perturb_weights)
        recording.on_step.append(self._before_step)

    def _perturb_weights(self, root: nn.Module) -> None:
        signs = _Signs(self._recording.run.perturbation)
        with torch.no_grad():
            for parameter in root.parameters():
                weights = _local(parameter)
                if weights.is_floating_point():
                    weights.mul_(1 + torch.finfo(weights.dtype).eps * signs.like(weights))

    def _before_step(self, optimizer: Optimizer, _loss_scale: float) -> None:
        with torch.no_grad():
            gradients = self._gradients_of(optimizer)
            unused = _unused_rows(gradients)
            for name, gradient in gradients.items():
                self._perturb(name, gradient, unused)

    def _gradients_of(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        parameters = parameters_of(optimizer)
        found = {self._recording.name_of(one): _local(one.grad) for one in parameters if one.grad is not None}
        return {
            name: gradient
            for name, gradient in found.items()
            if name is not None and gradient.layout == torch.strided and gradient.is_floating_point()
        }

    def _perturb(self, name: str, gradient: torch.Tensor, unused: Mapping[str, torch.Tensor]) -> None:
        error = self._recording.run.gradient_errors.get(name, 0.0)
        norm = float(gradient.double().norm())
        if error > 0 and 0 < norm < math.inf:
            change = self._signs.like(gradient) * (error * norm / math.sqrt(gradient.numel()))
            rows = unused.get(_module_of(name))
            if gradient.dim() > 1:
                change[gradient == 0] = 0.0
            elif rows is not None and gradient.dim() and len(rows) == len(gradient):
                change[rows] = 0.0
            gradient.add_(change)


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)  # of a DTensor


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name.partition(":")[0]


def _unused_rows(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return, for each module, which rows of its weight got no gradient, such as those of a ReLU that is always off.

    Their gradients are zero without rounding, and an optimizer that normalizes them would make a whole step of any change. An
    element of a bias that is zero alone may be a sum that cancels, which rounding does change (a bias before batch normalization).
    """
    return {
        _module_of(name): gradient.flatten(1).eq(0).all(dim=1)
        for name, gradient in gradients.items()
        if gradient.dim() > 1 and gradient.numel()
    }


class _Signs:
    """Random signs; those of an even seed are the opposite of those of the seed before it."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed((seed + 1) // 2)  # the script's own generator is left as it is
        self._first = 1 if seed % 2 else -1

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=self._generator).to(tensor) * 2 - 1
        return self._first * signs
