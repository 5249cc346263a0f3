"""Warns once if an evaluation divides a per-rank result by the length of the whole dataset."""

from __future__ import annotations

import linecache
import sys

import torch

from echelon.base.warnings import UserLine, is_library, user_line, warn
from echelon.distributed.collective_count import num_collectives_of_all_groups

__all__ = ["DatasetLength", "UngatheredMetricsCheck"]


class DatasetLength:
    """Records the line on which the program calls ``len(loader.dataset)`` for a sharded loader."""

    __slots__ = ("line",)

    def __init__(self) -> None:
        self.line: UserLine | None = None

    def record_access(self) -> None:
        """Record the line that reads ``loader.dataset``, unless it is library code such as DataLoader."""
        if is_library(sys._getframe(2).f_code.co_filename):
            return
        line = user_line()
        text = linecache.getline(*line)
        if not text or "len(" in text:  # other attributes of a dataset, such as its class names, do not matter
            self.line = line


class UngatheredMetricsCheck:
    """Detects an evaluation that calls ``len(loader.dataset)`` but does not gather its results.

    If no collective runs between the first batch of an evaluation and the next training pass, barrier, checkpoint or exit,
    each rank has only its own shard's result. Any torch.distributed collective counts, including the user's.

    Args:
        do: advice on how to combine the ranks' results.
    """

    __slots__ = ("_do", "_ended", "_num_ignored", "_warned")

    def __init__(self, do: str) -> None:
        self._do = do
        self._ended: dict[DatasetLength, int] = {}
        self._num_ignored = 0
        self._warned: set[UserLine] = set()

    def num_collectives(self) -> int | None:
        """Return the number of collectives so far, excluding ignored ones, or None if it is unknown."""
        num = num_collectives_of_all_groups()
        return None if num is None else num - self._num_ignored

    def ignore(self, num: int) -> None:
        """Ignore ``num`` collectives that cannot have combined results."""
        self._num_ignored += num

    def end_pass(self, length: DatasetLength, since: int | None) -> None:
        """Record the end of a pass; ``since`` is the value of ``num_collectives()`` at its first batch."""
        if since is not None and not torch.is_grad_enabled():
            self._ended[length] = since

    def begin_pass(self) -> None:
        """Check before a training batch is read, because one collective may combine the results of several evaluations."""
        if self._ended and torch.is_grad_enabled():
            self.check()

    def check(self) -> None:
        """Warn if an evaluation has ended, its dataset's length was read, and nothing was gathered; then reset the records."""
        if not self._ended:
            return
        ended = self._ended
        self.forget()
        num = self.num_collectives()
        for length, since in ended.items():
            line, length.line = length.line, None
            if line is not None and num == since and line not in self._warned:
                self._warned.add(line)
                warn(
                    "each process evaluated only its own shard, but len(loader.dataset) counts all samples, and nothing was "
                    "gathered or reduced. The result of one shard is therefore divided by the size of the whole dataset. "
                    f"{self._do}",
                    at=line,
                )

    def forget(self) -> None:
        """Discard the evaluations recorded so far."""
        self._ended = {}

    def close(self) -> None:
        """Run the check before the process group is destroyed, and reset the warnings for the next group."""
        self.check()
        self._warned.clear()
