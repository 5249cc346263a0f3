"""Small summaries of tensors, with which two runs are compared without storing their tensors.

A summary is linear over shards: the summaries of all shards of a tensor add up to the summary of the whole tensor, so a sharded run
is compared with an unsharded one without gathering anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["NUM_BUCKETS", "Sketch", "sketch_of"]

NUM_BUCKETS = 32
"""Length of the projection; the norm of a difference is estimated with a relative error of about sqrt(2 / NUM_BUCKETS)."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed 64-bit integer
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """What is kept of one tensor, or of the shards of it that one rank holds."""

    projection: np.ndarray
    """float64, ``(NUM_BUCKETS,)``: each bucket sums the elements that a hash of their index gives it, each times a random sign."""
    square_sum: float
    """Sum of the squared elements."""
    bits: int
    """Sum of a hash of each element's bits and index, modulo 2**64: equal for bit-equal tensors of one dtype."""
    num_elements: int
    num_nonfinite: int

    def __add__(self, other: Sketch) -> Sketch:
        """Return the sketch of both shards together."""
        return Sketch(
            projection=self.projection + other.projection,
            square_sum=self.square_sum + other.square_sum,
            bits=(self.bits + other.bits) % (1 << 64),
            num_elements=self.num_elements + other.num_elements,
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
        )

    @property
    def norm(self) -> float:
        """The L2 norm of the tensor."""
        return float(np.sqrt(self.square_sum))

    def distance(self, other: Sketch) -> float:
        """Return an unbiased estimate of the L2 norm of the difference; exactly 0.0 if the bits are equal."""
        if self.bits == other.bits and self.num_elements == other.num_elements:
            return 0.0
        return float(np.linalg.norm(self.projection - other.projection))


def sketch_of(tensor: torch.Tensor, *, offset: int = 0) -> Sketch:
    """Return the sketch of a dense tensor, whose first element is element ``offset`` of the flattened whole tensor.

    Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (count sketch).
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    values = flat.to(torch.float64)
    finite = torch.isfinite(values)
    num_nonfinite = int(values.numel() - int(finite.sum()))
    if num_nonfinite:
        values = torch.where(finite, values, torch.zeros((), dtype=torch.float64))
    signs, buckets = _signs_and_buckets(offset, values.numel())
    projection = torch.bincount(buckets, weights=values * signs, minlength=NUM_BUCKETS)
    return Sketch(
        projection=projection.numpy(),
        square_sum=float(values @ values),
        bits=_bit_sum(flat, offset),
        num_elements=flat.numel(),
        num_nonfinite=num_nonfinite,
    )


def _signs_and_buckets(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sign and the bucket of each element of a tensor.

    Each element has a sign of its own, and each run of NUM_BUCKETS elements its own rotation of the buckets: with one sign per run, or
    with bucket ``j % NUM_BUCKETS``, the estimates of rank-one matrices and of matrices with few columns (most gradients) would have one
    degree of freedom in place of NUM_BUCKETS. Tensors of up to NUM_BUCKETS elements are kept exactly.
    """
    indices = torch.arange(first, first + count)
    signs = ((_mixed(indices) >> 33) & 1).to(torch.float64) * 2 - 1
    rotation = _mixed(indices // NUM_BUCKETS) >> 40
    return signs, (indices + rotation) % NUM_BUCKETS


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int64 number (the finalizer of splitmix64, without its last rounds)."""
    numbers = (numbers + 1) * _GOLDEN
    numbers = (numbers ^ (numbers >> 30)) * _MIX
    return numbers ^ (numbers >> 27)


def _bit_sum(flat: torch.Tensor, offset: int) -> int:
    if not flat.numel():
        return 0
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = flat.view(sizes[flat.element_size()]).to(torch.int64)
    keys = _mixed(torch.arange(offset, offset + numbers.numel()))
    return int(_mixed(numbers ^ keys).sum()) % (1 << 64)
