"""Local SGD: each rank trains alone for some steps, then the ranks average their parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.distributed import collectives

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """The context of a training loop whose ranks communicate every ``local_sgd_steps`` steps only.

    Call ``step()`` after each optimizer step. Parameters are averaged; optimizer states and buffers stay each rank's own.
    If the block raises, nothing is averaged: the other ranks may not be there.

    Args:
        accelerator: whose optimizers step locally in the block, past the step guard.
        model: a prepared model that every rank holds whole.
        local_sgd_steps: steps from one average to the next.
        enabled: False, or one process: the block trains as without it.

    Collective: every rank enters, calls ``step()`` equally often, and leaves (where the parameters are averaged, too).

    Raises:
        UsageError: the ranks hold parts of the model, not copies; or ``local_sgd_steps`` is below 1.

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019, Algorithm 1.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self._local: AbstractContextManager[None] | None = None
        if self.enabled and not accelerator.capabilities.replicates:
            raise UsageError(
                f"LocalSGD needs a whole model on every rank, and the engine {accelerator.capabilities.name!r} does not keep one",
                do="use an engine that replicates (ddp), or LocalSGD(enabled=False)",
            )
        if local_sgd_steps < 1:
            raise UsageError(f"local_sgd_steps={local_sgd_steps} is below 1", do="average every 1 or more steps")

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._local = self.accelerator.no_sync(self.model, unsynced=True)
            self._local.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._local is None:
            return
        local, self._local = self._local, None
        try:
            if kind is None:
                self._average()
        finally:
            local.__exit__(kind, error, traceback)

    def step(self) -> None:
        """Count one optimizer step; average when ``local_sgd_steps`` of them are done. Collective: then."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(collectives.reduce(parameter.detach(), "mean"))
