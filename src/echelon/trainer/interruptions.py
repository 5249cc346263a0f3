"""What ends a training from outside or by an error, and the checkpoint that is saved then."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from echelon.accelerator.checkpoint_folders import same_on_all_ranks
from echelon.base.logging import get_logger
from echelon.base.warnings import warn

if TYPE_CHECKING:
    from echelon.trainer.loop import TrainingLoop

__all__ = ["EXIT_CODE", "TerminationWatch", "TrainingInterrupted", "save_after"]

logger = get_logger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""Of a process that was told to end and has saved: what a shell reports of one that SIGTERM has ended."""

_PATIENCE = timedelta(seconds=10)  # for the other ranks to fail, too


class TrainingInterrupted(SystemExit):
    """The process was told to end (SIGTERM), and the training is saved; not caught, it ends with exit code 143."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class TerminationWatch:
    """Takes SIGTERM while it is entered, for the loop to ask between two steps."""

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None
        self._is_on = False

    def __enter__(self) -> TerminationWatch:
        if threading.current_thread() is not threading.main_thread():
            warn("save_on_signal has no effect: only the main thread of a program can take signals")
        elif signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._is_on = True
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_on:
            return
        signal.signal(signal.SIGTERM, self._before)
        if self.came and kind is None:  # after the last step: nobody has asked any more
            os.kill(os.getpid(), signal.SIGTERM)


def save_after(error: BaseException, loop: TrainingLoop) -> None:
    """Save the training as it was after its last whole step, if that can be; why it cannot is logged.

    An error on one rank alone cannot be saved after: the others wait in a collective, and do not come here.

    Collective: every rank that can.
    """
    trainer = loop.trainer
    accelerator, step = trainer.accelerator, trainer.state.global_step
    why = None
    if loop.is_stepping:
        why = "it came while the optimizer was stepping"
    elif not step or loop.last_saved_step == step:
        return  # there is nothing to save, or it is saved
    elif accelerator.num_processes > 1 and not same_on_all_ranks(
        f"step {step}: {type(error).__name__}", within=_PATIENCE
    ):
        why = "the other ranks have not met it in the same step, and cannot save"
    if why is not None:
        logger.error("%s: no checkpoint is saved after step %d: %s", type(error).__name__, step, why)
        return
    try:
        loop.save_last_step()
    except Exception as problem:  # noqa: BLE001 - the error that brought us here is the one to raise
        logger.error("no checkpoint could be saved after step %d: %s", step, problem)
    else:
        logger.error("%s: the training is saved as it was after step %d", type(error).__name__, step)
