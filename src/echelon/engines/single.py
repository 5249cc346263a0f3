"""The ``single`` engine for one device, which leaves the user's objects unchanged and scales the loss for fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.engines.base import Engine, Prepared
from echelon.engines.bitwise.grad_norm import clip_by_rows
from echelon.engines.bitwise.tree_sum import ReplicatedUpdate
from echelon.engines.state_dicts import plain_state_dict
from echelon.engines.stepper import Stepper, multiply_gradients, zero_backward
from echelon.world.world import World

_CAPABILITIES = Capabilities(name="single", replicates=False, sums_shards=True)


class SingleEngine(Engine):
    """Trains in one process on one device."""

    def __init__(self, world: World, *, scaler: torch.amp.GradScaler | None = None) -> None:
        self._world = world
        self.stepper = Stepper(scaler)
        """Scales losses and steps optimizers."""
        self._clip: Callable[..., torch.Tensor] | None = None  # replaces torch's clipping, after build_sharded_update

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> SingleEngine:
        return cls(world, scaler=scaler)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Return the objects unchanged."""
        return Prepared(models=tuple(models), optimizers=tuple(optimizers), schedulers=tuple(schedulers))

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        self.stepper.scale(loss).backward(**options)  # type: ignore[no-untyped-call]

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        with zero_backward(parameters):
            self.backward(loss, **options)

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        return self.stepper.step(optimizer, closure)

    def update_loss_scale(self) -> None:
        self.stepper.update_loss_scale()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        self.stepper.note_cleared(optimizer)

    def drop_update(self) -> None:
        self.stepper.forget()

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        self.stepper.unscale(optimizer)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        clip = torch.nn.utils.clip_grad_norm_ if self._clip is None else self._clip
        return clip(list(parameters), max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        multiply_gradients(model.parameters(), factor)

    def reduced(self, model: nn.Module) -> bool:
        return True

    def build_sharded_update(
        self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]], *, num_chunks: int = 1
    ) -> ReplicatedUpdate:
        self._clip = partial(clip_by_rows, num_chunks=num_chunks)
        return ReplicatedUpdate(
            parameters, num_shards=num_shards, rank=self._world.rank, world_size=self._world.world_size
        )

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        return plain_state_dict(model)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        optimizer.load_state_dict(dict(state))

    def release(self) -> None:
        """Do nothing, because the engine holds no models or optimizers."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model
