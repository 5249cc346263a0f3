"""Evaluations whose result is that of one rank, divided by the length of all data: one warning at the line that asks for that length."""

from __future__ import annotations

import linecache
import sys

import torch

from echelon.base.warnings import UserLine, is_library, user_line, warn
from echelon.distributed.collective_count import num_collectives_of_all_groups

__all__ = ["DatasetLength", "UngatheredMetricsCheck"]


class DatasetLength:
    """Where the program asked for ``len(loader.dataset)`` of one loader, of which each rank reads a part."""

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
    """Was a result shared after an evaluation whose loader's ``dataset``, which all ranks share, was asked for its length?

    Ranks that exchange nothing between the first batch of an evaluation and the next training pass, barrier, checkpoint or end
    have results of their own parts. Any collective of torch.distributed counts, the user's as well.

    Args:
        do: how the ranks' results are put together here.
    """

    __slots__ = ("_do", "_ended", "_num_ignored", "_told")

    def __init__(self, do: str) -> None:
        self._do = do
        self._ended: dict[DatasetLength, int] = {}
        self._num_ignored = 0
        self._told: set[UserLine] = set()

    def num_collectives(self) -> int | None:
        """Return how many collectives there were, less the ignored ones; None: nobody counts them."""
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
        """Warn when an evaluation ended, its length was asked for, and nothing has been shared since; forget both."""
        if not self._ended:
            return
        ended = self._ended
        self.forget()
        num = self.num_collectives()
        for length, since in ended.items():
            line, length.line = length.line, None
            if line is not None and num == since and line not in self._told:
                self._told.add(line)
                warn(
                    "an evaluation was read by several processes, each its own part, loader.dataset (all samples) was asked "
                    "for here, and nothing was gathered or reduced: a sum divided by len(loader.dataset) is the result of one "
                    f"process over the data of all. {self._do}",
                    at=line,
                )

    def forget(self) -> None:
        """Expect nothing more of the evaluations so far."""
        self._ended = {}

    def close(self) -> None:
        """``check()`` at the end of the group; what comes after it is another program, which is told again."""
        self.check()
        self._told.clear()
