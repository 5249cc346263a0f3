"""Preemption of a run with an Accelerator: at which boundaries it may stop, what is saved there, how it ends.

Who asks, and how the ranks agree on one boundary, is ``distributed/preemption.py``. Boundaries are, in a loop of the user's own:

* whole ones: the end of a turn of the loop over training batches in which the optimizer stepped (not of the last one of a
  pass: what comes after it in the epoch is not made up for by ``resume``), and the end of an epoch of ``accelerator.epochs``;
* others: the end of a turn of any loop over a prepared loader between two updates. They count when half the grace is over.

The Trainer has its own: the end of a step with its evaluation, and each batch of an evaluation, which it makes again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn
from weakref import WeakMethod

from echelon.distributed.peer_responder import Watcher
from echelon.distributed.preemption import Preempted, member_of_launch, on_signals
from echelon.status.stop_barrier import BarrierMember

__all__ = ["Preempted", "PreemptionHandler"]


class PreemptionHandler:
    """Whether this rank takes part in preemptions, and where."""

    def __init__(self) -> None:
        self._member: BarrierMember | None = None
        self.is_driven = False
        """Somebody above (the Trainer) has boundaries of its own."""
        self.folder: str | os.PathLike[str] | None = None
        """What ``resume`` was given."""
        self.save_and_end: WeakMethod[Callable[[], NoReturn]] | None = None
        """Saves and ends the run. Weak: a cycle would keep what the Accelerator holds (a lock's thread) until a collection."""

    def __getstate__(self) -> dict[str, object]:
        return {"_member": None, "is_driven": self.is_driven, "folder": self.folder, "save_and_end": None}

    def join(self) -> bool:
        """Take part from now on if our launcher leads preemptions; return whether it does."""
        if self._member is None:
            self._member = member_of_launch()
        return self._member is not None

    @contextmanager
    def during(self, watcher: Watcher | None) -> Iterator[bool]:
        """Take part at least inside the ``with`` block; False: the program has handlers of its own, or this is a thread."""
        if self._member is not None or self.join():
            yield True
            return
        with on_signals(watcher) as self._member:
            try:
                yield self._member is not None
            finally:
                self._member = None

    def at_boundary(self, *, is_new_step: bool, is_whole: bool) -> bool:
        """Come to a boundary; return whether all ranks are to save here and end. See ``BarrierMember.pass_boundary``."""
        member = self._member
        return member is not None and member.pass_boundary(is_new_step=is_new_step, is_whole=is_whole)

    def stop_if_requested(self, *, is_new_step: bool, is_whole: bool) -> None:
        """Come to a boundary of a loop of the user's own; where all ranks are to end, save and end."""
        member = self._member
        if member is None or self.is_driven or self.save_and_end is None:
            return
        save_and_end = self.save_and_end()
        if save_and_end is not None and member.pass_boundary(is_new_step=is_new_step, is_whole=is_whole):
            save_and_end()
