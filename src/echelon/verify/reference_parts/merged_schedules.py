"""Steps prepared schedulers once for each merged batch, as the processes do that the run on one process stands for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from echelon.verify.recording import Recording

__all__ = ["MergedSchedules"]

_MODULES = ("echelon.accelerator.update.scheduler", "accelerate.scheduler")


class MergedSchedules:
    """Repeats ``step`` of ``AcceleratedScheduler``, of echelon and of accelerate, ``recording.batch_factor`` times.

    Both libraries step a prepared scheduler ``num_processes`` times per update, because the user's schedule counts the batches of
    one process. With merged batches, one process takes as many batches in an update.
    """

    def install(self, recording: Recording) -> Callable[[], None]:
        """Patch the class when the first training forward pass begins: by then the script has imported it."""
        factor = recording.batch_factor
        patched: dict[Any, Any] = {}

        def patch(_index: int, _root: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            for name in _MODULES:
                kind: Any = getattr(sys.modules.get(name), "AcceleratedScheduler", None)
                if kind is not None and kind not in patched:
                    patched[kind] = kind.step
                    kind.step = _repeated(kind.step, factor)

        if factor > 1:
            recording.on_training_forward(patch)

        def remove() -> None:
            for kind, step in patched.items():
                kind.step = step

        return remove


def _repeated(step: Callable[..., None], factor: int) -> Callable[..., None]:
    @wraps(step)
    def repeated(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        is_per_batch = scheduler.step_with_optimizer and not scheduler.split_batches
        # A scheduler that follows a metric counts evaluations.
        times = factor if is_per_batch and not isinstance(scheduler.scheduler, ReduceLROnPlateau) else 1
        for _ in range(times):
            step(scheduler, *args, **kwargs)

    return repeated
