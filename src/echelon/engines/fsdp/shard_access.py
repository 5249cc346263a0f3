"""Supports scripts that access shards: warns when they read a shard's value, and lets them load full tensors."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.base.warnings import UserLine, user_line, warn
from echelon.engines.shards import shard_like

__all__ = ["accept_full_state_dicts", "warn_on_shard_values"]

_ITEM = torch.ops.aten._local_scalar_dense.default


def warn_on_shard_values(owner: object) -> None:
    """While ``owner`` exists, warn once per line if a script reads this rank's part of an unfinished reduction.

    ``p.grad.norm().item()``, ``float()`` and ``bool()`` return one shard's value without a warning from torch. The value is not
    changed, because computing the full value needs all ranks, and not all of them may execute this line.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.get(_ITEM)
    if handler is None:
        handler = handlers[_ITEM] = _ItemHandler()
    if isinstance(handler, _ItemHandler):
        handler.owners.add(owner)


class _ItemHandler:
    """Replaces torch's implementation of ``DTensor.item()``."""

    def __init__(self) -> None:
        self.owners: WeakSet[Any] = WeakSet()
        self._lines: set[UserLine] = set()

    def __call__(self, _operator: object, args: tuple[Any, ...], _kwargs: object) -> Any:
        tensor: DTensor = args[0]
        if self.owners and tensor.device_mesh.size() > 1 and any(p.is_partial() for p in tensor.placements):
            line = user_line()
            if line not in self._lines:
                self._lines.add(line)
                warn(
                    "this line reads the sum, norm or maximum of only this rank's shard of a tensor, which differs between "
                    "ranks. For the full value, call x.full_tensor().item() on every rank instead of x.item(). For the norm of "
                    "all gradients, call accelerator.clip_grad_norm_(model.parameters(), float('inf')).",
                    at=line,
                )
        return tensor.to_local().item()


def accept_full_state_dicts(model: nn.Module) -> list[Any]:
    """Make ``load_state_dict`` on ``model`` and its submodules accept full tensors; return the hook handles."""
    modules: list[Any] = list(model.modules())
    return [module.register_load_state_dict_pre_hook(_shard_values) for module in modules]


def _shard_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name, own in [*module.named_parameters("", False, False), *module.named_buffers("", False, False)]:
        value = state_dict.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == own.shape:  # otherwise torch's error shows both shapes
            state_dict[prefix + name] = shard_like(value.detach(), own)
