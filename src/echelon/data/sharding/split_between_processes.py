"""Splits a list, tuple, dict, tensor or dataset across ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from echelon.base.errors import UsageError
from echelon.base.protocols import SupportsSelect
from echelon.distributed.division import slice_range
from echelon.distributed.tree import rebuild_like


@contextmanager
def split_between_processes(
    inputs: Any, apply_padding: bool = False, *, rank: int, world_size: int, device: torch.device | None = None
) -> Iterator[Any]:
    """Yield this rank's contiguous part of ``inputs``.

    If the length is not divisible by ``world_size``, the first ranks get one more item.

    Args:
        inputs: a list, tuple, tensor, array, range or dataset, or a dict whose values are any of these and are split
            individually. It is not modified.
        apply_padding: whether to repeat the last item so that every rank gets the same number of items. Drop the copies after
            a gather.
        device: device that padded tensors are moved to for a gather. If None, they are not moved.

    Raises:
        UsageError: a dict's values differ in length, or ``inputs`` cannot be split.
    """
    if world_size == 1:
        yield inputs
        return
    length = _length(inputs)
    indices = list(slice_range(range(length), num_parts=world_size, part=rank))
    missing = -(-length // world_size) - len(indices) if apply_padding else 0
    yield _select_items(inputs, indices, missing, length, device if apply_padding else None)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs) if isinstance(inputs, Sized) else 0
    lengths = {key: _length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(
            f"Expected all values in a dict to have the same length, but got lengths {lengths}",
            do="make them the same length, or split them separately",
        )
    return next(iter(lengths.values()), 0)


def _select_items(inputs: Any, indices: list[int], missing: int, length: int, device: torch.device | None) -> Any:
    if isinstance(inputs, Mapping):
        parts = {key: _select_items(value, indices, missing, length, device) for key, value in inputs.items()}
        return rebuild_like(inputs, parts)
    padding = [length - 1] * missing
    if isinstance(inputs, (torch.Tensor, np.ndarray)):
        part: Any = (
            inputs[indices + padding] if padding else inputs[indices[0] : indices[-1] + 1] if indices else inputs[:0]
        )
        return part if device is None or not isinstance(part, torch.Tensor) else part.to(device)
    if isinstance(inputs, (list, tuple)):
        return type(inputs)([inputs[index] for index in indices + padding])
    if isinstance(inputs, (range, str)) and not padding:
        return inputs[indices[0] : indices[-1] + 1] if indices else inputs[:0]
    if isinstance(inputs, range):
        return [inputs[index] for index in indices + padding]
    if isinstance(inputs, SupportsSelect):
        return inputs.select(indices + padding)
    if isinstance(inputs, Dataset) and isinstance(inputs, Sized):
        return Subset(inputs, indices + padding)
    raise UsageError(
        f"split_between_processes cannot split a {type(inputs).__name__}",
        do="pass a list, a tuple, a tensor, an array, a map-style dataset, or a dict of these",
    )
