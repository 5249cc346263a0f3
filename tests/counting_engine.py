"""An engine as a third party may write it: ddp, and a count of what it did."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.engines.base import Engine, Prepared
from echelon.engines.ddp import DDPEngine
from echelon.world.world import World

__all__ = ["CountingEngine", "installed"]


class CountingEngine(Engine):
    def __init__(self, world: World, *, scaler: torch.amp.GradScaler | None = None) -> None:
        self._ddp = DDPEngine(world, scaler=scaler)
        self.num_steps = 0

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> CountingEngine:
        return cls(world, scaler=scaler)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._ddp.capabilities, name="counting")

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return self._ddp.batch_axes

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        return self._ddp.prepare(models, optimizers, schedulers)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._ddp.no_sync(model)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._ddp.sync_next_backward(model)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        return self._ddp.join(models)

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        self._ddp.backward(loss, model, **options)

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        self._ddp.backward_zeros(loss, parameters, **options)

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        is_taken = self._ddp.step(optimizer, closure=closure, unsynced=unsynced)
        self.num_steps += is_taken
        return is_taken

    def settle(self) -> None:
        self._ddp.settle()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        self._ddp.zero_grad(optimizer, set_to_none=set_to_none)

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        self._ddp.unscale(optimizer, unsynced=unsynced)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        return self._ddp.clip_grad_norm(parameters, max_norm, norm_type, unsynced=unsynced)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        self._ddp.clip_grad_value(parameters, clip_value, unsynced=unsynced)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        self._ddp.finish_gradients(model, factor)

    def reduced(self, model: nn.Module) -> bool:
        return self._ddp.reduced(model)

    def sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        return self._ddp.sharded_state(model, optimizers)

    def load_sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        self._ddp.load_sharded_state(model, optimizers, state)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        return self._ddp.full_state_dict(model)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        return self._ddp.full_optimizer_state(optimizer)

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self._ddp.load_full_optimizer_state(optimizer, state)

    def release(self) -> None:
        self._ddp.release()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self._ddp.unwrap(model)


@contextmanager
def installed() -> Iterator[None]:
    """Let the block find the engine as that of an installed package: by the metadata that an installer writes."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        metadata = Path(folder, "counting-1.0.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[echelon.engines]\ncounting = {__name__}:CountingEngine\n")
        patch.setattr(sys, "path", [folder, *sys.path])
        yield
