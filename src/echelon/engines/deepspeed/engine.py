"""The ``deepspeed`` engine, which runs the DeepSpeed library (ZeRO stages 0 to 3, with CPU or NVMe offloading)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.config.library_variables import deepspeed_knows_rank
from echelon.engines.base import Engine, Prepared, ShardedState
from echelon.engines.deepspeed.config import (
    evaluation_config,
    is_on,
    replaces_optimizer_on_host,
    stage_of,
    training_config,
    unresolved,
)
from echelon.engines.deepspeed.flat_shards import full_shape, hook_loading, write_full
from echelon.engines.deepspeed.library import announce_kernels, host_optimizer, import_deepspeed
from echelon.engines.deepspeed.model_run import DeepSpeedModel
from echelon.engines.deepspeed.options import (
    DeepSpeedOptions,
    DrivenScheduler,
    DummyOptim,
    DummyScheduler,
    parameters_by_group,
)
from echelon.engines.output_hooks import OutputFlattener, flatten_outputs_for_hooks
from echelon.engines.state_dicts import plain_state_dict
from echelon.engines.stepper import Stepper, drop_scheduler_groups, repoint_scheduler, require_graph, zero_backward
from echelon.world.world import World


class DeepSpeedEngine(Engine):
    """Trains one model with one optimizer. Additional models may be prepared for evaluation only.

    Gradients are reduced when the update is clipped or stepped, so a loop may call ``backward`` any number of times before
    that. Weights are float32. With fp16 or bf16, the model computes with 16-bit copies in stages 1 to 3 and under autocast
    in stage 0.

    Source: deepspeed.initialize; Rajbhandari et al., "ZeRO", 2020; Ren et al., "ZeRO-Offload", 2021.
    """

    def __init__(
        self, world: World, *, scaler: torch.amp.GradScaler | None = None, options: DeepSpeedOptions | None = None
    ) -> None:
        self._world = world
        self._scaler = scaler
        self._options = options or DeepSpeedOptions()
        self._new = partial(type(self), world, scaler=scaler, options=options)
        self._run: DeepSpeedModel | None = None
        self._evaluated: list[Any] = []  # DeepSpeed engines of models without an optimizer
        self._hooks: list[Any] = []  # handles of module hooks
        self._is_local = False  # inside no_sync
        self._kept_groups: list[bool] = []  # of the optimizer's groups, those that the library keeps

    def __reduce__(self) -> tuple[Any, ...]:
        # Models and optimizers are identified by id, so a copy starts without prepared objects.
        return self._new, ()

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> DeepSpeedEngine:
        """See ``Engine.from_options``. It uses ``options["deepspeed"]``."""
        engine = cls(world, scaler=scaler, options=options.get("deepspeed"))
        if engine._options.makes_shards:
            import_deepspeed(world)  # otherwise deepspeed.zero.Init does this and compiles a kernel for a minute
        return engine

    @property
    def _stage(self) -> int:
        return stage_of(self._options.config)

    @property
    def _holds_copies(self) -> bool:
        """Whether the model computes with 16-bit copies of sharded float32 weights."""
        return self._stage > 0 and any(is_on(self._options.config, dtype) for dtype in ("fp16", "bf16"))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="deepspeed",
            distributed_type="DEEPSPEED",
            replicates=self._stage < 3,
            shards_parameters=self._stage == 3 or self._holds_copies,
            shards_optimizer_state=self._stage > 0,
            joins_uneven=False,
            owns_master_weights=self._stage > 0,
            owns_loss_scaling=self._stage > 0,
            exposes_state=False,
            supports_multiple_models=False,
            keeps_float64=False,
            takes_closures=False,
        )

    # ---- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Prepared:
        """Initialize DeepSpeed with the model that ``optimizers`` trains.

        Models without an optimizer are for evaluation. They are sharded with stage 3; otherwise rank zero broadcasts them.

        Raises:
            UsageError: there are several optimizers or trained models, or the optimizer's model is missing.
            ConfigError: the config is invalid.
        """
        if not models and not optimizers:
            return Prepared(models=(), optimizers=(), schedulers=tuple(map(self._build_scheduler, schedulers)))
        trained = self._trained_model(models, optimizers)
        self._require_complete()
        library = import_deepspeed(self._world)
        wrapped = []
        for model in models:
            if model is trained:
                self._run = self._initialize(library, model, optimizers[0], schedulers)
                wrapped.append(self._run.engine)
            else:
                wrapped.append(self._evaluate(library, model))
        steppers: list[Optimizer] = [] if self._run is None or not optimizers else [self._run.optimizer]
        if steppers and isinstance(optimizers[0], Optimizer) and steppers[0] is not optimizers[0]:
            for scheduler in schedulers:
                if not isinstance(scheduler, DummyScheduler):
                    repoint_scheduler(scheduler, old=optimizers[0], new=steppers[0])
        return Prepared(
            models=tuple(wrapped), optimizers=tuple(steppers), schedulers=tuple(map(self._build_scheduler, schedulers))
        )

    def _require_complete(self) -> None:
        autos = unresolved(self._options.config)
        if autos:
            raise ConfigError(
                f"DeepSpeed's config has unresolved 'auto' values: {', '.join(autos)}",
                where="deepspeed engine",
                do="replace them with numbers, or use Accelerator(deepspeed_plugin=), which resolves them from the loaders and "
                "the model",
            )

    def _trained_model(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> nn.Module | None:
        """Return the model that ``optimizers`` trains, or None."""
        if not optimizers:
            return None
        if len(optimizers) > 1:
            raise UsageError(
                f"DeepSpeed supports one optimizer, but prepare() got {len(optimizers)}",
                where="prepare(), deepspeed engine",
                do="create one optimizer with several parameter groups, or use the fsdp2 or ddp engine",
            )
        owned = {id(p) for group in parameters_by_group(optimizers[0]) for p in group}
        trained = [model for model in models if any(id(p) in owned for p in model.parameters())]
        if len(trained) == 1 and self._run is None:
            return trained[0]
        if self._run is not None or trained:
            number = len(trained) + (self._run is not None)
            raise UsageError(
                f"DeepSpeed trains one model per Accelerator, but {number} models would be trained",
                where="prepare(), deepspeed engine",
                do="combine them into one module (nn.ModuleDict) with one optimizer, create an Accelerator for each model, or "
                "use the fsdp2 or ddp engine",
            )
        raise UsageError(
            "the optimizer's parameters do not belong to any of the models passed with it",
            where="prepare(), deepspeed engine",
            do="pass the model and its optimizer to prepare() in one call, because DeepSpeed initializes them together",
        )

    def _initialize(self, library: Any, model: nn.Module, optimizer: Any, schedulers: Sequence[Any]) -> DeepSpeedModel:
        if any(p.dtype is torch.float64 for p in model.parameters()):
            raise UsageError(
                "DeepSpeed keeps weights in float32, but the model has float64 parameters",
                where="prepare(), deepspeed engine",
                do="use model.float(), or the fsdp2 or ddp engine",
            )
        config = training_config(
            self._options.config, optimizer, scaler=self._scaler, on_cpu=self._world.device.type == "cpu"
        )
        if is_on(config, "fp16") and not library.get_accelerator().is_fp16_supported():
            raise ConfigError(
                f"DeepSpeed does not support fp16 on this device ({self._world.device})",
                where="mixed_precision='fp16', deepspeed engine",
                do="use mixed_precision='bf16', ZeRO stage 0, or the fsdp2 engine",
            )
        groups = parameters_by_group(optimizer)
        if self._stage in (1, 2):
            _require_trainable(groups, self._stage)
        self._kept_groups = [bool(group) for group in groups]
        if any(later and not kept for kept, later in pairwise(self._kept_groups)):
            warn(
                _(
                    "DeepSpeed removes parameter groups without parameters (group {group} of {num_groups}), so "
                    "optimizer.param_groups has fewer elements, with other indices",
                    group=self._kept_groups.index(False),
                    num_groups=len(groups),
                )
            )
        arguments: dict[str, Any] = {}
        if isinstance(optimizer, DummyOptim):
            announce_kernels(config, optimizer=str(config["optimizer"].get("type")))
            arguments["model_parameters"] = optimizer.params
        elif replaces_optimizer_on_host(config):
            announce_kernels(config, optimizer=type(optimizer).__name__)
            arguments["optimizer"] = host_optimizer(optimizer)
        else:
            announce_kernels(config, optimizer=None)
            arguments["optimizer"] = optimizer
        for scheduler in schedulers:
            if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
                arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
        if self._options.leaf_classes:
            library.utils.set_z3_leaf_modules(model, list(self._options.leaf_classes))
        clipping = float(config.get("gradient_clipping") or 0.0)
        config["gradient_clipping"] = 0.0  # DeepSpeedModel clips; without a value, the library clips to 1.0 in stage 0
        if self._stage == 3:
            _require_owned(model, groups)
        engine = self._call_initialize(library, model, config=config, **arguments)[0]
        self._hooks += OutputFlattener(engine, model, where="deepspeed engine").hooks
        return DeepSpeedModel(
            library,
            engine,
            groups=groups,
            stepper=Stepper(self._scaler if self._stage == 0 else None),
            world=self._world,
            clipping=clipping or None,
            loop_clips=self._options.loop_clips,
        )

    def _call_initialize(self, library: Any, model: nn.Module, **arguments: Any) -> Any:
        """Call ``deepspeed.initialize``. In stage 3 it hooks all modules' outputs, which are flattened for these hooks."""
        with ExitStack() as stack:
            for module in model.modules() if self._stage == 3 else ():
                if not type(module).__module__.startswith("torch.nn.modules."):  # these return tensors
                    stack.enter_context(flatten_outputs_for_hooks(module))
            stack.enter_context(deepspeed_knows_rank(self._world.local_rank))
            return library.initialize(model=model, **arguments)

    def _evaluate(self, library: Any, model: nn.Module) -> nn.Module:
        if self._stage == 3:
            engine, *_ = self._call_initialize(library, model, config=evaluation_config(self._options.config))
            self._hooks += hook_loading(model, partial(write_full, library.zero, rank=self._world.rank))
            self._evaluated.append(engine)
            return engine  # type: ignore[no-any-return]
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)
        return model

    def _build_scheduler(self, scheduler: Any) -> Any:
        if not isinstance(scheduler, DummyScheduler):
            if not all(self._kept_groups):
                drop_scheduler_groups(scheduler, self._kept_groups)
            return scheduler
        if self._run is None or self._run.engine.lr_scheduler is None:
            raise ConfigError(
                "prepare() got a DummyScheduler, but DeepSpeed's config does not define a scheduler",
                where="ds_config 'scheduler'",
                do="add a 'scheduler' to the config, set DummyScheduler(lr_scheduler_callable=), or pass a torch scheduler. "
                "Prepare the scheduler, the model and the optimizer in one call",
            )
        return DrivenScheduler(self._run.engine.lr_scheduler)

    # ---- backward ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _set_sync(self, sync: bool) -> Iterator[None]:
        before, self._is_local = self._is_local, not sync
        try:
            yield
        finally:
            self._is_local = before

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See ``Engine.no_sync``. Stages 2 and 3 reduce in every backward pass, because no rank stores full gradients."""
        return self._set_sync(False)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._set_sync(True)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return an empty context, because DeepSpeed does not support uneven inputs."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """See ``Engine.backward``. DeepSpeed supports only one option, ``retain_graph``.

        Raises:
            UsageError: another option is passed, there is no model to train, or gradients were clipped but not stepped.
        """
        retain = bool(options.pop("retain_graph", False))
        if any(value is not None for value in options.values()):
            raise UsageError(
                f"backward() got {', '.join(options)}, which DeepSpeed does not support",
                where="deepspeed engine",
                do="remove this argument, or use the fsdp2 or ddp engine",
            )
        self._require_run("backward()").backward(loss, retain_graph=retain, is_local=self._is_local)

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        require_graph(loss, "deepspeed")
        with zero_backward(parameters):
            self.backward(loss, **options)

    def _require_run(self, operation: str) -> DeepSpeedModel:
        if self._run is None:
            raise UsageError(
                f"{operation} needs a model that was prepared together with its optimizer",
                where="deepspeed engine",
                do="pass both to prepare() in one call",
            )
        return self._run

    # ---- step --------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """See ``Engine.step``.

        Raises:
            UsageError: ``closure`` or ``unsynced`` is passed.
        """
        if unsynced or closure is not None:
            raise UsageError(
                f"the deepspeed engine cannot step with {'a closure' if closure is not None else 'the gradients from one rank'}",
                where="LocalSGD, no_sync(unsynced=True)" if unsynced else "optimizer.step(closure)",
                do="use the ddp engine",
            )
        return self._require_run("step()").step()

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """Return False for DeepSpeed's optimizer, which is the only one that gets gradients.

        Raises:
            UsageError: ``optimizer`` is not DeepSpeed's optimizer.
        """
        if self._run is not None and optimizer is self._run.optimizer:
            return False
        raise UsageError(
            f"{type(optimizer).__name__} would step without gradients, because DeepSpeed trains the model that holds its "
            "parameters, but the optimizer was not prepared together with that model",
            where="step(), deepspeed engine",
            do="prepare both in one call (model, optimizer = accelerator.prepare(model, optimizer)), and step the returned "
            "optimizer",
        )

    def update_loss_scale(self) -> None:
        if self._run is not None:
            self._run.stepper.update_loss_scale()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """See ``Engine.zero_grad``. DeepSpeed clears gradients after each step."""
        if self._run is not None:
            self._run.discard_gradients()

    def drop_update(self) -> None:
        if self._run is not None:
            self._run.discard_gradients()
            self._run.stepper.forget()

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """Unscale the gradients with stage 0. With stages 1 to 3 they are not accessible; clipping and stepping unscale them."""
        if self._run is not None and not unsynced:
            self._run.unscale()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """See ``Engine.clip_grad_norm``. The smaller of ``max_norm`` and the config's ``gradient_clipping`` applies.

        With ``unsynced``, return the norm of the last update, because this update has no norm yet.

        Raises:
            UsageError: ``norm_type`` is not 2, or ``parameters`` lacks some trained parameters.
        """
        run = self._require_run("clip_grad_norm_()")
        return run.last_norm if unsynced else run.clip(list(parameters), max_norm, float(norm_type))

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """See ``Engine.clip_grad_value``. It raises UsageError with stages 1 to 3, because gradients are not accessible."""
        run = self._require_run("clip_grad_value_()")
        if self._stage > 0:
            raise UsageError(
                "DeepSpeed does not support clipping by value with ZeRO stages 1 to 3",
                where="clip_grad_value_(), deepspeed engine",
                do="use clip_grad_norm_(), or the fsdp2 engine",
            )
        if not unsynced:
            run.finish()
        torch.nn.utils.clip_grad_value_(list(parameters), clip_value)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """See ``Engine.finish_gradients``. The factor is applied when the gradients are clipped or stepped."""
        self._require_run("backward()").factor *= factor

    def reduced(self, model: nn.Module) -> bool:
        return self._run is None or not self._run.is_local

    # ---- state -------------------------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """See ``Engine.full_state_dict``. It returns the float32 weights if DeepSpeed keeps them."""
        run = self._run
        if run is not None and model is run.engine:
            return run.full_state_dict(on_rank_zero=self.capabilities.shards_parameters)
        if model not in self._evaluated:
            return plain_state_dict(self.unwrap(model))
        return self._gather_state_dict(model)

    def sharded_state(self, model: nn.Module) -> ShardedState | None:
        run = self._run
        is_sharded = self.capabilities.shards_parameters and run is not None and model is run.engine
        return run.sharded_state(self._world.rank) if is_sharded and run is not None else None

    def _gather_state_dict(self, model: Any) -> dict[str, Any] | None:
        """Gather the state dict of a model that is sharded for evaluation. Collective: call on every rank."""
        keep = self._world.rank == 0
        zero = import_deepspeed(self._world).zero
        found: dict[str, Any] = {}
        parameters = dict(model.module.named_parameters(remove_duplicate=False))
        for name, value in plain_state_dict(model.module).items():
            owner = parameters.get(name)
            with nullcontext() if owner is None else zero.GatheredParameters([owner]):
                if keep:
                    found[name] = (value if owner is None else owner).detach().to("cpu", copy=True)
        return found if keep else None

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """See ``Engine.full_optimizer_state``. With stages 1 to 3, the tensors are on the CPU."""
        run = self._require_run("the optimizer state")
        return optimizer.state_dict() if run.shards is None else run.full_optimizer_state()

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        run = self._require_run("the optimizer state")
        if run.shards is None:
            optimizer.load_state_dict(dict(state))
        else:
            run.load_optimizer_state(state)

    def parameter_groups(self, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        """See ``Engine.parameter_groups``. With stages 1 to 3, frozen parameters and empty groups are omitted."""
        run = self._run
        if run is None or run.shards is None:
            return super().parameter_groups(optimizer)
        return run.shards.parameter_groups

    def full_shape(self, parameter: torch.Tensor) -> torch.Size:
        return full_shape(parameter)

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for engine in self._evaluated:
            engine.destroy()
        self._hooks.clear()
        self._evaluated.clear()
        if self._run is not None:
            self._run.release()
            self._run = None

    def unwrap(self, model: nn.Module) -> nn.Module:
        ours = [*self._evaluated, *([] if self._run is None else [self._run.engine])]
        wrapper: Any = model
        inner: nn.Module = wrapper.module if any(model is one for one in ours) else model
        return inner


def _require_trainable(groups: Sequence[Sequence[torch.Tensor]], stage: int) -> None:
    """Raise UsageError if a group has only frozen parameters, for which the library fails with an IndexError."""
    frozen = [i for i, group in enumerate(groups) if group and not any(p.requires_grad for p in group)]
    if frozen:
        raise UsageError(
            f"all parameters in parameter group {frozen[0]} of the optimizer are frozen, which ZeRO stage {stage} does not support",
            where="prepare(), deepspeed engine",
            do="create the optimizer without this group (DeepSpeed does not train parameters that are unfrozen later), or use ZeRO stage "
            "0 or 3, or engine='fsdp2' or 'ddp'",
        )


def _require_owned(model: nn.Module, groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raise UsageError if a trainable parameter is not in the optimizer, which the library does not expect in stage 3."""
    owned = {id(p) for group in groups for p in group}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in owned]
    if others:
        raise UsageError(
            f"{', '.join(others[:3])}{' and others' if len(others) > 3 else ''} would get gradients, but no optimizer steps them, which "
            "ZeRO stage 3 does not support",
            where="prepare(), deepspeed engine",
            do="freeze these parameters (requires_grad_(False)), pass them to the optimizer, or use engine='fsdp2' or 'ddp'",
        )
