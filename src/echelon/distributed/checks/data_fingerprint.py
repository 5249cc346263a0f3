"""Fingerprints of datasets, samples and batch rows, for comparison between ranks, machines and runs.

A fingerprint depends only on contents, not on object identity or a hash seed. It is cheap because it reads only a few
indices, and it detects accidents, not attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from echelon.base.lengths import length_of
from echelon.base.protocols import SupportsWithFormat
from echelon.distributed.tree import leaves

_PART_OF_A_TABLE = "rows (a part)"
_NUM_PLACES = 16
_MAX_COLUMNS = 32
_MAX_DEPTH = 4
_MAX_ITEMS = 64
_END_BYTES = 1 << 16
_ROW_BYTES = 256
# Odd weights of the words of a row, from a generator with a fixed seed, so that all machines use the same.
_WEIGHTS = np.random.Generator(np.random.PCG64(20260)).integers(1, 2**63, _ROW_BYTES // 8, dtype=np.uint64) | np.uint64(
    1
)

_Column = Callable[[int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFingerprint:
    """A fingerprint of a few items from one column."""

    value: int
    """A 62-bit hash."""
    varies: bool
    """Whether the items have more than one distinct value. If not, equal fingerprints prove little."""
    is_numeric: bool = True
    """Whether all items are numbers, which each rank may have drawn at random."""


def column_fingerprints(dataset: Any) -> dict[str, ColumnFingerprint]:
    """Return the fingerprint of each column of ``dataset`` that is cheap to read.

    A column is a CPU tensor, array, list or data frame with one item per sample: the dataset itself or one of its
    attributes, including those inside a ``TensorDataset``, ``Subset``, ``ConcatDataset`` or ``StackDataset``. A Hugging Face
    dataset contributes its rows, and an iterable dataset its lists and arrays (for example, of file names). Only the last
    component of a path counts, because machines may store data in different directories.
    """
    num_samples = length_of(dataset)
    found: dict[str, ColumnFingerprint] = {}
    for name, column, length in _columns(dataset, num_samples, "", 0)[:_MAX_COLUMNS]:
        number = min(length, _NUM_PLACES)
        items = [column(place * (length - 1) // max(number - 1, 1)) for place in range(number)]
        fingerprint = _fingerprint_items(items, is_drawn=name.endswith("indices"))
        if fingerprint is not None:
            found[name] = fingerprint
    return found


def sample_fingerprints(samples: Sequence[Any]) -> dict[str, ColumnFingerprint]:
    """Return a fingerprint of each leaf across the first 64 ``samples``, which must have the same structure."""
    rows = [list(leaves(sample)) for sample in samples[:_MAX_ITEMS]]
    width = min((len(row) for row in rows), default=0)
    found = {}
    for number in range(min(width, _MAX_COLUMNS)):
        fingerprint = _fingerprint_items([row[number] for row in rows])
        if fingerprint is not None:
            found[str(number)] = fingerprint
    return found


def are_of_different_data(one: Mapping[str, ColumnFingerprint], other: Mapping[str, ColumnFingerprint]) -> bool:
    """Return whether two ranks have different data, given columns that should describe the same samples.

    A column may differ for a good reason (augmentation, or noise drawn by each rank), and an equal column may prove nothing
    (labels that are all the same). Therefore the differing columns must outnumber the equal columns that vary.
    """
    num_different = num_equal = 0
    for name in one.keys() & other.keys():
        if one[name] != other[name]:
            num_different += 1
        else:
            num_equal += one[name].varies
    return num_different > num_equal


def are_shards(
    one: Mapping[str, ColumnFingerprint], other: Mapping[str, ColumnFingerprint], *, same_seeds: bool
) -> bool:
    """Return whether two ranks hold shards of one dataset, rather than random numbers drawn by each rank.

    Args:
        same_seeds: whether the ranks' generators had the same seed, so that random data would be equal.
    """
    if not are_of_different_data(one, other):
        return False
    return same_seeds or any(
        one[name] != other[name] and not one[name].is_numeric for name in one.keys() & other.keys()
    )


def are_table_shards(columns: Sequence[Mapping[str, ColumnFingerprint]], num_samples: Sequence[int]) -> bool:
    """Return whether the ranks hold different rows of a Hugging Face dataset, as after ``split_dataset_by_node``."""
    first, *others = columns
    if not others or not all(_PART_OF_A_TABLE in found for found in columns):
        return False
    differ = all(are_of_different_data(first, other) for other in others)
    return differ and max(num_samples) - min(num_samples) <= 1


def fingerprint_of_sample(value: Any) -> int | None:
    """Return a 62-bit hash of plain data (tensors, arrays, numbers, strings and containers of these), or None."""
    found = xxhash.xxh3_64()
    return int(found.intdigest() >> 2) if _update(found, value, 0) else None


def row_fingerprints(batch: Any) -> np.ndarray[Any, np.dtype[np.uint64]] | None:
    """Return a 64-bit hash of each sample in a collated batch [number of samples], or None if it has no CPU columns.

    Wide rows are subsampled: only every n-th element is hashed.
    """
    found: np.ndarray[Any, np.dtype[np.uint64]] | None = None
    for number, column in enumerate(_batch_columns(batch)):
        if found is not None and len(column) != len(found):
            continue
        values = _hash_rows(column) if isinstance(column, torch.Tensor) else _hash_texts(column)
        if values is None:
            continue
        values = _mix_bits(values + np.uint64(number))
        found = values if found is None else _mix_bits(found ^ values)
    return found


# ---- columns of a dataset -----------------------------------------------------------------------------------------------


def _columns(data: Any, num_samples: int, name: str, depth: int) -> list[tuple[str, _Column, int]]:
    """Return, for each column of ``data``, its name, a function that gets an item, and its number of items."""
    if isinstance(data, IterableDataset):
        lists = [
            (key, part) for key, part in vars(data).items() if isinstance(part, (list, tuple, torch.Tensor, np.ndarray))
        ]
        return [(key, _item_of(part), len(part)) for key, part in lists if _is_column(part, length_of(part))]
    if num_samples <= 0 or depth > _MAX_DEPTH:
        return []
    if isinstance(data, Subset):
        return _columns_of_subset(data, name, depth)
    if isinstance(data, ConcatDataset):
        parts = [(f"{name}{number}.", part) for number, part in enumerate(data.datasets[:8])]
        return [column for key, part in parts for column in _columns(part, length_of(part), key, depth + 1)]
    if isinstance(data, StackDataset):
        stacked: Any = data.datasets
        named = stacked.items() if isinstance(stacked, Mapping) else enumerate(stacked)
        return [column for key, part in named for column in _columns(part, num_samples, f"{name}{key}.", depth + 1)]
    if isinstance(data, SupportsWithFormat):  # the library `datasets`: raw rows, without decoding or transforms
        rows = data.with_format("arrow")
        chosen, stored = getattr(data, "_indices", None), getattr(data, "_data", ())
        is_part = chosen is None or len(chosen) < len(stored)  # a shuffled table still has all of its rows
        return [
            (
                f"{name}rows{' (a part)' if is_part else ''}",
                lambda place: rows[place : place + 1].to_pydict(),
                num_samples,
            )
        ]
    if _is_column(data, num_samples):
        return [(name or "items", _item_of(data), num_samples)]
    if isinstance(data, Mapping):
        return [c for key, part in data.items() for c in _columns(part, num_samples, f"{name}{key}.", depth + 1)]
    if depth and isinstance(data, (list, tuple)) and len(data) <= _MAX_ITEMS:
        return [
            c for number, part in enumerate(data) for c in _columns(part, num_samples, f"{name}{number}.", depth + 1)
        ]
    if isinstance(data, Dataset) or not depth:
        attributes = vars(data) if hasattr(data, "__dict__") else {}
        return [
            column
            for key, part in attributes.items()
            if not isinstance(part, IterableDataset)
            for column in _columns(part, num_samples, f"{name}{key}.", depth + 1)
        ]
    return []


def _columns_of_subset(data: Any, name: str, depth: int) -> list[tuple[str, _Column, int]]:
    indices, length = data.indices, length_of(data.indices)
    whole = length_of(data.dataset)

    def through(column: _Column) -> _Column:
        return lambda place: column(int(indices[place]))

    below = [
        (key, through(column), length)
        for key, column, num_items in _columns(data.dataset, whole, f"{name}dataset.", depth + 1)
        if num_items == whole
    ]
    chosen = [(f"{name}indices", lambda place: int(indices[place]), length)] if length > 0 else []
    return [*chosen, *below]


def _is_column(data: Any, num_samples: int) -> bool:
    if isinstance(data, torch.Tensor):
        return (
            data.device.type == "cpu" and data.layout == torch.strided and data.dim() > 0 and len(data) == num_samples
        )
    if isinstance(data, np.ndarray):
        return data.ndim > 0 and len(data) == num_samples
    return (isinstance(data, (list, tuple, range)) or hasattr(data, "iloc")) and len(data) == num_samples


def _item_of(data: Any) -> _Column:
    if not hasattr(data, "iloc"):
        return lambda place: data[place]
    frame = data.iloc
    return lambda place: list(frame[place]) if data.ndim > 1 else frame[place]


# ---- plain data ---------------------------------------------------------------------------------------------------------


def _fingerprint_items(items: list[Any], *, is_drawn: bool = False) -> ColumnFingerprint | None:
    """Return the fingerprint of a column's items, or None if it has no items or one of them is None or not plain data.

    Args:
        is_drawn: whether the items are a subset's indices, which may have been drawn at random.
    """
    values = [None if item is None else fingerprint_of_sample(item) for item in items]
    if not values or any(value is None for value in values):
        return None
    found = xxhash.xxh3_64(",".join(map(str, values)).encode())
    has_text = any(isinstance(leaf, (str, bytes)) for item in items for leaf in leaves(item))
    return ColumnFingerprint(
        value=int(found.intdigest() >> 2), varies=len(set(values)) > 1, is_numeric=not (has_text or is_drawn)
    )


def _update(found: Any, value: Any, depth: int) -> bool:
    """Update the hash ``found`` with ``value``; return False if ``value`` is not plain data."""
    if isinstance(value, str):
        found.update(b"s" + value.rstrip("/").rpartition("/")[2].encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray)):
        found.update(b"b" + _ends(memoryview(value)))
    elif value is None or isinstance(value, (bool, int, float, complex, np.generic)):
        found.update(f"n{value!r}".encode())
    elif isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            return False
        plain = value.detach().contiguous().reshape(-1)
        found.update(f"t{value.dtype}{list(value.shape)}".encode())
        found.update(_ends(plain.view(torch.uint8).numpy().data) if plain.numel() else b"")
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        found.update(f"a{value.dtype}{list(value.shape)}".encode())
        found.update(_ends(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data) if value.size else b"")
    elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
        items = list(value.items())[:_MAX_ITEMS]
        found.update(f"m{len(value)}".encode())
        return all(_update(found, key, depth + 1) and _update(found, item, depth + 1) for key, item in items)
    elif isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        found.update(f"l{len(value)}".encode())
        return all(_update(found, item, depth + 1) for item in value[:_MAX_ITEMS])
    else:
        return False
    return True


def _ends(data: memoryview) -> bytes:
    return bytes(data) if len(data) <= 2 * _END_BYTES else bytes(data[:_END_BYTES]) + bytes(data[-_END_BYTES:])


# ---- rows of a batch ----------------------------------------------------------------------------------------------------


def _batch_columns(batch: Any) -> list[Any]:
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.dim() > 0 and batch.device.type == "cpu" and batch.layout == torch.strided else []
    if isinstance(batch, Mapping):
        return [column for item in batch.values() for column in _batch_columns(item)]
    if isinstance(batch, (list, tuple)):
        if batch and all(isinstance(item, (str, bytes, int, float)) for item in batch):
            return [batch]
        return [column for item in batch for column in _batch_columns(item)]
    return []


def _hash_rows(column: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]] | None:
    if column.numel() == 0 or type(column) is not torch.Tensor:
        return None
    rows = column.detach().reshape(len(column), -1)
    most = max(_ROW_BYTES // rows.element_size(), 1)
    if rows.size(1) > most:
        rows = rows[:, :: -(-rows.size(1) // most)]
    raw = rows.contiguous().view(torch.uint8).numpy()
    words = np.zeros((len(raw), -(-raw.shape[1] // 8) * 8), dtype=np.uint8)
    words[:, : raw.shape[1]] = raw
    numbers = words.view(np.uint64)
    return _mix_bits((numbers * _WEIGHTS[: numbers.shape[1]]).sum(axis=1, dtype=np.uint64))


def _hash_texts(column: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([xxhash.xxh3_64_intdigest(repr(item).encode()) for item in column], dtype=np.uint64)


def _mix_bits(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Mix the bits of each value.

    Source: the finalizer of splitmix64 (Steele, Lea, Flood 2014).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
