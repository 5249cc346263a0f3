"""Accelerator methods that this version does not support or that have no effect."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from echelon.base.errors import ConfigError, UsageError

__all__ = ["deepspeed_ulysses_dl_adapter", "lomo_backward", "refuse_unsupported"]

T = TypeVar("T")


def refuse_unsupported(**arguments: Any) -> None:
    """Raise if any of these arguments is set, because none is supported yet."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"Accelerator({name}=) is not supported by this version of echelon",
                where=f"code Accelerator({name}=)",
                do=f"remove {name}",
            )


def deepspeed_ulysses_dl_adapter(self: object, dl: T, model: nn.Module) -> T:
    """Return ``dl`` unchanged, because sequence parallelism is not supported."""
    return dl


def lomo_backward(self: object, loss: torch.Tensor, learning_rate: float) -> None:
    """Raise, because LOMO, which updates the parameters inside the backward pass, is not supported."""
    raise UsageError(
        "lomo_backward() is not supported: LOMO updates the parameters inside the backward pass, separately on each rank",
        do="use an optimizer with a step() method, and call accelerator.backward(loss)",
    )
