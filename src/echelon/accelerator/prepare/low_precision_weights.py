"""Trained weights in low precision under mixed precision: cast to float32 where the engine allows it, else named."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.session import Session
from echelon.base.sharded import is_fsdp_module
from echelon.base.warnings import warn

__all__ = ["upcast_trained_weights", "warn_of_low_precision_weights"]

_LOW = (torch.bfloat16, torch.float16)


def upcast_trained_weights(session: Session, model: nn.Module) -> None:
    """With mixed precision, cast trained weights to float32 in place if the engine computes with low-precision copies of them.

    Source: accelerate.utils.fsdp_utils.fsdp2_prepare_model (1.15), which does the same.
    """
    if session.precision.mode == "no" or not session.capabilities.upcasts_weights or is_fsdp_module(model):
        return
    low = [p for p in model.parameters() if p.requires_grad and p.dtype in _LOW]
    if not low:
        return
    kind = str(low[0].dtype).removeprefix("torch.")
    for parameter in low:
        parameter.data = parameter.data.to(torch.float32)
    warn(
        f"{len(low)} trained parameters of {type(model).__name__} are {kind}, and mixed_precision={session.precision.mode!r}: they are "
        "cast to float32 before they are sharded, as accelerate does, so that small updates are not lost. Each rank needs "
        "twice the memory for its shards, and checkpoints have float32 weights. To train the weights in low precision, use "
        "mixed_precision='no'"
    )


def warn_of_low_precision_weights(session: Session, optimizers: Iterable[Optimizer]) -> None:
    """With mixed precision, warn once if an optimizer steps low-precision weights."""
    mode = session.precision.mode
    if mode == "no" or session.warned_of_low_precision or not session.capabilities.exposes_state:
        return
    held = [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    low = [p for p in held if p.dtype in _LOW]
    if not low:
        return
    session.warned_of_low_precision = True
    kind = str(low[0].dtype).removeprefix("torch.")
    warn(
        f"mixed_precision={mode!r}, but {len(low)} of {len(held)} trained parameters are {kind} themselves, and so is the optimizer's "
        "state of them: an update that changes a weight by less than about 1/256 of it is lost. Load the model in float32 "
        "(from_pretrained(..., dtype=torch.float32)), or call model.float() before the optimizer is made; the forward pass still "
        "computes in low precision"
    )
