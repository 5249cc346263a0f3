"""The ``ddp`` engine, the default for multiple ranks, which adds the step guard to torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed.ddp.replica import Replica, average_gradients
from echelon.distributed.ddp.sparse_gradients import copy_sparse_gradients, refuse_to_join_sparse
from echelon.distributed.ddp.unused_parameters_warning import silence_unused_parameters_warning
from echelon.engines.base import LocalGradient, Prepared
from echelon.engines.bitwise.tree_sum import ShardedUpdate
from echelon.engines.broadcast import broadcast_model
from echelon.engines.comm_hooks import register_comm_hook
from echelon.engines.delegating_engine import DelegatingEngine
from echelon.engines.output_hooks import OutputFlattener
from echelon.engines.quantized_weights import wrapped_tensors
from echelon.engines.single import SingleEngine
from echelon.engines.stepper import zero_backward
from echelon.world.world import World

_CAPABILITIES = Capabilities(name="ddp", replicates=True, sums_shards=True)


class DDPEngine(DelegatingEngine):
    """Every rank holds the whole model; the backward pass averages gradients across ranks.

    Source: torch.nn.parallel.DistributedDataParallel.
    """

    def __init__(
        self,
        world: World,
        *,
        scaler: torch.amp.GradScaler | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        of_one_rank = SingleEngine(world, scaler=scaler)
        super().__init__(of_one_rank)
        self._world = world
        self._stepper = of_one_rank.stepper
        self._options = dict(options or {})
        self._replicas: dict[int, Replica] = {}  # by the id of the wrapper, which the replica keeps alive
        self._frozen: list[_Frozen] = []
        self._optimizers: list[ref[Optimizer]] = []  # in the order of prepare, the same on every rank
        # For each optimizer, the cache key and the parameters that no replica holds.
        self._strays: WeakKeyDictionary[Optimizer, tuple[list[int], list[torch.Tensor]]] = WeakKeyDictionary()
        self._shared: dict[int, torch.Tensor] = {}  # strays that were broadcast to all ranks, by id
        self._warned = False
        self._warned_of_assigned = False
        self._reduces = True  # False after build_sharded_update, which reduces gradients itself

    def __reduce__(self) -> tuple[Any, ...]:
        # Models are identified by id, so a copy starts without prepared models.
        return partial(type(self), scaler=self._stepper.scaler, options=self._options), (self._world,)

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> DDPEngine:
        return cls(world, scaler=scaler, options=options)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Wrap each model that has trainable parameters (DDP broadcasts rank zero's weights), and return others unchanged."""
        wrapped = tuple(self._wrap(model) for model in models)
        self._optimizers += map(ref, optimizers)
        return Prepared(models=wrapped, optimizers=tuple(optimizers), schedulers=tuple(schedulers))

    def _wrap(self, model: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            self._frozen.append(_Frozen(model, self._share_strays))
            return model  # DDP rejects modules without trainable parameters
        device = self._world.device
        on_device = all(p.device.type == device.type for p in model.parameters())
        ids = [device.index] if device.type != "cpu" and on_device else None
        options = dict(self._options)
        hook, outer = (str(options.pop(name, "no")) for name in ("comm_hook", "comm_wrapper"))
        state_options = options.pop("comm_state_option", None)
        copy_sparse_gradients(model)
        if any(map(wrapped_tensors, model.parameters())):
            options["init_sync"] = False  # DDP cannot broadcast them
            broadcast_model(model, device)
        wrapper = DistributedDataParallel(model, device_ids=ids, **options)
        register_comm_hook(wrapper, hook=hook, wrapper=outer, state_options=state_options)
        wrapper.require_backward_grad_sync = self._reduces
        wrapper.require_forward_param_sync = self._reduces  # no buffer may depend on a rank's data
        hooks: Sequence[Any] = ()
        if wrapper.find_unused_parameters or wrapper.static_graph:
            where = "DistributedDataParallelKwargs(find_unused_parameters=True), or static_graph=True"
            hooks = OutputFlattener(wrapper, wrapper.module, where=where).hooks
            if wrapper.find_unused_parameters and self._world.rank > 0:
                silence_unused_parameters_warning(self._world.device)  # torch would repeat it on every rank
        self._replicas[id(wrapper)] = Replica(wrapper, reduces=self._reduces, hooks=hooks)
        self._strays.clear()
        return wrapper

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See ``Engine.no_sync``. With ``static_graph``, torch records the graph in the first passes, which it must reduce."""
        replica = self._replicas.get(id(model))
        if replica is None or (replica.wrapper.static_graph and replica.num_reduced < 1):
            return nullcontext()
        return replica.wrapper.no_sync()

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        replica = self._replicas.get(id(model))
        return nullcontext() if replica is None else replica.sync_next_backward()

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        wrappers: list[Any] = [self._replicas[id(model)].wrapper for model in models if id(model) in self._replicas]
        for wrapper in wrappers:
            refuse_to_join_sparse(wrapper.module)
        return torch.distributed.algorithms.join.Join(wrappers) if wrappers else nullcontext()

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        for replica in self._replicas.values():
            replica.prepare_for_backward([loss])
        super().backward(loss, **options)
        for replica in self._replicas.values():
            replica.update_reduced()

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        with zero_backward(parameters):
            self.backward(loss, **options)
        # e.g. torch.zeros((), requires_grad=True), while the other ranks' losses reach the model
        if loss.grad_fn is None:
            for replica in self._replicas.values():
                replica.contribute_zeros()

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        if not unsynced:
            self._guard_optimizer(optimizer)
        try:
            return super().step(optimizer, closure=closure)
        finally:
            for replica in self._replicas.values():
                replica.end_step()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        super().zero_grad(optimizer, set_to_none=set_to_none)
        if any(replica.is_dirty() for replica in self._replicas.values()):
            cleared = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for replica in self._replicas.values():
                if all(id(p) in cleared for p in replica.parameters):
                    replica.mark_reduced()

    def drop_update(self) -> None:
        super().drop_update()
        for replica in self._replicas.values():
            replica.update_reduced()
            replica.mark_reduced()

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        if not unsynced:
            self._guard_optimizer(optimizer)
        self._stepper.unscale(optimizer, is_local=unsynced)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        parameters = list(parameters)
        if not unsynced:
            self._guard(parameters)
        return super().clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        parameters = list(parameters)
        if not unsynced:
            self._guard(parameters)
        super().clip_grad_value(parameters, clip_value)

    def reduced(self, model: nn.Module) -> bool:
        replica = self._replicas.get(id(model))
        return replica is None or not replica.is_dirty()

    def build_sharded_update(
        self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]], *, num_chunks: int = 1
    ) -> ShardedUpdate:
        self._reduces = False
        return super().build_sharded_update(num_shards, parameters, num_chunks=num_chunks)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        return super().full_state_dict(self.unwrap(model))

    def local_gradients(self, parameters: Sequence[torch.Tensor]) -> list[LocalGradient]:
        """See ``Engine.local_gradients``. A communication hook may change gradients on purpose, so they are not comparable."""
        hooked = {
            id(parameter)
            for replica in self._replicas.values()
            if replica.wrapper._comm_hooks or replica.wrapper.mixed_precision is not None
            for parameter in replica.parameters
        }
        return [LocalGradient(None if id(parameter) in hooked else parameter) for parameter in parameters]

    def keeps_buffers_equal(self, model: nn.Module) -> bool:
        replica = self._replicas.get(id(model))
        if replica is None:
            return False
        attributes = vars(replica.wrapper)  # since torch 2.13, forward_sync_buffers replaces broadcast_buffers
        return not self._reduces or bool(attributes.get("forward_sync_buffers", attributes.get("broadcast_buffers")))

    def release(self) -> None:
        for replica in self._replicas.values():
            replica.release()
        self._replicas.clear()
        for model in self._frozen:
            model.hook.remove()
        self._frozen.clear()
        self._optimizers.clear()
        self._strays.clear()
        self._shared.clear()

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        return inner

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for replica in self._replicas.values():
            replica.require_finished_reduction()
            replica.sync_parameters_before_step()
        is_reduced = any(replica.is_dirty() for replica in self._replicas.values()) and self._reduce(parameters)
        self._average_strays(optimizer, parameters)
        return is_reduced

    def _guard_optimizer(self, optimizer: Optimizer) -> None:
        """Average the optimizer's unreduced gradients."""
        if self.reduce_gradients(optimizer):
            self._warn()

    def _strays_of(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the optimizer's parameters that no replica holds."""
        # Cached until models or parameters change, to avoid a search in every step.
        looked_up = [*(replica.version for replica in self._replicas.values()), *map(id, parameters)]
        known = self._strays.get(optimizer)
        if known is None or known[0] != looked_up:
            owned = {id(p) for replica in self._replicas.values() for p in replica.wrapper.module.parameters()}
            known = self._strays[optimizer] = (looked_up, [p for p in parameters if id(p) not in owned])
        return known[1]

    def _average_strays(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        """Average the gradients of the optimizer's ``parameters`` that no replica holds. Collective if there are any."""
        strays = [p for p in self._strays_of(optimizer, parameters) if p.requires_grad]
        if strays:
            self._share_strays(strays)
            if self._reduces:
                average_gradients(strays)

    def _guard(self, parameters: Iterable[torch.Tensor]) -> None:
        for replica in self._replicas.values():
            replica.require_finished_reduction()
        for optimizer in (living for reference in self._optimizers if (living := reference()) is not None):
            self._average_strays(optimizer, [p for group in optimizer.param_groups for p in group["params"]])
        if any(replica.is_dirty() for replica in self._replicas.values()) and self._reduce(parameters):
            self._warn()

    def _reduce(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Average the gradients of each dirty replica that holds any of ``parameters``; return whether there were any.

        Every rank runs the same program and therefore has the same dirty replicas. Averaging gradients that DDP has already
        averaged does not change them, so a mixture of synchronized and local contributions is handled correctly.

        Collective if there are such replicas.
        """
        ids = set(map(id, parameters))
        is_reduced = False
        for replica in self._replicas.values():
            if replica.is_dirty() and any(id(p) in ids for p in replica.parameters):
                if replica.is_assigned():
                    self._average_assigned(replica)
                    continue
                average_gradients(replica.parameters)
                replica.mark_reduced()
                is_reduced = True
        return is_reduced

    def _average_assigned(self, replica: Replica) -> None:
        """Average gradients that no backward pass computed; warn if they differed between ranks. Collective: call on every rank."""
        copies = replica.copy_assigned()
        average_gradients(replica.parameters)
        replica.mark_reduced()
        if self._warned_of_assigned or not replica.have_changed(copies):
            return
        self._warned_of_assigned = True
        warn(
            _(
                "the gradients for this step() were assigned (with torch.autograd.grad?), not computed by a backward "
                "pass, so DDP did not average them across ranks. echelon averages them now, before the step. Call "
                "accelerator.backward(loss), which averages them during the backward pass, or "
                "accelerator.reduce(gradient, 'mean') before you clip or change them."
            )
        )

    def _share_strays(self, strays: list[torch.Tensor]) -> None:
        former = {id(p) for replica in self._replicas.values() for p in replica.former}
        new = [p for p in strays if id(p) not in self._shared and id(p) not in former]
        if not new:
            return
        self._shared.update((id(p), p) for p in new)
        frozen = {id(p) for model in self._frozen for p in model.parameters}
        if any(id(p) in frozen for p in new):
            warn(
                _(
                    "{num_new} parameter(s) of this optimizer belong to a model that was fully frozen when it was "
                    "prepared, so DDP does not wrap it. echelon averages their gradients across ranks at each step. To "
                    "overlap this with the backward pass, unfreeze a parameter before you prepare the model.",
                    num_new=len(new),
                )
            )
        else:
            warn(
                _(
                    "{num_new} parameter(s) of this optimizer do not belong to a prepared model. echelon copies their "
                    "values from rank zero before the first step and averages their gradients across ranks at each "
                    "step. To start all ranks with the same values and overlap averaging with the backward pass, "
                    "prepare the model with its optimizer: model, optimizer = accelerator.prepare(model, optimizer)",
                    num_new=len(new),
                )
            )
        for parameter in new:
            dist.broadcast(parameter.data, src=0)  # the ranks may have initialized them differently

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                _(
                    "the last backward pass did not synchronize gradients across ranks, because it ran inside "
                    "no_sync() or followed a forward pass through the unprepared module. echelon will average the "
                    "gradients now, which is correct but slower. Call the prepared model, and run the last forward and backward pass "
                    "before step() outside no_sync()."
                )
            )


class _Frozen:
    """A model that was not wrapped, because it was fully frozen. Parameters unfrozen later are broadcast before use."""

    def __init__(self, model: nn.Module, share: Callable[[list[torch.Tensor]], None]) -> None:
        self.parameters = list(model.parameters())
        self._share = share
        self.hook = model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            trained: list[torch.Tensor] = [p for p in self.parameters if p.requires_grad]
            if trained:
                self._share(trained)
