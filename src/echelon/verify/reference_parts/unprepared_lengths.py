"""Gives loaders that are not prepared yet the length that they have on several processes: schedules are computed from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from echelon.verify.recorders.user_code import line_of_user
from echelon.verify.recording import Recording

__all__ = ["UnpreparedLengths"]


class UnpreparedLengths:
    """In a script with an Accelerator, ``len`` of a loader that was not passed to ``prepare`` counts batches that are not merged.

    On each of several processes, such a loader has all batches of the data. ``MergedSchedules`` steps schedules as often.
    """

    def install(self, recording: Recording) -> Callable[[], None]:
        """Patch ``DataLoader.__len__``; return a function that undoes it."""
        factor = recording.batch_factor
        if factor == 1:
            return lambda: None
        length = DataLoader.__len__

        def unmerged(loader: DataLoader[Any]) -> int:
            # Prepared loaders are of subclasses. Libraries that iterate need the true length.
            is_plain = type(loader) is DataLoader and loader.batch_size is not None
            if not is_plain or not _has_accelerator() or not _is_called_by_user():
                return length(loader)
            batch_size = loader.batch_size // factor  # type: ignore[operator]
            num_batches = len(loader.sampler) / batch_size  # type: ignore[arg-type]
            return math.floor(num_batches) if loader.drop_last else math.ceil(num_batches)

        loaders: Any = DataLoader
        loaders.__len__ = unmerged

        def remove() -> None:
            loaders.__len__ = length

        return remove


def _has_accelerator() -> bool:
    own = sys.modules.get("echelon.accelerator.current")
    if own is not None and own.has_accelerator():
        return True
    theirs = sys.modules.get("accelerate.state")
    state = getattr(theirs, "AcceleratorState", None)
    return bool(getattr(state, "_shared_state", None))


def _is_called_by_user() -> bool:
    """Return whether the caller of ``len`` is the user's code."""
    caller = sys._getframe(2)
    return line_of_user() == f"{caller.f_code.co_filename}:{caller.f_lineno}"
