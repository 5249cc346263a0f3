"""Accelerate's members that this version does not support, or that have no effect in it: methods of the Accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.base.errors import ConfigError, UsageError

__all__ = ["deepspeed_ulysses_dl_adapter", "lomo_backward", "maybe_context_parallel", "refuse_unsupported"]

T = TypeVar("T")


def refuse_unsupported(**arguments: Any) -> None:
    """Raise for the first argument that was given: each belongs to a later version."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"Accelerator({name}=) is not offered yet by this version of echelon",
                where=f"code Accelerator({name}=)",
                do=f"leave {name} out",
            )


def maybe_context_parallel(
    self: object,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> AbstractContextManager[None]:
    """Return the context that cuts sequences over the ranks where ``parallelism_config`` says so: here an empty one."""
    return nullcontext()


def deepspeed_ulysses_dl_adapter(self: object, dl: T, model: nn.Module) -> T:
    """Return ``dl``: sequences are cut over the ranks where ``parallelism_config`` says so only."""
    return dl


def lomo_backward(self: object, loss: torch.Tensor, learning_rate: float) -> None:
    """Raise: LOMO, which updates the parameters inside the backward pass, is not offered."""
    raise UsageError(
        "lomo_backward() is not offered: LOMO updates the parameters inside the backward pass, rank by rank",
        do="use an optimizer with a step(), and backward(loss)",
    )
