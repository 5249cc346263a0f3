"""The DeepSpeed library: ZeRO stages 0 to 3, with optimizer and parameters on the host or NVMe where its config says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.base.errors import ConfigError, UsageError
from echelon.engines.base import Engine, Prepared
from echelon.engines.deepspeed.ds_config import unresolved
from echelon.engines.deepspeed.flat_shards import follow_loading, whole_shape, write_whole
from echelon.engines.deepspeed.library import announce_kernels, import_deepspeed
from echelon.engines.deepspeed.model_run import DeepSpeedModel
from echelon.engines.deepspeed.options import DeepSpeedOptions, DrivenScheduler, DummyOptim, DummyScheduler
from echelon.engines.deepspeed.training_config import (
    evaluation_config,
    host_optimizer,
    is_on,
    parameter_groups,
    replaces_optimizer_on_host,
    stage_of,
    training_config,
)
from echelon.engines.output_hooks import SightOfOutputs, show_outputs_to_hooks
from echelon.engines.repoint import follow
from echelon.engines.stepper import Stepper, load_state, plain_state_dict, state_of, zeros_for
from echelon.world.world import World

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(Engine):
    """One model and its optimizer under DeepSpeed; further models may be prepared for evaluation.

    Gradients become those of the update when it is stepped or clipped, so a loop may call ``backward`` as often as it likes
    before. Weights are float32: in stages 1 to 3 with fp16 or bf16, the model computes in copies of that dtype; in stage 0,
    under autocast alone.

    Source: deepspeed.initialize; Rajbhandari et al., "ZeRO", 2020; Ren et al., "ZeRO-Offload", 2021.
    """

    def __init__(
        self, world: World, *, scaler: torch.amp.GradScaler | None = None, options: DeepSpeedOptions | None = None
    ) -> None:
        self._world = world
        self._scaler = scaler
        self._options = options or DeepSpeedOptions()
        self._again = partial(type(self), world, scaler=scaler, options=options)
        self._run: DeepSpeedModel | None = None
        self._evaluated: list[Any] = []  # DeepSpeed's engines of models without an optimizer
        self._hooks: list[Any] = []  # on their modules
        self._is_local = False  # inside no_sync

    def __reduce__(self) -> tuple[Any, ...]:
        # Without models and optimizers, which it knows by their identity: a copy has prepared nothing.
        return self._again, ()

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> DeepSpeedEngine:
        """See ``Engine``; of ``options`` the entry ``deepspeed`` counts."""
        engine = cls(world, scaler=scaler, options=options.get("deepspeed"))
        if engine._options.makes_shards:
            import_deepspeed(world)  # else whoever makes a model opens it, with a kernel that is compiled for a minute
        return engine

    @property
    def _stage(self) -> int:
        return stage_of(self._options.config)

    @property
    def _holds_copies(self) -> bool:
        """Does the model compute in 16-bit copies of weights that the ranks keep in float32, each a part?"""
        return self._stage > 0 and any(is_on(self._options.config, dtype) for dtype in ("fp16", "bf16"))

    @property
    def capabilities(self) -> Capabilities:
        """See ``Engine``; they depend on the stage."""
        return Capabilities(
            name="deepspeed",
            distributed_type="DEEPSPEED",
            replicates=self._stage < 3,
            shards_parameters=self._stage == 3 or self._holds_copies,
            shards_optimizer_state=self._stage > 0,
            joins_uneven=False,
            owns_loss_scaling=self._stage > 0,
            exposes_state=False,
            supports_multiple_models=False,
            keeps_float64=False,
            takes_closures=False,
        )

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Every rank reads its own part of the batch."""
        return ("dp_replicate",) if self._stage < 3 else ("dp_shard",)

    # ---- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Prepared:
        """Hand the model that ``optimizers`` trains to DeepSpeed, with it and a ``DummyScheduler``.

        A model without an optimizer is for evaluation: in stage 3 it is sharded, else every rank keeps rank zero's weights.

        Collective: every rank, with the same objects in the same order.

        Raises:
            UsageError: several models or optimizers that train, or one without the other.
            ConfigError: a config that cannot be used.
        """
        if not models and not optimizers:
            return Prepared(models=(), optimizers=(), schedulers=tuple(map(self._schedule, schedulers)))
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
                    follow(scheduler, old=optimizers[0], new=steppers[0])
        return Prepared(
            models=tuple(wrapped), optimizers=tuple(steppers), schedulers=tuple(map(self._schedule, schedulers))
        )

    def _require_complete(self) -> None:
        autos = unresolved(self._options.config)
        if autos:
            raise ConfigError(
                f"DeepSpeed's config leaves {', '.join(autos)} to be found out ('auto'), and nobody has",
                where="engine deepspeed",
                do="give numbers, or use Accelerator(deepspeed_plugin=), which knows the loaders and the model",
            )

    def _trained_model(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> nn.Module | None:
        """Return the model that ``optimizers`` trains; None: there is none."""
        if not optimizers:
            return None
        if len(optimizers) > 1:
            raise UsageError(
                f"{len(optimizers)} optimizers were given, and DeepSpeed steps one",
                where="prepare(), engine deepspeed",
                do="make one optimizer with several groups of parameters, or use the engine fsdp2 or ddp",
            )
        owned = {id(p) for group in parameter_groups(optimizers[0]) for p in group}
        trained = [model for model in models if any(id(p) in owned for p in model.parameters())]
        if len(trained) == 1 and self._run is None:
            return trained[0]
        if self._run is not None or trained:
            number = len(trained) + (self._run is not None)
            raise UsageError(
                f"{number} models would be trained, and DeepSpeed trains one for each Accelerator",
                where="prepare(), engine deepspeed",
                do="make them one module (nn.ModuleDict) with one optimizer, give the others an Accelerator of their own, or use "
                "the engine fsdp2 or ddp",
            )
        raise UsageError(
            "the parameters of the optimizer belong to none of the models beside it",
            where="prepare(), engine deepspeed",
            do="give prepare() the model and its optimizer in one call: DeepSpeed makes one object of both",
        )

    def _initialize(self, library: Any, model: nn.Module, optimizer: Any, schedulers: Sequence[Any]) -> DeepSpeedModel:
        if any(p.dtype is torch.float64 for p in model.parameters()):
            raise UsageError(
                "DeepSpeed keeps weights in float32, and the model has float64 ones",
                where="prepare(), engine deepspeed",
                do="use model.float(), or the engine fsdp2 or ddp",
            )
        config = training_config(
            self._options.config, optimizer, scaler=self._scaler, on_cpu=self._world.device.type == "cpu"
        )
        if is_on(config, "fp16") and not library.get_accelerator().is_fp16_supported():
            raise ConfigError(
                f"DeepSpeed has no fp16 on this device ({self._world.device})",
                where="mixed_precision='fp16', engine deepspeed",
                do="use mixed_precision='bf16', or ZeRO stage 0, or the engine fsdp2",
            )
        groups = parameter_groups(optimizer)
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
        clipping = float(config.pop("gradient_clipping", 0.0) or 0.0)
        engine, *_ = self._shown(library.initialize, model, config=config, **arguments)
        self._hooks += SightOfOutputs(engine, model, where="engine deepspeed").hooks
        return DeepSpeedModel(
            library,
            engine,
            groups=groups,
            stepper=Stepper(self._scaler if self._stage == 0 else None),
            world=self._world,
            clipping=clipping or None,
            loop_clips=self._options.loop_clips,
        )

    def _shown(self, initialize: Any, model: nn.Module, **arguments: Any) -> Any:
        """Initialize; in stage 3 the library hangs on the output of every module, and sees a tuple where it knew no better."""
        with ExitStack() as stack:
            for module in model.modules() if self._stage == 3 else ():
                if not type(module).__module__.startswith("torch.nn.modules."):  # those return tensors
                    stack.enter_context(show_outputs_to_hooks(module))
            return initialize(model=model, **arguments)

    def _evaluate(self, library: Any, model: nn.Module) -> nn.Module:
        """Make ``model`` ready for evaluation."""
        if self._stage == 3:
            engine, *_ = self._shown(library.initialize, model, config=evaluation_config(self._options.config))
            self._hooks += follow_loading(model, partial(write_whole, library.zero, rank=self._world.rank))
            self._evaluated.append(engine)
            return engine  # type: ignore[no-any-return]
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)
        return model

    def _schedule(self, scheduler: Any) -> Any:
        if not isinstance(scheduler, DummyScheduler):
            return scheduler
        if self._run is None or self._run.engine.lr_scheduler is None:
            raise ConfigError(
                "prepare() was given a DummyScheduler, and there is no schedule in DeepSpeed's config that it could stand for",
                where="ds_config 'scheduler'",
                do="put a 'scheduler' into the config, give DummyScheduler(lr_scheduler_callable=), or a schedule of torch; and "
                "prepare it with the model and the optimizer in one call",
            )
        return DrivenScheduler(self._run.engine.lr_scheduler)

    # ---- backward ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _synchronising(self, synchronise: bool) -> Iterator[None]:
        before, self._is_local = self._is_local, not synchronise
        try:
            yield
        finally:
            self._is_local = before

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See ``Engine``; stages 2 and 3 send gradients in every backward pass all the same: no rank has room for them."""
        return self._synchronising(False)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See ``Engine``."""
        return self._synchronising(True)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return an empty context: ranks cannot run out of batches apart, which ``capabilities.joins_uneven`` says."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """See ``Engine``; of ``options`` DeepSpeed knows ``retain_graph``.

        Raises:
            UsageError: other options, no model that trains, or gradients that were clipped and not stepped.
        """
        retain = bool(options.pop("retain_graph", False))
        if any(value is not None for value in options.values()):
            raise UsageError(
                f"backward() was given {', '.join(options)}, which DeepSpeed's does not know",
                where="engine deepspeed",
                do="leave it out, or use the engine fsdp2 or ddp",
            )
        self._required("backward()").backward(loss, retain_graph=retain, is_local=self._is_local)

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """See ``Engine``."""
        if loss.grad_fn is None:
            raise UsageError(
                "the loss of a rank without items does not depend on the model, and the other ranks' do: they wait for this "
                "rank's part in the backward pass",
                where="backward(), engine deepspeed",
                do="compute the loss from the model's outputs on every rank",
            )
        with zeros_for(parameters):
            self.backward(loss, **options)

    def _required(self, operation: str) -> DeepSpeedModel:
        if self._run is None:
            raise UsageError(
                f"{operation} needs a model that was prepared together with its optimizer",
                where="engine deepspeed",
                do="give prepare() both in one call",
            )
        return self._run

    # ---- step --------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """See ``Engine``.

        Raises:
            UsageError: a closure, or ``unsynced``: no rank could step alone.
        """
        if unsynced or closure is not None:
            raise UsageError(
                f"the engine deepspeed cannot step with {'a closure' if closure is not None else 'the gradients of one rank'}",
                where="LocalSGD, no_sync(unsynced=True)" if unsynced else "optimizer.step(closure)",
                do="use the engine ddp for that",
            )
        return self._required("step()").step()

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """See ``Engine``: only DeepSpeed's own optimizer gets the gradients.

        Raises:
            UsageError: another one.
        """
        if self._run is not None and optimizer is self._run.optimizer:
            return False
        raise UsageError(
            f"{type(optimizer).__name__} holds parameters of a model that DeepSpeed trains, and was not prepared with it: it would "
            "step without their gradients",
            where="step(), engine deepspeed",
            do="write model, optimizer = accelerator.prepare(model, optimizer), in one call, and step what it returns",
        )

    def settle(self) -> None:
        """See ``Engine``."""
        if self._run is not None:
            self._run.stepper.settle()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """See ``Engine``; a step has cleared them already."""
        if self._run is not None:
            self._run.drop_gradients()

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """See ``Engine``: clipping and stepping do it; stages 1 to 3 have no gradients to look at in between."""
        if self._run is not None and not unsynced:
            self._run.unscale()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """See ``Engine``; the smaller one of ``max_norm`` and the config's ``gradient_clipping`` holds.

        In the middle of a window (``unsynced``) there is no norm yet: that of the last update is returned.

        Raises:
            UsageError: another norm than the second, or not of all parameters that train.
        """
        run = self._required("clip_grad_norm_()")
        return run.last_norm if unsynced else run.clip(list(parameters), max_norm, float(norm_type))

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """See ``Engine``. Raises: UsageError in stages 1 to 3, whose gradients DeepSpeed keeps to itself."""
        run = self._required("clip_grad_value_()")
        if self._stage > 0:
            raise UsageError(
                "DeepSpeed has no clipping by value in ZeRO stages 1 to 3",
                where="clip_grad_value_(), engine deepspeed",
                do="use clip_grad_norm_(), or the engine fsdp2",
            )
        if not unsynced:
            run.finish()
        torch.nn.utils.clip_grad_value_(list(parameters), clip_value)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """See ``Engine``; multiplied when they are stepped or clipped."""
        self._required("backward()").factor *= factor

    def reduced(self, model: nn.Module) -> bool:
        """See ``Engine``."""
        return self._run is None or not self._run.is_local

    # ---- state -------------------------------------------------------------------------------------------------------

    def sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """See ``Engine``; of sharded tensors the values of this rank's part."""
        run = self._run
        if run is None or model is not run.engine or run.parts is None:
            return state_of(self.unwrap(model), optimizers)
        return run.own_state(with_optimizer=bool(optimizers))

    def load_sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """See ``Engine``: on ranks of the same number."""
        run = self._run
        if run is None or model is not run.engine or run.parts is None:
            load_state(self.unwrap(model), optimizers, state)
        else:
            run.load_own_state(state)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """See ``Engine``; in float32 where DeepSpeed keeps that, whatever dtype the model computes in."""
        run = self._run
        if run is not None and model is run.engine:
            return run.full_state_dict(on_rank_zero=self.capabilities.shards_parameters)
        if model not in self._evaluated:
            return plain_state_dict(self.unwrap(model))
        return self._gathered_state(model)

    def _gathered_state(self, model: Any) -> dict[str, Any] | None:
        """Return the state dict of a model that is sharded for evaluation. Collective."""
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
        """See ``Engine``; of stages 1 to 3 on the host."""
        run = self._required("the optimizer's state")
        return optimizer.state_dict() if run.parts is None else run.full_optimizer_state()

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """See ``Engine``."""
        run = self._required("the optimizer's state")
        if run.parts is None:
            optimizer.load_state_dict(dict(state))
        else:
            run.load_optimizer_state(state, is_whole=True)

    def parameter_groups(self, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        """See ``Engine``; in stages 1 to 3, those that train, and no empty groups."""
        run = self._run
        if run is None or run.parts is None:
            return super().parameter_groups(optimizer)
        return run.parts.parameter_groups

    def shape_of(self, parameter: torch.Tensor) -> torch.Size:
        """See ``Engine``."""
        return whole_shape(parameter)

    def release(self) -> None:
        """See ``Engine``."""
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
        """See ``Engine``."""
        ours = [*self._evaluated, *([] if self._run is None else [self._run.engine])]
        wrapper: Any = model
        inner: nn.Module = wrapper.module if any(model is one for one in ours) else model
        return inner
