"""Seeds a dataset's random numbers (for augmentation) per sample, independently of ranks, workers and resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from echelon.data.rng.host_rng import other_states, set_other_states
from echelon.distributed.checks.already_sharded import set_epoch
from echelon.world.seed import seed_random_and_numpy

# Last number of a key for draws that do not belong to a single sample.
OF_COLLATE, OF_WORKERS = -1, -2
_MASK = 2**64 - 1


def key_of(*numbers: int) -> int:
    """Return a 64-bit hash of ``numbers``, which is the same on all machines.

    Source: the finalizer of splitmix64 (Steele, Lea, Flood 2014), chained.
    """
    key = 0
    for number in numbers:
        key = (key + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


class KeyedSamples(list[int]):
    """The indices that a rank reads in one micro-step, with the seed, epoch and position."""

    __slots__ = ("epoch", "seed", "start")

    def __init__(self, indices: list[int], *, seed: int, epoch: int, start: int) -> None:
        super().__init__(indices)
        self.seed = seed
        self.epoch = epoch
        self.start = start

    def __reduce__(self) -> tuple[Any, ...]:  # list.__reduce__ does not support keyword arguments
        return _make_piece, (list(self), self.seed, self.epoch, self.start)

    def key(self, offset: int) -> tuple[int, int, int]:
        """Return the RNG key for the sample at ``offset``."""
        return self.seed, self.epoch, self.start + offset


def _make_piece(indices: list[int], seed: int, epoch: int, start: int) -> KeyedSamples:
    return KeyedSamples(indices, seed=seed, epoch=epoch, start=start)


@contextmanager
def draws_of(*numbers: int) -> Iterator[None]:
    """Seed torch, NumPy and ``random`` with ``numbers`` inside the block."""
    with _preserve_states():
        _seed(key_of(*numbers))
        yield


class KeyedDataset(Dataset[Any]):
    """A dataset whose random numbers for a sample (``random``, NumPy and torch) depend only on (seed, epoch, position).

    Augmentation is therefore the same for any number of ranks and DataLoader workers, for any batch size, and after resuming.
    In the main process, the RNG states are restored afterwards, so reading data does not affect dropout.

    A dataset that reads several samples at once (``__getitems__``) still does so, unless it draws random numbers. If a
    dataset is indexed with a whole batch (``batch_size=None``), the first sample determines the key.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        """The user's dataset."""
        self._draws = False  # __getitems__ draws random numbers, so samples are read one by one

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's dataset, if it has ``set_epoch``."""
        set_epoch(epoch, self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, piece: KeyedSamples) -> SampleBatch:
        samples = self._read_together(piece)
        return SampleBatch(self._read_one_by_one(piece) if samples is None else samples, piece)

    def _read_together(self, piece: KeyedSamples) -> list[Any] | None:
        """Return the samples if the dataset can read several at once without drawing random numbers, else None."""
        read_all = getattr(self.dataset, "__getitems__", None)
        if read_all is None or self._draws:
            return None
        with draws_of(*piece.key(0)):
            before = rng_states() if len(piece) > 1 else None
            found: list[Any] = read_all(list(piece))
            self._draws = before is not None and not are_equal_states(before, rng_states())
        return None if self._draws else found

    def _read_one_by_one(self, piece: KeyedSamples) -> list[Any]:
        read_all = getattr(self.dataset, "__getitems__", None)
        samples = []
        with _preserve_states():
            for offset, index in enumerate(piece):
                _seed(key_of(*piece.key(offset)))
                samples.append(self.dataset[index] if read_all is None else read_all([index])[0])
        return samples

    def __getitem__(self, piece: Any) -> Any:
        if not isinstance(piece, KeyedSamples):
            return self.dataset[piece]
        with draws_of(*piece.key(0)):
            return self.dataset[list(piece)]


class SampleBatch(list[Any]):
    """The samples that were read for a ``KeyedSamples``."""

    __slots__ = ("piece",)

    def __init__(self, samples: list[Any], piece: KeyedSamples) -> None:
        super().__init__(samples)
        self.piece = piece


class KeyedCollate:
    """The user's ``collate_fn``, whose random numbers (for masking or mixing) depend on (seed, epoch, first sample's position).

    The random numbers are the same after resuming, but not with a different number of ranks, where batches start at other
    positions.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, SampleBatch):
            return self.collate_fn(samples)
        with draws_of(*samples.piece.key(0), OF_COLLATE):
            return self.collate_fn(list(samples))


@contextmanager
def _preserve_states() -> Iterator[None]:
    if get_worker_info() is not None:  # nothing else draws in a loader worker
        yield
        return
    of_torch, others = rng_states()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        set_other_states(others)


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    seed_random_and_numpy(key)


def rng_states() -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the states of the global generators: that of torch, and those of NumPy and ``random``."""
    return torch.get_rng_state(), other_states()


def are_equal_states(one: tuple[torch.Tensor, dict[str, Any]], other: tuple[torch.Tensor, dict[str, Any]]) -> bool:
    """Return whether two results of ``rng_states()`` are equal, which means that no random numbers were drawn in between."""
    return torch.equal(one[0], other[0]) and one[1] == other[1]
