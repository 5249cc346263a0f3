"""Whole tensors and the parts of them that ranks hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.base.sharded import is_dtensor, is_fsdp_module, local_shape_and_offset

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["from_parts", "fsdp_groups", "local_parts", "part_like", "parts_of", "slices_of", "whole"]


def fsdp_groups(root: Any) -> list[Any]:
    """Return torch's parameter groups of ``root`` and the modules in it.

    No public name of torch tells what was not reduced. torch 2.7 has one group in a state, later versions a list.
    """
    found: list[Any] = []
    modules: Iterable[nn.Module] = root.modules()
    for module in modules:
        if is_fsdp_module(module):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
            found += groups
    return found


def slices_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor this rank holds, by dim."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = local_shape_and_offset(tensor)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape))


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of each tensor, sharing its memory."""
    return [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


def whole(value: Any, *, keep: bool) -> Any:
    """Return ``value`` whole and on the host; None where ``keep`` is False and it is sharded.

    Collective: of a sharded tensor.
    """
    if is_dtensor(value):
        full: torch.Tensor = value.full_tensor().detach()
        return full.cpu() if keep else None
    return value.detach().cpu() if isinstance(value, torch.Tensor) and keep else value


def parts_of(value: Any) -> Any:
    """Return plain data of what this rank holds: ``{"shape", "offset", "values"}`` of a sharded tensor."""
    if not is_dtensor(value):
        return value
    _, offset = local_shape_and_offset(value)
    return {"shape": list(value.shape), "offset": list(offset), "values": value.to_local().detach()}


def part_like(value: Any, like: torch.Tensor) -> Any:
    """Return this rank's part of the whole tensor ``value``, sharded as ``like``; what has another shape stays whole."""
    if not is_dtensor(like) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value.to(like.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
    shape, offset = local_shape_and_offset(like)
    for dim, (size, start) in enumerate(zip(shape, offset)):
        value = value.narrow(dim, min(start, value.shape[dim]), size)
    return _sharded(value.clone(), like)


def from_parts(value: Any, like: torch.Tensor) -> Any:
    """Return what ``parts_of`` took apart, on a rank that holds the same part of ``like``."""
    return _sharded(value["values"], like) if isinstance(value, dict) and is_dtensor(like) else value


def _sharded(local: torch.Tensor, like: DTensor) -> DTensor:
    local = local.to(like.to_local().device).contiguous()
    return type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
