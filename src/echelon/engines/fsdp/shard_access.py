"""Where a script meets the shards of a model itself: a number of one shard is told, whole state dicts are taken apart."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.base.warnings import UserLine, user_line, warn
from echelon.engines.shards import part_like

__all__ = ["take_whole_state_dicts", "watch_numbers_of_shards"]

_ITEM = torch.ops.aten._local_scalar_dense.default


def watch_numbers_of_shards(owner: object) -> None:
    """Warn, once a line, where a number is read off a tensor that is this rank's part of a sum, a norm or a maximum.

    ``p.grad.norm().item()``, ``float()`` and ``bool()`` of it give the number of one shard, and torch says nothing. The number
    is left as it is: making it whole needs all ranks, and they need not all be there.

    Args:
        owner: as long as it lives.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.get(_ITEM)
    if handler is None:
        handler = handlers[_ITEM] = _Reader()
    if isinstance(handler, _Reader):
        handler.owners.add(owner)


class _Reader:
    """Reads the number of a sharded tensor, in torch's place."""

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
                    "a number was read off a sharded tensor: it is the sum, norm or maximum of this rank's shard alone, and another "
                    "on each rank. For the whole one call x.full_tensor().item() on every rank in the place of x.item(); the norm of "
                    "all gradients is accelerator.clip_grad_norm_(model.parameters(), float('inf')).",
                    at=line,
                )
        return tensor.to_local().item()


def take_whole_state_dicts(model: nn.Module) -> list[Any]:
    """Let ``load_state_dict`` of ``model``, and of the modules in it, take whole tensors, of which each rank keeps its part.

    Returns:
        The handles of the hooks.
    """
    modules: list[Any] = list(model.modules())
    return [module.register_load_state_dict_pre_hook(_take_apart) for module in modules]


def _take_apart(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name, own in [*module._parameters.items(), *module._buffers.items()]:
        value = state_dict.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == own.shape:  # of other shapes torch names both
            state_dict[prefix + name] = part_like(value.detach(), own)
