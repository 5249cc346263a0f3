"""DDP whose ranks share out the optimizer's state: ZeRO stage 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.base.errors import UsageError
from echelon.distributed.ddp.sparse_gradients import refuse_to_join_sparse
from echelon.engines.base import Engine, Prepared
from echelon.engines.bitwise.tree_sum import ReplicatedUpdate
from echelon.engines.ddp import DDPEngine
from echelon.engines.gather_optimizer_state import gather_parts
from echelon.engines.join_uneven_inputs import join_sharded
from echelon.engines.repoint import follow
from echelon.engines.sharded_optimizer import ShardedOptimizer
from echelon.engines.stepper import load_state, plain_parameters, state_of
from echelon.world.world import World

__all__ = ["Zero1Engine"]

_CAPABILITIES = Capabilities(name="zero1", replicates=True, shards_optimizer_state=True, sums_shards=True)


class Zero1Engine(Engine):
    """Every rank holds the model; each keeps the optimizer state of a part of the parameters, and sends these to all.

    The numbers are those of ddp, bit for bit.

    Source: torch.nn.parallel.DistributedDataParallel and torch.distributed.optim.ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        world: World,
        *,
        scaler: torch.amp.GradScaler | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._ddp = DDPEngine(world, scaler=scaler, options=options)
        self._again = partial(type(self), world, scaler=scaler, options=options)
        # By the optimizer that was given: a scheduler of it may be prepared later.
        self._sharded: dict[Optimizer, ShardedOptimizer] = {}
        self._is_stepping = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Without models and optimizers, which it knows by their identity: a copy has prepared nothing.
        return self._again, ()

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> Zero1Engine:
        """See ``Engine``; ``options`` are those of DistributedDataParallel."""
        return cls(world, scaler=scaler, options=options)

    @property
    def capabilities(self) -> Capabilities:
        """See ``Engine``."""
        return _CAPABILITIES

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """As ddp."""
        return self._ddp.batch_axes

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Wrap the models as ddp does; give each optimizer back as one whose state is shared out.

        Collective: every rank, with the same objects in the same order.

        Raises:
            UsageError: the state of an optimizer cannot be shared out.
        """
        prepared = self._ddp.prepare(models, optimizers, schedulers)
        for optimizer in prepared.optimizers:
            self._sharded[optimizer] = ShardedOptimizer(optimizer)
        for scheduler in prepared.schedulers:
            for old, new in self._sharded.items():
                follow(scheduler, old=old, new=new)
        sharded = tuple(self._sharded[optimizer] for optimizer in prepared.optimizers)
        return Prepared(models=prepared.models, optimizers=sharded, schedulers=prepared.schedulers)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """As ddp."""
        return self._ddp.no_sync(model)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """As ddp."""
        return self._ddp.sync_next_backward(model)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """See ``Engine``; a rank that has ended steps its part with the others."""
        wrappers = [model for model in models if isinstance(model, DistributedDataParallel)]
        for wrapper in wrappers:
            refuse_to_join_sparse(wrapper.module)
        owned = {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}
        optimizers = [
            optimizer
            for optimizer in self._sharded.values()
            if any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"])
        ]
        return join_sharded(wrappers, optimizers, note=self._note_own_step) if wrappers else nullcontext()

    def _note_own_step(self, is_stepping: bool) -> None:
        self._is_stepping = is_stepping

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """As ddp."""
        self._ddp.backward(loss, model, **options)

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """As ddp."""
        self._ddp.backward_zeros(loss, parameters, **options)

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """See ``Engine``.

        Collective: every rank sends the parameters that it has stepped.

        Raises:
            UsageError: ``unsynced``; each rank would step its part by its own gradients, and nobody by all of them.
        """
        if unsynced:
            raise UsageError(
                "the engine zero1 cannot step with the gradients of one rank (LocalSGD, no_sync(unsynced=True)): no rank "
                "has the whole optimizer state",
                do="use the engine ddp for that",
            )
        return self._ddp.step(optimizer, closure=closure)

    @property
    def steps_by_itself(self) -> bool:
        """See ``Engine``."""
        return self._is_stepping

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """As ddp."""
        return self._ddp.reduce_gradients(optimizer)

    def settle(self) -> None:
        """As ddp."""
        self._ddp.settle()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """As ddp."""
        self._ddp.zero_grad(optimizer, set_to_none=set_to_none)

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """As ddp."""
        self._ddp.unscale(optimizer, unsynced=unsynced)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """As ddp: every rank has all gradients."""
        return self._ddp.clip_grad_norm(parameters, max_norm, norm_type, unsynced=unsynced)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """As ddp."""
        self._ddp.clip_grad_value(parameters, clip_value, unsynced=unsynced)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """As ddp."""
        self._ddp.finish_gradients(model, factor)

    def reduced(self, model: nn.Module) -> bool:
        """As ddp."""
        return self._ddp.reduced(model)

    def open_shards(self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]]) -> ReplicatedUpdate:
        """As ddp."""
        return self._ddp.open_shards(num_shards, parameters)

    def sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """See ``Engine``: the whole model, and of the optimizers what this rank keeps."""
        return state_of(self.unwrap(model), optimizers)

    def load_sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """See ``Engine``.

        Raises:
            UsageError: ``state`` is of another rank, or of another number of ranks.
        """
        names = {id(parameter): name for name, parameter in plain_parameters(self.unwrap(model))}
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            assert isinstance(optimizer, ShardedOptimizer), type(optimizer)
            own = {names[id(parameter)] for group in optimizer.optim.param_groups for parameter in group["params"]}
            others = sorted(set(saved["state"]) - own)
            if others:
                raise UsageError(
                    f"the part of the optimizer's state has {', '.join(others[:3])}, which another rank keeps",
                    do="load on as many ranks as it was saved on, each its own part; or load the whole state",
                )
        load_state(self.unwrap(model), optimizers, state)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """As ddp: every rank has it."""
        return self._ddp.full_state_dict(model)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """See ``Engine``; the tensors are copies, on the CPU."""
        assert isinstance(optimizer, ShardedOptimizer), type(optimizer)
        own = optimizer.own_state()
        state = gather_parts(own["state"])
        return None if state is None else {**own, "state": state}

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """See ``Engine``; each rank takes its part."""
        optimizer.load_state_dict(dict(state))

    def release(self) -> None:
        """See ``Engine``."""
        self._ddp.release()
        self._sharded.clear()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """As ddp."""
        return self._ddp.unwrap(model)
