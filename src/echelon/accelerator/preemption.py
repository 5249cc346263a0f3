"""Preemption of a run with an Accelerator: at which boundaries it may stop, what is saved there, how it ends.

Who asks, and how the ranks agree on one boundary, is ``distributed/preemption.py``. Boundaries are, in a loop of the user's own:

* whole ones: the end of a turn of the loop over training batches in which the optimizer stepped (not of the last one of a
  pass: what comes after it in the epoch is not made up for by ``resume``), and the end of an epoch of ``accelerator.epochs``;
* others: the end of a turn of any loop over a prepared loader between two updates. They count when half the grace is over.

The Trainer has its own: the end of a step with its evaluation, and each batch of an evaluation, which it makes again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from echelon.base.logging import get_logger
from echelon.distributed.preemption import Preempted, member_of_launch, on_signals
from echelon.status.stop_barrier import EXIT_CODE, BarrierMember

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator

__all__ = ["Preempted", "PreemptionHandler", "save_and_end"]

_logger = get_logger(__name__)
_FOLDER = "preempted"


class PreemptionHandler:
    """Whether this rank takes part in preemptions, and where."""

    def __init__(self) -> None:
        self._member: BarrierMember | None = None
        self.is_driven = False
        """Somebody above (the Trainer) has boundaries of its own."""
        self.folder: str | os.PathLike[str] | None = None
        """What ``resume`` was given."""

    def __getstate__(self) -> dict[str, object]:
        return {"_member": None, "is_driven": self.is_driven, "folder": self.folder}

    def join(self) -> bool:
        """Take part from now on if our launcher leads preemptions; return whether it does."""
        if self._member is None:
            self._member = member_of_launch()
        return self._member is not None

    @contextmanager
    def during(self, accelerator: Accelerator) -> Iterator[bool]:
        """Take part at least inside the ``with`` block; False: the program has handlers of its own, or this is a thread."""
        if self._member is not None or self.join():
            yield True
            return
        with on_signals(accelerator._watcher) as self._member:
            try:
                yield self._member is not None
            finally:
                self._member = None

    def at_boundary(self, *, is_new_step: bool, is_whole: bool) -> bool:
        """Come to a boundary; return whether all ranks are to save here and end. See ``BarrierMember.at_boundary``."""
        member = self._member
        return member is not None and member.at_boundary(is_new_step=is_new_step, is_whole=is_whole)


def save_and_end(accelerator: Accelerator) -> NoReturn:
    """Save what ``resume`` goes on from, where there is a place for it, and end.

    Collective: every rank.

    Raises:
        Preempted: in any case but a disk that takes nothing any more.
    """
    project, step = accelerator.project_configuration, accelerator.progress.step
    folder = accelerator.preemption.folder
    if folder is None and project.project_dir is not None:
        folder = Path(os.fspath(project.project_dir)) / _FOLDER
    if project.automatic_checkpoint_naming and project.project_dir is not None:
        folder = None
    elif folder is None:
        _logger.warning(
            "asked to end by a signal: the run ends after step %d with exit code %d, and nothing is saved: use "
            "Accelerator(project_dir=...), or resume(folder)",
            step,
            EXIT_CODE,
        )
        raise Preempted
    place = accelerator.save_state(folder)
    if accelerator._checkpoints.failures.in_a_row:  # it was told why
        how = f"{place} could not be written: the next start goes on from the checkpoint before"
    else:
        how = f"saved in {place}, from where resume({'' if folder is None else repr(str(folder))}) goes on"
    accelerator._checkpoints.close()
    _logger.warning("asked to end by a signal: the run ends after step %d with exit code %d; %s", step, EXIT_CODE, how)
    raise Preempted
