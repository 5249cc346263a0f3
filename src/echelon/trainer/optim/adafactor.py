"""Adafactor with the arguments of transformers' class; torch's Adafactor always scales and caps the learning rate, and so trains differently."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.base.errors import ConfigError


class Adafactor(Optimizer):
    """Divides the gradient by the root of its running mean square; for matrices, stores only row and column means.

    Source: Adafactor, arXiv 1804.04235, algorithms 4 and 5; names and defaults are those of transformers' class.

    Args:
        params: parameters or parameter groups.
        lr: learning rate; None with ``relative_step``.
        eps: the term added to squared gradients, and the minimum parameter scale.
        clip_threshold: largest root mean square of an update, relative to the learning rate.
        decay_rate: at step t, the running mean square keeps the fraction ``1 - t ** decay_rate`` of its value.
        beta1: decay of the first moment; None for no first moment.
        weight_decay: each step multiplies a parameter by ``1 - weight_decay * lr``.
        scale_parameter: multiply the learning rate by the root mean square of the parameter.
        relative_step: use the learning rate ``min(0.01, 1 / sqrt(t))`` instead of ``lr``.
        warmup_init: with ``relative_step``, use ``1e-6 * t`` instead of 0.01.

    Raises:
        ConfigError: ``lr`` or ``warmup_init`` conflicts with ``relative_step``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if relative_step == (lr is not None) or (warmup_init and not relative_step):
            raise ConfigError(
                "Adafactor needs either lr or relative_step=True, and warmup_init=True requires relative_step=True",
                where="Adafactor",
                do="pass lr and relative_step=False (and no warmup_init), or relative_step=True without lr",
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "eps": eps,
                "clip_threshold": clip_threshold,
                "decay_rate": decay_rate,
                "beta1": beta1,
                "weight_decay": weight_decay,
                "scale_parameter": scale_parameter,
                "relative_step": relative_step,
                "warmup_init": warmup_init,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _update(parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    grad, value = _in_float32(grad), _in_float32(parameter)
    step = state["step"] = state.get("step", 0) + 1
    state["RMS"] = _rms(value)
    rate = group["lr"]
    if group["relative_step"]:
        rate = min(1e-6 * step if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))
    if group["scale_parameter"]:
        rate = rate * state["RMS"].clamp(min=group["eps"][1])
    kept = 1.0 - math.pow(step, group["decay_rate"])
    square = grad**2 + group["eps"][0]
    if grad.dim() > 1:
        rows = _average(state, "exp_avg_sq_row", square.mean(dim=-1), kept)
        columns = _average(state, "exp_avg_sq_col", square.mean(dim=-2), kept)
        rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt()
        update = rows.unsqueeze(-1) * columns.rsqrt().unsqueeze(-2) * grad
    else:
        update = _average(state, "exp_avg_sq", square, kept).rsqrt() * grad
    update = update / (_rms(update) / group["clip_threshold"]).clamp(min=1.0) * rate
    if group["beta1"] is not None:
        update = _average(state, "exp_avg", update, group["beta1"])
    value = value * (1.0 - group["weight_decay"] * rate) - update
    parameter.copy_(value)


def _average(state: dict[str, Any], name: str, new: Tensor, kept: float) -> Tensor:
    """Update and return the moving average ``name``, which keeps the fraction ``kept`` of its value."""
    before = state[name].to(new) if name in state else torch.zeros_like(new)
    state[name] = before.mul_(kept).add_(new, alpha=1.0 - kept)
    average: Tensor = state[name]
    return average


def _in_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _rms(value: Tensor) -> Tensor:
    norm: Tensor = value.norm(2)
    return norm / math.sqrt(value.numel())
