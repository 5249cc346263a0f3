"""Counts, concatenates and slices batches along the sample dimension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from echelon.base.errors import UsageError
from echelon.distributed.tree import contents, describe, is_record, leaves, map_items, rebuild_like

# A column is a tensor, or a list with one item per sample (strings, numbers, dicts without tensors). Other lists, tuples,
# dicts and dataclasses hold columns. Any other value (None, a flag, a name) belongs to the batch as a whole.


def num_samples(batch: Any) -> int | None:
    """Return the number of samples in ``batch``, or None if it has no columns.

    This is the length of its first tensor or, without tensors, of its first list: a list is more often a constant.
    """
    first: int | None = None
    for column in _columns(batch, "batch"):
        if column.is_tensor:
            return column.length
        first = column.length if first is None else first
    return first


def agreed_num_samples(batch: Any) -> int | None:
    """Return the length of all columns of ``batch``, or None if it has none, or of different lengths."""
    lengths = {column.length for column in _columns(batch, "batch")}
    return lengths.pop() if len(lengths) == 1 else None


def require_rows_per_sample(batch: Any, num_samples: int | None, *, is_default_collate: bool) -> None:
    """Check that ``slice_batch`` can cut ``batch`` by sample: each column has one row per sample.

    Args:
        num_samples: the number of samples that were collated; None if unknown, then the columns need only agree.
        is_default_collate: whether ``default_collate`` made the batch, so that a list of lists holds columns.

    Raises:
        UsageError: a column has a different number of rows, or a list of lists may hold either columns or samples.
    """
    columns = list(_columns(batch, "batch"))
    wanted = agreed_num_samples(batch) if num_samples is None else num_samples
    if any(column.length != wanted for column in columns):
        lengths = ", ".join(f"{column.name}: {column.length}" for column in columns)
        samples = "" if num_samples is None else f" for {num_samples} sample{'s' * (num_samples != 1)}"
        raise _not_by_sample(f"its columns do not all have one row per sample: their rows are {lengths}{samples}")
    unclear = (
        [] if is_default_collate else [name for name, length in _lists_of_lists(batch, "batch") if length == wanted]
    )
    if unclear:
        raise _not_by_sample(f"{unclear[0]} is a list of {wanted} lists of {wanted}, which may be samples or columns")


def _not_by_sample(why: str) -> UsageError:
    return UsageError(
        f"rank zero's batch cannot be split across ranks, because {why}",
        where="dispatch_batches=True (the default for an iterable dataset)",
        do="pass DataLoaderConfiguration(dispatch_batches=False), of a Trainer accelerator_config={'dispatch_batches': False}, so "
        "that each rank collates its own samples; or make collate_fn return one row per sample (and a tuple for columns)",
    )


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
    """Return the samples in the slice ``part`` of ``batch``. Values that are not per-sample are kept."""
    if isinstance(batch, torch.Tensor):
        return batch[part] if batch.dim() > 0 else batch
    if isinstance(batch, (list, tuple)) and is_column(batch):
        return batch[part]
    return batch if contents(batch) is None else map_items(lambda item: slice_batch(item, part), batch)


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


class _Column(NamedTuple):
    name: str
    length: int
    is_tensor: bool


def _columns(batch: Any, name: str) -> Iterator[_Column]:
    if isinstance(batch, torch.Tensor):
        if batch.dim() > 0:
            yield _Column(name, batch.size(0), True)
    elif isinstance(batch, (list, tuple)) and is_column(batch):
        yield _Column(name, len(batch), False)
    else:
        for key, item in _items(batch):
            yield from _columns(item, f"{name}[{key!r}]")


def _lists_of_lists(batch: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the name and length of each list that holds lists, but no tensors. (A tuple of lists holds columns.)"""
    held = [item for _, item in _items(batch)]
    if isinstance(batch, list) and held and all(isinstance(item, (list, tuple)) for item in held):
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves(held)):
            yield name, len(held)
        return
    if isinstance(batch, (list, tuple)) and is_column(batch):
        return
    for key, item in _items(batch):
        yield from _lists_of_lists(item, f"{name}[{key!r}]")


def _items(batch: Any) -> list[tuple[Any, Any]]:
    held = contents(batch)
    return list(held.items() if isinstance(held, dict) else enumerate(held or ()))


def is_column(items: Any) -> bool:
    """Return whether the list or tuple ``items`` is a column, with one item per sample."""
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
        if all(is_column(part) for part in parts):
            return type(first)(item for part in parts for item in part)
        if any(len(part) != len(first) for part in parts):
            raise ValueError("lengths")
        return rebuild_like(first, [_join(list(items)) for items in zip(*parts)])
    if any(type(part) is not type(first) or not _same(part, first) for part in parts):
        raise ValueError("values")
    return first


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
