"""Preempts a run with an Accelerator: where it may stop, what it saves, and how it ends.

``distributed/preemption.py`` handles requests and makes the ranks agree. In a user's own loop, the
run can stop at these boundaries:

* complete boundaries: the end of an iteration over training batches in which the optimizer stepped (except the last
  iteration of a pass, because ``resume`` does not repeat the rest of the epoch's code), and the end of an epoch of
  ``accelerator.epochs``;
* other boundaries: the end of an iteration over any prepared loader between two updates. They are used after half the
  grace period.

The Trainer has its own boundaries: the end of a step including its evaluation, and each batch of an evaluation, which is
repeated after resuming.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn
from weakref import WeakMethod

from echelon.checkpoint.object_store import ObjectPath
from echelon.distributed.peer_responder import Watcher
from echelon.distributed.preemption import Preempted, member_of_launch, on_signals
from echelon.status.stop_barrier import BarrierMember

__all__ = ["Preempted", "PreemptionHandler"]


class PreemptionHandler:
    """Decides whether and where this rank takes part in preemptions."""

    def __init__(self) -> None:
        self.member: BarrierMember | None = None
        """This rank's part in the agreement on where to stop; None if it takes no part."""
        self.is_driven = False
        """Whether the caller (the Trainer) checks for preemption itself, at its own step boundaries."""
        self.folder: str | os.PathLike[str] | ObjectPath | None = None
        """Folder passed to ``resume``."""
        self.save_and_end: WeakMethod[Callable[[], NoReturn]] | None = None
        """Saves and ends the run. Weak, because a cycle would keep the Accelerator's lock thread alive until garbage
        collection."""

    def __getstate__(self) -> dict[str, object]:
        return {"member": None, "is_driven": self.is_driven, "folder": self.folder, "save_and_end": None}

    def join(self) -> bool:
        """Take part from now on if the echelon launcher handles preemptions; return whether it does."""
        if self.member is None:
            self.member = member_of_launch()
        return self.member is not None

    @contextmanager
    def during(self, watcher: Watcher | None) -> Iterator[bool]:
        """Take part in preemptions in the block; yield False with custom signal handlers or outside the main thread."""
        if self.member is not None or self.join():
            yield True
            return
        with on_signals(watcher) as self.member:
            try:
                yield self.member is not None
            finally:
                self.member = None

    def at_boundary(self, *, is_new_step: bool, is_whole: bool) -> bool:
        """Report a boundary; return whether all ranks must save here and exit. See ``BarrierMember.pass_boundary``."""
        member = self.member
        return member is not None and member.pass_boundary(is_new_step=is_new_step, is_whole=is_whole)

    def stop_if_requested(self, *, is_new_step: bool, is_whole: bool) -> None:
        """Report a boundary of a user's own loop; save and exit if all ranks must."""
        member = self.member
        if member is None or self.is_driven or self.save_and_end is None:
            return
        save_and_end = self.save_and_end()
        if save_and_end is not None and member.pass_boundary(is_new_step=is_new_step, is_whole=is_whole):
            save_and_end()
