"""One micro-step of a training loop: the contexts around its passes, and the loss that it backpropagates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.step_guard import StepGuard
from echelon.base.errors import UsageError

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator

__all__ = ["LocalBackward", "MicroStep", "checked_loss"]


class MicroStep:
    """The context of ``accumulate()``; a class, because a generator costs several microseconds a step."""

    __slots__ = ("_accelerator", "_local", "_models")

    def __init__(self, accelerator: Accelerator, models: tuple[nn.Module, ...]) -> None:
        self._accelerator = accelerator
        self._models = models
        self._local: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        accelerator = self._accelerator
        synchronise = accelerator._begin_micro_step()
        accelerator._accumulating = self._models
        if not synchronise:
            models = self._models or accelerator._models
            if len(models) == 1:
                self._local = accelerator._engine.no_sync(models[0])
                self._local.__enter__()
            else:
                self._local = stack = ExitStack()
                for model in models:
                    stack.enter_context(accelerator._engine.no_sync(model))

    def __exit__(self, *_: object) -> None:
        accelerator = self._accelerator
        accelerator._accumulating = None
        if accelerator.gradient_state.sync_gradients and not (accelerator._ledger and accelerator._ledger.drives):
            accelerator._window.end_window()
            accelerator._epochs.end_update()
            accelerator.gradient_state.micro_step = 0
        if self._local is not None:
            self._local.__exit__(None, None, None)


class LocalBackward:
    """The context of ``no_sync()``."""

    __slots__ = ("_context", "_optimizers")

    def __init__(
        self, context: AbstractContextManager[Any], optimizers: Iterable[AcceleratedOptimizer | StepGuard]
    ) -> None:
        self._context = context
        self._optimizers = list(optimizers)

    def __enter__(self) -> None:
        self._context.__enter__()
        for optimizer in self._optimizers:
            optimizer.unsynced = True

    def __exit__(self, *details: Any) -> None:
        for optimizer in self._optimizers:
            optimizer.unsynced = False
        self._context.__exit__(*details)


def checked_loss(loss: Any, kwargs: Mapping[str, Any], *, num_devices: int) -> torch.Tensor:
    """Return the loss to backpropagate: of one for each device, the mean.

    Raises:
        UsageError: no scalar, or no graph.
    """
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"backward() was given {type(loss).__name__}, not a tensor",
            do="give it the loss; a model that returns a dict or a tuple has it as .loss or [0]",
        )
    if loss.dim() == 1 and 1 < loss.numel() <= num_devices and "gradient" not in kwargs:
        loss = loss.mean()
    if loss.numel() != 1 and "gradient" not in kwargs:
        raise UsageError(
            f"backward() needs one number, and the loss has the shape {list(loss.shape)}",
            do="reduce it, for example by loss.mean()",
        )
    if not loss.requires_grad:
        raise UsageError(
            "backward() was given a loss without a graph: nothing that it depends on requires gradients",
            do="compute it from the model's outputs, outside torch.no_grad(), and without .item() or .detach()",
        )
    checked: torch.Tensor = loss
    return checked
