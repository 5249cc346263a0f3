"""Random draws of a dataset (augmentation) that depend on the sample, not on who reads it or when."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

__all__ = ["KeyedDataset", "Piece", "key_of", "keyed"]

_MASK = 2**64 - 1


def key_of(*numbers: int) -> int:
    """Return 64 well-mixed bits of ``numbers``, the same everywhere.

    Source: the finalizer of splitmix64 (Steele, Lea, Flood 2014), chained.
    """
    key = 0
    for number in numbers:
        key = (key + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


class Piece(list[int]):
    """The indices that a rank reads in one micro-step, and where they stand in the run."""

    __slots__ = ("epoch", "seed", "start")

    def __init__(self, indices: list[int], *, seed: int, epoch: int, start: int) -> None:
        super().__init__(indices)
        self.seed = seed
        self.epoch = epoch
        self.start = start

    def __reduce__(self) -> tuple[Any, ...]:  # to a loader worker; keyword arguments do not survive list's own
        return _make_piece, (list(self), self.seed, self.epoch, self.start)

    def key(self, offset: int) -> int:
        """Return the seed of the draws for the sample at ``offset``."""
        return key_of(self.seed, self.epoch, self.start + offset)


def _make_piece(indices: list[int], seed: int, epoch: int, start: int) -> Piece:
    return Piece(indices, seed=seed, epoch=epoch, start=start)


def keyed(dataset: Any) -> Any:
    """Return ``dataset``, its draws keyed by sample; itself where it is known to draw nothing."""
    return dataset if type(dataset) is TensorDataset else KeyedDataset(dataset)


class KeyedDataset(Dataset[Any]):
    """A dataset whose ``random``, numpy and torch draws for a sample depend on (seed, epoch, position) only.

    So augmentation is the same on any number of ranks and loader workers, with any batch size, and after a resume. In
    the main process the states are put back: the stream of dropout does not notice that data was read.

    A dataset that reads a whole batch at once (``__getitems__``) is keyed by the first sample of the piece.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        """The user's."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, piece: Piece) -> list[Any]:
        read_all = getattr(self.dataset, "__getitems__", None)
        with _states_put_back():
            if read_all is not None:
                _seed(piece.key(0))
                found: list[Any] = read_all(list(piece))
                return found
            samples = []
            for offset, index in enumerate(piece):
                _seed(piece.key(offset))
                samples.append(self.dataset[index])
            return samples

    def __getitem__(self, piece: Any) -> Any:
        if not isinstance(piece, Piece):
            return self.dataset[piece]
        with _states_put_back():
            _seed(piece.key(0))
            return self.dataset[list(piece)]


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(key % 2**32)


@contextmanager
def _states_put_back() -> Iterator[None]:
    if get_worker_info() is not None:
        yield
        return
    numpy = sys.modules.get("numpy")
    ours, pythons = torch.get_rng_state(), random.getstate()
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(ours)
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(numpys)
