"""Detects optimizers that cannot step sharded parameters, and updates optimizers that were created before ``prepare``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.engines.shards import shard_like

__all__ = ["cannot_step_shards", "parameter_ids", "repoint_optimizer", "require_elementwise"]

# LBFGS silently uses dot products of one shard. The other optimizers fail with errors of torch.
_NEEDS_FULL_PARAMETERS = frozenset({"Adafactor", "LBFGS", "Muon", "Rprop"})


def cannot_step_shards(optimizer: Optimizer, why: str) -> UsageError:
    """Return the error for an optimizer that cannot step shards."""
    kind = type(optimizer).__name__
    return UsageError(
        f"{kind} cannot step sharded parameters: {why}",
        where="fsdp2 engine",
        do=f"use AdamW, SGD or another elementwise optimizer, or keep {kind} and use "
        f"engine='{'ddp' if kind == 'LBFGS' else 'zero1'}'",
    )


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise UsageError if ``optimizer`` is a torch optimizer that cannot step shards."""
    kind = type(optimizer)
    if kind.__name__ == "Adafactor" or (
        kind.__module__.startswith("torch.optim") and kind.__name__ in _NEEDS_FULL_PARAMETERS
    ):
        raise cannot_step_shards(optimizer, "its update needs unsharded parameters")


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of the optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def repoint_optimizer(optimizer: Optimizer, replaced: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Replace the optimizer's parameters with the sharded ones, and shard its state."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
        if len({isinstance(p, DTensor) for p in group["params"]}) > 1:  # no kernel accepts both kinds
            group["foreach"] = False
            if group.get("fused"):
                group["fused"] = False
    for old in list(optimizer.state):
        new = replaced.get(old, old)
        if new is not old:
            entries = optimizer.state.pop(old)
            optimizer.state[new] = {key: shard_like(value, new) for key, value in entries.items()}
