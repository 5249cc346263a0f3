"""Warns once of an evaluation that reads the whole dataset of its loader, to divide by its length, and gathers nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import UserLine, user_line, warn
from echelon.distributed.uncompiled import uncompiled
from echelon.status.call_site import is_user_file


class DatasetAccess:
    """Records the line on which the program reads ``loader.dataset`` of a sharded loader, mostly for its length."""

    __slots__ = ("line",)

    def __init__(self) -> None:
        self.line: UserLine | None = None

    def record(self) -> None:
        """Record the line that reads ``loader.dataset``, unless it is in an installed package such as torch."""
        if is_user_file(sys._getframe(2).f_code.co_filename):
            self.line = user_line()


@dataclass(slots=True, kw_only=True)
class _Pass:
    """An evaluation pass that has ended."""

    access: DatasetAccess
    since: int
    """Number of collectives at its first batch."""
    line: UserLine | None
    """Line that reads the dataset for this pass."""


class UngatheredMetricsCheck:
    """Detects an evaluation that reads the whole dataset, as in ``len(loader.dataset)``, but does not gather its results.

    If no collective runs between the first batch of an evaluation and the next training pass, checkpoint or exit, each rank has only
    its own shard's result. Any torch.distributed collective counts, including the user's. A length that the program takes from its
    own variable of the dataset (``len(test_set)``) is not seen.
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

    def end_pass(self, access: DatasetAccess, since: int | None) -> None:
        """Record the end of a pass, in the loop's own thread.

        Args:
            since: the value of ``num_collectives()`` at the first batch of the pass.
        """
        if since is None or torch.is_grad_enabled():
            return
        num = self.num_collectives()
        self._take_line(access)
        # A pass after which a collective ran, or whose dataset was not read, is settled.
        self._passes = [one for one in self._passes if one.line is not None and one.since == num]
        self._passes.append(_Pass(access=access, since=since, line=access.line))
        access.line = None

    def begin_pass(self) -> None:
        """Check before a training batch is read, because one collective may combine the results of several evaluations."""
        if self._passes and torch.is_grad_enabled():
            self.check()

    def check(self) -> None:
        """Warn if an evaluation has ended, its dataset was read, and nothing was gathered; then reset the records."""
        if not self._passes:
            return
        for access in {one.access for one in self._passes}:
            self._take_line(access)
        passes = self._passes
        self.forget()
        num = self.num_collectives()
        for one in passes:
            one.access.line = None
            if one.line is not None and num == one.since and one.line not in self._warned:
                self._warned.add(one.line)
                warn(
                    _(
                        "each process evaluated only its own shard, but the dataset of the loader holds all "
                        "samples, and nothing was gathered or reduced. A result that is divided by "
                        "len(loader.dataset) is that of one shard, divided by the size of the whole dataset.\n  "
                        "do:    {do}",
                        do=_(self._do),
                    ),
                    at=one.line,
                )

    def _take_line(self, access: DatasetAccess) -> None:
        """Let the latest pass over a loader own a line that was recorded since; if it has one, the next pass owns it."""
        latest = next((one for one in reversed(self._passes) if one.access is access), None)
        if latest is not None and latest.line is None:
            latest.line, access.line = access.line, None

    def forget(self) -> None:
        """Discard the evaluations recorded so far."""
        self._passes = []

    def close(self) -> None:
        """Run the check before the process group is destroyed, and reset the warnings for the next group."""
        self.check()
        self._warned.clear()


@uncompiled
def num_collectives() -> int | None:
    """Return the number of collectives this process has started in the default group, or None if unknown."""
    return _number_of(dist.group.WORLD) if dist.is_initialized() else None


@uncompiled
def num_collectives_of_all_groups() -> int | None:
    """Return the number of collectives this process has started in all groups, on all devices, or None if unknown.

    A GPU group has a second backend for CPU tensors, whose collectives the group's sequence number does not count.
    """
    if not dist.is_initialized():
        return None
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        devices = getattr(group, "_device_types", None)
        backends = {id(found): found for found in map(group._get_backend, devices)} if devices else {0: group}
        for backend in backends.values():
            num = _number_of(backend)
            if num is None:
                return None
            total += num
    return total


def _number_of(group: object) -> int | None:
    """Return the sequence number of the last collective in a group or backend, or None if it has no counter."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    if count is None:
        return None
    try:
        return int(count())
    except RuntimeError:  # raised by torch if the backend (MPI, many device backends) does not count
        return None
