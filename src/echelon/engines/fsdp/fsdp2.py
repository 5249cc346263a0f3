"""Parameters, gradients and optimizer states in shards: ZeRO 2 and 3 by torch's fully_shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from echelon.base.capabilities import Capabilities
from echelon.base.errors import ConfigError, UsageError
from echelon.base.versions import torch_version
from echelon.base.warnings import user_line, warn
from echelon.distributed.ddp.replica import Structure, average_gradients, require_same_parameters
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.distributed.tree import map_tensors
from echelon.engines.base import Engine, Prepared
from echelon.engines.bitwise.grad_norm import clip_by_rows
from echelon.engines.bitwise.sharded_tree_sum import ShardedTreeSum
from echelon.engines.bitwise.tree_sum import ReplicatedUpdate, ShardedUpdate
from echelon.engines.fsdp.meta_device import fill_from_rank_zero, refuse_without_values, take_values
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.fsdp.shard_access import take_whole_state_dicts, watch_numbers_of_shards
from echelon.engines.fsdp.wrap_policy import checkpoint_activations, ignored_in, modules_to_shard
from echelon.engines.output_hooks import show_outputs_to_hooks
from echelon.engines.shards import from_parts, fsdp_groups, local_parts, part_like, parts_of, whole
from echelon.engines.stepper import Stepper, load_state, plain_state_dict, state_of, zeros_for
from echelon.world.world import World

__all__ = ["FSDP2Engine"]

_CAPABILITIES = Capabilities(
    name="fsdp2",
    distributed_type="FSDP",
    replicates=False,
    shards_parameters=True,
    shards_optimizer_state=True,
    replaces_parameters=True,
    joins_uneven=False,
    sums_shards=True,
)


class FSDP2Engine(Engine):
    """Each rank holds a part of every parameter; a block's parameters are whole while it computes.

    Stage 3: ``reshard_after_forward=True``; stage 2: False (parameters stay whole from forward to backward); an integer:
    in between; ``replicas`` > 1: shards within groups of ranks that hold the same (hybrid).

    Source: torch.distributed.fsdp.fully_shard; Zhao et al., "PyTorch FSDP", 2023.
    """

    def __init__(
        self, world: World, *, scaler: torch.amp.GradScaler | None = None, options: ShardingOptions | None = None
    ) -> None:
        self._world = world
        self._options = options or ShardingOptions()
        self._stepper = Stepper(scaler)
        self._mesh: DeviceMesh | None = None
        self._roots: dict[int, FSDPModule] = {}  # by id, which the value keeps alive
        self._strays: dict[int, _Strays] = {}  # by root
        self._hooks: list[Any] = []  # on the modules
        # Models and optimizers may be prepared in calls of their own, in any order.
        self._replaced = WeakIdKeyDictionary()  # whole parameters of before prepare -> sharded ones
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._warned = False
        self._averages: bool | None = None  # does the backend divide sums for ReduceOp.AVG; None: not tried yet
        self._update: ShardedUpdate | None = None  # who sums the gradients in the place of torch (open_shards)

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> FSDP2Engine:
        """See ``Engine``; of ``options`` the entry ``sharding`` counts."""
        return cls(world, scaler=scaler, options=options.get("sharding"))

    @property
    def capabilities(self) -> Capabilities:
        """See ``Engine``."""
        return _CAPABILITIES

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Every rank reads its own part of the batch, whichever shards it holds."""
        return ("dp_replicate", "dp_shard") if self._options.replicas > 1 else ("dp_shard",)

    # ---- prepare -----------------------------------------------------------------------------------------------------

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Shard each model in place, and give optimizers that were made before the sharded parameters, by name.

        Rank zero's weights are sent to all first; the other ranks may have the model on the meta device. What every rank has
        there stays without values, until ``load_checkpoint_in_model``. A model without trainable parameters is sharded, too.

        Collective: every rank, with the same objects in the same order.

        Raises:
            UsageError: an optimizer that cannot step parts of parameters.
        """
        for optimizer in optimizers:
            if (
                type(optimizer).__module__.startswith("torch.optim")
                and type(optimizer).__name__ in _OF_WHOLE_PARAMETERS
            ):
                raise _no_optimizer_of_shards(optimizer, "it looks at a parameter, or at all of them, as a whole")
        before = [dict(model.named_parameters()) for model in models]
        for model in models:
            self._shard(model)
        for old, model in zip(before, models):
            after = dict(model.named_parameters())
            for name, parameter in old.items():
                if after[name] is not parameter:
                    self._replaced[parameter] = after[name]
        self._optimizers.update(optimizers)
        for optimizer in list(self._optimizers):
            _repoint(optimizer, self._replaced)
        return Prepared(models=tuple(models), optimizers=tuple(optimizers), schedulers=tuple(schedulers))

    def _shard(self, model: nn.Module) -> None:
        options = self._options
        if isinstance(model, FSDPModule):  # by the user's own fully_shard
            self._adopt(model)
            return
        device = self._world.device
        left_whole = set(map(id, ignored_in(model, options.ignored)))
        _refuse_sparse(model, left_whole)
        # A number has no dim along which it could be cut.
        ignored = [name for name, p in model.named_parameters() if id(p) in left_whole or p.dim() == 0]
        values = take_values(model, only_rank_zero=options.ram_efficient_loading)
        if values is None:
            _share_from_rank_zero(model, device)
        blocks = modules_to_shard(model, options)
        if options.activation_checkpointing:
            checkpoint_activations(blocks)
        settings: dict[str, Any] = {
            "mesh": self._device_mesh(),
            "reshard_after_forward": options.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=options.param_dtype,
                reduce_dtype=options.reduce_dtype,
                output_dtype=options.output_dtype,
                cast_forward_inputs=options.cast_forward_inputs,
            ),
            "offload_policy": self._offload_policy(),
        }
        if ignored:
            settings["ignored_params"] = {model.get_parameter(name) for name in ignored}
        for block in (*blocks, model):
            with show_outputs_to_hooks(block):
                fully_shard(block, **settings)
        if values is not None:
            fill_from_rank_zero(model, values, device=device)
            if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
                model.register_forward_pre_hook(refuse_without_values, prepend=True)
        self._adopt(model)

    def _adopt(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        _require_one_dtype(model)
        self._average_by_hand(model)
        self._roots[id(model)] = model
        model.register_forward_hook(_reshard_after_evaluation)
        self._strays[id(model)] = _Strays(model)
        self._hooks += take_whole_state_dicts(model)
        watch_numbers_of_shards(self)
        if isinstance(self._update, ShardedTreeSum):
            self._update.attach(model)

    def _average_by_hand(self, model: nn.Module) -> None:
        """Where the backend does not divide the sums of gradients, let torch do it. Collective, on CPUs.

        Until torch 2.8 gloo takes ``ReduceOp.AVG`` for a sum and says nothing: the gradients are ``world_size`` times too large.
        """
        if self._world.device.type != "cpu" or self._world.world_size == 1:
            return
        if self._averages is None:
            self._averages = _backend_averages(self._world)
        if self._averages:
            return
        for module in model.modules():
            if isinstance(module, FSDPModule):
                if not hasattr(module, "set_force_sum_reduction_for_comms"):
                    raise UsageError(
                        f"the fully_shard of torch {torch_version} takes the sum of the ranks' gradients on CPUs for their mean",
                        where="engine='fsdp2', on CPUs",
                        do="install torch 2.8 or newer, or take engine='zero1'",
                    )
                module.set_force_sum_reduction_for_comms(True)

    def _device_mesh(self) -> DeviceMesh:
        """Make the mesh once. Collective."""
        if self._mesh is None:
            world_size, replicas = self._world.world_size, self._options.replicas
            if world_size % replicas:
                raise ConfigError(
                    f"{world_size} ranks cannot be {replicas} groups of equal size",
                    where="dp_replicate",
                    do="choose a divisor of the number of ranks",
                )
            shape = (replicas, world_size // replicas) if replicas > 1 else (world_size,)
            self._mesh = init_device_mesh(self._world.device.type, shape, mesh_dim_names=self.batch_axes)
        return self._mesh

    def _offload_policy(self) -> OffloadPolicy:
        if not self._options.cpu_offload:
            return OffloadPolicy()
        pin = self._options.pin_memory
        # Pinning asks for an accelerator, also where there is none.
        return CPUOffloadPolicy(pin_memory=self._world.device.type != "cpu" if pin is None else pin)

    # ---- backward ----------------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See ``Engine``: whole gradients are kept and added up; nothing is sent. Source: set_requires_gradient_sync.

        Of shards (``open_shards``) the gradients are sent in each micro-step.
        """
        if self._update is not None:
            return nullcontext()
        return _syncing(self._roots.get(id(model)), sync=False)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See ``Engine``."""
        return _syncing(self._roots.get(id(model)), sync=True)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return an empty context: each layer of the other ranks needs this one's shard, so ranks cannot run out apart.

        ``capabilities.joins_uneven`` says so, and uneven loaders end in an error that names the rank that ended first.
        """
        return nullcontext()

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """See ``Engine``.

        Raises:
            UsageError: a second derivative, for which torch does not gather the parameters again.
        """
        try:
            self._stepper.scale(loss).backward(**options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "setStorage" not in str(error):
                raise
            raise UsageError(
                "the backward pass needs the whole parameters of a layer that has given them back: the loss holds a gradient "
                "(torch.autograd.grad(..., create_graph=True)), and fully_shard makes no second derivatives",
                where="backward(), engine fsdp2",
                do="use engine='ddp' or 'zero1' for a gradient penalty, or take the difference of two forward passes in its place",
            ) from error

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """See ``Engine``: what autograd reaches are the whole parameters inside fully_shard, not the shards."""
        if loss.grad_fn is None:
            raise UsageError(
                "the loss of a rank without items does not depend on the model, and the other ranks' do: their layers "
                "wait for this rank's part in the backward pass",
                where="backward(), engine fsdp2",
                do="compute the loss from the model's outputs on every rank",
            )
        wanted = {id(p) for p in parameters}
        inner = [
            part._unsharded_param
            for root in self._roots.values()
            for part in _fsdp_params(root)
            if id(part.sharded_param) in wanted and hasattr(part, "_unsharded_param")
        ]
        plain = [p for strays in self._strays.values() for p in strays.parameters() if id(p) in wanted]
        with zeros_for([*inner, *plain]):
            self.backward(loss, **options)

    # ---- step --------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """See ``Engine``."""
        if not unsynced:
            self._guard()
        self._reshard(optimizer)
        try:
            return self._stepper.step(optimizer, closure)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "DTensor" not in str(error) and "DeviceMesh" not in str(error):
                raise
            raise _no_optimizer_of_shards(optimizer, f"torch says {str(error).splitlines()[0]!r}") from error

    def _reshard(self, optimizer: Optimizer) -> None:
        """Free the whole parameters that a forward pass without a backward pass has left: they keep the old values."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for root in self._roots.values():
            if any(id(part.sharded_param) in held for part in _fsdp_params(root)):
                _reshard(root)

    def replaced_parameters(self) -> Sequence[torch.Tensor]:
        """See ``Engine``: those that were whole."""
        return list(self._replaced.keys())  # type: ignore[no-untyped-call]

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """See ``Engine``.

        Raises:
            UsageError: ``optimizer`` holds parameters of before ``prepare``, which get no gradients any more.
        """
        replaced = set(map(id, self.replaced_parameters()))
        num_replaced = sum(id(p) in replaced for group in optimizer.param_groups for p in group["params"])
        if num_replaced:
            raise UsageError(
                f"{type(optimizer).__name__} holds {num_replaced} parameters of before prepare(), whose place sharded ones have "
                "taken: it would change nothing",
                where=f"step() at {user_line()}, engine fsdp2",
                do="write model, optimizer = accelerator.prepare(model, optimizer), in one call, or make the optimizer of "
                "model.parameters() after prepare()",
            )
        self._reshard(optimizer)
        return self._reduce()

    def settle(self) -> None:
        """See ``Engine``."""
        self._stepper.settle()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """See ``Engine``; what was not reduced is gone with the gradients."""
        optimizer.zero_grad(set_to_none=set_to_none)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for root in self._roots.values():
            for part in _fsdp_params(root):
                if id(part.sharded_param) in held and _is_unreduced(part):
                    part._unsharded_param.grad = None
                    if part.unsharded_accumulated_grad is not None:  # from torch 2.15 on that is the same gradient
                        part.unsharded_accumulated_grad = None

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """See ``Engine``."""
        if not unsynced:
            self._guard()
        self._stepper.unscale(optimizer)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """See ``Engine``: the norm of the shards of all ranks together.

        Collective: one small reduction.
        """
        if not unsynced:
            self._guard()
        if self._update is not None:
            return clip_by_rows(parameters, max_norm, norm_type)
        gradients = [p.grad for p in parameters if p.grad is not None]
        sharded = [g for g in gradients if isinstance(g, DTensor)]
        plain = [g for g in gradients if not isinstance(g, DTensor)]
        norm = _total_norm(sharded, plain, float(norm_type), self._mesh, self._world.device)
        if gradients:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in local_parts(gradients):
                gradient.mul_(scale.to(gradient.device))
        return norm

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """See ``Engine``. Source: torch.nn.utils.clip_grad_value_."""
        if not unsynced:
            self._guard()
        for gradient in local_parts([p.grad for p in parameters if p.grad is not None]):
            gradient.clamp_(min=-clip_value, max=clip_value)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """See ``Engine``."""
        gradients = local_parts([p.grad for p in model.parameters() if p.grad is not None])
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def reduced(self, model: nn.Module) -> bool:
        """See ``Engine``."""
        root = self._roots.get(id(model))
        return root is None or not any(_is_unreduced(part) for part in _fsdp_params(root))

    def _guard(self) -> None:
        if self._reduce():
            self._warn()

    def _reduce(self) -> bool:
        """Reduce what the other ranks have not seen: of an unsynchronised pass, and of parameters that torch leaves alone.

        Returns:
            Was a pass unsynchronised?

        Collective: when something is to be reduced.
        """
        if self._update is not None:
            return False
        is_reduced = False
        for key, root in self._roots.items():
            if not self.reduced(root):  # type: ignore[arg-type]
                is_reduced = True
                _reduce_now(root)
            average_gradients([p for p in self._strays[key].parameters() if p.requires_grad])
        return is_reduced

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "the last backward pass was not synchronised between the ranks (a step inside no_sync()): echelon reduces "
                "the gradients now, so the result is right, but slower. Step outside no_sync()."
            )

    def open_shards(self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]]) -> ShardedUpdate:
        """See ``Engine``.

        Raises:
            UsageError: shards within groups of ranks, or a torch that cannot.
        """
        if self._options.replicas > 1:
            raise UsageError(
                f"the engine fsdp2 sums the gradients of shards over all ranks, and here are {self._options.replicas} groups",
                where="parity='bitwise'",
                do="leave dp_replicate_size and the HYBRID sharding strategies out, or use parity='exact'",
            )
        kind = ShardedTreeSum if self._world.world_size > 1 else ReplicatedUpdate
        self._update = kind(
            lambda: self._as_sharded(parameters()),
            num_shards=num_shards,
            rank=self._world.rank,
            world_size=self._world.world_size,
        )
        return self._update

    def _as_sharded(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``parameters`` with sharded ones in the place of whole ones, each once and always in one order.

        Between forward and backward of modules that stay whole a model has whole parameters, and its optimizers sharded ones:
        gradients of another moment would be put to others.
        """
        sharded = {
            id(part._unsharded_param): part.sharded_param
            for root in self._roots.values()
            for group in fsdp_groups(root)
            for part in group.fsdp_params
            if hasattr(part, "_unsharded_param")  # torch makes it with the first pass
        }
        found = [sharded.get(id(parameter), parameter) for parameter in parameters]
        return list({id(parameter): parameter for parameter in found}.values())

    # ---- state -------------------------------------------------------------------------------------------------------

    def sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Return this rank's parts: each sharded tensor as ``{"shape", "offset", "values"}``."""
        parts: Mapping[str, Any] = map_tensors(parts_of, state_of(model, optimizers))
        return parts

    def load_sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """See ``Engine``: on ranks of the same number, that hold the same parts."""
        own = plain_state_dict(model)
        load_state(
            model,
            optimizers,
            {
                "model": {name: from_parts(value, own[name]) for name, value in state["model"].items()},
                "optimizers": [
                    {
                        **saved,
                        "state": {
                            name: {key: from_parts(value, own[name]) for key, value in entries.items()}
                            for name, entries in saved["state"].items()
                        },
                    }
                    for saved in state["optimizers"]
                ],
            },
        )

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the whole state dict on the host of rank zero, None elsewhere; one tensor is whole at a time.

        Collective: every rank.
        """
        refuse_without_values(model)
        keep = self._world.rank == 0
        found = {name: whole(value, keep=keep) for name, value in plain_state_dict(model).items()}
        return found if keep else None

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """See ``Engine``; on the host."""
        keep = self._world.rank == 0
        state = optimizer.state_dict()
        values = {
            number: {key: whole(value, keep=keep) for key, value in entries.items()}
            for number, entries in state["state"].items()
        }
        return {**state, "state": values} if keep else None

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """See ``Engine``: each rank keeps its part of every tensor."""
        owners = [p for group in optimizer.param_groups for p in group["params"]]
        parts = {
            number: {key: part_like(value, owners[number]) for key, value in entries.items()}
            for number, entries in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": parts})

    def release(self) -> None:
        """See ``Engine``."""
        self._roots.clear()
        self._replaced.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for strays in self._strays.values():
            strays.release()
        self._strays.clear()
        if isinstance(self._update, ShardedTreeSum):
            self._update.release()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return ``model``: fully_shard changes it in place."""
        return model


class _Strays:
    """The parameters of a model that torch neither shards nor reduces: those that it was to leave whole, and later ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure = Structure(model)
        self._known: list[nn.Parameter] = []
        self._look()
        self._hook = model.register_forward_pre_hook(self._before_forward, prepend=True)

    def parameters(self) -> list[nn.Parameter]:
        """Return them. Collective: after parameters were added to the model, or replaced."""
        self._follow()
        return self._known

    def release(self) -> None:
        """Take the hook off the model."""
        self._hook.remove()

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._follow()

    def _follow(self) -> None:
        """Give parameters that are new rank zero's values. Collective: where there are some."""
        if not self._structure.is_changed:
            return
        known = set(map(id, self._known))
        self._look()
        new = [p for p in self._known if id(p) not in known]
        self._structure.renew(self._model)
        if not new:
            return
        monitored_barrier("the first forward pass after the parameters of a prepared model changed")
        require_same_parameters(self._model)
        names = {id(p): name for name, p in self._model.named_parameters()}
        large = [names[id(p)] for p in new if p.dim()]
        if large:
            warn(
                f"{', '.join(large[:3])}{' and others' if len(large) > 3 else ''} came into the model after prepare(): "
                "fully_shard does not know it, so every rank holds it whole, and echelon averages its gradient over the ranks at each "
                "step. To shard it, too, change the model before prepare()"
            )
        for parameter in new:
            dist.broadcast(parameter.data, src=0)

    def _look(self) -> None:
        self._known = [p for p in self._model.parameters() if not isinstance(p, DTensor)]


@contextmanager
def _syncing(root: FSDPModule | None, *, sync: bool) -> Iterator[None]:
    """Let backward passes in the block reduce gradients, or keep them; afterwards they reduce."""
    if root is None:
        yield
        return
    root.set_requires_gradient_sync(sync)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


# LBFGS adds up products of one shard, and says nothing; the others end in torch's messages.
_OF_WHOLE_PARAMETERS = frozenset({"Adafactor", "LBFGS", "Muon", "Rprop"})


def _no_optimizer_of_shards(optimizer: Optimizer, why: str) -> UsageError:
    kind = type(optimizer).__name__
    return UsageError(
        f"{kind} cannot step sharded parameters: {why}",
        where="engine fsdp2",
        do=f"use AdamW, SGD or another optimizer that takes each number by itself, or keep {kind} and use "
        f"engine='{'ddp' if kind == 'LBFGS' else 'zero1'}'",
    )


def _require_one_dtype(root: FSDPModule) -> None:
    """Raise where a unit holds parameters of several dtypes, which torch refuses in the first forward pass, without a name.

    Raises:
        UsageError: one of each.
    """
    names = {id(p): name for name, p in root.named_parameters()}  # type: ignore[attr-defined]
    for group in fsdp_groups(root):
        by_dtype: dict[torch.dtype, torch.Tensor] = {}
        for parameter in (part.sharded_param for part in group.fsdp_params):
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, parameter)
        if len(by_dtype) > 1:
            found = " and ".join(f"{names.get(id(p), 'one')} ({dtype})" for dtype, p in list(by_dtype.items())[:2])
            raise UsageError(
                f"{found} would be sent together, and torch's fully_shard sends parameters of one dtype in a unit",
                where="prepare(), engine fsdp2",
                do="cast the model to one dtype, make the modules of one dtype units of their own (the wrap policy), leave them "
                "whole (ignored_modules), or use engine='ddp'",
            )


def _reshard_after_evaluation(root: nn.Module, _args: Any, _out: Any) -> None:
    """Free the whole parameters after a forward pass that no backward pass follows.

    ``reshard_after_forward=False`` keeps them until the backward pass. Without one they would stay, with the values of
    before the next step, and in the place of the shards: what is done to ``model.parameters()`` would be lost.
    """
    if not torch.is_grad_enabled():
        assert isinstance(root, FSDPModule)
        _reshard(root)


def _reshard(root: FSDPModule) -> None:
    for group in fsdp_groups(root):
        if group.is_unsharded:
            group.reshard()


def _fsdp_params(root: FSDPModule) -> Iterator[Any]:
    for group in fsdp_groups(root):
        yield from group.fsdp_params


def _backend_averages(world: World) -> bool:
    """Tell whether the default group's backend knows ``ReduceOp.AVG``. Collective."""
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its older name
    mean = torch.zeros(1, device=world.device)
    try:
        reduce_scatter(mean, torch.ones(world.world_size, device=world.device), op=dist.ReduceOp.AVG)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    except RuntimeError:  # that it does not is said by some versions
        return False
    return float(mean) == 1.0


def _is_unreduced(part: Any) -> bool:
    """Does a parameter of torch's hold a whole gradient, which the other ranks have not seen?"""
    own = getattr(part, "_unsharded_param", None)
    return own is not None and (part.unsharded_accumulated_grad is not None or own.grad is not None)


def _reduce_now(root: FSDPModule) -> None:
    """Reduce what backward passes without reduction have added up.

    Collective: every rank of the mesh.
    """
    root.set_requires_gradient_sync(True)
    groups = [g for g in fsdp_groups(root) if any(map(_is_unreduced, g.fsdp_params))]
    for group in reversed(groups):
        group.post_backward()
    for group in groups:
        group.finalize_backward()
        group._training_state = type(group._training_state).IDLE
        group.comm_ctx.__dict__.get("reduce_scatter_states", []).clear()


def _total_norm(
    sharded: Sequence[DTensor], plain: Sequence[torch.Tensor], p: float, mesh: DeviceMesh | None, device: torch.device
) -> torch.Tensor:
    """Return the norm of all gradients: shards of all ranks, and those that every rank has whole.

    Collective: where something is sharded.
    """
    is_max = math.isinf(p)
    parts = local_parts(sharded)
    own = _power_sum(parts, p, device)
    if sharded and mesh is not None:
        group = mesh.get_group(mesh.mesh_dim_names[-1]) if mesh.mesh_dim_names else mesh.get_group()
        dist.all_reduce(own, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    rest = _power_sum(plain, p, device)
    return torch.maximum(own, rest) if is_max else (own + rest) ** (1.0 / p)


def _power_sum(tensors: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Return the sum of the p-th powers (the largest size for p = inf), 0-d, at least in float32."""
    # The dtype is that of all parts, the empty ones, too: the ranks add these numbers up, and a rank may hold nothing.
    wide = max((t.dtype.to_real() for t in tensors), key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    wide = torch.float32 if torch.finfo(wide).bits < 32 else wide
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.stack([norm.to(device=device, dtype=wide) for norm in torch._foreach_norm(filled, p)])
    return norms.max() if math.isinf(p) else (norms**p).sum()


def _refuse_sparse(model: nn.Module, left_whole: Container[int]) -> None:
    """Raise where a layer gives gradients that torch cannot reduce to shards: its own error names no layer."""
    for name, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and module.weight.requires_grad and id(module.weight) not in left_whole:
            raise UsageError(
                f"{name or type(module).__name__} is an embedding with sparse=True, and fully_shard cannot reduce sparse gradients",
                where="prepare(), engine fsdp2",
                do="make it with sparse=False, or use engine='ddp'",
            )


def _share_from_rank_zero(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights and buffers of rank zero, whatever each was seeded with.

    Collective: every rank.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == device.type:
            dist.broadcast(tensor.data, src=0)
        else:
            sent = tensor.data.to(device)
            dist.broadcast(sent, src=0)
            tensor.data.copy_(sent)


def _repoint(optimizer: Optimizer, replaced: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Give ``optimizer`` the sharded parameters in the place of those that it was made with, and its state in parts."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
        if len({isinstance(p, DTensor) for p in group["params"]}) > 1:  # one kernel does not take both kinds
            group["foreach"] = False
            if group.get("fused"):
                group["fused"] = False
    for old in list(optimizer.state):
        new = replaced.get(old, old)
        if new is not old:
            entries = optimizer.state.pop(old)
            optimizer.state[new] = {key: part_like(value, new) for key, value in entries.items()}
