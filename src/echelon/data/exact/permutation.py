"""Permutations of samples that depend only on (seed, epoch) and can be evaluated at any position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import isqrt
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

from echelon.base.errors import UsageError
from echelon.data.rng.per_sample_rng import key_of

# After 4 rounds, neighbors in a column are correlated (test_the_statistical_test_detects_four_rounds); after 6, for n up to 97.
_ROUNDS = 8
_LARGEST = 2**48
_EXPLICIT_UP_TO = 2**16  # small n have few Feistel networks: at n = 5, 8 rounds favor some of the 120 permutations

_Words: TypeAlias = "npt.NDArray[np.uint64]"


class Permutation(ABC):
    """A permutation of ``range(n)`` for one epoch. To resume, a run needs only its arguments and a position."""

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        self._n = n

    @abstractmethod
    def indices(self, positions: torch.Tensor | range) -> torch.Tensor:
        """Return the indices at ``positions`` (int64, any shape, in any order) as int64 with the same shape."""


@final
class ExplicitPermutation(Permutation):
    """``randperm(n, generator=Generator().manual_seed(seed + epoch))``, with 4 bytes per sample (8 for n >= 2**31).

    Source: the order used by accelerate's seedable sampler and the transformers Trainer.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        super().__init__(n, seed, epoch)
        # torch draws the same permutation for both types (test_explicit_order_is_that_of_randperm).
        self._order = torch.randperm(
            n,
            generator=torch.Generator().manual_seed(seed + epoch),
            dtype=torch.int32 if n < 2**31 else torch.int64,
        )

    def indices(self, positions: torch.Tensor | range) -> torch.Tensor:
        return self._order[_checked(positions, self._n)].to(torch.int64)


@final
class FeistelPermutation(Permutation):
    """A keyed permutation that is computed instead of stored. It needs no memory or setup, and seeks instantly.

    The positions form a grid of about sqrt(n) rows and columns. Each round shifts the row by a keyed hash of the column, or
    the column by a keyed hash of the row. Results in the grid's few cells beyond n are permuted again. Only 64-bit integer
    arithmetic is used, so the order is the same on every machine and in every version. For up to 65,536 samples, the order is
    instead obtained by sorting keyed hashes of the indices, and is stored.

    Raises:
        UsageError: there are more than 2**48 samples.

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (generalized Feistel, cycle walking).
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        super().__init__(n, seed, epoch)
        if n > _LARGEST:
            raise UsageError(
                f"the dataset has {n} samples, but a keyed permutation supports at most {_LARGEST} samples",
                where='order="feistel"',
                do="split the dataset into parts and shuffle each part",
            )
        self._keys = [np.uint64(key_of(seed, epoch, n, number)) for number in range(_ROUNDS)]
        self._order: torch.Tensor | None = None
        if n <= _EXPLICIT_UP_TO:
            hashes = _mix(np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._keys[0])
            self._order = torch.from_numpy(np.argsort(hashes, kind="stable").astype(np.int32))

    def indices(self, positions: torch.Tensor | range) -> torch.Tensor:
        inside = _checked(positions, self._n)
        if self._order is not None:
            return self._order[inside].to(torch.int64)
        words = _permute(inside.reshape(-1).numpy().astype(np.uint64), self._n, self._keys)
        return torch.from_numpy(words.view(np.int64)).reshape(inside.shape)


def _checked(positions: torch.Tensor | range, n: int) -> torch.Tensor:
    """Return ``positions`` as a tensor, after checking that they are in ``range(n)``."""
    if isinstance(positions, range):
        positions = torch.arange(len(positions)) * positions.step + positions.start
    if positions.numel():
        low, high = (int(bound) for bound in torch.aminmax(positions))
        assert 0 <= low <= high < n, (low, high, n)
    return positions


def _permute(positions: _Words, n: int, keys: list[np.uint64]) -> _Words:
    """Permute ``positions`` repeatedly until they are below ``n``, which always happens, usually after one step."""
    rows = isqrt(n - 1) + 1
    columns = -(-n // rows)  # rows * columns - n < rows
    words = _encrypt(positions, rows, columns, keys)
    while len(outside := np.flatnonzero(words >= n)):
        words[outside] = _encrypt(words[outside], rows, columns, keys)
    return words


def _encrypt(positions: _Words, rows: int, columns: int, keys: list[np.uint64]) -> _Words:
    """Permute positions in ``range(rows * columns)``, where both factors are at most 2**24."""
    row = positions // np.uint64(columns)
    column = positions - row * np.uint64(columns)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            _shift(row, _mix(column + key), np.uint64(rows))
        else:
            _shift(column, _mix(row + key), np.uint64(columns))
    row *= np.uint64(columns)
    row += column
    return row


def _shift(words: _Words, hashes: _Words, size: np.uint64) -> None:
    """Add the hashes, scaled to ``range(size)`` without a division, to ``words`` modulo ``size``."""
    hashes >>= np.uint64(24)
    hashes *= size
    hashes >>= np.uint64(40)
    words += hashes
    np.minimum(words, words - size, out=words)  # below size, the difference wraps to a huge number


def _mix(words: _Words) -> _Words:
    """Mix the bits of ``words`` in place. Source: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
