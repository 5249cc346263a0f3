"""Small summaries of tensors, with which two runs are compared without storing their tensors.

A summary is linear over shards: the summaries of all shards of a tensor add up to the summary of the whole tensor, so a sharded run
is compared with an unsharded one without gathering anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

__all__ = ["NUM_BUCKETS", "Positions", "Sketch", "sketch_of", "sketches_of"]

NUM_BUCKETS = 32
"""Length of the projection; the norm of a difference is estimated with a relative error of about sqrt(2 / NUM_BUCKETS)."""

Positions = int | np.ndarray
"""Where a shard's elements are in the flattened whole tensor: the index of the first one, or the index of each (int64)."""

_COLUMNS = 1021
"""Elements whose buckets repeat after them: a prime, so that the elements of one column of a matrix get different ones."""
_CHUNK = 32 * _COLUMNS
"""Elements; what is drawn for the first chunk is used for all chunks, each with other signs and keys of its own."""
_SMALL = 2**12  # elements; smaller tensors are summarized together
_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """What is kept of one tensor, or of the shards of it that one rank holds."""

    projection: np.ndarray
    """float64, ``(NUM_BUCKETS,)``: each bucket sums the elements that a hash of their index gives it, each times a random sign."""
    square_sum: float
    """Sum of the squared elements."""
    bits: int
    """Sum of a hash of each element's value and index, modulo 2**64: equal for bit-equal tensors."""
    num_elements: int
    num_nonfinite: int

    def __add__(self, other: Sketch) -> Sketch:
        """Return the sketch of both shards together."""
        return Sketch(
            projection=self.projection + other.projection,
            square_sum=self.square_sum + other.square_sum,
            bits=(self.bits + other.bits) % _MODULUS,
            num_elements=self.num_elements + other.num_elements,
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
        )

    @property
    def norm(self) -> float:
        """The L2 norm of the tensor."""
        return float(np.sqrt(self.square_sum))

    def distance(self, other: Sketch) -> float:
        """Return an estimate of the L2 norm of the difference (unbiased in its square); exactly 0.0 if the bits are equal."""
        if self.bits == other.bits and self.num_elements == other.num_elements:
            return 0.0
        return float(np.linalg.norm(self.projection - other.projection))


def sketch_of(tensor: torch.Tensor, *, offset: Positions = 0) -> Sketch:
    """Return the sketch of a dense tensor, whose elements are at ``offset`` in the flattened whole tensor.

    Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (count sketch).
    """
    return sketches_of([tensor], [offset])[0]


def sketches_of(tensors: Sequence[torch.Tensor], positions: Sequence[Positions] | None = None) -> list[Sketch]:
    """Return the sketch of each tensor. One call for many small tensors takes much less time than many calls.

    Args:
        tensors: dense tensors of any dtype and device.
        positions: where each tensor's elements are in the whole tensor; None: each is a whole tensor.
    """
    sketches: list[Any] = [None] * len(tensors)
    small = []
    for number, tensor in enumerate(tensors):
        where = 0 if positions is None else positions[number]
        if not isinstance(where, int):
            sketches[number] = _sketch_listed(_flat(tensor), where)
        elif tensor.numel() <= _SMALL:
            small.append(number)
        else:
            sketches[number] = _sketch_run(_flat(tensor), where)
    if small:
        offsets: Any = [0] * len(small) if positions is None else [positions[number] for number in small]
        for number, sketch in zip(small, _sketch_together([tensors[number] for number in small], offsets), strict=True):
            sketches[number] = sketch
    return sketches


class _Layout:
    """A buffer with room for several tensors, each from a multiple of ``NUM_BUCKETS``, and its signs and keys."""

    def __init__(self, sizes: Sequence[tuple[torch.Size, int]]) -> None:
        fronts = [offset % NUM_BUCKETS for _, offset in sizes]
        self.counts = [shape.numel() for shape, _ in sizes]
        num_rows = [
            max(1, -(-(front + count) // NUM_BUCKETS)) for front, count in zip(fronts, self.counts, strict=True)
        ]
        self.starts = np.cumsum([0, *num_rows[:-1]])
        self.values = np.zeros((sum(num_rows), NUM_BUCKETS))
        self.signs = np.zeros_like(self.values)
        self.buckets = np.zeros(self.values.shape, dtype=np.int64)
        """Bucket of each element, numbered over all tensors."""
        self.keys = np.zeros(self.values.shape, dtype=np.int64)
        self.latest: list[Sketch] | None = None
        """The sketches of ``latest_values``: often, the same gradients are summarized again before they are clipped."""
        self.latest_values = np.empty_like(self.values)
        self.slots = []
        flat = torch.from_numpy(self.values).view(-1)
        for number, (start, front, (shape, offset)) in enumerate(zip(self.starts, fronts, sizes, strict=True)):
            first = int(start) * NUM_BUCKETS + front
            here = slice(first, first + shape.numel())
            drawn = _drawn_at(np.arange(offset, offset + shape.numel()))
            self.signs.reshape(-1)[here] = drawn.signs
            self.keys.reshape(-1)[here] = drawn.keys
            self.buckets.reshape(-1)[here] = number * NUM_BUCKETS + drawn.buckets
            self.slots.append(flat[here].view(shape))


_layout = lru_cache(maxsize=64)(_Layout)


def _sketch_together(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[Sketch]:
    tensors = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    layout = _layout(tuple((one.shape, offset) for one, offset in zip(tensors, offsets, strict=True)))
    with torch.no_grad():
        torch._foreach_copy_(layout.slots, tensors)
    if layout.latest is not None and np.array_equal(layout.values.view(np.int64), layout.latest_values.view(np.int64)):
        return layout.latest
    layout.latest_values[:] = layout.values
    values, starts = layout.values.reshape(-1), layout.starts * NUM_BUCKETS
    bits = np.add.reduceat(_mixed(values.view(np.int64)) * layout.keys.reshape(-1), starts)
    squares = np.add.reduceat(values * values, starts)
    num_nonfinite = [0] * len(tensors)
    if not np.isfinite(squares).all():
        _make_nan_equal(values)
        bits = np.add.reduceat(_mixed(values.view(np.int64)) * layout.keys.reshape(-1), starts)
        num_nonfinite = np.add.reduceat((~np.isfinite(values)).astype(np.int64), starts).tolist()
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        squares = np.add.reduceat(values * values, starts)
    signed = values * layout.signs.reshape(-1)
    sums = np.bincount(layout.buckets.reshape(-1), weights=signed, minlength=len(tensors) * NUM_BUCKETS)
    projections = sums.reshape(-1, NUM_BUCKETS)
    layout.latest = [
        Sketch(projection=projection, square_sum=square, bits=bit % _MODULUS, num_elements=count, num_nonfinite=wrong)
        for projection, square, bit, count, wrong in zip(
            projections, squares.tolist(), bits.tolist(), layout.counts, num_nonfinite, strict=True
        )
    ]
    return layout.latest


def _sketch_listed(values: torch.Tensor, positions: np.ndarray) -> Sketch:
    """Return the sketch of the elements at ``positions`` of the whole tensor."""
    projection = np.zeros(NUM_BUCKETS)
    square_sum, bits, num_nonfinite = 0.0, 0, 0
    for begin in range(0, len(positions), _CHUNK):
        drawn = _drawn_at(positions[begin : begin + _CHUNK])
        part = values[begin : begin + _CHUNK].to(torch.float64, copy=True).numpy()
        _make_nan_equal(part)
        bits += int(_mixed(part.view(np.int64)) @ drawn.keys)
        num_nonfinite += _remove_nonfinite(part)
        square_sum += float(part @ part)
        projection += np.bincount(drawn.buckets, weights=part * drawn.signs, minlength=NUM_BUCKETS)
    return Sketch(
        projection=projection,
        square_sum=square_sum,
        bits=bits % _MODULUS,
        num_elements=len(positions),
        num_nonfinite=num_nonfinite,
    )


def _sketch_run(values: torch.Tensor, first: int) -> Sketch:
    """Return the sketch of consecutive elements, from the element ``first`` of the whole tensor on.

    Chunk by chunk, because a chunk in float64 with its signs and keys fits into the processor's cache.
    """
    count = values.numel()
    chunks = range(first // _CHUNK, -(-(first + count) // _CHUNK))
    columns = np.empty((len(chunks), _COLUMNS))
    square_sum, bits, num_nonfinite = 0.0, 0, 0
    for place, number in enumerate(chunks):
        start = number * _CHUNK
        begin, end = max(first - start, 0), min(first + count - start, _CHUNK)
        rows = _rows(begin // _COLUMNS, -(-end // _COLUMNS))
        if rows.begin != begin:
            rows.tensor[rows.begin : begin] = 0
        if rows.end != end:
            rows.tensor[end : rows.end] = 0
        rows.tensor[begin:end].copy_(values[start + begin - first : start + end - first])
        square = float(np.einsum("i,i->", rows.values, rows.values))  # dot would wake the threads of BLAS
        if not math.isfinite(square):
            _make_nan_equal(rows.values)
        np.right_shift(rows.bits, 32, out=rows.mixed)
        np.bitwise_xor(rows.mixed, rows.bits, out=rows.mixed)
        bits += int(np.einsum("i,i->", rows.mixed, rows.keys)) * _signs_and_key_of_chunk(number)[1]
        if not math.isfinite(square):
            num_nonfinite += _remove_nonfinite(rows.values)
            square = float(np.einsum("i,i->", rows.values, rows.values))
        square_sum += square
        np.einsum("ij,ij->j", rows.table, rows.signs, out=columns[place])
    # In all rows, a column has the same bucket.
    chunk_signs = np.stack([_signs_and_key_of_chunk(number)[0] for number in chunks])
    projection = np.einsum("cb,cb->b", columns @ _buckets_of_columns(), chunk_signs)
    return Sketch(
        projection=projection,
        square_sum=square_sum,
        bits=bits % _MODULUS,
        num_elements=count,
        num_nonfinite=num_nonfinite,
    )


def _make_nan_equal(values: np.ndarray) -> None:
    """Give all nan the same bits; their sign and payload depend on the processor's instruction."""
    values[np.isnan(values)] = np.nan


def _remove_nonfinite(values: np.ndarray) -> int:
    """Set elements that are not finite to zero; return their number."""
    if math.isfinite(float(values @ values)):
        return 0
    is_wrong = ~np.isfinite(values)
    values[is_wrong] = 0.0
    return int(is_wrong.sum())


@lru_cache(maxsize=1)
def _space() -> tuple[torch.Tensor, np.ndarray]:
    """Return room for one chunk and its hashes, which is reused: fresh memory takes longer than the computation."""
    return torch.zeros(_CHUNK, dtype=torch.float64), np.zeros(_CHUNK, dtype=np.int64)


class _Rows:
    """Rows of a chunk, of _COLUMNS elements each."""

    def __init__(self, first: int, last: int) -> None:
        drawn, (self.tensor, mixed) = _first_chunk(), _space()
        self.begin, self.end = first * _COLUMNS, last * _COLUMNS
        here = slice(self.begin, self.end)
        self.values = self.tensor.numpy()[here]
        self.table = self.values.reshape(-1, _COLUMNS)
        self.bits, self.mixed, self.keys = self.values.view(np.int64), mixed[here], drawn.keys[here]
        self.signs = drawn.signs[here].reshape(-1, _COLUMNS)


_rows = lru_cache(maxsize=(_CHUNK // _COLUMNS + 1) ** 2)(_Rows)


@lru_cache(maxsize=1)
def _buckets_of_columns() -> np.ndarray:
    """Return which bucket each column has, ``(_COLUMNS, NUM_BUCKETS)``."""
    found: np.ndarray = np.eye(NUM_BUCKETS)[_first_chunk().buckets[:_COLUMNS]]
    return found


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.cpu().reshape(-1)


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Return the bits of float64 numbers with the upper half, in which most differences are, added to the lower half.

    Only numbers of which one has all bits of the other inverted give the same.
    """
    mixed: np.ndarray = bits ^ (bits >> 32)
    return mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """What was drawn at random for some elements of a whole tensor.

    Each element has a sign of its own, and each run of NUM_BUCKETS elements (out of _COLUMNS) its own rotation of the buckets: with one
    sign per run, or with bucket ``j % NUM_BUCKETS``, the estimates of rank-one matrices and of matrices with few columns (most gradients) would have one
    degree of freedom in place of NUM_BUCKETS. Tensors of up to NUM_BUCKETS elements are kept exactly.
    """

    signs: np.ndarray
    """float64: 1 or -1."""
    keys: np.ndarray
    """int64, odd."""
    buckets: np.ndarray
    """int64."""


@lru_cache(maxsize=1)
def _first_chunk() -> _Drawn:
    random = np.random.default_rng(0x5EED)
    columns = np.arange(_CHUNK) % _COLUMNS
    rotations = random.permutation(NUM_BUCKETS)
    return _Drawn(
        signs=random.integers(0, 2, _CHUNK).astype(np.float64) * 2 - 1,
        keys=random.integers(-(2**63), 2**63, _CHUNK, dtype=np.int64) | 1,
        buckets=(columns + rotations[columns // NUM_BUCKETS]) % NUM_BUCKETS,
    )


@lru_cache(maxsize=4096)
def _signs_and_key_of_chunk(number: int) -> tuple[np.ndarray, int]:
    """Return the sign of each bucket and the odd key by which those of the first chunk are multiplied; 1 for the first chunk."""
    if number == 0:
        return np.ones(NUM_BUCKETS), 1
    random = np.random.default_rng((0xC4A7, number))
    return random.integers(0, 2, NUM_BUCKETS).astype(np.float64) * 2 - 1, int(random.integers(0, 2**63)) | 1


def _drawn_at(positions: np.ndarray) -> _Drawn:
    """Return what was drawn for the elements at ``positions``."""
    first, numbers = _first_chunk(), positions // _CHUNK
    signs, keys, buckets = (one[positions % _CHUNK] for one in (first.signs, first.keys, first.buckets))
    for number in np.unique(numbers).tolist():
        chunk_signs, chunk_key = _signs_and_key_of_chunk(number)
        here = numbers == number
        signs[here] *= chunk_signs[buckets[here]]
        keys[here] *= np.int64(chunk_key)
    return _Drawn(signs=signs, keys=keys, buckets=buckets)
