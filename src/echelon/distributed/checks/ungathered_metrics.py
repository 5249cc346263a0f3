"""Warns, once, of an evaluation whose per-rank result is divided by the length of the whole dataset."""

from __future__ import annotations

import linecache
import sys

import torch

from echelon.base.warnings import UserLine, is_library, user_line, warn
from echelon.distributed.collective_count import num_collectives_of_all_groups

__all__ = ["DatasetLength", "UngatheredMetricsCheck"]


class DatasetLength:
    """Where the program called ``len(loader.dataset)`` of a sharded loader."""

    __slots__ = ("line",)

    def __init__(self) -> None:
        self.line: UserLine | None = None

    def note_access(self) -> None:
        """``loader.dataset`` is read by the caller's caller; DataLoader itself does that, too."""
        if is_library(sys._getframe(2).f_code.co_filename):
            return
        line = user_line()
        text = linecache.getline(*line)
        if not text or "len(" in text:  # not of what else a dataset has, such as the names of its classes
            self.line = line


class UngatheredMetricsCheck:
    """Detects an evaluation whose results were not gathered, although ``len(loader.dataset)`` was called.

    Ranks that exchange nothing between the first batch of an evaluation and the next training pass, barrier, checkpoint or end
    have results of their own shards. Any collective of torch.distributed counts, the user's as well.

    Args:
        do: how the ranks' results are combined here.
    """

    __slots__ = ("_do", "_ended", "_num_ignored", "_warned")

    def __init__(self, do: str) -> None:
        self._do = do
        self._ended: dict[DatasetLength, int] = {}
        self._num_ignored = 0
        self._warned: set[UserLine] = set()

    def num_collectives(self) -> int | None:
        """Return how many collectives there were, less the ignored ones; None: unknown."""
        num = num_collectives_of_all_groups()
        return None if num is None else num - self._num_ignored

    def ignore(self, num: int) -> None:
        """Leave out ``num`` collectives that cannot have shared a result."""
        self._num_ignored += num

    def note_pass(self, length: DatasetLength, since: int | None) -> None:
        """A pass was read to its end; ``since`` is ``num_collectives()`` at its first batch."""
        if since is not None and not torch.is_grad_enabled():
            self._ended[length] = since

    def begin_pass(self) -> None:
        """A batch is about to be read. Evaluations of several loaders may share their results together."""
        if self._ended and torch.is_grad_enabled():
            self.check()

    def check(self) -> None:
        """Warn when an evaluation ended, its length was read, and nothing has been gathered since; forget both."""
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
                    "several processes evaluated, each its own shard; len(loader.dataset), the number of all samples, is used "
                    "here, and nothing was gathered or reduced: the result is that of one shard divided by the size of all "
                    f"data. {self._do}",
                    at=line,
                )

    def forget(self) -> None:
        """Forget the evaluations so far."""
        self._ended = {}

    def close(self) -> None:
        """``check()`` at the end of the group; what comes after it is another program, which is warned again."""
        self.check()
        self._warned.clear()
