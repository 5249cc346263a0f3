"""Is the order that rank zero's sampler gives to all ranks a whole one, or only the share of rank zero?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.base.errors import UsageError
from echelon.base.warnings import UserLine, warn
from echelon.distributed.checks.data_fingerprint import fingerprint_of_sample
from echelon.distributed.small_messages import gather_bytes, gather_counts

__all__ = ["OrderCheck"]

_SKETCH = 256
_LEAST = 12


class OrderCheck:
    """Compares, once, what the ranks' samplers draw, of which rank zero's is taken for all.

    Samplers may draw in any order, or other samples on each rank (with replacement, a random part): that is no mistake, for
    rank zero's draw counts. But where the ranks' draws have nothing in common and are the whole dataset together, the
    sampler divides the data by rank, and most of them would never be read.

    Args:
        sampler: the user's.
        num_samples: of the dataset; -1: nobody knows, and nothing is compared.
        line: where the loader was given to echelon.
        is_error: raise in the place of a warning.
    """

    def __init__(self, sampler: Any, *, num_samples: int, line: UserLine, is_error: bool) -> None:
        self._name = type(sampler).__name__
        self._num_samples = num_samples
        self._line = line
        self._is_error = is_error
        # These draw at random by design: two ranks may have nothing in common by chance.
        draws = getattr(sampler, "replacement", False) is True or getattr(sampler, "weights", None) is not None
        self._is_wanted = num_samples >= _LEAST and not draws

    def judge(self, drawn: Sequence[Any]) -> None:
        """Look at what this rank has drawn in a pass.

        Collective: every rank, at the first call.

        Raises:
            UsageError: the sampler divides the data by rank (``is_error``).
        """
        if not self._is_wanted:
            return
        self._is_wanted = False
        indices = _spread(drawn)
        digest = int(indices.sum(dtype=np.uint64) >> np.uint64(2))
        digests, counts = gather_counts(digest, len(indices))
        if len(set(digests)) == 1 or sum(counts) > self._num_samples + len(counts) ** 2:
            return
        sketches = [np.frombuffer(sketch, dtype=np.uint64) for sketch in gather_bytes(indices[:_SKETCH].tobytes())]
        num_all, num_apart = sum(len(sketch) for sketch in sketches), len(np.unique(np.concatenate(sketches)))
        # Some cuts repeat a few samples, so that all ranks have equally many.
        covers = num_apart >= self._num_samples if max(counts) <= _SKETCH else sum(counts) >= self._num_samples
        if covers and num_all - num_apart <= len(counts):
            self._tell(counts)

    def _tell(self, counts: list[int]) -> None:
        message = (
            f"the sampler of the loader ({self._name}) gives each rank other samples, and all of them together are the "
            f"dataset: {counts[0]} of {self._num_samples} on rank 0. It has been cut for the ranks already, and is cut once "
            "more: the other ranks' samples are not read"
        )
        do = (
            "take the sampler out (echelon cuts the loader), or keep its cut: "
            "accelerator.prepare_data_loader(loader, already_sharded=True)"
        )
        if self._is_error:
            raise UsageError(message, where=str(self._line), do=do.partition(", or")[0])
        warn(f"{message}. Either {do}", at=self._line)


def _spread(drawn: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return 64 well-spread bits of each index, each once, sorted: the same on all ranks."""
    if all(type(index) is int for index in drawn):
        numbers = np.array(drawn, dtype=np.int64).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return np.unique(numbers ^ (numbers >> np.uint64(32)))
    return np.unique(np.array([fingerprint_of_sample(index) or 0 for index in drawn], dtype=np.uint64))
