"""Counts, concatenates and slices batches along the sample dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.base.errors import UsageError
from echelon.distributed.tree import contents, describe, is_record, leaves, rebuild_like

__all__ = ["join_batches", "num_samples", "require_divisible", "slice_batch"]

# A column is a tensor, or a list with one item per sample (strings, numbers, dicts without tensors). Other lists, tuples,
# dicts and dataclasses hold columns. Any other value (None, a flag, a name) belongs to the batch as a whole.


def num_samples(batch: Any) -> int | None:
    """Return the number of samples in ``batch``, which is the length of its first column, or None if it has no columns."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() > 0 else None
    if isinstance(batch, (list, tuple)) and _is_column(batch):
        return len(batch)
    held = contents(batch)
    if held is None:
        return None
    counts = (num_samples(item) for item in (held.values() if isinstance(held, dict) else held))
    return next((count for count in counts if count is not None), None)


def join_batches(batches: list[Any]) -> Any:
    """Concatenate batches with the same structure along the sample dimension.

    Raises:
        UsageError: the batches differ in something other than the number of samples.
    """
    if len(batches) == 1:
        return batches[0]
    try:
        return _join(batches)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        kinds = "\n".join(f"    {describe(batch)}" for batch in batches)
        raise UsageError(
            "rank zero's batches cannot be concatenated into one for all ranks, because they differ in more than "
            f"their length\n{kinds}",
            where="dispatch_batches=True (the default for an iterable dataset)",
            do="pad samples to a fixed size in collate_fn, or pass DataLoaderConfiguration(split_batches=True) to "
            "split each batch across ranks, or dispatch_batches=False to let every rank read the data",
        ) from error


def slice_batch(batch: Any, part: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """Return the samples in the slice ``part`` of ``batch``. Values that are not per-sample are kept.

    Args:
        batch: nested columns.
        part: the samples.
        process_index: unused, but required by the ``slice_fn_for_dispatch`` signature.
        num_processes: unused, likewise.
    """
    if isinstance(batch, torch.Tensor):
        return batch[part] if batch.dim() > 0 else batch
    if isinstance(batch, Mapping) or is_record(batch):
        held: Any = contents(batch)
        return rebuild_like(batch, {key: slice_batch(value, part) for key, value in held.items()})
    if isinstance(batch, (list, tuple)):
        if _is_column(batch):
            return batch[part]
        return rebuild_like(batch, [slice_batch(item, part) for item in batch])
    return batch


def require_divisible(batch_size: int | None, world_size: int) -> None:
    """Check that every batch can be split evenly across ranks.

    Raises:
        UsageError: it cannot.
    """
    if batch_size is None or batch_size % world_size:
        raise UsageError(
            "split_batches=True requires a batch size that is divisible by the number of processes "
            f"({world_size}), but got batch_size={batch_size}",
            where="DataLoaderConfiguration(split_batches=)",
            do=f"use a batch size that is a multiple of {world_size}, or omit split_batches",
        )


def _is_column(items: Any) -> bool:
    if isinstance(items, tuple) and hasattr(items, "_fields"):
        return False
    if any(isinstance(item, (torch.Tensor, list, tuple)) for item in items):
        return False
    if any(is_record(item) for item in items):
        return True  # a list of samples, each an object
    return len(items) > 0 and not any(isinstance(leaf, torch.Tensor) for leaf in leaves(items))


def _join(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return torch.cat(parts)
    if isinstance(first, Mapping) or is_record(first):
        held: list[Any] = [contents(part) for part in parts]
        if any(type(one) is not dict or one.keys() != held[0].keys() for one in held):
            raise ValueError("keys")
        return rebuild_like(first, {key: _join([one[key] for one in held]) for key in held[0]})
    if isinstance(first, (list, tuple)):
        if all(_is_column(part) for part in parts):
            return type(first)(item for part in parts for item in part)
        if any(len(part) != len(first) for part in parts):
            raise ValueError("lengths")
        return rebuild_like(first, [_join(list(items)) for items in zip(*parts)])
    if any(type(part) is not type(first) or not _same(part, first) for part in parts):
        raise ValueError("values")
    return first


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
