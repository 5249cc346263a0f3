"""Small summaries of tensors, with which two runs are compared without storing their tensors.

A summary is linear over shards: the summaries of all shards of a tensor add up to the summary of the whole tensor, so a sharded run
is compared with an unsharded one without gathering anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, overload

import numpy as np
import torch

__all__ = ["NUM_BUCKETS", "Positions", "Raw", "Sketch", "Sketches", "sketch_of", "sketches_of"]

NUM_BUCKETS = 32
"""Length of the projection; the norm of a difference is estimated with a relative error of about sqrt(2 / NUM_BUCKETS)."""

Positions = int | np.ndarray
"""Where a shard's elements are in the flattened whole tensor: the index of the first one, or the index of each (int64)."""

_COLUMNS = 1021
"""Elements whose buckets repeat after them: a prime, so that the elements of one column of a matrix get different ones."""
_CHUNK = 96 * _COLUMNS
"""Elements; what is drawn for the first chunk is used for all chunks, each with other signs and keys of its own."""
_FEW_ROWS = 8  # 8,168 elements: from 10,000 on, OpenBLAS computes a dot product in threads
_SMALL = 2**13  # elements; smaller tensors are summarized together
_FEW = 2**14  # elements of small tensors together, which are written as they are
_MODULUS = 1 << 64
_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Their numbers are hashed as float32; those of other dtypes, as float64."""
_ODD_KEY = (1 << 32) + 1
"""The key of the second element of a pair is that of the first one times this: see ``_add_upper_half``."""


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


class Raw(NamedTuple):
    """The elements of several tensors."""

    values: np.ndarray
    """float32 or float64, one tensor after the other."""
    sizes: tuple[int, ...]


class Sketches(Sequence[Sketch]):
    """Sketches of several tensors, kept in arrays: a ``Sketch`` is made when one is asked for.

    Args:
        numbers: float64, ``(number of tensors, NUM_BUCKETS + 1)``: the projections and the sums of squares.
        counts: int64, ``(number of tensors, 3)``: the bits as a signed number, ``num_elements`` and ``num_nonfinite``.
    """

    __slots__ = ("_counts", "_numbers", "raw")

    def __init__(self, numbers: np.ndarray | None, counts: np.ndarray | None, raw: Raw | None = None) -> None:
        self._numbers = numbers
        self._counts = counts
        self.raw = raw
        """The elements, if they are few: to write them takes less time than to summarize them, which the reader does then."""

    @property
    def numbers(self) -> np.ndarray:
        """See the class."""
        if self._numbers is None:
            self._compute()
        assert self._numbers is not None
        return self._numbers

    @property
    def counts(self) -> np.ndarray:
        """See the class."""
        if self._counts is None:
            self._compute()
        assert self._counts is not None
        return self._counts

    def _compute(self) -> None:
        assert self.raw is not None
        parts = torch.split(torch.from_numpy(self.raw.values), list(self.raw.sizes))
        found = _sketch_together(parts, self.raw.sizes, None)
        self._numbers, self._counts = found.numbers, found.counts

    def has_bits_of(self, other: Sketches) -> bool:
        """Return whether all tensors have the bits of those of ``other``; may be False for other bits of nan."""
        one, two = self.raw, other.raw
        if one is None or two is None:
            return self.bits == other.bits
        if one.sizes != two.sizes or one.values.dtype != two.values.dtype:
            return False
        kind = np.int32 if one.values.itemsize == 4 else np.int64
        return bool((one.values.view(kind) == two.values.view(kind)).all())

    @classmethod
    def of(cls, sketches: Sequence[Sketch]) -> Sketches:
        """Return ``sketches`` as arrays."""
        if isinstance(sketches, Sketches):
            return sketches
        numbers, counts = np.zeros((len(sketches), NUM_BUCKETS + 1)), np.zeros((len(sketches), 3), dtype=np.int64)
        for row, one in enumerate(sketches):
            numbers[row, :-1], numbers[row, -1] = one.projection, one.square_sum
            counts[row] = _signed(one.bits), one.num_elements, one.num_nonfinite
        return cls(numbers, counts)

    @overload
    def __getitem__(self, index: int) -> Sketch: ...
    @overload
    def __getitem__(self, index: slice) -> Sketches: ...
    def __getitem__(self, index: int | slice) -> Sketch | Sketches:
        if isinstance(index, slice):
            return Sketches(self.numbers[index], self.counts[index])
        row = self.numbers[index]
        bits, num_elements, num_nonfinite = self.counts[index].tolist()
        return Sketch(
            projection=row[:-1],
            square_sum=float(row[-1]),
            bits=bits % _MODULUS,
            num_elements=num_elements,
            num_nonfinite=num_nonfinite,
        )

    def __len__(self) -> int:
        return len(self.counts) if self.raw is None else len(self.raw.sizes)

    def __iter__(self) -> Iterator[Sketch]:
        return (self[row] for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Sketches, list)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Sketches({list(self)})"

    @property
    def bits(self) -> list[int]:
        """The bits of each, as signed numbers."""
        found: list[int] = self.counts[:, 0].tolist()
        return found


def _signed(bits: int) -> int:
    return bits - _MODULUS if bits >> 63 else bits


def sketch_of(tensor: torch.Tensor, *, offset: Positions = 0) -> Sketch:
    """Return the sketch of a dense tensor, whose elements are at ``offset`` in the flattened whole tensor.

    Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (count sketch).
    """
    return sketches_of([tensor], [offset])[0]


def sketches_of(tensors: Sequence[torch.Tensor], positions: Sequence[Positions] | None = None) -> Sketches:
    """Return the sketch of each tensor. One call for many small tensors takes much less time than many calls.

    Args:
        tensors: dense tensors of any dtype and device.
        positions: where each tensor's elements are in the whole tensor; None: each is a whole tensor.
    """
    sizes = [tensor.numel() for tensor in tensors]
    if positions is None and max(sizes, default=0) <= _SMALL:
        if 0 < sum(sizes) <= _FEW and _are_plain(tensors) and all(sizes):
            with torch.no_grad():
                flat = torch.cat([one.reshape(-1) for one in tensors])
            return Sketches(None, None, Raw(flat.numpy(), tuple(sizes)))
        return _sketch_together(tensors, sizes, None)
    numbers, counts = np.empty((len(tensors), NUM_BUCKETS + 1)), np.empty((len(tensors), 3), dtype=np.int64)
    small = []
    for row, tensor in enumerate(tensors):
        where = 0 if positions is None else positions[row]
        if isinstance(where, int) and sizes[row] <= _SMALL:
            small.append(row)
            continue
        values = _flat(tensor)
        if isinstance(where, int):
            numbers[row, -1], bits, num_nonfinite = _sketch_run(values, where, numbers[row, :-1])
        else:
            numbers[row, -1], bits, num_nonfinite = _sketch_listed(values, where, numbers[row, :-1])
        counts[row] = _signed(bits % _MODULUS), values.numel(), num_nonfinite
    if small:
        offsets: Any = None if positions is None else [positions[row] for row in small]
        found = _sketch_together([tensors[row] for row in small], [sizes[row] for row in small], offsets)
        numbers[small], counts[small] = found.numbers, found.counts
    return Sketches(numbers, counts)


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors are on the CPU and have the same dtype, float32 or float64."""
    kind = tensors[0].dtype
    if kind is not torch.float32 and kind is not torch.float64:
        return False
    for one in tensors:  # noqa: SIM110 - a generator takes twice as long
        if one.dtype is not kind or not one.is_cpu:
            return False
    return True


class _Layout:
    """A buffer with room for several tensors, one after the other, and the signs, keys and buckets of their elements."""

    def __init__(self, sizes: Sequence[int], offsets: Sequence[int]) -> None:
        ends = np.cumsum(sizes, dtype=np.int64)
        total = int(ends[-1])
        self.starts = ends - sizes
        self.counts = np.array(sizes, dtype=np.int64)
        drawn = [_drawn_at(np.arange(offset, offset + size)) for size, offset in zip(sizes, offsets, strict=True)]
        self.signs = np.concatenate([one.signs for one in drawn])
        self.keys = {
            is_narrow: np.concatenate([one.narrow_keys if is_narrow else one.keys for one in drawn])
            for is_narrow in (True, False)
        }
        self.buckets = np.concatenate([number * NUM_BUCKETS + one.buckets for number, one in enumerate(drawn)])
        """Bucket of each element, numbered over all tensors."""
        self.tensor = torch.zeros(total, dtype=torch.float64)
        self.values = self.tensor.numpy()
        self.latest: Sketches | None = None
        """The sketches of ``latest_values``: often, the same gradients are summarized again before they are clipped."""
        self.latest_values = np.empty_like(self.values)
        self.latest_dtypes: tuple[torch.dtype, ...] = ()
        self.slots = [
            self.tensor[begin : begin + size]
            for begin, size in zip(self.starts.tolist(), self.counts.tolist(), strict=True)
        ]

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy ``tensors`` into the buffer."""
        first = tensors[0]
        with torch.no_grad():
            if all(one.dtype is first.dtype and one.device == first.device for one in tensors):
                self.tensor.copy_(torch.cat([one.reshape(-1) for one in tensors]))
            else:
                for slot, one in zip(self.slots, tensors, strict=True):
                    slot.copy_(one.reshape(-1))

    def parts(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, slice]]:
        """Return the dtypes of ``tensors``, and where the elements of each are: all, or those of one tensor."""
        kinds = {one.dtype for one in tensors}
        if len(kinds) == 1:
            return [(kinds.pop(), slice(None))]
        begins, ends = self.starts.tolist(), (self.starts + self.counts).tolist()
        return [(one.dtype, slice(begin, end)) for one, begin, end in zip(tensors, begins, ends, strict=True)]

    def holds_latest(self) -> bool:
        """Return whether the buffer has the bits that it had when ``latest`` was computed."""
        if self.latest is None:
            return False
        now, before = self.values.view(np.int64), self.latest_values.view(np.int64)
        few = slice(0, NUM_BUCKETS)
        return bool((now[few] == before[few]).all()) and bool((now == before).all())


_layout = lru_cache(maxsize=64)(_Layout)


def _sketch_together(tensors: Sequence[torch.Tensor], sizes: Sequence[int], offsets: Sequence[int] | None) -> Sketches:
    if any(one.is_complex() for one in tensors):
        tensors = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
        sizes = [one.numel() for one in tensors]
    if not sizes or not all(sizes):
        return _sketch_not_empty(tensors, sizes, offsets)
    layout = _layout(tuple(sizes), (0,) * len(sizes) if offsets is None else tuple(offsets))
    layout.hold(tensors)
    kinds = tuple([one.dtype for one in tensors])
    if layout.latest_dtypes == kinds and layout.holds_latest():
        assert layout.latest is not None
        return layout.latest
    layout.latest_dtypes = kinds
    layout.latest_values[:] = layout.values
    values, starts = layout.values, layout.starts
    num = len(sizes)
    numbers, counts = np.empty((num, NUM_BUCKETS + 1)), np.zeros((num, 3), dtype=np.int64)
    squares = np.add.reduceat(values * values, starts)
    if not math.isfinite(np.add.reduce(squares)):
        _make_nan_equal(values)
    mixed = np.empty(values.shape, dtype=np.int64)
    for dtype, place in layout.parts(tensors):
        np.multiply(_hashed(values[place], dtype), layout.keys[dtype in _NARROW][place], out=mixed[place])
    counts[:, 0] = np.add.reduceat(mixed, starts)
    counts[:, 1] = layout.counts
    if not math.isfinite(np.add.reduce(squares)):
        counts[:, 2] = np.add.reduceat((~np.isfinite(values)).astype(np.int64), starts)
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        squares = np.add.reduceat(values * values, starts)
    sums = np.bincount(layout.buckets, weights=values * layout.signs, minlength=num * NUM_BUCKETS)
    numbers[:, :-1] = sums.reshape(num, NUM_BUCKETS)
    numbers[:, -1] = squares
    layout.latest = Sketches(numbers, counts)
    return layout.latest


def _sketch_not_empty(tensors: Sequence[torch.Tensor], sizes: Sequence[int], offsets: Sequence[int] | None) -> Sketches:
    """Return zeros for tensors without elements."""
    places = [place for place, size in enumerate(sizes) if size]
    numbers, counts = np.zeros((len(sizes), NUM_BUCKETS + 1)), np.zeros((len(sizes), 3), dtype=np.int64)
    if places:
        found = _sketch_together(
            [tensors[place] for place in places],
            [sizes[place] for place in places],
            None if offsets is None else [offsets[place] for place in places],
        )
        numbers[places], counts[places] = found.numbers, found.counts
    return Sketches(numbers, counts)


def _sketch_listed(values: torch.Tensor, positions: np.ndarray, out: np.ndarray) -> tuple[float, int, int]:
    """Write the projection of the elements at ``positions`` of the whole tensor to ``out``.

    Returns:
        The sum of squares, the sum of hashes and the number of elements that are not finite.
    """
    out[:] = 0.0
    square_sum, bits, num_nonfinite = 0.0, 0, 0
    for begin in range(0, len(positions), _CHUNK):
        drawn = _drawn_at(positions[begin : begin + _CHUNK])
        part = values[begin : begin + _CHUNK].to(torch.float64, copy=True).numpy()
        _make_nan_equal(part)
        bits += int(_hashed(part, values.dtype) @ drawn.keys_of(values.dtype))
        num_nonfinite += _remove_nonfinite(part)
        square_sum += float(part @ part)
        out += np.bincount(drawn.buckets, weights=part * drawn.signs, minlength=NUM_BUCKETS)
    return square_sum, bits, num_nonfinite


def _sketch_run(values: torch.Tensor, first: int, out: np.ndarray) -> tuple[float, int, int]:
    """Do the same for consecutive elements, from the element ``first`` of the whole tensor on.

    Chunk by chunk, because a chunk in float64 with its signs and keys fits into the processor's cache.
    """
    count = values.numel()
    chunks = range(first // _CHUNK, -(-(first + count) // _CHUNK))
    columns = np.empty((len(chunks), _COLUMNS))
    square_sum, bits, num_nonfinite = 0.0, 0, 0
    for number, into in zip(chunks, columns, strict=True):
        start = number * _CHUNK
        begin, end = max(first - start, 0), min(first + count - start, _CHUNK)
        rows = _rows(begin // _COLUMNS, -(-end // _COLUMNS))
        if rows.begin != begin:
            rows.tensor[rows.begin : begin] = 0
        if rows.end != end:
            rows.tensor[end : rows.end] = 0
        part = values[start + begin - first : start + end - first]
        rows.tensor[begin:end].copy_(part)
        square = rows.square_sum()
        if not math.isfinite(square):
            _make_nan_equal(rows.values)
            part = rows.tensor[begin:end].to(values.dtype)
        bits += _bits_of_run(part, begin) * _signs_and_key_of_chunk(number)[1]
        if not math.isfinite(square):
            num_nonfinite += _remove_nonfinite(rows.values)
            square = rows.square_sum()
        square_sum += square
        np.einsum("ij,ij->j", rows.table, rows.signs, out=into)
    # In all rows, a column has the same bucket.
    np.einsum("cb,cb->b", columns @ _buckets_of_columns(), _signs_of_chunks(chunks), out=out)
    return square_sum, bits, num_nonfinite


def _bits_of_run(values: torch.Tensor, begin: int) -> int:
    """Return the sum of the hashes of consecutive elements of the first chunk, from the element ``begin`` on."""
    drawn, count = _first_chunk(), values.numel()
    if values.dtype not in _NARROW:
        words, keys = values.to(torch.float64).numpy().view(np.int64), drawn.keys[begin : begin + count]
    elif values.dtype is torch.float32 and not (begin % 2 or count % 2 or values.data_ptr() % 8):
        words, keys = values.numpy().view(np.int64), _pair_keys()[begin // 2 : (begin + count) // 2]
    else:  # a zero adds nothing: pairs of which a half is not in the run are filled with it
        first, last = begin // 2, -(-(begin + count) // 2)
        pairs = np.zeros(2 * (last - first), dtype=np.float32)
        torch.from_numpy(pairs)[begin - 2 * first :][:count].copy_(values)
        words, keys = pairs.view(np.int64), _pair_keys()[first:last]
    mixed = _add_upper_half(words, _space()[1][: len(words)])
    # In one pass over both; `@` of integers takes longer.
    return int(np.einsum("i,i->", mixed, keys))


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
        drawn, (self.tensor, _) = _first_chunk(), _space()
        self.begin, self.end = first * _COLUMNS, last * _COLUMNS
        here = slice(self.begin, self.end)
        self.values = self.tensor.numpy()[here]
        self.table = self.values.reshape(-1, _COLUMNS)
        self.signs = drawn.signs[here].reshape(-1, _COLUMNS)
        few, end = _FEW_ROWS * _COLUMNS, (last - first) // _FEW_ROWS * _FEW_ROWS * _COLUMNS
        parts = self.values[:end].reshape(-1, few), self.values[end:].reshape(-1, _COLUMNS)
        self._parts = [part for part in parts if len(part)]

    def square_sum(self) -> float:
        """Return the sum of squares. A few rows at a time: BLAS would wake its threads for longer sums."""
        total = 0.0
        for part in self._parts:
            total += float(np.add.reduce(np.matmul(part[:, None, :], part[:, :, None]), axis=None))
        return total


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


def _add_upper_half(words: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write each word plus its upper half to ``out``, and return that.

    A product does not mix higher bits into lower ones: without this, the hashes of two words whose signs differ would add up to the same.
    It is linear: of a pair of float32 numbers in one word, the second one adds its bits times ``_ODD_KEY``.
    """
    np.right_shift(words.view(np.uint64), np.uint64(32), out=out.view(np.uint64))
    np.add(out, words, out=out)
    return out


def _hashed(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return what is multiplied by the keys of elements.

    Args:
        values: float64.
        dtype: of the tensor that they come from.
    """
    if dtype in _NARROW:
        return values.astype(np.float32).view(np.uint32).astype(np.int64)
    return _add_upper_half(values.view(np.int64), np.empty(values.shape, dtype=np.int64))


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
    """int64, odd: for float64 numbers."""
    narrow_keys: np.ndarray
    """int64, odd: for float32 numbers."""
    buckets: np.ndarray
    """int64."""

    def keys_of(self, dtype: torch.dtype) -> np.ndarray:
        """Return the keys for numbers of this dtype."""
        return self.narrow_keys if dtype in _NARROW else self.keys


@lru_cache(maxsize=1)
def _first_chunk() -> _Drawn:
    random = np.random.default_rng(0x5EED)
    columns = np.arange(_CHUNK) % _COLUMNS
    rotations = random.permutation(NUM_BUCKETS)
    signs = random.integers(0, 2, _CHUNK).astype(np.float64) * 2 - 1
    keys = random.integers(-(2**63), 2**63, _CHUNK, dtype=np.int64) | 1
    pair_keys = random.integers(-(2**63), 2**63, _CHUNK // 2, dtype=np.int64) | 1
    return _Drawn(
        signs=signs,
        keys=keys,
        narrow_keys=np.stack([pair_keys, pair_keys * np.int64(_ODD_KEY)], axis=1).reshape(-1),
        buckets=(columns + rotations[columns // NUM_BUCKETS]) % NUM_BUCKETS,
    )


@lru_cache(maxsize=1)
def _pair_keys() -> np.ndarray:
    """Return the keys of the elements of the first chunk at even positions."""
    return _first_chunk().narrow_keys[::2].copy()


@lru_cache(maxsize=4096)
def _signs_and_key_of_chunk(number: int) -> tuple[np.ndarray, int]:
    """Return the sign of each bucket and the odd key by which those of the first chunk are multiplied; 1 for the first chunk."""
    if number == 0:
        return np.ones(NUM_BUCKETS), 1
    random = np.random.default_rng((0xC4A7, number))
    return random.integers(0, 2, NUM_BUCKETS).astype(np.float64) * 2 - 1, int(random.integers(0, 2**63)) | 1


@lru_cache(maxsize=256)
def _signs_of_chunks(numbers: range) -> np.ndarray:
    return np.stack([_signs_and_key_of_chunk(number)[0] for number in numbers])


def _drawn_at(positions: np.ndarray) -> _Drawn:
    """Return what was drawn for the elements at ``positions``."""
    first, numbers, places = _first_chunk(), positions // _CHUNK, positions % _CHUNK
    signs, keys, narrow_keys, buckets = (
        one[places] for one in (first.signs, first.keys, first.narrow_keys, first.buckets)
    )
    for number in np.unique(numbers).tolist():
        chunk_signs, chunk_key = _signs_and_key_of_chunk(number)
        here = numbers == number
        signs[here] *= chunk_signs[buckets[here]]
        keys[here] *= np.int64(chunk_key)
        narrow_keys[here] *= np.int64(chunk_key)
    return _Drawn(signs=signs, keys=keys, narrow_keys=narrow_keys, buckets=buckets)
