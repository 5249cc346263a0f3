"""A scheduler wrapper that advances only if its optimizers stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.swa_utils import SWALR

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.update.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler:
    """Wraps a learning-rate scheduler.

    With ``step_with_optimizer`` it does not advance while gradients are accumulated or if a step was skipped. Unless
    ``split_batches``, it advances ``num_processes`` times per update, because that many batches have been used.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        *,
        gradient_state: GradientState,
        num_processes: int,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = [optimizers] if isinstance(optimizers, AcceleratedOptimizer) else list(optimizers)
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = gradient_state
        self._times = 1 if split_batches else num_processes
        self._has_end = hasattr(scheduler, "total_steps")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if its optimizers stepped."""
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        for _ in range(self._times):
            # OneCycleLR raises beyond total_steps, and the last update of an epoch may contain padding.
            if not self._has_end or scheduler._step_count <= scheduler.total_steps:
                scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """Return the learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> Any:
        """Return the state of the wrapped scheduler."""
        state = self.scheduler.state_dict()
        if isinstance(self.scheduler, SWALR):
            # Torch 2.7 adds a function here, which a checkpoint cannot store and the restored scheduler already has.
            return {key: value for key, value in state.items() if key != "anneal_func"}
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # not set yet while unpickling
        return getattr(self.scheduler, name)
