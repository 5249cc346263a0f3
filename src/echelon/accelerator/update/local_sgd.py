"""Local SGD: each rank trains independently for some steps, then the ranks average their parameters."""

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


class LocalSGD:
    """Context for a training loop whose ranks communicate only every ``local_sgd_steps`` steps.

    Call ``step()`` after each optimizer step. Parameters are averaged; optimizer state and buffers stay local. If the
    block raises, parameters are not averaged, because the other ranks may not take part.

    Args:
        accelerator: the Accelerator, whose optimizers step locally inside the block.
        model: prepared model, with a full copy on every rank.
        local_sgd_steps: number of steps after which parameters are averaged.
        enabled: whether to use local SGD; it has no effect on a single process.

    Collective: on every rank, enter, call ``step()`` the same number of times, and exit (which averages the parameters
        again).

    Raises:
        UsageError: the engine shards the model, or ``local_sgd_steps`` is below 1.

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
                f"LocalSGD requires a full copy of the model on every rank, but the {accelerator.capabilities.name!r} engine shards "
                "the model",
                do="use a replicating engine (ddp), or LocalSGD(enabled=False)",
            )
        if local_sgd_steps < 1:
            raise UsageError(f"local_sgd_steps={local_sgd_steps} is below 1", do="set local_sgd_steps to 1 or more")

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
        """Count one optimizer step; every ``local_sgd_steps`` steps, average the parameters (collective).

        Examples:
            >>> with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            ...     for x, y in loader:
            ...         accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...         local_sgd.step()
        """
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(collectives.reduce(parameter.detach(), "mean"))
