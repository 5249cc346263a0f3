"""Moves a batch to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.base.protocols import SupportsTo
from echelon.distributed.tree import contents, is_record, rebuild_like

__all__ = ["to_device"]


def to_device(data: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Move all tensors and other objects in ``data`` that have ``.to`` to ``device``. Containers keep their types."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, SupportsTo) and not isinstance(data, type):
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:  # a `.to` that accepts only the device; any other TypeError is raised again
            return data.to(device)
    if isinstance(data, (tuple, list)):
        return rebuild_like(data, [to_device(item, device, non_blocking=non_blocking) for item in data])
    if isinstance(data, Mapping):
        return rebuild_like(
            data, {key: to_device(value, device, non_blocking=non_blocking) for key, value in data.items()}
        )
    if is_record(data):
        held: Any = contents(data)  # a dict
        return rebuild_like(
            data, {key: to_device(value, device, non_blocking=non_blocking) for key, value in held.items()}
        )
    return data
