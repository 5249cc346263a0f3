"""Scripts that touch the shards themselves: a warning where a shard's value is read, and ``load_state_dict`` of full tensors."""

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
    """Warn, once per line and while ``owner`` lives, if a script reads a value that is partial: this rank's share of a reduction.

    ``p.grad.norm().item()``, ``float()`` and ``bool()`` return the value of one shard, and torch does not warn. The value is not
    changed: the full one needs all ranks, which may not all be here.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.get(_ITEM)
    if handler is None:
        handler = handlers[_ITEM] = _ItemHandler()
    if isinstance(handler, _ItemHandler):
        handler.owners.add(owner)


class _ItemHandler:
    """Replaces torch's ``item()`` of a DTensor."""

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
                    "a value was read from a sharded tensor: it is the sum, norm or maximum of this rank's shard only, and differs "
                    "between the ranks. For the full value, call x.full_tensor().item() on every rank instead of x.item(); the norm "
                    "of all gradients is accelerator.clip_grad_norm_(model.parameters(), float('inf')).",
                    at=line,
                )
        return tensor.to_local().item()


def accept_full_state_dicts(model: nn.Module) -> list[Any]:
    """Let ``load_state_dict`` of ``model``, and of the modules in it, accept full tensors; return the handles of the hooks."""
    modules: list[Any] = list(model.modules())
    return [module.register_load_state_dict_pre_hook(_shard_values) for module in modules]


def _shard_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name, own in [*module.named_parameters("", False, False), *module.named_buffers("", False, False)]:
        value = state_dict.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == own.shape:  # if they differ, torch's error names both
            state_dict[prefix + name] = shard_like(value.detach(), own)
