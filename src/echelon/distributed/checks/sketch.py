"""Linear sketches of tensors: the sketches of all shards of a tensor add up to the sketch of the whole tensor.

They tell whether two tensors are equal, and whether the gradients of several ranks and micro-steps add up to another gradient, without
storing or gathering any of them. They are computed where the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, overload

import numpy as np
import torch
import xxhash

from echelon.distributed.small_messages import bytes_of

NUM_BUCKETS = 32
"""Length of the projection; the norm of a difference is estimated with a relative error of about sqrt(2 / NUM_BUCKETS)."""

Positions = int | np.ndarray
"""Where a shard's elements are in the flattened whole tensor: the index of the first one, or the index of each (int64)."""

Hashes = np.ndarray[Any, np.dtype[np.int64]]
"""One number of each tensor."""

_COLUMNS = 1021
"""Elements whose buckets repeat after them: a prime, so that the elements of one column of a matrix get different ones."""
_CHUNK = 96 * _COLUMNS
"""Elements; what is drawn for the first chunk is used for all chunks, each with other signs and another key of its own."""
_CHUNKS_AT_ONCE = 40
"""On accelerators, where each operation costs a kernel launch. On the CPU, one chunk in float64 with its signs stays in the cache."""
_SMALL = 2**12  # elements; smaller tensors are sketched together: each operation takes longer than their elements
_MODULUS = 1 << 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        return math.sqrt(self.square_sum)

    def has_bits_of(self, other: Sketch) -> bool:
        """Return whether the tensors are bit-equal."""
        return self.bits == other.bits and self.num_elements == other.num_elements

    def distance(self, other: Sketch) -> float:
        """Return an estimate of the L2 norm of the difference (unbiased in its square); exactly 0.0 if the bits are equal."""
        return 0.0 if self.has_bits_of(other) else float(np.linalg.norm(self.projection - other.projection))


@dataclass(frozen=True, slots=True, eq=False)
class Sketches(Sequence[Sketch]):
    """Sketches of several tensors, kept in arrays: a ``Sketch`` is made when one is asked for."""

    numbers: np.ndarray
    """float64, ``(number of tensors, NUM_BUCKETS + 1)``: the projections and the sums of squares."""
    counts: np.ndarray
    """int64, ``(number of tensors, 3)``: the bits as a signed number, ``num_elements`` and ``num_nonfinite``."""

    @classmethod
    def empty(cls, count: int = 0) -> Sketches:
        """Return the sketches of ``count`` tensors without elements."""
        return cls(np.zeros((count, NUM_BUCKETS + 1)), np.zeros((count, 3), dtype=np.int64))

    @classmethod
    def of(cls, sketches: Sequence[Sketch]) -> Sketches:
        """Return ``sketches`` as arrays."""
        if isinstance(sketches, Sketches):
            return sketches
        found = cls.empty(len(sketches))
        for row, one in enumerate(sketches):
            found.numbers[row, :-1], found.numbers[row, -1] = one.projection, one.square_sum
            found.counts[row] = _signed(one.bits), one.num_elements, one.num_nonfinite
        return found

    @overload
    def __getitem__(self, index: int) -> Sketch: ...
    @overload
    def __getitem__(self, index: slice | list[int]) -> Sketches: ...
    def __getitem__(self, index: int | slice | list[int]) -> Sketch | Sketches:
        if not isinstance(index, int):
            return Sketches(self.numbers[index], self.counts[index])
        bits, num_elements, num_nonfinite = self.counts[index].tolist()
        return Sketch(
            projection=self.numbers[index, :-1],
            square_sum=float(self.numbers[index, -1]),
            bits=bits % _MODULUS,
            num_elements=num_elements,
            num_nonfinite=num_nonfinite,
        )

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def bits(self) -> list[int]:
        """The bits of each, as signed numbers."""
        found: list[int] = self.counts[:, 0].tolist()
        return found


def sketch_of(tensor: torch.Tensor, *, offset: Positions = 0) -> Sketch:
    """Return the sketch of a dense tensor, whose elements are at ``offset`` in the flattened whole tensor."""
    return sketches_of([tensor], [offset])[0]


@torch.no_grad()
def sketches_of(tensors: Sequence[torch.Tensor], positions: Sequence[Positions] | None = None) -> Sketches:
    """Return the sketch of each tensor. One call for many small tensors takes much less time than many calls.

    Args:
        tensors: dense local tensors of any dtype and device.
        positions: where each tensor's elements are in the whole tensor; None: each is a whole tensor.

    Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (count sketch).
    """
    flats = list[torch.Tensor]()
    large, small = list[int](), dict[torch.device, _Small]()
    for row, tensor in enumerate(tensors):
        flat, place = tensor.reshape(-1), 0 if positions is None else positions[row]
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        size, device = flat.numel(), flat.device
        if device.type == "mps":  # it has no float64
            flat = flat.cpu()
            device = flat.device
        flats.append(flat)
        if size > (_SMALL if isinstance(place, int) else _CHUNK):
            large.append(row)
        elif size:
            if device not in small:
                small[device] = _Small()
            group = small[device]
            group.rows.append(row)
            group.sizes.append(size)
            group.places.append(place)
    together = {device: _sketch_together(flats, group, device) for device, group in small.items()}
    for device, group in small.items():
        if len(group.rows) == len(flats):
            return together[device]
    found = Sketches.empty(len(tensors))
    for device, group in small.items():
        found.numbers[group.rows], found.counts[group.rows] = together[device].numbers, together[device].counts
    for row in large:
        flat, place = flats[row], 0 if positions is None else positions[row]
        if isinstance(place, int):
            run = _run_on_cpu if flat.is_cpu else _run_on_accelerator
            found.numbers[row], bits, num_nonfinite = run(flat, place)
            found.counts[row] = bits, flat.numel(), num_nonfinite
        else:
            cuts = range(_CHUNK, flat.numel(), _CHUNK)
            parts = sketches_of(torch.split(flat, _CHUNK), np.split(place, cuts))
            found.numbers[row], found.counts[row] = parts.numbers.sum(axis=0), parts.counts.sum(axis=0)
    return found


def content_hashes(tensors: Sequence[torch.Tensor]) -> Hashes:
    """Return a hash of each tensor's contents: 62 bits of xxh3 on the CPU, elsewhere the sum of the bit patterns.

    For tensors that must have the same bits, it takes much less time than a sketch.
    """
    found = np.zeros(len(tensors), dtype=np.int64)
    elsewhere: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        plain = tensor.detach()
        if plain.device.type == "cpu":
            found[i] = xxhash.xxh3_64_intdigest(bytes_of(plain).numpy().data) >> 2 if plain.numel() else 1
            continue
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        total = plain.contiguous().view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64)
        elsewhere.setdefault(plain.device, []).append((i, total))
    for sums in elsewhere.values():  # one transfer for each device
        found[[i for i, _ in sums]] = torch.stack([total for _, total in sums]).cpu().numpy()
    return found


def generator_hash(device: torch.device) -> int:
    """Return a hash of the state of torch's generator for ``device``, from which dropout masks are drawn."""
    state = (
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device).cpu()
    )
    return xxhash.xxh3_64_intdigest(state.numpy().data) >> 2


class LatestSketches:
    """Sketches of tensors by key. A large tensor with the contents that its key had at the latest call is not sketched again.

    On the CPU, a hash of the contents takes a small part of the time of a sketch. Elsewhere, all tensors are sketched: the sum of the bits
    would not tell a permutation.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Sketches, int]] = {}
        self._marks: dict[Hashable, Hashable] = {}
        """Hash, dtype and place of what large tensors held at the latest call."""

    def sketches_of(
        self, keys: Sequence[Hashable], tensors: Sequence[torch.Tensor], positions: Sequence[Positions] | None = None
    ) -> Sketches:
        """Return the sketch of each tensor; ``tensors`` and ``positions`` are as in the function of this name.

        Raises:
            ValueError: two tensors have one key.
        """
        if len(set(keys)) != len(keys):
            raise ValueError(f"each tensor needs a key of its own, but {len(keys)} tensors have {len(set(keys))} keys")
        where = [0] * len(keys) if positions is None else positions
        marks = dict[Hashable, Hashable]()
        for key, tensor, place in zip(keys, tensors, where):
            if tensor.numel() > _SMALL and tensor.is_cpu and isinstance(place, int):
                marks[key] = (content_hashes([tensor])[0], tensor.dtype, place)
        new = [row for row, key in enumerate(keys) if key not in marks or self._marks.get(key) != marks[key]]
        sketches = sketches_of([tensors[row] for row in new], [where[row] for row in new])
        for number, row in enumerate(new):
            self._known[keys[row]] = (sketches, number)
            self._marks.pop(keys[row], None)
        self._marks |= marks
        return sketches if len(new) == len(keys) else self.known(keys)

    def known(self, keys: Sequence[Hashable]) -> Sketches:
        """Return the latest sketches; those of unknown keys are those of no elements."""
        found = Sketches.empty(len(keys))
        for row, key in enumerate(keys):
            if key in self._known:
                sketches, number = self._known[key]
                found.numbers[row], found.counts[row] = sketches.numbers[number], sketches.counts[number]
        return found

    def forget(self, key: Hashable) -> None:
        """Forget the sketch of ``key``, if there is one."""
        self._known.pop(key, None)
        self._marks.pop(key, None)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What was drawn at random for some elements of a whole tensor.

    Each element has a sign of its own, and each run of NUM_BUCKETS elements (out of _COLUMNS) its own rotation of the buckets: with one
    sign per run, or with bucket ``j % NUM_BUCKETS``, the estimates of rank-one matrices and of matrices with few columns (most
    gradients) would have one degree of freedom in place of NUM_BUCKETS. Tensors of up to NUM_BUCKETS elements are kept exactly.
    """

    signs: torch.Tensor
    """float64: 1 or -1."""
    keys: torch.Tensor
    """int64, odd."""
    buckets: torch.Tensor
    """int64."""


@lru_cache(maxsize=8)
def _first_chunk(device: torch.device) -> _Drawn:
    random = np.random.default_rng(0x5EED)  # the global generators stay as they are
    columns = np.arange(_CHUNK) % _COLUMNS
    rotations = random.permutation(NUM_BUCKETS)
    drawn = (
        random.integers(0, 2, _CHUNK).astype(np.float64) * 2 - 1,
        random.integers(-(2**63), 2**63, _CHUNK, dtype=np.int64) | 1,
        (columns + rotations[columns // NUM_BUCKETS]) % NUM_BUCKETS,
    )
    return _Drawn(*(torch.from_numpy(one).to(device) for one in drawn))


@lru_cache(maxsize=8)
def _buckets_of_columns(device: torch.device) -> torch.Tensor:
    """Return which bucket each column has, ``(_COLUMNS, NUM_BUCKETS)``."""
    return torch.eye(NUM_BUCKETS, dtype=torch.float64, device=device)[_first_chunk(device).buckets[:_COLUMNS]]


@lru_cache(maxsize=4096)
def _signs_and_key_of_chunk(number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sign of each column and the odd key by which those of the first chunk are multiplied; 1 for the first chunk."""
    random = np.random.default_rng((0xC4A7, number))
    signs, key = random.integers(0, 2, _COLUMNS).astype(np.float64) * 2 - 1, int(random.integers(0, 2**63)) | 1
    if number == 0:
        signs, key = np.ones(_COLUMNS), 1
    return torch.from_numpy(signs).to(device), torch.tensor(key, device=device)


def _drawn_at(positions: np.ndarray) -> _Drawn:
    """Return what was drawn for the elements at ``positions``, on the CPU."""
    cpu = torch.device("cpu")
    first, numbers, places = _first_chunk(cpu), positions // _CHUNK, positions % _CHUNK
    signs, keys, buckets = first.signs[places], first.keys[places], first.buckets[places]
    for number in np.unique(numbers).tolist():
        of_chunk, key = _signs_and_key_of_chunk(number, cpu)
        here = (numbers == number).nonzero()[0]
        signs[here] *= of_chunk[places[here] % _COLUMNS]
        keys[here] *= key
    return _Drawn(signs, keys, buckets)


class _Layout:
    """Several tensors, one after the other, and what was drawn for their elements."""

    def __init__(self, sizes: Sequence[int], where: Sequence[Positions], device: torch.device) -> None:
        ranges = [np.arange(one, one + size) if isinstance(one, int) else one for one, size in zip(where, sizes)]
        drawn = _drawn_at(np.concatenate(ranges))
        self.sizes: Hashes = np.array(sizes, dtype=np.int64)
        self.starts: Hashes = np.cumsum(self.sizes) - self.sizes
        """Place of each tensor's first element."""
        self.owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)
        """Number of the tensor of each element."""
        self.buckets = self.owners * (NUM_BUCKETS + 1) + drawn.buckets.to(device)
        """Bucket of each element, numbered over all tensors."""
        self.signs, self.keys = drawn.signs.to(device), drawn.keys.to(device)
        self.latest: tuple[Hashable, Sketches] | None = None
        """Dtype and hash of the latest values on the CPU, and their sketches: often, gradients are sketched again before they are clipped."""


_known_layout = lru_cache(maxsize=16)(_Layout)


@dataclass(frozen=True, slots=True)
class _Small:
    """Small tensors of one device."""

    rows: list[int] = field(default_factory=list)
    """Their numbers among all tensors."""
    sizes: list[int] = field(default_factory=list)
    places: list[Positions] = field(default_factory=list)


def _sketch_together(flats: Sequence[torch.Tensor], group: _Small, device: torch.device) -> Sketches:
    """Return the sketches of those of the tensors that are small, on one device."""
    own = list(flats) if len(group.rows) == len(flats) else [flats[row] for row in group.rows]
    offsets = tuple([one for one in group.places if isinstance(one, int)])
    if len(offsets) == len(own):
        layout = _known_layout(tuple(group.sizes), offsets, device)
    else:
        layout = _Layout(group.sizes, group.places, device)
    if any(flat.dtype is not own[0].dtype for flat in own):
        own = [flat.double() for flat in own]
    values = torch.cat(own)
    if device.type != "cpu":
        return _together_on_accelerator(values.double(), layout)
    mark = values.dtype, xxhash.xxh3_128_intdigest(bytes_of(values).numpy().data)
    if layout.latest is None or layout.latest[0] != mark:
        layout.latest = mark, _together_on_cpu(values.double().numpy(), layout)
    return layout.latest[1]


# On the CPU, in NumPy: its operations begin in a fraction of the time of torch's, and those on integers take a third of it.


def _together_on_cpu(values: np.ndarray, layout: _Layout) -> Sketches:
    """Return the sketches of tensors with float64 ``values``, which may be changed."""
    count = len(layout.starts)
    squares, nonfinite = np.add.reduceat(values * values, layout.starts), np.zeros(count, dtype=np.int64)
    is_finite = math.isfinite(float(squares.sum()))
    if not is_finite:
        values[np.isnan(values)] = math.nan
    bits = np.add.reduceat(_mixed(values, np.empty(values.shape, dtype=np.int64)) * layout.keys.numpy(), layout.starts)
    if not is_finite:
        wrong = ~np.isfinite(values)
        nonfinite = np.add.reduceat(wrong.astype(np.int64), layout.starts)
        values[wrong] = 0.0
        squares = np.add.reduceat(values * values, layout.starts)
    size = count * (NUM_BUCKETS + 1)
    numbers = np.bincount(layout.buckets.numpy(), weights=values * layout.signs.numpy(), minlength=size)
    numbers = numbers.reshape(count, -1)
    numbers[:, NUM_BUCKETS] = squares
    return Sketches(numbers, np.stack([bits, layout.sizes, nonfinite], axis=1))


def _run_on_cpu(flat: torch.Tensor, first: int) -> tuple[np.ndarray, int, int]:
    """Sketch consecutive elements of one tensor, the first of which is element ``first`` of the whole tensor.

    Returns:
        The projection followed by the sum of squares, the bits, and the number of elements that are not finite.
    """
    cpu, stop = flat.device, first + flat.numel()
    drawn, (room, space) = _first_chunk(cpu), (one.numpy() for one in _space(cpu))
    signs, keys = drawn.signs.numpy(), drawn.keys.numpy()
    columns, square_sum, bits, nonfinite = np.zeros(_COLUMNS), 0.0, 0, 0
    for number in range(first // _CHUNK, -(-stop // _CHUNK)):
        start = number * _CHUNK
        begin, end = max(first - start, 0), min(stop - start, _CHUNK)
        here = slice(begin // _COLUMNS * _COLUMNS, -(-end // _COLUMNS) * _COLUMNS)  # only the rows that it has
        block, hashed = room[: here.stop - here.start], space[: here.stop - here.start]
        block[: begin - here.start], block[end - here.start :] = 0.0, 0.0
        own = block[begin - here.start : end - here.start]
        torch.from_numpy(own).copy_(flat[start + begin - first : start + end - first])
        square = float(np.einsum("i,i->", block, block))  # BLAS would wake its threads
        is_finite = math.isfinite(square)
        if not is_finite:
            block[np.isnan(block)] = math.nan
        product = int(np.einsum("i,i->", _mixed(block, hashed), keys[here]))
        if not is_finite:
            wrong = ~np.isfinite(block)
            nonfinite += int(wrong.sum())
            block[wrong] = 0.0
            square = float(np.einsum("i,i->", block, block))
        of_chunk, key = _signs_and_key_of_chunk(number, cpu)
        rows = block.reshape(-1, _COLUMNS), signs[here].reshape(-1, _COLUMNS)
        columns += np.einsum("ij,ij->j", *rows) * of_chunk.numpy()
        square_sum += square
        bits += product * int(key)
    buckets = drawn.buckets.numpy()[:_COLUMNS]  # in all rows, a column has the same bucket
    projection = np.bincount(buckets, weights=columns, minlength=NUM_BUCKETS)
    return np.append(projection, square_sum), _signed(bits), nonfinite


def _mixed(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write to ``out`` what is multiplied by the keys of elements: the bits of float64 ``values``, whose nan all have the same.

    A product does not mix higher bits into lower ones: without the sum, the hashes of two words whose signs differ would add up to the
    same.
    """
    words = values.view(np.int64)
    mixed: np.ndarray = np.add(np.right_shift(words, 32, out=out), words, out=out)
    return mixed


# On accelerators, in torch: each operation costs a kernel launch, so many chunks are computed at once.


def _together_on_accelerator(values: torch.Tensor, layout: _Layout) -> Sketches:
    """Return the sketches of tensors with float64 ``values`` on an accelerator."""
    count = len(layout.starts)
    is_finite = math.isfinite(float(values @ values))
    if not is_finite:
        values = values.masked_fill(values.isnan(), math.nan)
    products = _mixed_on_accelerator(values, out=torch.empty_like(layout.keys)).mul_(layout.keys)
    bits = torch.zeros(count, dtype=torch.int64, device=values.device).index_add_(0, layout.owners, products)
    nonfinite = torch.zeros_like(bits)
    if not is_finite:
        wrong = ~values.isfinite()
        nonfinite.index_add_(0, layout.owners, wrong.long())
        values = values.masked_fill(wrong, 0.0)
    numbers = torch.zeros(count * (NUM_BUCKETS + 1), dtype=torch.float64, device=values.device)
    squares = layout.owners * (NUM_BUCKETS + 1) + NUM_BUCKETS
    numbers.index_add_(0, layout.buckets, values * layout.signs).index_add_(0, squares, values * values)
    counts = np.stack([bits.cpu().numpy(), layout.sizes, nonfinite.cpu().numpy()], axis=1)
    return Sketches(numbers.view(count, -1).cpu().numpy(), counts)


@lru_cache(maxsize=8)
def _space(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the chunks and hashes that are computed at once; fresh memory takes longer than the computation."""
    size = _CHUNK if device.type == "cpu" else _CHUNKS_AT_ONCE * _CHUNK
    return tuple(torch.empty(size, dtype=dtype, device=device) for dtype in (torch.float64, torch.int64))  # type: ignore[return-value]


def _run_on_accelerator(flat: torch.Tensor, first: int) -> tuple[np.ndarray, int, int]:
    """Sketch consecutive elements of one tensor on an accelerator, many chunks at once; returns what ``_run_on_cpu`` returns."""
    device, stop = flat.device, first + flat.numel()
    drawn, space = _first_chunk(device), _space(device)
    total = torch.zeros(NUM_BUCKETS + 1, dtype=torch.float64, device=device)
    bits = torch.zeros((), dtype=torch.int64, device=device)
    nonfinite = torch.zeros_like(bits)
    last, at_once = -(-stop // _CHUNK), len(space[0]) // _CHUNK
    for number in range(first // _CHUNK, last, at_once):
        chunks, start = range(number, min(number + at_once, last)), number * _CHUNK
        begin, end = max(first, start) - start, min(stop, start + len(chunks) * _CHUNK) - start
        low, high = 0, len(chunks) * _CHUNK
        if len(chunks) == 1:  # only the rows that it has
            low, high = begin // _COLUMNS * _COLUMNS, -(-end // _COLUMNS) * _COLUMNS
        here = slice(low, min(high, low + _CHUNK))
        block, hashed = (one[: high - low] for one in space)
        block[: begin - low], block[end - low :] = 0.0, 0.0
        block[begin - low : end - low].copy_(flat[start + begin - first : start + end - first])
        square = block @ block
        if not math.isfinite(float(square)):
            block[block.isnan()] = math.nan
        products = _mixed_on_accelerator(block, out=hashed).view(len(chunks), -1).mul_(drawn.keys[here]).sum(dim=1)
        if not math.isfinite(float(square)):
            wrong = ~block.isfinite()
            nonfinite += wrong.sum()
            square = block.masked_fill_(wrong, 0.0) @ block
        table = block.view(len(chunks), -1, _COLUMNS).mul_(drawn.signs[here].view(-1, _COLUMNS))
        of_chunks = [_signs_and_key_of_chunk(one, device) for one in chunks]
        columns = (table.sum(dim=1) * torch.stack([one for one, _ in of_chunks])).sum(dim=0)
        total[:-1] += columns @ _buckets_of_columns(device)  # in all rows, a column has the same bucket
        total[-1] += square
        bits += (products * torch.stack([key for _, key in of_chunks])).sum()
    return total.cpu().numpy(), int(bits), int(nonfinite)


def _mixed_on_accelerator(values: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write to ``out`` what is multiplied by the keys of elements, as ``_mixed`` does on the CPU."""
    words = values.view(torch.int64)
    return torch.bitwise_right_shift(words, 32, out=out).add_(words)


def _signed(bits: int) -> int:
    """Return the signed number that has these bits, modulo 2**64."""
    bits %= _MODULUS
    return bits - _MODULUS * (bits >> 63)
