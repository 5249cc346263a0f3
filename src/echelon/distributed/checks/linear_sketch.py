"""Linear sketches of tensors, computed where the tensors are: the sketch of a sum is the sum of the sketches.

They tell whether gradients of several ranks, shards and micro-steps add up to another gradient without gathering any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

__all__ = ["NUM_BUCKETS", "WIDTH", "LinearSketch"]

NUM_BUCKETS = 32
WIDTH = NUM_BUCKETS + 1
"""Numbers per tensor: one sum of randomly signed elements per bucket, and the sum of squares."""

_SMALL = 4096  # elements; smaller tensors are sketched together, because one kernel launch each would cost more than their elements
_NUM_RUNS = 2**17
# Elements that are converted to float64 at a time. On the CPU, the buffer stays in the cache; elsewhere, each chunk costs kernel launches.
_CHUNK, _CHUNK_OF_ACCELERATOR = 2**18, 2**22
_MAX_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each element of several small tensors goes."""

    buckets: torch.Tensor
    squares: torch.Tensor
    signs: torch.Tensor


class LinearSketch:
    """Computes sketches; every instance on every rank uses the same signs.

    Element ``j`` of a flattened tensor goes to bucket ``j % NUM_BUCKETS``, and each run of ``NUM_BUCKETS`` elements has a random sign.
    For any fixed error vector ``e``, a bucket of its sketch is at most ``t`` times the norm of ``e`` with probability
    ``1 - 2 exp(-t**2 / 2)``.

    Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (count sketch); Hoeffding's inequality.
    """

    def __init__(self) -> None:
        self._first_signs: dict[torch.device, torch.Tensor] = {}
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        self._buffers: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int] | None = None) -> torch.Tensor:
        """Return the sketches, float64 on the CPU ``[number of tensors, WIDTH]``.

        Args:
            tensors: dense local tensors.
            offsets: number of the first element of each tensor in the flattened whole tensor (default: 0).
        """
        offsets = [0] * len(tensors) if offsets is None else offsets
        flats = [_flat(tensor) for tensor in tensors]
        if flats and all(flat.numel() <= _SMALL and flat.device.type == "cpu" for flat in flats):
            return self._together(flats, offsets, flats[0].device)
        found = torch.zeros(len(flats), WIDTH, dtype=torch.float64)
        small: dict[torch.device, list[int]] = {}
        for i, flat in enumerate(flats):
            if flat.numel() <= _SMALL:
                small.setdefault(flat.device, []).append(i)
            else:
                found[i] = self._large(flat, offsets[i]).cpu()
        for device, indices in small.items():
            together = self._together([flats[i] for i in indices], [offsets[i] for i in indices], device)
            found[indices] = together.cpu()
        return found

    def _together(self, flats: list[torch.Tensor], offsets: Sequence[int], device: torch.device) -> torch.Tensor:
        key = (device, *((flat.numel(), offset) for flat, offset in zip(flats, offsets)))
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._lay_out([flat.numel() for flat in flats], offsets, device)
        values = torch.cat(flats).to(torch.float64)
        found = torch.zeros(len(flats) * WIDTH, dtype=torch.float64, device=device)
        found.index_add_(0, layout.buckets, values * layout.signs)
        found.index_add_(0, layout.squares, values * values)
        return found.view(-1, WIDTH)

    def _lay_out(self, lengths: list[int], offsets: Sequence[int], device: torch.device) -> _Layout:
        buckets, squares, signs = [], [], []
        for i, (length, offset) in enumerate(zip(lengths, offsets)):
            places = torch.arange(offset, offset + length)
            buckets.append(i * WIDTH + places % NUM_BUCKETS)
            squares.append(torch.full((length,), i * WIDTH + NUM_BUCKETS))
            first = offset // NUM_BUCKETS
            signs.append(
                self._signs(first, length // NUM_BUCKETS + 2, torch.device("cpu"))[places // NUM_BUCKETS - first]
            )
        return _Layout(torch.cat(buckets).to(device), torch.cat(squares).to(device), torch.cat(signs).to(device))

    def _large(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        buffer = self._buffers.get(flat.device)
        if buffer is None:  # allocating it takes longer than a sketch
            buffer = self._buffers[flat.device] = torch.empty(
                _chunk_size(flat.device), dtype=torch.float64, device=flat.device
            )
        found = torch.zeros(WIDTH, dtype=torch.float64, device=flat.device)
        sums, square = found[:NUM_BUCKETS], found[NUM_BUCKETS]
        for start, part in _chunks(flat, offset):
            values = buffer[: part.numel()].copy_(part)
            square += values @ values
            front = start % NUM_BUCKETS
            back = -(front + values.numel()) % NUM_BUCKETS
            runs = (pad(values, (front, back)) if front or back else values).view(-1, NUM_BUCKETS)
            sums += self._signs(start // NUM_BUCKETS, len(runs), flat.device) @ runs
        return found

    def _signs(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Return the signs of the runs from ``first`` on, float64."""
        parts = []
        while count > 0:
            block, start = divmod(first, _NUM_RUNS)
            signs = self._first_signs.get(device) if block == 0 else _block(block, device)
            if signs is None:
                signs = self._first_signs[device] = _block(0, device)
            parts.append(signs[start : start + count])
            first, count = first + len(parts[-1]), count - len(parts[-1])
        return torch.cat(parts) if len(parts) != 1 else parts[0]


def _block(number: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20_260 + number)  # the global generators stay as they are
    return torch.randint(2, (_NUM_RUNS,), generator=generator).mul_(2).sub_(1).to(device, torch.float64)


def _chunks(flat: torch.Tensor, offset: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield parts of ``flat`` and the number of their first element, so that each part needs one block of signs."""
    start, size = 0, _chunk_size(flat.device)
    while start < flat.numel():
        length = size - (offset + start) % size
        yield offset + start, flat[start : start + length]
        start += length


def _chunk_size(device: torch.device) -> int:
    return _CHUNK if device.type == "cpu" else _CHUNK_OF_ACCELERATOR


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.device.type == "mps":  # it has no float64
        tensor = tensor.cpu()
    return tensor.reshape(-1)
