"""Detects ranks that read the same samples in the first pass over a loader.

The check uses no collectives, because ranks may read different numbers of batches or leave the loop early. Each rank writes
fingerprints to the process group's store, and the last rank to do so compares them. Later passes are not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch.distributed as dist

from echelon.base.errors import DesyncError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import UserLine, warn_here
from echelon.distributed.checks.data_fingerprint import ColumnFingerprint, are_of_different_data, row_fingerprints
from echelon.distributed.stores import exchange_once, is_first, store_of

_Rows = np.ndarray[Any, np.dtype[np.uint64]]

_NUM_WINDOWS = 4
_MAX_ROWS = 256
_MIN_ROWS = 8
_MIN_ROWS_OF_PASS = 16
_SKETCH = 128
_MAX_NEIGHBOURS = 64
# Data with many equal samples (constant columns, few classes, copies) does not show which rank read which sample.
_MOSTLY_DISTINCT = 0.9


class DuplicateSamplesCheck:
    """Compares the fingerprints of this rank's first pass with those on the other ranks.

    Args:
        token: number that identifies the loader on all ranks.
        rank: this rank's index among the ranks that should read different data.
        reads_own: whether each rank reads its own shard. If so, whole passes are compared, because each rank may read all
            data in a different order. Otherwise echelon shards the samples, and only the first batches are compared.
    """

    def __init__(
        self, token: int, *, rank: int, world_size: int, line: UserLine, reads_own: bool, do: str, is_error: bool
    ) -> None:
        self._token = token
        self._rank = rank
        self._world_size = world_size
        self._line = line
        self._reads_own = reads_own
        self._do = do
        self._is_error = is_error
        self._windows: list[_Rows] = []
        self._has_compared = False
        self._is_complete = False  # nothing more is compared
        self._sketch: _Rows = np.empty(0, dtype=np.uint64)
        self._num_rows = 0

    def add(self, batch: Any) -> None:
        """Add the next batch, as long as more are needed.

        Raises:
            DesyncError: ``is_error`` is True and several ranks read the same samples.
        """
        if self._is_complete:
            return
        rows = row_fingerprints(batch)
        if rows is None:
            self._is_complete = True
            return
        if not self._has_compared:
            self._windows.append(rows)
            if len(self._windows) == _NUM_WINDOWS:
                self._compare_windows()
        if self._reads_own:
            self._num_rows += len(rows)
            self._sketch = np.unique(np.concatenate((self._sketch, rows)))[:_SKETCH]
        self._is_complete = self._has_compared and not self._reads_own

    def end(self) -> None:
        """Compare the fingerprints at the end of the pass.

        Raises:
            DesyncError: ``is_error`` is True and several ranks read the same samples.
        """
        if self._is_complete:
            return
        if not self._has_compared:
            self._compare_windows()
        if self._reads_own and self._num_rows:
            numbers = np.array([self._num_rows], dtype=np.uint64)
            self._compare("pass", np.concatenate((numbers, self._sketch)), _same_in_pass)

    def compare_stream(self, columns: dict[str, ColumnFingerprint]) -> None:
        """Compare samples from a stream that each rank reads in full, keeping only its slice.

        Raises:
            DesyncError: ``is_error`` is True and the ranks read different streams.
        """
        plain = json.dumps({name: asdict(column) for name, column in columns.items()})
        texts = self._exchange("stream", plain.encode())
        if texts is None:
            return
        first, *others = (
            {name: ColumnFingerprint(**column) for name, column in json.loads(text).items()} for text in texts
        )
        other = next((rank for rank, columns in enumerate(others, 1) if are_of_different_data(first, columns)), None)
        if other is not None:
            self._report(
                f"ranks 0 and {other} read different streams, but each rank keeps only its slice, so the rest of each stream is lost"
            )

    def _compare_windows(self) -> None:
        self._has_compared = True
        rows = np.concatenate(self._windows)[:_MAX_ROWS] if self._windows else np.empty(0, dtype=np.uint64)
        num_windows = np.array([len(self._windows)], dtype=np.uint64)
        self._windows = []
        self._compare("windows", np.concatenate((num_windows, rows)), _same_in_windows)

    def _compare(self, what: str, mine: _Rows, find: Callable[[list[_Rows]], tuple[int, int, str] | None]) -> None:
        texts = self._exchange(what, mine.tobytes())
        found = None if texts is None else find([np.frombuffer(text, dtype=np.uint64) for text in texts])
        if found is not None:
            one, other, reason = found
            self._report(f"ranks {one} and {other} read the same samples: {reason}")

    def _exchange(self, what: str, mine: bytes) -> list[bytes] | None:
        """Return the messages of all ranks on the last one that has one; None on the others, or if there is no store any more."""
        if dist.group.WORLD is None:
            return None
        store = dist.PrefixStore(f"echelon/first_pass/{self._token}/{what}", store_of())
        try:
            return exchange_once(store, mine, rank=self._rank, world_size=self._world_size)
        except dist.DistNetworkError:
            # Without a launcher rank zero holds the store, and it may have finished its work. If it has failed instead, the
            # next collective raises.
            return None

    def _report(self, message: str) -> None:
        if not is_first(dist.PrefixStore(f"echelon/first_pass/{self._token}", store_of())):
            return
        if self._is_error:
            raise DesyncError(message, where=f"the loader from {self._line}", do=self._do)
        # Only the last rank has compared the data, so it warns whatever its number.
        warn_here(
            _("the loader from {line}: {message}. To fix it: {do}", line=self._line, message=message, do=self._do),
            at=self._line,
        )


def _same_in_windows(ranks: list[_Rows]) -> tuple[int, int, str] | None:
    """Return two ranks whose first batches are equal row by row, with a reason for the message, or None."""
    seen: dict[bytes, int] = {}
    for rank, numbers in enumerate(ranks):
        num_windows, rows = _split_header(numbers)
        # Duplicates within one rank's batches are duplicates in the data. A single batch may be a whole small dataset that
        # even_batches has padded.
        if num_windows < 2 or len(rows) < _MIN_ROWS or len(np.unique(rows)) < _MOSTLY_DISTINCT * len(rows):
            continue
        other = seen.setdefault(numbers.tobytes(), rank)
        if other != rank:
            return other, rank, f"their first {num_windows} batches are equal"
    return None


def _same_in_pass(ranks: list[_Rows]) -> tuple[int, int, str] | None:
    """Return two ranks that read mostly the same samples in a pass, in any order, with a reason for the message, or None."""
    for one in range(len(ranks)):
        for other in range(one + 1, min(len(ranks), one + _MAX_NEIGHBOURS)):
            (num_rows, rows), (num_others, others) = _split_header(ranks[one]), _split_header(ranks[other])
            if min(num_rows, num_others) < _MIN_ROWS_OF_PASS:
                continue
            if not (_is_distinct(num_rows, rows) and _is_distinct(num_others, others)):
                continue
            # The smallest hashes of the union are a uniform sample of it (MinHash).
            both = np.union1d(rows, others)[:_SKETCH]
            num_common = int((np.isin(both, rows) & np.isin(both, others)).sum())
            if num_common >= 0.5 * len(both):
                part = round(100 * num_common / len(both))
                return one, other, f"about {part} % of the samples in their first passes are the same"
    return None


def _split_header(numbers: _Rows) -> tuple[int, _Rows]:
    return int(numbers[0]), numbers[1:]


def _is_distinct(num_rows: int, sketch: _Rows) -> bool:
    """Return whether most of ``num_rows`` samples are distinct, estimated from their smallest hashes, ``sketch``."""
    if len(sketch) < _SKETCH:
        num_distinct = float(len(sketch))
    else:  # k of n uniform numbers lie below the largest of them
        num_distinct = (_SKETCH - 1) / (float(sketch[-1]) / 2**64)
    return num_distinct >= (_MOSTLY_DISTINCT if len(sketch) < _SKETCH else 0.7) * num_rows
