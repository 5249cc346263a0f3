"""The ``zero1`` engine, which is DDP with sharded optimizer state (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.base.errors import UsageError
from echelon.distributed.ddp.sparse_gradients import refuse_to_join_sparse
from echelon.engines.base import Prepared
from echelon.engines.ddp import DDPEngine
from echelon.engines.delegating_engine import DelegatingEngine
from echelon.engines.gather_state import gather_state
from echelon.engines.join_uneven_inputs import join_sharded
from echelon.engines.optimizer_copy import why_not_copied
from echelon.engines.optimizer_probe import ProbeError, probe_optimizer, warn_of_assumption
from echelon.engines.sharded_optimizer import ShardedOptimizer, unshardable
from echelon.engines.stepper import repoint_scheduler
from echelon.world.world import World

_CAPABILITIES = Capabilities(name="zero1", replicates=True, shards_optimizer_state=True, sums_shards=True)


class Zero1Engine(DelegatingEngine):
    """Every rank holds the whole model, steps part of its parameters, and holds the optimizer state for that part.

    After a step, each rank broadcasts its part of the parameters. The results are bit-identical to the ddp engine's.

    Source: torch.nn.parallel.DistributedDataParallel and torch.distributed.optim.ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        world: World,
        *,
        scaler: torch.amp.GradScaler | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(DDPEngine(world, scaler=scaler, options=options))
        self._world = world
        self._new = partial(type(self), world, scaler=scaler, options=options)
        # By the user's optimizer, because its schedulers may be prepared later.
        self._sharded: dict[Optimizer, ShardedOptimizer] = {}
        self._is_shadow_step = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Models and optimizers are identified by id, so a copy starts without prepared objects.
        return self._new, ()

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> Zero1Engine:
        return cls(world, scaler=scaler, options=options)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Wrap the models like the ddp engine, and replace each optimizer with one that shards its state.

        Raises:
            UsageError: an optimizer's state cannot be sharded.
        """
        for optimizer in optimizers if self._world.world_size > 1 else ():
            _require_independent(optimizer)
        prepared = super().prepare(models, optimizers, schedulers)
        for optimizer in prepared.optimizers:
            self._sharded[optimizer] = ShardedOptimizer(optimizer)
        for scheduler in prepared.schedulers:
            for old, new in self._sharded.items():
                repoint_scheduler(scheduler, old=old, new=new)
        return replace(prepared, optimizers=tuple(self._sharded[optimizer] for optimizer in prepared.optimizers))

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """See ``Engine.join``. A rank that runs out of batches keeps stepping its part of the parameters."""
        wrappers = [model for model in models if isinstance(model, DistributedDataParallel)]
        for wrapper in wrappers:
            refuse_to_join_sparse(wrapper.module)
        owned = {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}
        optimizers = [
            optimizer
            for optimizer in self._sharded.values()
            if any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"])
        ]
        return join_sharded(wrappers, optimizers, on_step=self._set_shadow_step) if wrappers else nullcontext()

    @property
    def is_shadow_step(self) -> bool:
        return self._is_shadow_step

    def _set_shadow_step(self, is_stepping: bool) -> None:
        self._is_shadow_step = is_stepping

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """See ``Engine.step``.

        Collective: call on every rank; each broadcasts the parameters that it has stepped.

        Raises:
            UsageError: ``unsynced`` is True, so each rank would step its part with only its own local gradients.
        """
        if unsynced:
            raise UsageError(
                "the zero1 engine cannot step with one rank's gradients (LocalSGD, no_sync(unsynced=True)), because no rank "
                "has the full optimizer state",
                do="use the ddp engine",
            )
        return super().step(optimizer, closure=closure)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """See ``Engine.full_optimizer_state``. The returned tensors are copies on the CPU."""
        assert isinstance(optimizer, ShardedOptimizer), type(optimizer)
        own = optimizer.own_state()
        others = {key: value for key, value in own["state"].items() if not isinstance(key, int)}  # of no parameter
        state = gather_state({key: value for key, value in own["state"].items() if key not in others})
        return None if state is None else {**own, "state": {**others, **state}}

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """See ``Engine.stepping_optimizer``. This rank's part of the parameters is stepped by an optimizer inside."""
        return optimizer.optim if isinstance(optimizer, ShardedOptimizer) else optimizer

    def release(self) -> None:
        super().release()
        self._sharded.clear()


def _require_independent(optimizer: Optimizer) -> None:
    """Raise UsageError if the update of a parameter depends on other parameters, which are on other ranks."""
    if why_not_copied(optimizer) is not None:
        return  # ShardedOptimizer rejects it
    try:
        behavior = probe_optimizer(optimizer, dims=())
    except ProbeError as error:
        warn_of_assumption(optimizer, error, engine="zero1")
        return
    if not behavior.by_tensor:
        raise unshardable(optimizer, "a step on two parameters differs from a step on each of them")
