"""The ``fsdp2`` engine, which uses torch's ``fully_shard`` (ZeRO stages 2 and 3)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from echelon.base.capabilities import Capabilities
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.sharded import is_dtensor
from echelon.base.versions import torch_version
from echelon.base.warnings import user_line, warn
from echelon.distributed.ddp.replica import average_gradients
from echelon.engines.activation_checkpointing import checkpoint_activations
from echelon.engines.base import Engine, LocalGradient, Prepared, ShardedState, ShardedTensor
from echelon.engines.bitwise.grad_norm import clip_by_rows
from echelon.engines.bitwise.sharded_tree_sum import ShardedTreeSum
from echelon.engines.bitwise.tree_sum import ReplicatedUpdate, ShardedUpdate
from echelon.engines.broadcast import broadcast_model
from echelon.engines.expert_parallel.experts import divide_experts, shard_experts
from echelon.engines.fsdp.meta_device import Values, fill_from_rank_zero, move_to_meta, require_values
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.fsdp.pipeline_state import (
    gather_model,
    gather_optimizer,
    has_rank_zero,
    own_optimizer_state,
)
from echelon.engines.fsdp.sharded_model import (
    UnshardedParameters,
    accept_full_state_dicts,
    total_norm,
    warn_on_shard_values,
)
from echelon.engines.fsdp.wrap_policy import ignored_parameters, modules_to_shard, reject_sparse
from echelon.engines.gather_state import gather_state
from echelon.engines.gathered_optimizer import GatheredOptimizer
from echelon.engines.optimizer_copy import attribute_with_parameters, why_not_copied
from echelon.engines.optimizer_probe import ProbeError, probe_optimizer, steps_shards, warn_of_assumption
from echelon.engines.output_hooks import ZeroOutputGradients, flatten_outputs_for_hooks
from echelon.engines.param_groups import (
    clear_unreduced_gradients,
    fsdp_params,
    has_unreduced_gradients,
    reduce_accumulated_gradients,
    reduce_once,
    require_one_dtype,
    reshard,
    reshard_after_evaluation,
    sharded_parameters,
    unsharded_parameters,
)
from echelon.engines.quantized_weights import require_scales, unshardable_parameters, wrapped_tensors
from echelon.engines.random_numbers import share_states
from echelon.engines.shards import gather_full, local_tensors, shard_like
from echelon.engines.state_dicts import plain_name, plain_state_dict
from echelon.engines.stepper import Stepper, repoint_scheduler, require_graph, zero_backward
from echelon.engines.tensor_parallel.canonical_layers import exchanges_chunks
from echelon.engines.tensor_parallel.parallelize import (
    adopt_split_layers,
    has_split_layers,
    parallelize,
    return_no_views,
)
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages  # slow to import

_AVERAGE_UNSUPPORTED = re.compile(r"AVG|average|ReduceOp", re.IGNORECASE)

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
    """Each rank holds a shard of every parameter. A block's parameters are all-gathered while it computes.

    ``reshard_after_forward=True`` is ZeRO stage 3. False is stage 2, in which parameters stay unsharded between the forward
    and backward pass; an integer is in between. With ``replicas > 1``, each group of ranks holds a sharded replica (hybrid
    sharding).

    Source: torch.distributed.fsdp.fully_shard; Zhao et al., "PyTorch FSDP", 2023.
    """

    def __init__(
        self, world: World, *, scaler: torch.amp.GradScaler | None = None, options: ShardingOptions | None = None
    ) -> None:
        self._world = world
        self._options = options or ShardingOptions()
        self._stepper = Stepper(scaler)
        if self._options.tensor_parallel is not None:
            # Torch looks for infinities over the mesh of an optimizer's first gradient, which may be that of a whole layer.
            self._stepper.found_inf_groups.append(self._options.tensor_parallel.mesh.get_group())
        self._mesh: DeviceMesh | None = None
        self._roots: dict[int, FSDPModule] = {}  # by id of the value
        self._unsharded: dict[int, UnshardedParameters] = {}  # by id of the root
        self._hooks: list[Any] = []  # handles of module hooks
        self._output_gradients = ZeroOutputGradients()
        # Models and optimizers may be prepared in separate calls, in any order.
        self._replaced = WeakIdKeyDictionary()  # original parameters -> sharded parameters
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        # By the user's optimizer, because its schedulers may be prepared later.
        self._gathered: dict[Optimizer, GatheredOptimizer] = {}
        self._warned = False
        self._averages: bool | None = None  # whether the backend implements ReduceOp.AVG, or None if unknown
        self._contexts = ExitStack()  # of torch, until the models are released
        self._is_loss_parallel = False
        self._pipelines: dict[int, PipelineStages] = {}  # by id of the model
        self._update: ShardedUpdate | None = None  # sums the gradients instead of torch (build_sharded_update)
        self._num_chunks = 1  # of split layers, with ``self._update``

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> FSDP2Engine:
        """See ``Engine.from_options``. It uses ``options["sharding"]``."""
        return cls(world, scaler=scaler, options=options.get("sharding"))

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    # ---- prepare -----------------------------------------------------------------------------------------------------

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Shard each model in place, and replace the parameters in existing optimizers with the sharded ones.

        Rank zero's weights are broadcast, so other ranks may have the model on the meta device. Tensors that are on the meta
        device on every rank stay there until ``load_checkpoint_in_model`` is called. Models without trainable parameters are
        also sharded.

        Raises:
            UsageError: an optimizer can step neither shards nor whole parameters one by one.
        """
        optimizers = [self._gather_if_needed(optimizer) for optimizer in optimizers]
        before = [dict(model.named_parameters()) for model in models]
        for model in models:
            self._shard(model)
        for old, model in zip(before, models):
            after = dict(model.named_parameters())
            for name, parameter in old.items():
                if after[name] is not parameter:
                    self._replaced[parameter] = after[name]
        self._optimizers.update(optimizers)
        self._note_unsharded()
        for pipeline in self._pipelines.values():
            pipeline.drop_removed(optimizers)
        for optimizer in list(self._optimizers):
            _repoint_optimizer(optimizer, self._replaced)
        for scheduler in schedulers:
            for own, gathered in self._gathered.items():
                repoint_scheduler(scheduler, old=own, new=gathered)
        return Prepared(models=tuple(models), optimizers=tuple(optimizers), schedulers=tuple(schedulers))

    def _gather_if_needed(self, optimizer: Optimizer) -> Optimizer:
        """Return ``optimizer`` if it can step shards, else one that steps the gathered parameters.

        Collective: call on every rank.

        Raises:
            UsageError: ``optimizer`` can do neither.
        """
        attribute = attribute_with_parameters(optimizer, or_optimizer=False)
        if attribute is not None and not all(
            isinstance(p, DTensor) for g in optimizer.param_groups for p in g["params"]
        ):
            raise _cannot_step_shards(
                optimizer,
                f"its attribute {attribute!r} references parameters, which prepare() replaces with sharded ones",
            )
        try:
            behavior = probe_optimizer(optimizer, dims=(0,) if self._options.tensor_parallel is None else (0, 1))
        except ProbeError as error:
            warn_of_assumption(optimizer, error, engine="fsdp2")
            return optimizer
        elementwise, mesh = behavior.elementwise, self._device_mesh()
        # Sums over all parameters are right on one mesh; split layers have parameters on several.
        if all(elementwise) or (not behavior.by_tensor and self._options.tensor_parallel is None):
            if steps_shards(optimizer, optimizer.param_groups, mesh, is_elementwise=all(elementwise)):
                return optimizer
            elementwise = (False,) * len(elementwise)  # torch lacks an operation on shards
        if not behavior.by_tensor:
            raise _cannot_step_shards(
                optimizer,
                "a step on two halves differs from a step on the whole, and a step on two parameters differs from a step on each of them",
            )
        reason = why_not_copied(optimizer)
        if reason is None and self._pipelines:
            reason = "the ranks of a pipeline have different parameters"
        if reason is not None:
            raise _cannot_step_shards(
                optimizer,
                f"a step on two halves differs from a step on the whole, which cannot be gathered because {reason}",
            )
        sharded = [group for group, is_elementwise in zip(optimizer.param_groups, elementwise) if is_elementwise]
        if sharded and not steps_shards(optimizer, sharded, mesh, is_elementwise=True):
            elementwise = (False,) * len(elementwise)
        self._gathered[optimizer] = GatheredOptimizer(optimizer, elementwise=elementwise)
        return self._gathered[optimizer]

    def _shard(self, model: nn.Module) -> None:
        options = self._options
        if isinstance(model, FSDPModule):  # by the user's own fully_shard
            self._adopt(model)
            return
        device = self._world.device
        require_scales(model)
        unsharded = set(map(id, ignored_parameters(model, options.ignored)))
        quantized = unshardable_parameters(model, options.param_dtype)
        unsharded |= set(map(id, quantized.values()))
        if any(parameter.is_floating_point() for parameter in quantized.values() if not wrapped_tensors(parameter)):
            warn(
                _(
                    "each rank keeps all 4-bit weights of {name}, which are stored as {stored}: fully_shard would cast these "
                    "bytes to {dtype}. To shard them, load the model with BitsAndBytesConfig(bnb_4bit_quant_storage={dtype})",
                    name=type(model).__name__,
                    stored=next(iter(quantized.values())).dtype,
                    dtype=options.param_dtype,
                )
            )
        reject_sparse(model, unsharded)
        # Scalars have no dimension to shard.
        ignored = [name for name, p in model.named_parameters() if id(p) in unsharded or p.dim() == 0]
        pipeline = self._pipelines.get(id(model))
        if pipeline is not None and ignored:
            raise ConfigError(
                f"{ignored[0]!r} is a scalar or excluded from sharding (ignored_modules), but the fsdp2 engine averages such parameters over "
                "all ranks, and the ranks of a pipeline have different ones",
                where="prepare_pipeline()",
                do="remove it from ignored_modules, or give the parameter a dimension (torch.zeros(1))",
            )
        values = self._distribute_values(model, pipeline)
        experts = divide_experts(model, options.expert_mesh["ep"]) if options.expert_mesh is not None else []
        units = modules_to_shard(model, options) if pipeline is None else pipeline.units()
        blocks = [block for block in units if block not in experts]
        _require_whole_activations(model, blocks)
        if options.activation_checkpointing != "none":
            checkpoint_activations(
                blocks, options.activation_checkpointing, where="fsdp_plugin, activation_checkpointing"
            )
        settings: dict[str, Any] = {
            "mesh": self._device_mesh(),
            # Else each micro-batch of a pipeline would gather the parameters twice.
            "reshard_after_forward": options.reshard_after_forward if pipeline is None else False,
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
        if options.expert_mesh is not None:
            shard_experts(experts, options.expert_mesh, settings)
        for block in (*blocks, model):
            if options.tensor_parallel is not None:
                return_no_views(block)
            with flatten_outputs_for_hooks(block):
                fully_shard(block, **settings)
        if pipeline is not None:
            # Stages call the units without the model, which must be their root even so: its own forward only evaluates.
            model._get_fsdp_state()._lazy_init()  # type: ignore[operator]
        if values is not None:
            fill_from_rank_zero(model, values, device=device)
            if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
                model.register_forward_pre_hook(require_values, prepend=True)
        self._adopt(model)

    def _distribute_values(self, model: nn.Module, pipeline: PipelineStages | None) -> Values | None:
        """Give all ranks rank zero's values, and split layers. Return values that must be sent after sharding (see ``move_to_meta``).

        The whole model of a pipeline stage was broadcast before it was cut.
        """
        options, device = self._options, self._world.device
        tensor_parallel = options.tensor_parallel
        values = None
        if has_split_layers(model):
            adopt_split_layers(model, tensor_parallel, data_mesh=self._device_mesh())
        else:
            if pipeline is None:
                values = move_to_meta(model, only_rank_zero=options.ram_efficient_loading)
                if values is None:
                    broadcast_model(model, device)
            if tensor_parallel is not None:
                parallelize(model, tensor_parallel, plan=None if pipeline is None else pipeline.layer_plan)
        if tensor_parallel is not None:
            share_states(tensor_parallel.mesh.get_group(), device)
            if tensor_parallel.loss_parallel and not self._is_loss_parallel:
                self._is_loss_parallel = True
                self._contexts.enter_context(loss_parallel())
        return values

    def _adopt(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        require_one_dtype(model)
        self._replace_missing_average(model)
        self._roots[id(model)] = model
        model.register_forward_hook(reshard_after_evaluation)
        self._unsharded[id(model)] = UnshardedParameters(model)
        self._hooks += accept_full_state_dicts(model)
        if self._options.exchanges_activations:
            self._hooks.append(self._output_gradients.watch(model))
        warn_on_shard_values(self)
        if isinstance(self._update, ShardedTreeSum):
            self._update.attach(model)

    def _replace_missing_average(self, model: nn.Module) -> None:
        """If the backend does not implement ``ReduceOp.AVG``, make torch sum and divide. Collective on CPUs.

        Before torch 2.8, gloo silently computes a sum instead of the mean, so gradients are ``world_size`` times too large.
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
                        f"fully_shard in torch {torch_version} sums gradients across ranks on CPUs instead of averaging them",
                        where="engine='fsdp2', on CPUs",
                        do="install torch 2.8 or newer, or use engine='zero1'",
                    )
                module.set_force_sum_reduction_for_comms(True)

    def _device_mesh(self) -> DeviceMesh:
        """Return the mesh over which parameters are sharded, and replicated if it has two axes.

        Collective: the first call.
        """
        if self._mesh is None:
            self._mesh = self._options.mesh
        if self._mesh is None:
            world_size, replicas = self._world.world_size, self._options.replicas
            if world_size % replicas:
                raise ConfigError(
                    f"{world_size} ranks cannot be divided into {replicas} groups of the same size",
                    where="dp_replicate",
                    do="choose a divisor of the number of ranks",
                )
            shape = (replicas, world_size // replicas) if replicas > 1 else (world_size,)
            names = ("dp_replicate", "dp_shard") if replicas > 1 else ("dp_shard",)
            self._mesh = init_device_mesh(self._world.device.type, shape, mesh_dim_names=names)
        return self._mesh

    def _offload_policy(self) -> OffloadPolicy:
        if not self._options.cpu_offload:
            return OffloadPolicy()
        pin = self._options.pin_memory
        # Pinned memory requires an accelerator.
        return CPUOffloadPolicy(pin_memory=self._world.device.type != "cpu" if pin is None else pin)

    def use_pipeline(self, stages: PipelineStages) -> None:
        """See ``Engine.use_pipeline``. The stages' modules become units, and stay unsharded between micro-batches."""
        self._pipelines[id(stages.model)] = stages
        self._stepper.found_inf_groups.append(stages.group)

    def run_pipeline(self, stages: PipelineStages, run: Callable[[], None]) -> None:
        """See ``Engine.run_pipeline``.

        Zero-bubble schedules compute the gradients of weights after those of inputs, where torch's hooks would reduce them.
        """
        root = self._roots[id(stages.model)]
        with reduce_once(root) as reduces:
            run()
        if reduces:
            stages.add_tied_gradients()

    # ---- backward ----------------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See ``Engine.no_sync``. Unsharded gradients accumulate (FSDPModule.set_requires_gradient_sync).

        After ``build_sharded_update``, gradients are exchanged in each micro-step even inside this context.
        """
        if self._update is not None:
            return nullcontext()
        return _syncing(self._roots.get(id(model)), sync=False)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        return _syncing(self._roots.get(id(model)), sync=True)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return an empty context. Uneven inputs are not supported, because every layer needs all ranks' shards."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """See ``Engine.backward``.

        Raises:
            UsageError: ``loss`` needs second derivatives, but torch does not all-gather the parameters again for them.
        """
        try:
            self._stepper.scale(loss).backward(**options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "setStorage" not in str(error):
                raise
            raise UsageError(
                "the backward pass needs parameters that have already been resharded, because the loss contains a gradient "
                "(torch.autograd.grad(..., create_graph=True)), but fully_shard does not support second derivatives",
                where="backward(), fsdp2 engine",
                do="for a gradient penalty, use engine='ddp' or 'zero1', or approximate it with two forward passes",
            ) from error

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """See ``Engine.backward_zeros``. Autograd reaches the unsharded parameters inside ``fully_shard`` instead of the shards."""
        require_graph(loss, "fsdp2")
        if self._options.exchanges_activations:
            with self._output_gradients.zeros():
                # terms of the loss that do not depend on outputs have the weight 0, too
                self.backward(loss * 0, **options)
            return
        wanted = {id(p) for p in parameters}
        inner = unsharded_parameters(self._roots.values(), wanted)
        plain = [p for unsharded in self._unsharded.values() for p in unsharded.current() if id(p) in wanted]
        with zero_backward([*inner, *plain]):
            self.backward(loss, **options)

    # ---- step --------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        if not unsynced:
            self._guard()
        self._reshard(optimizer)
        try:
            return self._stepper.step(optimizer, closure)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "DTensor" not in str(error) and "DeviceMesh" not in str(error):
                raise
            raise _cannot_step_shards(optimizer, f"torch says {str(error).splitlines()[0]!r}") from error

    def _reshard(self, optimizer: Optimizer) -> None:
        """Free unsharded parameters that a forward pass without a backward pass left behind, because the step does not update them."""
        owners = _parameter_ids(optimizer)
        for root in self._roots.values():
            if any(id(part.sharded_param) in owners for part in fsdp_params([root])):
                reshard(root)

    def free_gathered_weights(self) -> bool:
        for root in self._roots.values():
            reshard(root)
        return True

    def _note_unsharded(self) -> None:
        """Note which shards the parameters replace that ``model.parameters()`` has between a forward and a backward pass."""
        for part in fsdp_params(self._roots.values()):
            unsharded = getattr(part, "_unsharded_param", None)
            if unsharded is not None:
                self._replaced[unsharded] = part.sharded_param

    def replaced_parameters(self) -> Sequence[torch.Tensor]:
        self._note_unsharded()
        return list(self._replaced.keys())  # type: ignore[no-untyped-call]

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """See ``Engine.reduce_gradients``.

        Raises:
            UsageError: ``optimizer`` holds parameters that ``prepare`` replaced and that no longer get gradients.
        """
        replaced = set(map(id, self.replaced_parameters()))
        num_replaced = sum(id(p) in replaced for group in optimizer.param_groups for p in group["params"])
        if num_replaced:
            raise UsageError(
                f"{type(optimizer).__name__} holds {num_replaced} parameter{'s' if num_replaced != 1 else ''} that prepare() replaced with "
                "sharded ones, so its step would have no effect",
                where=f"step() at {user_line()}, fsdp2 engine",
                do="prepare both in one call (model, optimizer = accelerator.prepare(model, optimizer)), or prepare the optimizer, "
                "too: optimizer = accelerator.prepare(optimizer)",
            )
        self._reshard(optimizer)
        return self._reduce()

    def update_loss_scale(self) -> None:
        self._stepper.update_loss_scale()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        clear_unreduced_gradients(self._roots.values(), _parameter_ids(optimizer))
        self._stepper.note_cleared(optimizer)

    def drop_update(self) -> None:
        """See ``Engine.drop_update``. Parameters that a forward pass has left unsharded are freed, because loading changes the shards."""
        self._stepper.forget()
        roots = self._roots.values()
        clear_unreduced_gradients(roots, {id(part.sharded_param) for part in fsdp_params(roots)})
        self.free_gathered_weights()

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        if not unsynced:
            self._guard()
        self._stepper.unscale(optimizer, is_local=unsynced)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        if not unsynced:
            self._guard()
        if self._update is not None:
            split = self._options.tensor_parallel
            holders = None if split is None else split.mesh
            return clip_by_rows(parameters, max_norm, norm_type, num_chunks=self._num_chunks, copies=holders)
        owners = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in owners if p.grad is not None]
        stages = self._pipelines.values()
        copies = {id(p) for pipeline in stages for p in pipeline.second_copies()}
        counted = [p.grad for p in owners if p.grad is not None and id(p) not in copies]
        groups = [pipeline.group for pipeline in stages]
        norm = total_norm(counted, float(norm_type), self._world.device, also=groups)
        if gradients:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in local_tensors(gradients):
                gradient.mul_(scale.to(gradient.device))
        return norm

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        if not unsynced:
            self._guard()
        for gradient in local_tensors([p.grad for p in parameters if p.grad is not None]):
            gradient.clamp_(min=-clip_value, max=clip_value)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        gradients = local_tensors([p.grad for p in model.parameters() if p.grad is not None])
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def reduced(self, model: nn.Module) -> bool:
        root = self._roots.get(id(model))
        return root is None or not has_unreduced_gradients(root)

    def _guard(self) -> None:
        if self._reduce():
            self._warn()

    def _reduce(self) -> bool:
        """Reduce gradients from unsynchronized passes and of unsharded parameters; return whether a pass was unsynchronized.

        Collective if there are gradients to reduce.
        """
        if self._update is not None:
            return False
        is_reduced = False
        for key, root in self._roots.items():
            if has_unreduced_gradients(root):
                is_reduced = True
                reduce_accumulated_gradients(root)
            average_gradients([p for p in self._unsharded[key].current() if p.requires_grad])
        return is_reduced

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                _(
                    "the last backward pass did not synchronize gradients across ranks, because it ran inside "
                    "no_sync(). echelon will reduce the gradients now, which is correct but slower. Run the last "
                    "backward pass before step() outside no_sync()."
                )
            )

    def build_sharded_update(
        self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]], *, num_chunks: int = 1
    ) -> ShardedUpdate:
        """See ``Engine.build_sharded_update``.

        Raises:
            UsageError: hybrid sharding is enabled, experts are divided, or this version of torch cannot reduce unused parameters.
        """
        if self._options.expert_mesh is not None:
            raise UsageError(
                "the sum of an expert's gradient depends on the ranks that hold its tokens, so experts that are divided among "
                "ranks do not give the same bits on any number of ranks",
                where="parity='bitwise'",
                do="remove ep_size, or use parity='exact'",
            )
        if self._options.replicas > 1:
            raise UsageError(
                f"the fsdp2 engine sums the gradients of batch shards across all ranks and does not support "
                f"{self._options.replicas} replicas",
                where="parity='bitwise'",
                do="remove dp_replicate_size or the HYBRID sharding strategy, or use parity='exact'",
            )
        mesh = self._options.mesh
        world = self._world if mesh is None else self._world.along(mesh)
        kind = ShardedTreeSum if world.world_size > 1 else ReplicatedUpdate
        self._num_chunks = num_chunks
        self._update = kind(
            lambda: sharded_parameters(self._roots.values(), parameters()),
            num_shards=num_shards,
            rank=world.rank,
            world_size=world.world_size,
            group=world.group,
        )
        return self._update

    # ---- state -------------------------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """Gather the state dict on rank zero's CPU, one tensor at a time; return None on other ranks. Collective: call on every rank."""
        require_values(model)
        pipeline = self._pipelines.get(id(model))
        # Rank zero's pipeline has all stages.
        keep = self._world.rank == 0 if pipeline is None else has_rank_zero(pipeline.group)
        first: dict[int, str] = {}  # tied parameters stay tied, as in one process
        tied = {
            plain_name(name): first.setdefault(id(p), plain_name(name))
            for name, p in model.named_parameters(remove_duplicate=False)
        }
        found: dict[str, Any] = {}
        for name, value in plain_state_dict(model).items():
            other = tied.get(name, name)
            found[name] = found[other] if other in found else gather_full(value, keep=keep)
        if pipeline is not None and keep:
            return gather_model(pipeline, found)
        return found if keep else None

    def sharded_state(self, model: nn.Module) -> ShardedState | None:
        require_values(model)
        state, pipeline = plain_state_dict(model), self._pipelines.get(id(model))
        is_whole = pipeline is None and not any(map(is_dtensor, state.values()))
        if is_whole or not all(map(_is_plain, state.values())):
            return None
        first: dict[int, str] = {}
        tied = {
            plain_name(name): first.setdefault(id(p), plain_name(name))
            for name, p in model.named_parameters(remove_duplicate=False)
        }
        aliases = {name: other for name, other in tied.items() if name in state and name != other}
        if pipeline is not None:  # a stage may have the copy of a weight of another one
            aliases = {**aliases, **pipeline.aliases}
        return ShardedState(
            names=list(state) if pipeline is None else pipeline.state_names,
            aliases=aliases,
            tensors={
                name: ShardedTensor(
                    dtype=value.dtype,
                    shape=value.shape,
                    is_sharded=is_dtensor(value),
                    gather=partial(self._gather_for, value),
                )
                for name, value in state.items()
                if name not in aliases
            },
            part=0 if pipeline is None else dist.get_rank(pipeline.group),
        )

    def _gather_for(self, value: torch.Tensor, rank: int) -> torch.Tensor | None:
        keep = self._world.rank == rank
        full = gather_full(value, keep=keep)
        return full if keep else None

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        pipeline = self._pipeline_of(optimizer)
        keep = self._world.rank == 0 if pipeline is None else has_rank_zero(pipeline.group)
        state = optimizer.own_state() if isinstance(optimizer, GatheredOptimizer) else optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owned = {n for n in state["state"] if isinstance(n, int) and _owner(optimizer, parameters[n]) is not None}
        values = {
            number: {key: gather_full(value, keep=keep) for key, value in entries.items()}
            if isinstance(number, int)
            else entries  # of no parameter
            for number, entries in state["state"].items()
            if number not in owned
        }
        if isinstance(optimizer, GatheredOptimizer):
            others = gather_state({number: state["state"][number] for number in sorted(owned)})
            values = {**values, **(others or {})}
        if pipeline is not None and keep:
            return gather_optimizer(pipeline, optimizer, {**state, "state": values})
        return {**state, "state": values} if keep else None

    def _pipeline_of(self, optimizer: Optimizer) -> PipelineStages | None:
        """Return the pipeline whose stages ``optimizer`` steps; there is at most one, on all ranks."""
        return next(iter(self._pipelines.values()), None)

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        pipeline = self._pipeline_of(optimizer)
        if pipeline is not None:
            state = own_optimizer_state(pipeline, optimizer, state)
        owners = [p for group in optimizer.param_groups for p in group["params"]]
        parts = {
            number: {key: shard_like(value, owners[number]) for key, value in entries.items()}
            if isinstance(number, int) and _owner(optimizer, owners[number]) is None
            else entries  # of no parameter, or whole
            for number, entries in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": parts})

    def local_gradients(self, parameters: Sequence[torch.Tensor]) -> list[LocalGradient]:
        """See ``Engine.local_gradients``. Autograd reaches the unsharded parameters inside ``fully_shard``."""
        inner = {
            id(part.sharded_param): LocalGradient(getattr(part, "_unsharded_param", None), part.reduce_dtype)
            for part in fsdp_params(self._roots.values())
        }
        return [inner.get(id(parameter)) or LocalGradient(parameter) for parameter in parameters]

    def share_random_states(self) -> bool:
        tensor_parallel = self._options.tensor_parallel
        if tensor_parallel is not None:
            share_states(tensor_parallel.mesh.get_group(), self._world.device)
        return tensor_parallel is not None

    def release(self) -> None:
        self._contexts.close()
        self._is_loss_parallel = False
        self._roots.clear()
        self._replaced.clear()
        self._gathered.clear()
        self._pipelines.clear()
        self._stepper.found_inf_groups.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for unsharded in self._unsharded.values():
            unsharded.release()
        self._unsharded.clear()
        if isinstance(self._update, ShardedTreeSum):
            self._update.release()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model  # fully_shard modifies it in place


def _require_whole_activations(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Raise ConfigError if the input or output of a unit is in chunks, to which torch cannot attach its hooks."""
    names = {module: plain_name(name) for name, module in model.named_modules()}
    for unit in units:
        if exchanges_chunks(unit):
            raise ConfigError(
                f"{names[unit]} is a unit of its own, but its input or output is divided into chunks, to which fully_shard cannot attach "
                "hooks",
                where="prepare(), parity='bitwise', fsdp2 engine",
                do="choose whole blocks as units (auto_wrap_policy='transformer_based_wrap'), or use parity='exact'",
            )


@contextmanager
def _syncing(root: FSDPModule | None, *, sync: bool) -> Iterator[None]:
    """Set whether backward passes inside the block reduce gradients; after the block they always do."""
    if root is None:
        yield
        return
    root.set_requires_gradient_sync(sync)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


def _backend_averages(world: World) -> bool:
    """Return whether the default group's backend implements ``ReduceOp.AVG``. Collective: call on every rank."""
    # the second name is that of torch before 2.13
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    mean = torch.zeros(1, device=world.device)
    try:
        reduce_scatter(mean, torch.ones(world.world_size, device=world.device), op=dist.ReduceOp.AVG)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    except RuntimeError as error:
        # A backend that does not implement the operation names it in its error. Any other error, such as a lost connection, is
        # not an answer.
        if not _AVERAGE_UNSUPPORTED.search(str(error)):
            raise
        return False
    return float(mean) == 1.0


def _cannot_step_shards(optimizer: Optimizer, why: str) -> UsageError:
    """Return the error for an optimizer that cannot step shards."""
    kind = type(optimizer).__name__
    return UsageError(
        f"{kind} cannot step sharded parameters: {why}",
        where="fsdp2 engine",
        do=f"use AdamW, SGD or another elementwise optimizer, or keep {kind} and use engine='ddp'",
    )


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of the optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _repoint_optimizer(optimizer: Optimizer, replaced: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Replace the optimizer's parameters with the sharded ones, and shard its state."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
        if len({isinstance(p, DTensor) for p in group["params"]}) > 1:  # no kernel accepts both kinds
            group["foreach"] = False
            if group.get("fused"):
                group["fused"] = False
    for old in list(optimizer.state):
        new = replaced.get(old, old)
        if new is not old:
            entries = optimizer.state.pop(old)
            owner = _owner(optimizer, new)
            if owner is None:
                optimizer.state[new] = {key: shard_like(value, new) for key, value in entries.items()}
            elif owner == dist.get_rank():
                optimizer.state[new] = entries


def _owner(optimizer: Optimizer, parameter: torch.Tensor) -> int | None:
    """Return the rank that has the whole state of ``parameter``; None if each rank has its shard."""
    return optimizer.owner(parameter) if isinstance(optimizer, GatheredOptimizer) else None


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a tensor or a DTensor of plain values; quantized weights are neither."""
    if not isinstance(value, torch.Tensor):
        return False
    own = value.to_local() if is_dtensor(value) else value.detach()
    return type(own.detach()) is torch.Tensor
