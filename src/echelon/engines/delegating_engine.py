"""Base class of engines that wrap another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.engines.base import Engine, LocalGradient, Prepared, ShardedState
from echelon.engines.bitwise.tree_sum import ShardedUpdate

if TYPE_CHECKING:
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages


class DelegatingEngine(Engine):
    """Forwards every member of the interface to ``inner``. Subclasses override the members that differ."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        return self.inner.prepare(models, optimizers, schedulers)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.inner.no_sync(model)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.inner.sync_next_backward(model)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        return self.inner.join(models)

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        self.inner.backward(loss, model, **options)

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        self.inner.backward_zeros(loss, parameters, **options)

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        return self.inner.step(optimizer, closure=closure, unsynced=unsynced)

    @property
    def is_shadow_step(self) -> bool:
        return self.inner.is_shadow_step

    def replaced_parameters(self) -> Sequence[torch.Tensor]:
        return self.inner.replaced_parameters()

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        return self.inner.reduce_gradients(optimizer)

    def update_loss_scale(self) -> None:
        self.inner.update_loss_scale()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        self.inner.zero_grad(optimizer, set_to_none=set_to_none)

    def drop_update(self) -> None:
        self.inner.drop_update()

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        self.inner.unscale(optimizer, unsynced=unsynced)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        return self.inner.clip_grad_norm(parameters, max_norm, norm_type, unsynced=unsynced)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        self.inner.clip_grad_value(parameters, clip_value, unsynced=unsynced)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        self.inner.finish_gradients(model, factor)

    def reduced(self, model: nn.Module) -> bool:
        return self.inner.reduced(model)

    def build_sharded_update(
        self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]], *, num_chunks: int = 1
    ) -> ShardedUpdate:
        return self.inner.build_sharded_update(num_shards, parameters, num_chunks=num_chunks)

    def use_pipeline(self, stages: PipelineStages) -> None:
        self.inner.use_pipeline(stages)

    def run_pipeline(self, stages: PipelineStages, run: Callable[[], None]) -> None:
        self.inner.run_pipeline(stages, run)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        return self.inner.full_state_dict(model)

    def sharded_state(self, model: nn.Module) -> ShardedState | None:
        return self.inner.sharded_state(model)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        return self.inner.full_optimizer_state(optimizer)

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self.inner.load_full_optimizer_state(optimizer, state)

    def parameter_groups(self, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        return self.inner.parameter_groups(optimizer)

    def local_gradients(self, parameters: Sequence[torch.Tensor]) -> list[LocalGradient]:
        return self.inner.local_gradients(parameters)

    def share_random_states(self) -> bool:
        return self.inner.share_random_states()

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self.inner.stepping_optimizer(optimizer)

    def free_gathered_weights(self) -> bool:
        return self.inner.free_gathered_weights()

    def keeps_buffers_equal(self, model: nn.Module) -> bool:
        return self.inner.keeps_buffers_equal(model)

    def full_shape(self, parameter: torch.Tensor) -> torch.Size:
        return self.inner.full_shape(parameter)

    def release(self) -> None:
        self.inner.release()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self.inner.unwrap(model)
