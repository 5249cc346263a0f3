"""Detects whether a sampler whose order rank zero broadcasts yields only rank zero's shard of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import UserLine, warn
from echelon.distributed.checks.data_fingerprint import fingerprint_of_sample
from echelon.distributed.small_messages import gather_bytes, gather_counts
from echelon.world.world import World

_SKETCH = 256
_MIN_SAMPLES = 12


class OrderCheck:
    """Compares the orders drawn by the ranks' samplers once, for loaders where all ranks use rank zero's order.

    Samplers may legitimately draw different orders or samples on each rank (with replacement, or from a random subset). But
    if the ranks' samples are disjoint and together cover the dataset, the sampler shards the data, and most samples would
    never be read.

    Args:
        world: the ranks that read different samples.
        num_samples: length of the dataset, or -1 if unknown, in which case nothing is compared.
    """

    def __init__(self, sampler: Any, *, world: World, num_samples: int, line: UserLine, is_error: bool) -> None:
        self._world = world
        self._name = type(sampler).__name__
        self._num_samples = num_samples
        self._line = line
        self._is_error = is_error
        # Random draws of two ranks may be disjoint by chance.
        draws = getattr(sampler, "replacement", False) is True or getattr(sampler, "weights", None) is not None
        self._is_wanted = num_samples >= _MIN_SAMPLES and not draws

    def check_order(self, drawn: Sequence[Any]) -> None:
        """Compare the orders that the ranks drew in a pass.

        Collective: call on every rank the first time.

        Raises:
            UsageError: the sampler shards the data (``is_error``).
        """
        if not self._is_wanted:
            return
        self._is_wanted = False
        indices = _hash_indices(drawn)
        digest = int(indices.sum(dtype=np.uint64) >> np.uint64(2))
        digests, counts = gather_counts(digest, len(indices), group=self._world.group)
        if len(set(digests)) == 1 or sum(counts) > self._num_samples + len(counts) ** 2:
            return
        sketches = [
            np.frombuffer(sketch, dtype=np.uint64)
            for sketch in gather_bytes(indices[:_SKETCH].tobytes(), group=self._world.group)
        ]
        num_all, num_apart = sum(len(sketch) for sketch in sketches), len(np.unique(np.concatenate(sketches)))
        # Some samplers repeat a few samples so that all ranks have the same number.
        covers = num_apart >= self._num_samples if max(counts) <= _SKETCH else sum(counts) >= self._num_samples
        if covers and num_all - num_apart <= len(counts):
            self._report(counts)

    def _report(self, counts: list[int]) -> None:
        message = (
            f"the sampler of the loader ({self._name}) yields different samples on each rank, and together they "
            f"cover the dataset ({counts[0]} of {self._num_samples} samples are on rank 0). This means that the "
            "loader is already sharded. Because echelon shards it again, the other ranks' samples are never read"
        )
        do = (
            "remove the sampler (echelon shards the loader itself), or call "
            "accelerator.prepare_data_loader(loader, already_sharded=True) to keep the sampler's sharding"
        )
        if self._is_error:
            raise UsageError(message, where=str(self._line), do=do.partition(", or")[0])
        warn(_("{message}. Either {do}", message=message, do=do), at=self._line)


def _hash_indices(drawn: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a 64-bit hash of each distinct index, sorted."""
    if all(type(index) is int for index in drawn):
        numbers = np.array(drawn, dtype=np.int64).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return np.unique(numbers ^ (numbers >> np.uint64(32)))
    return np.unique(np.array([fingerprint_of_sample(index) or 0 for index in drawn], dtype=np.uint64))
