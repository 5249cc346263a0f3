"""Operations on a batch's tensors: move, detach, truncate, concatenate and count samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from echelon.accelerator.metrics import is_column
from echelon.accelerator.prepare.prepare_arguments import contents, is_record, leaves, map_tensors, rebuild_like

__all__ = ["batch_size", "concatenate", "cut", "detach", "fill", "map_tensors", "to_device", "to_numpy"]


def to_device(data: Any, device: torch.device) -> Any:
    """Move ``data`` to ``device``; return the same object if it is already there."""
    return data if _is_on(data, device) else map_tensors(lambda tensor: tensor.to(device), data)


def detach(data: Any) -> Any:
    """Detach the tensors in ``data`` from the graph."""
    return map_tensors(lambda tensor: tensor.detach(), data)


def to_numpy(data: Any) -> Any:
    """Convert the tensors in ``data`` to numpy arrays; bfloat16 becomes float32."""
    return map_tensors(_array, data)


def batch_size(data: Any) -> int | None:
    """Return the number of samples in ``data`` (the rows of its first tensor), or None if it holds no tensor."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return None


def cut(data: Any, *, rows: int, of: int) -> Any:
    """Return the first ``rows`` of a batch's ``of`` samples; tensors and lists that do not have ``of`` rows stay unchanged."""
    if isinstance(data, (list, tuple)) and is_column(data) and batch_size(data) is None:
        return data[:rows] if len(data) == of else data
    if isinstance(data, Mapping):
        columns: Any = contents(data)
        return rebuild_like(data, {name: cut(column, rows=rows, of=of) for name, column in columns.items()})
    return map_tensors(lambda tensor: tensor[:rows] if tensor.dim() and tensor.shape[0] == of else tensor, data)


def fill(data: Any, *, rows: int, of: int) -> Any:
    """Undo ``cut``: extend each tensor with ``rows`` rows to ``of`` rows by repeating its last row."""

    def _filled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != rows:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(of - rows, *tensor.shape[1:])])

    return map_tensors(_filled, data)


def concatenate(parts: list[Any], *, padding: int = -100) -> Any:
    """Concatenate batches of the same structure along the first dimension.

    Tensors whose second dimensions differ are padded to the longest one with ``padding``.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim() > 1 and len({part.shape[1] for part in parts}) > 1:
            parts = [_lengthen(part, max(part.shape[1] for part in parts), padding) for part in parts]
        return torch.cat([part.reshape(1) if not part.dim() else part for part in parts])
    if isinstance(first, Mapping) or is_record(first):
        columns: list[Any] = [contents(part) for part in parts]
        return rebuild_like(
            first, {name: concatenate([one[name] for one in columns], padding=padding) for name in columns[0]}
        )
    if isinstance(first, (list, tuple)):
        return rebuild_like(first, [concatenate(list(column), padding=padding) for column in zip(*parts)])
    raise TypeError(f"predictions contain a {type(first).__name__}, not only tensors")


def _lengthen(tensor: torch.Tensor, length: int, padding: int) -> torch.Tensor:
    longer = tensor.new_full((tensor.shape[0], length, *tensor.shape[2:]), padding)
    longer[:, : tensor.shape[1]] = tensor
    return longer


def _is_on(data: Any, device: torch.device) -> bool:
    if isinstance(data, torch.Tensor):
        return data.device == device
    if isinstance(data, (dict, Mapping)):  # dict first: asking an abstract class calls Python functions
        data = data.values()
    elif is_record(data):
        data = leaves(data)
    elif not isinstance(data, (list, tuple)):
        return True
    for part in data:  # noqa: SIM110 - runs at every step, where a generator is several times slower
        if not (part.device == device if type(part) is torch.Tensor else _is_on(part, device)):
            return False
    return True


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
