"""Recognizes samples by their content, also if they are padded to different lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from echelon.distributed.tree import contents
from echelon.verify.trace import Row

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRows:
    """The samples of one batch."""

    rows: list[Row]
    keys: np.ndarray
    """uint64, ``(num_samples,)``: hash of each sample that does not depend on its padding (as far as that can be recognized)."""
    lengths: dict[int, np.ndarray]
    """For each length of integer leaves of shape ``(num_samples, length)``: the sample's length without its padding, ``(num_samples,)``."""
    num_items: int | None = None
    """Number of labels that are not -100, if there is an integer leaf named ``labels``."""

    def part(self, start: int, stop: int) -> SampleRows:
        """Return the samples ``start`` to ``stop``."""
        lengths = {length: each[start:stop] for length, each in self.lengths.items()}
        return SampleRows(rows=self.rows[start:stop], keys=self.keys[start:stop], lengths=lengths)


@dataclass(frozen=True, slots=True)
class _Leaf:
    path: str
    values: np.ndarray
    """int64, ``(num_samples, num_values)``: the bits of float32 values, integers, or hashes of other objects."""
    length: int | None
    """Length of the dimension that may be padded, or None."""

    @property
    def num_values_per_position(self) -> int:
        assert self.length is not None
        return int(self.values.shape[1] // self.length)


def num_rows(data: Any) -> int | None:
    """Return the number of samples of a batch: the length of its first tensor with dimensions, or else of its first list of objects."""
    return _num_rows(_leaves(data))


def _num_rows(leaves: Iterable[tuple[str, Any]]) -> int | None:
    of_list: int | None = None
    for _, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() > 0:
                return leaf.size(0)
        elif of_list is None and isinstance(leaf, list):
            of_list = len(leaf)
    return of_list


def item_lengths(items: list[Any]) -> np.ndarray | None:
    """Return the length of each item of a dataset: of the longest of its integer tensors and lists; None if one has none."""
    found = []
    for item in items:
        sizes = [
            leaf.size(0) if isinstance(leaf, torch.Tensor) else len(leaf)
            for _, leaf in _leaves(item)
            if (isinstance(leaf, list) and leaf and isinstance(leaf[0], int))
            or (isinstance(leaf, torch.Tensor) and leaf.dim() and not leaf.is_floating_point())
            or (isinstance(leaf, np.ndarray) and leaf.ndim and leaf.dtype.kind == "i")
        ]
        if not sizes:
            return None
        found.append(max(sizes))
    return np.array(found)


def rows_of(batch: Any, of_items: np.ndarray | None = None) -> SampleRows | None:
    """Return the samples of ``batch``, or None if it has no samples along dimension 0.

    Args:
        of_items: lengths of the items of the dataset from which the batch was collated. If the longest one fits, or has one element
            more (``padded[:, :-1]``, which cuts the longest text of a batch only), they tell what is padding.
    """
    leaves = list(_leaves(batch))
    count = _num_rows(leaves)
    if count is None:
        return None
    found = [one for path, leaf in leaves if (one := _leaf(path, leaf, count)) is not None]
    lengths, stops = {}, {}
    for length in {leaf.length for leaf in found if leaf.length is not None}:
        num_cut = None if of_items is None or len(of_items) != count else int(of_items.max()) - length
        if of_items is not None and num_cut in (0, 1):
            lengths[length] = stops[length] = of_items - num_cut
        else:
            lengths[length], stops[length] = _lengths([leaf for leaf in found if leaf.length == length], length)
    is_padded = any((stop < length).any() for length, stop in stops.items())
    num_variants = 3 if is_padded else 1
    whole, *others = (np.zeros(count, dtype=np.uint64) for _ in range(num_variants))
    for leaf in found:
        if not is_padded or leaf.length is None:
            of_leaf = _hashes(leaf, ()) * num_variants
        else:
            of_leaf = _hashes(leaf, (lengths[leaf.length], stops[leaf.length]))
        for total, hashes in zip((whole, *others), of_leaf, strict=True):
            total += hashes
    keys, prefix = others if others else (whole, whole)
    mixed = _mixed(whole)
    ids = mixed.tolist()
    rows = list(map(Row, ids, ids if prefix is whole else _mixed(prefix).tolist()))
    return SampleRows(
        rows=rows, keys=mixed if keys is whole else _mixed(keys), lengths=lengths, num_items=_num_items(leaves)
    )


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf); a list without tensors or containers is one leaf, with an object per sample."""
    held = contents(data)
    if held is None or (
        isinstance(data, list) and not any(isinstance(one, torch.Tensor) or contents(one) is not None for one in data)
    ):
        yield path, data
        return
    items = held.items() if isinstance(held, dict) else enumerate(held)
    for key, value in items:
        yield from _leaves(value, f"{path}.{key}")


def _leaf(path: str, leaf: Any, count: int) -> _Leaf | None:
    """Return the leaf as integers; None if it is not per sample."""
    if isinstance(leaf, list) and len(leaf) == count:
        return _Leaf(path, np.array([[_hash_of_object(one)] for one in leaf], dtype=np.uint64).view(np.int64), None)
    if (
        not isinstance(leaf, torch.Tensor)
        or leaf.layout is not torch.strided
        or leaf.dim() == 0
        or leaf.size(0) != count
    ):
        return None
    flat = leaf.detach().reshape(count, -1) if leaf.numel() else leaf.detach().new_zeros(count, 0)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(count, -1)
    if flat.is_floating_point():
        # In a run in float64, a script may compute in float64 what it otherwise computes in float32.
        values = flat.to("cpu", torch.float64).numpy().astype(np.float32)
        return _Leaf(path, values.view(np.int32).astype(np.int64), None)
    length = leaf.size(1) if leaf.dim() in (2, 3) and leaf.size(1) > 1 and flat.size(1) > 0 else None
    if leaf.dim() == 3 and leaf.size(1) == leaf.size(2):  # a matrix over pairs of positions
        length = None
    return _Leaf(path, flat.to("cpu", torch.int64).numpy(), length)


def _hash_of_object(one: Any) -> int:
    data = one if isinstance(one, bytes) else repr(one).encode() if isinstance(one, (str, int, float, bool)) else b""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _lengths(leaves: list[_Leaf], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each sample's length without padding, and the same where the last run of equal values counts as padding, too.

    The first must be the same for a sample that is padded in one batch and not in another, so it relies on an attention mask, or on
    labels of -100, zeros, or a repeated value at the end. The second can be compared with the whole of a sample without padding.
    """
    tables = [leaf.values.reshape(leaf.values.shape[0], length, -1) for leaf in leaves]
    masks = [table for leaf, table in zip(leaves, tables, strict=True) if _is_mask(leaf)]
    if masks:
        lengths = np.max([_end(mask != 0) for mask in masks], axis=0)
        return lengths, lengths
    lengths = np.max([_end(table != 0) for table in tables], axis=0)
    for table in tables:
        if (table == -100).any():
            lengths = np.minimum(lengths, _end(table != -100))
    runs = np.max([_end(table != table[:, -1:]) for table in tables], axis=0)
    if (lengths == length).all():
        last = tables[0][:, -1, 0]
        padding = set(last[runs < length - 1].tolist())  # values that some sample repeats at its end
        if padding:
            lengths = np.where(np.isin(last, list(padding)), runs, lengths)
    return lengths, np.where(lengths == length, runs, lengths)


def _is_mask(leaf: _Leaf) -> bool:
    return leaf.path.endswith("mask") and bool(((leaf.values == 0) | (leaf.values == 1)).all())


def _end(is_kept: np.ndarray) -> np.ndarray:
    """Return the index after the last position of each row where any value is kept; ``(rows, positions, values)`` to ``(rows,)``."""
    kept: np.ndarray = np.logical_or.reduce(is_kept, axis=2)
    return np.where(kept.any(axis=1), kept.shape[1] - kept[:, ::-1].argmax(axis=1), 0)


def _hashes(leaf: _Leaf, stops: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """Return a hash of each row of ``leaf``, then of each row up to each of ``stops``: products with random numbers, modulo 2**64."""
    values = leaf.values.view(np.uint64)
    # The lower bits of many numbers are zeros, and a product does not mix higher bits into lower ones.
    values = values ^ (values >> _HALF)
    factors = _factors(leaf.path, values.shape[1])
    found = [values @ factors]
    if stops:
        columns = np.arange(values.shape[1]) // leaf.num_values_per_position
    for stop in stops:
        found.append(np.where(columns < stop[:, None], values, np.uint64(0)) @ factors)
    return found


@lru_cache(maxsize=64)
def _factors(path: str, count: int) -> np.ndarray:
    """Return the odd random factors of a leaf; those of a shorter one are the first of a longer one."""
    seed = _hash_of_object(path) >> 8
    return _mixed((np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed)) * _GOLDEN) | np.uint64(1)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each uint64 number (the finalizer of splitmix64)."""
    numbers = (numbers ^ (numbers >> _SHIFTS[0])) * _MIX[0]
    numbers = (numbers ^ (numbers >> _SHIFTS[1])) * _MIX[1]
    numbers ^= numbers >> _SHIFTS[2]
    return numbers


def _num_items(leaves: Iterable[tuple[str, Any]]) -> int | None:
    for path, leaf in leaves:
        if path.endswith(".labels") and isinstance(leaf, torch.Tensor) and not leaf.is_floating_point():
            return int((leaf != -100).sum())
    return None
