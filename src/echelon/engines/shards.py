"""Converts between local DTensor shards and full tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from echelon.base.sharded import is_dtensor, local_shape_and_offset

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return, for each dimension, the slice of the full tensor that this rank holds."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = local_shape_and_offset(tensor)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape))


def local_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shard of each tensor, without copying it."""
    return [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


def local_as(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as this rank's shard of a tensor that is sharded as ``like``; without shards, ``local`` itself."""
    return _from_local(local, like) if is_dtensor(like) else local


def address_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where this rank's elements of ``tensor`` are in memory, and their number; (0, 0) if it has none."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return (local.data_ptr(), local.numel()) if local.numel() else (0, 0)


def gather_full(value: Any, *, keep: bool) -> Any:
    """Return ``value`` unsharded on the CPU, or None if it is sharded and ``keep`` is False. Collective if sharded."""
    if is_dtensor(value):
        full: torch.Tensor = value.full_tensor().detach()
        return full.cpu() if keep else None
    return value.detach().cpu() if isinstance(value, torch.Tensor) and keep else value


def shard_like(value: Any, like: torch.Tensor) -> Any:
    """Shard the full tensor ``value`` in the same way as ``like``. A tensor with another shape stays unsharded."""
    if not is_dtensor(like) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value.to(like.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
    shape, offset = local_shape_and_offset(like)
    for dim, (size, start) in enumerate(zip(shape, offset)):
        value = value.narrow(dim, min(start, value.shape[dim]), size)
    return _from_local(value.clone(), like)


def _from_local(local: torch.Tensor, like: DTensor) -> DTensor:
    local = local.to(like.to_local().device).contiguous()
    return type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
