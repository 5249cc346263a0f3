"""Warns once if an evaluation divides a per-rank result by the length of the whole dataset."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass

import torch

from echelon.base.warnings import UserLine, is_library, user_line, warn
from echelon.distributed.checks.dataset_division import find_division
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


@dataclass(slots=True, kw_only=True)
class _Pass:
    """An evaluation pass that has ended."""

    length: DatasetLength
    since: int
    """Number of collectives at its first batch."""
    line: UserLine | None
    """Line that uses the length of the dataset for this pass."""


class UngatheredMetricsCheck:
    """Detects an evaluation that divides by the length of the whole dataset but does not gather its results.

    The length is ``len(loader.dataset)``, or ``len()`` of the same dataset under another name (``find_division``). If no
    collective runs between the first batch of an evaluation and the next training pass, checkpoint or exit, each rank has only
    its own shard's result. Any torch.distributed collective counts, including the user's.

    Args:
        do: advice on how to combine the ranks' results.
    """

    __slots__ = ("_do", "_num_ignored", "_passes", "_warned")

    def __init__(self, do: str) -> None:
        self._do = do
        self._passes: list[_Pass] = []
        self._num_ignored = 0
        self._warned: set[UserLine] = set()

    def num_collectives(self) -> int | None:
        """Return the number of collectives so far, excluding ignored ones, or None if it is unknown."""
        num = num_collectives_of_all_groups()
        return None if num is None else num - self._num_ignored

    def ignore(self, num: int) -> None:
        """Ignore ``num`` collectives that cannot have combined results."""
        self._num_ignored += num

    def end_pass(self, length: DatasetLength, since: int | None, *, dataset: object) -> None:
        """Record the end of a pass, in the loop's own thread.

        Args:
            length: where the length of the loader's dataset was read.
            since: the value of ``num_collectives()`` at the first batch of the pass.
            dataset: the whole dataset.
        """
        if since is None or torch.is_grad_enabled():
            return
        num = self.num_collectives()
        self._take_line(length)
        # A pass after which a collective ran, or that divides nothing, is settled.
        self._passes = [one for one in self._passes if one.line is not None and one.since == num]
        line, length.line = length.line, None
        if line is None and since == num:
            line = find_division(dataset)
        self._passes.append(_Pass(length=length, since=since, line=line))

    def begin_pass(self) -> None:
        """Check before a training batch is read, because one collective may combine the results of several evaluations."""
        if self._passes and torch.is_grad_enabled():
            self.check()

    def check(self) -> None:
        """Warn if an evaluation has ended, its dataset's length was read, and nothing was gathered; then reset the records."""
        if not self._passes:
            return
        for length in {one.length for one in self._passes}:
            self._take_line(length)
        passes = self._passes
        self.forget()
        num = self.num_collectives()
        for one in passes:
            one.length.line = None
            if one.line is not None and num == one.since and one.line not in self._warned:
                self._warned.add(one.line)
                warn(
                    "each process evaluated only its own shard, but the length of the dataset counts all samples, and nothing "
                    "was gathered or reduced. The result of one shard is therefore divided by the size of the whole dataset."
                    f"\n  do:    {self._do}",
                    at=one.line,
                )

    def _take_line(self, length: DatasetLength) -> None:
        """Let the latest pass over a loader own a length that was read since; if it has a line, the next pass owns it."""
        latest = next((one for one in reversed(self._passes) if one.length is length), None)
        if latest is not None and latest.line is None:
            latest.line, length.line = length.line, None

    def forget(self) -> None:
        """Discard the evaluations recorded so far."""
        self._passes = []

    def close(self) -> None:
        """Run the check before the process group is destroyed, and reset the warnings for the next group."""
        self.check()
        self._warned.clear()
