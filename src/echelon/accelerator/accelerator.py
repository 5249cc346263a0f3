"""The Accelerator: a training loop written for one device, on any number of ranks."""

from __future__ import annotations

import builtins
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from echelon.accelerator.checkpoint.checkpoints import Checkpoints
from echelon.accelerator.current import living_accelerators, note_accelerator
from echelon.accelerator.epochs import Epochs
from echelon.accelerator.facts import AcceleratorFacts
from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.metrics import gather_samples, own_samples
from echelon.accelerator.models.save_objects import save, without_wrappers
from echelon.accelerator.plugins.configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin
from echelon.accelerator.plugins.kwargs_handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    fp8_recipe,
)
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.preemption import PreemptionHandler, save_and_end
from echelon.accelerator.prepare.compile import (
    compile_regions,
    compile_whole,
    compiles,
    is_compiled,
    moved_to,
    uncompiled,
)
from echelon.accelerator.prepare.data_loaders import rng_type_names, skip_first_batches
from echelon.accelerator.prepare.prepare_arguments import collect_known, replace_prepared
from echelon.accelerator.prepare.unprepared import refuse_unprepared_loader, warn_of_unprepared_model
from echelon.accelerator.profiling import ProfileKwargs, profile
from echelon.accelerator.setup.agreement import agree_on_models, agree_on_settings
from echelon.accelerator.setup.build import (
    build_sharding,
    build_world,
    dynamo_plugin_of,
    dynamo_settings,
    handlers_by_kind,
    make_engine,
    refuse_what_is_not_offered,
    resolve_settings,
)
from echelon.accelerator.setup.build_deepspeed import build_deepspeed, refuse_stand_ins
from echelon.accelerator.setup.watch import watched
from echelon.accelerator.state import AcceleratorState, only_if
from echelon.accelerator.tracking import Tracking
from echelon.accelerator.update.accumulation_window import AccumulationWindow
from echelon.accelerator.update.bitwise_update import build_bitwise_update
from echelon.accelerator.update.exact_update import ExactUpdate
from echelon.accelerator.update.micro_step import LocalBackward, MicroStep, checked_loss
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.accelerator.update.step_guard import StepGuard
from echelon.accelerator.update.step_timing import time_forward, timed_backward
from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.base.progress import Progress
from echelon.base.protocols import HasDeviceMap
from echelon.config.origin import Setting, SettingSource
from echelon.data.active_loaders import LoaderOptions
from echelon.data.loader import PreparedLoader
from echelon.data.prepare_loader import prepare_loader
from echelon.data.sharding.split import split_between_processes
from echelon.distributed import collectives, control
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.distributed.responder import Watcher
from echelon.distributed.setup import cleanup
from echelon.engines.base import Engine
from echelon.engines.deepspeed.options import DrivenScheduler, DummyOptim, DummyScheduler
from echelon.precision.float8 import convert_model_to_fp8_ao
from echelon.precision.policy import PrecisionPolicy, unwrap_forward
from echelon.status.board import Phase
from echelon.status.call_site import here
from echelon.status.notes import note_loaded, saving, slow, within
from echelon.world.seed import set_seed

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin

__all__ = ["Accelerator"]

_logger = get_logger(__name__)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Accelerator(AcceleratorFacts):
    """Prepares models, optimizers, schedulers and loaders for the ranks, and runs the parts of a loop that depend on them.

    The interface is that of Hugging Face Accelerate: same names, same defaults, same meaning, except where that is
    provably wrong. Two Accelerators in one process do not touch each other.

    Args:
        device_placement: move models and batches to the device.
        split_batches: as in ``DataLoaderConfiguration``.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``; None: from the environment or the launcher, else ``no``.
        gradient_accumulation_steps: micro-batches in one update.
        cpu: use the CPU even where accelerators are present.
        dataloader_config: how loaders are cut for the processes.
        deepspeed_plugin: train by the DeepSpeed library (or, with ``engine="fsdp2"``, by torch what it asks for); None: from
            the environment (``ACCELERATE_USE_DEEPSPEED``).
        fsdp_plugin: shard the model over the ranks, in this way; None: from the environment (``ACCELERATE_USE_FSDP``).
        gradient_accumulation_plugin: instead of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: advance prepared schedulers with the optimizer's steps, num_processes times each;
            False: once per call, whatever the optimizer does.
        kwargs_handlers: options of torch's parts; at most one of each kind.
        dynamo_backend: compile prepared models by this backend of ``torch.compile``; None: from the environment or the
            launcher, else they are not compiled.
        dynamo_plugin: instead of ``dynamo_backend``, with more options.
        deepspeed_plugins: another name of ``deepspeed_plugin``.
        parallelism_config: over how many ranks the model is sharded, and how many such groups there are; None: from the
            environment (``ACCELERATE_USE_PARALLELISM_CONFIG``).
        engine: the name of an engine, or an ``Engine``; None: by the number of processes and whether the model is sharded.
        parity: ``off``: the meaning of Accelerate, more processes are a larger batch. ``exact``: a loader's batch is that
            of all processes together, and the update is that of one process (docs/parity.md). ``bitwise``: also to the
            last bit. None: from the environment or the launcher, else ``off``.
        seed: of ``random``, numpy and torch, set here; in the exact modes also of the order of the data. None: the
            script's own (``set_seed``), that of rank zero counts.
        canonical_shards: with ``parity="bitwise"``, the shards of an update, whose gradients are summed in a fixed order:
            at least the number of processes. None: 8.
        max_micro_batch_size: in the exact modes, the most samples of one process in one forward pass: fewer processes
            accumulate over more of them.

    Collective: the first one makes the process group, so every rank must come here.

    Raises:
        ConfigError: settings that are wrong, in conflict, or not offered.
    """

    def __getstate__(self) -> dict[str, Any]:
        # A pickle holds the settings and the facts. What was prepared is known by its identity, which no copy has.
        nothing: dict[str, Any] = {
            name: [] for name in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_unsharded")
        }
        return {
            **vars(self),
            **nothing,
            "_originals": {},
            "_compiled": {},
            "_watcher": None,
            "_epochs": None,
            "_guard": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._epochs = self._open_epochs()
        self._guard = self._open_guard()
        note_accelerator(self)  # in a process that was given it, AcceleratorState() looks at it

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Return this very object: a copy of what holds it must not hold another process group's view."""
        return self

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        engine: Engine | str | None = None,
        parity: str | None = None,
        seed: int | None = None,
        max_micro_batch_size: int | None = None,
        canonical_shards: int | None = None,
    ) -> None:
        refuse_what_is_not_offered(
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
        )
        self._config = resolve_settings(
            mixed_precision,
            gradient_accumulation_steps,
            cpu,
            gradient_accumulation_plugin,
            more={
                **dynamo_settings(dynamo_backend, dynamo_plugin),
                "engine": engine if isinstance(engine, str) else None,
                "parity": parity,
                "seed": seed,
                "max_micro_batch_size": max_micro_batch_size,
                "canonical_shards": canonical_shards,
            },
        )
        self._handlers = tuple(kwargs_handlers or ())
        handlers = handlers_by_kind(self._handlers)
        self._deepspeed, self._config = build_deepspeed(
            deepspeed_plugin,
            deepspeed_plugins,
            self._config,
            engine=engine if isinstance(engine, Engine) else self._config.value.engine,
            fsdp_plugin=fsdp_plugin,
        )
        chosen = self._deepspeed.engine
        self._world = build_world(self._config.value, handlers[InitProcessGroupKwargs], chosen)
        agree_on_settings()

        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config.split_batches = split_batches
        self.gradient_state = GradientState(
            gradient_accumulation_plugin
            or GradientAccumulationPlugin(num_steps=self._config.value.gradient_accumulation_steps)
        )
        self.step = 0
        self.rng_types = ["generator"] if rng_types is None else list(rng_types)
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self._tracking = Tracking(log_with, self.project_configuration)
        self._checkpoints = Checkpoints(self.project_configuration)
        self._triggered = False

        self._precision = PrecisionPolicy(
            mode=self._config.value.mixed_precision,
            device_type=self._world.device.type,
            autocast_options=handlers[AutocastKwargs].to_kwargs(),
        )
        self.ao_recipe_handler: AORecipeKwargs | None = fp8_recipe(
            handlers.get(AORecipeKwargs), precision=self.mixed_precision, device=self._world.device
        )
        self.dynamo_plugin: TorchDynamoPlugin = dynamo_plugin or dynamo_plugin_of(self._config.value)
        scaling = handlers[GradScalerKwargs] if self.scaler_handler else self._deepspeed.scaling or GradScalerKwargs()
        self.scaler = self._precision.make_scaler(scaling.to_kwargs())
        self.fsdp_plugin, sharding, self._layout = build_sharding(
            self._deepspeed.fsdp_plugin,
            parallelism_config,
            world=self._world,
            mixed_precision=self.mixed_precision,
            engine=chosen,
        )
        if self._layout is not None:
            self._layout.get_device_mesh(self._world.device.type)
        of_ddp = handlers[DistributedDataParallelKwargs]
        options, origin = self._deepspeed.options, self._config.origins["engine"]
        self._engine = make_engine(chosen, self._world, self.scaler, of_ddp, sharding, options, engine_from=origin)
        if self.capabilities.owns_loss_scaling:
            self.scaler = None
        is_canonical = self.parity == "bitwise"  # gradients are summed, elsewhere averaged
        self._window = AccumulationWindow(
            world_size=1 if is_canonical else self.num_processes, total_of=self._total_of, is_redone=is_canonical
        )
        self._progress = Progress()
        self._steps_before = 0  # optimizer steps that self._optimizers have not counted
        self._accumulating: tuple[nn.Module, ...] | None = None  # of the accumulate() that we are in; () = all
        self._num_in_short_window = (
            0  # micro-steps of an update that this rank alone ends, because it has no more batches
        )
        self._is_data_checked = self._world.world_size == 1
        self._unsharded: list[DataLoader[Any]] = []

        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []
        self._originals: dict[int, tuple[object, Any]] = {}  # id of what was given -> (it, what it became)
        self._ledger = self._open_ledger()
        self.preemption = PreemptionHandler()
        """Where the run may stop when it is asked to end."""
        self._epochs = self._open_epochs()
        self._guard = self._open_guard()
        self._compiled: dict[int, nn.Module] = {}  # id of a whole compiled model -> the engine's model in it
        self._watcher: Watcher | None = None
        self._told: set[type] = set()  # classes of schedulers of which was said how often they advance
        note_accelerator(self)

    @property
    def state(self) -> AcceleratorState:
        """The facts under the names of Accelerate's state."""
        return AcceleratorState.of(self)

    @property
    def is_fsdp2(self) -> bool:
        """Are parameters sharded?"""
        return self.state.is_fsdp2

    # ---- accumulation ------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Is this micro-batch the last of its update?"""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in one update."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.plugin.num_steps = gradient_accumulation_steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Did loss scaling leave out the last step of any optimizer?"""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one micro-step: gradients are synchronised, and optimizers step, in the last of a window.

        Args:
            models: the models that this micro-step trains; none: all.
        """
        return MicroStep(self, tuple(map(self._engine_model, models)))

    def no_sync(self, model: nn.Module, *, unsynced: bool = False) -> AbstractContextManager[None]:
        """Return a context in which backward passes of ``model`` stay local.

        Args:
            model: a prepared model.
            unsynced: optimizers step with the local gradients in it, on purpose: the ranks drift apart. Otherwise a step
                in it is taken with gradients averaged over the ranks there and then.
        """
        steppers: list[AcceleratedOptimizer | StepGuard] = [*self._optimizers, self._guard] if unsynced else []
        return LocalBackward(self._engine.no_sync(self._engine_model(model)), steppers)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass is synchronised although its forward passes ran in ``no_sync``.

        For several forward passes in ``no_sync`` before the first backward pass: the last backward pass, in this context,
        brings the gradients of all of them together. Static, as in Accelerate: the Accelerator that prepared ``model`` is
        found; for a model that none did, the context is empty.

        Collective: the backward pass in it.
        """
        for accelerator in living_accelerators():
            inner = accelerator._engine_model(model)
            if any(inner is known for known in accelerator._models):
                context: AbstractContextManager[Any] = accelerator._engine.sync_next_backward(inner)
                return context
        return nullcontext()

    def backward(self, loss: torch.Tensor, num_items: float | None = None, **kwargs: Any) -> None:
        """Backpropagate ``loss``, weighted for its update.

        Args:
            loss: a scalar with a graph: a mean.
            num_items: the number of items (samples or tokens) of this process that ``loss`` is a mean over; then the
                update is the mean over all items of all processes and micro-steps, however they were split. None: every
                process and micro-step counts the same, as in Accelerate.
            kwargs: of ``torch.Tensor.backward``.

        Collective: in the last micro-step of an update.

        Raises:
            UsageError: no scalar, no graph, weights that contradict each other, or (once, on several processes) a
                loader that was not prepared.
        """
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or (loss.dim() > 0 and loss.numel() != 1):
            loss = checked_loss(loss, kwargs, num_devices=self.capabilities.num_devices)
        if not self._is_data_checked:
            self._check_data()
        if self.gradient_state.sync_gradients:
            self._require_every_rank("backward()")
        scale, factor = self._weigh(loss, num_items)
        state = self.gradient_state
        if state.in_closure:
            state.has_loss_in_closure = True
        else:
            state.has_loss = True
        if self._ledger is not None:
            self._ledger.before_backward()
        with timed_backward(loss):
            if scale == 0.0:
                self._engine.backward_zeros(loss, self._parameters(), **kwargs)
            else:
                self._engine.backward(loss if scale == 1.0 else loss * scale, **kwargs)
        if self._ledger is not None:
            self._ledger.after_backward()
        if factor != 1.0:
            self._finish_gradients(factor)

    def _weigh(self, loss: torch.Tensor, num_items: float | None) -> tuple[float, float]:
        """Return the factor of ``loss``, and that of the gradients after it. Collective: as ``backward``."""
        state, window = self.gradient_state, self._window
        contribution = None if self._ledger is None else self._ledger.contribution()
        inside = self._accumulating is not None or contribution is not None
        if contribution is None or self._ledger is None:
            if num_items is None:
                return window.plain(num_steps=state.num_steps, inside=inside, sync=state.sync_gradients)
        else:
            num_items, is_counted = (0.0 if contribution.is_padding else num_items), num_items is not None
            items = contribution.num_items if num_items is None else num_items
            postponed = sum(o.num_postponed for o in self._optimizers)
            self._ledger.note_loss(loss, items, num_postponed=postponed, num_taken=self._num_steps())
            if not is_counted:
                return self._ledger.weigh(contribution), 1.0
        assert num_items is not None
        trained = frozenset(map(id, self._trained_models()))
        return window.weighted(num_items, inside=inside, sync=state.sync_gradients, trained=trained)

    def update_loss(self) -> float:
        """Return the loss of the update that was made last: the mean over the items of all processes and micro-steps.

        Losses of one micro-step are added up. An update without items has no mean: nan. It waits for the device: call it
        where the loss is logged.

        Collective: every process.

        Raises:
            UsageError: not in the exact modes, or before the first update.
        """
        if self._ledger is None:
            raise UsageError(
                "update_loss() needs the weight of every loss, which parity='off' does not ask for",
                where=f"parity={self.parity} (from {self._config.origins['parity']})",
                do="use Accelerator(parity='exact'), or accelerator.reduce(loss, 'mean')",
            )
        return self._ledger.update_loss(self._sum_over_ranks)

    @property
    def progress(self) -> Progress:
        """Where the run is."""
        self._progress.step = self._steps_before + self._num_steps()
        return self._progress

    def _num_steps(self) -> int:
        return max((optimizer.num_steps for optimizer in self._optimizers), default=0)

    def _snapshot_progress(self) -> dict[str, Any] | None:
        """Return the random states that belong into a checkpoint made now; None: those of now."""
        return None if self._ledger is None else self._ledger.close()

    def _restore_progress(self, progress: dict[str, Any] | None) -> None:
        """Go on from the counters of a checkpoint; None: it has none."""
        if self._ledger is not None:
            self._ledger.reopen()
        self._epochs.end_update()
        if progress is not None:
            self._progress.load_json(progress)
            self._steps_before = self._progress.step - self._num_steps()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo fp16 loss scaling on the gradients of ``optimizer`` (one, several, or all), before looking at them.

        In the exact modes only in the last micro-step of an update: what comes after it is scaled, too.
        """
        if self.scaler is None or self._is_unfinished():
            return
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            inner = one.optimizer if isinstance(one, AcceleratedOptimizer) else one
            self._engine.unscale(inner, unsynced=self._is_local())

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return the norm before.

        In the exact modes only in the last micro-step of an update: in the others, it returns what there is so far.

        Collective: where parameters are sharded, or the step guard has to reduce.
        """
        if self._is_unfinished():
            norm = self._engine.clip_grad_norm(_as_iterable(parameters), math.inf, norm_type, unsynced=True)
            return norm if self.scaler is None else norm / self.scaler.get_scale()
        self.unscale_gradients()
        for optimizer in self._optimizers:
            optimizer.is_clipped = True
        return self._engine.clip_grad_norm(_as_iterable(parameters), max_norm, norm_type, unsynced=self._is_local())

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``; in the exact modes once per update, at its end.

        Collective: where the step guard has to reduce.
        """
        if self._is_unfinished():
            return
        self.unscale_gradients()
        self._engine.clip_grad_value(_as_iterable(parameters), clip_value, unsynced=self._is_local())

    def _is_unfinished(self) -> bool:
        """Is this a micro-step of the exact modes after which the gradients are not yet those of the update?"""
        return self._ledger is not None and not self.sync_gradients

    def _is_local(self) -> bool:
        """Are the gradients still each rank's own: in mid-window, or in a ``no_sync(unsynced=True)``?"""
        return not self.sync_gradients or any(optimizer.unsynced for optimizer in self._optimizers)

    def _begin_micro_step(self) -> bool:
        state = self.gradient_state
        if self._ledger is not None and self._ledger.drives:
            self.step += 1
            return state.sync_gradients or state.plugin.sync_each_batch
        self.step += 1
        state.sync_gradients = self.step % state.num_steps == 0
        self._num_in_short_window = 0
        if state.sync_with_dataloader and state.end_of_dataloader:
            loader = state.active_dataloader
            if not state.sync_gradients and loader is not None and loader.ends_early:
                self._num_in_short_window = self.step % state.num_steps
            self.step = 0
            state.sync_gradients = True
        self._window.begin_micro_step()
        state.micro_step, state.has_loss = self._window.num_micro_steps, False
        return state.sync_gradients or state.plugin.sync_each_batch

    def _open_ledger(self) -> ExactUpdate | None:
        """Make the book of the exact modes."""
        config = self._config.value
        if config.seed is not None and self._config.origins["seed"].source is SettingSource.CODE:
            set_seed(config.seed)
        if config.parity == "off":
            if config.max_micro_batch_size is not None:
                raise ConfigError(
                    f"max_micro_batch_size={config.max_micro_batch_size} (from {self._config.origins['max_micro_batch_size']}) "
                    "cuts the batches of the exact modes, and parity is off",
                    do="give parity='exact', too, or leave max_micro_batch_size out",
                )
            return None
        book: dict[str, Any] = {
            "world": self._world,
            "seed": config.seed,
            "state": self.gradient_state,
            "window": self._window,
            "progress": self._progress,
            "models": lambda: self._models,
            "drop_gradients": self._drop_gradients,
            "max_micro_batch_size": config.max_micro_batch_size,
        }
        if config.parity == "exact":
            ledger = ExactUpdate(**book)
        else:
            hook = handlers_by_kind(self._handlers)[DistributedDataParallelKwargs].comm_hook
            ledger = build_bitwise_update(self._engine, self._parameters, self._config, comm_hook=hook, book=book)
        self.gradient_state.reading.driver = ledger
        return ledger

    def _open_epochs(self) -> Epochs:
        return Epochs(
            state=self.gradient_state,
            progress=self._progress,
            models=self._models,
            loaders=self._dataloaders,
            is_exact=self._ledger is not None,
            # Weak: a cycle would keep what this holds (a lock's thread) until Python looks for cycles.
            owner=weakref.ref(self),
        )

    def _open_guard(self) -> StepGuard:
        return StepGuard(
            engine=self._engine,
            models=self._models,
            state=self.gradient_state,
            parity=self._config.value.parity,
            scaler=self.scaler,
            num_processes=self._world.world_size,
        )

    def _at_boundary(self, is_new_step: bool, is_whole: bool) -> None:
        """The run may stop here: if all ranks are to, save and end."""
        preemption = self.preemption
        if not preemption.is_driven and preemption.at_boundary(is_new_step=is_new_step, is_whole=is_whole):
            save_and_end(self)

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.drop_gradients()
        for model in self._models:
            model.zero_grad(set_to_none=True)

    def _trained_models(self) -> list[nn.Module]:
        return list(self._accumulating or self._models)

    def _parameters(self) -> list[nn.Parameter]:
        """Return those of all prepared models and optimizers, each once."""
        held = [parameter for model in self._models for parameter in model.parameters()]
        owned = [parameter for o in self._optimizers for g in o.param_groups for parameter in g["params"]]
        return list({id(parameter): parameter for parameter in [*held, *owned]}.values())

    def _finish_gradients(self, factor: float) -> None:
        trained = self._trained_models()
        for model in trained if self._ledger is None else self._ledger.finished_models(trained):
            self._engine.finish_gradients(model, factor)
        held = {id(parameter) for model in self._models for parameter in model.parameters()}
        strays = [p for o in self._optimizers for g in o.param_groups for p in g["params"] if id(p) not in held]
        for parameter in strays:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _total_of(self, items: float) -> float:
        return self._sum_over_ranks([items])[0]

    def _sum_over_ranks(self, numbers: list[float]) -> list[float]:
        """Return the sum of each number over the ranks: one small reduction. Collective."""
        if self.num_processes == 1:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()  # the host needs them: losses are scaled by them

    def _check_data(self) -> None:
        self._is_data_checked = True
        if not self.gradient_state.in_dataloader:
            refuse_unprepared_loader(num_processes=self.num_processes, unsharded=self._unsharded)
        if not self._models:
            warn_of_unprepared_model(num_processes=self.num_processes)

    def _require_every_rank(self, operation: str) -> None:
        """Say which rank has run out of batches, in the place of waiting for it (an uneven loader, outside join)."""
        loaders = self.gradient_state.reading.loaders
        if not loaders:
            return
        for loader in reversed(loaders):  # of loaders that are read together, any may have ended the loop of a rank
            loader.require_every_rank(operation)
        loader = loaders[-1]
        if self._num_in_short_window and self._accumulating is not None:
            num_steps = self.gradient_state.num_steps
            loader.refuse_short_window(operation, micro_step=self._num_in_short_window, num_steps=num_steps)

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        self._require_every_rank("the forward pass")

    def _before_training_forward(self, model: nn.Module, _inputs: Any) -> None:
        # DDP sends buffers there, and once what its buckets are. A rank may well evaluate alone.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and model.training:
            self._require_every_rank("the forward pass")

    def allow_unsharded(self, loader: DataLoader[T]) -> DataLoader[T]:
        """Let every process read all of ``loader``, on purpose; returns it."""
        self._unsharded.append(loader)
        return loader

    # ---- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Return ``args`` made ready for the ranks, in the same order; unknown objects come back as they are.

        Args:
            args: models, optimizers, schedulers, DataLoaders, in any order and number, also nested in tuples, lists and
                dicts. What was prepared before comes back as what it became.
            device_placement: for each argument, whether to move it to the device; None: as the Accelerator.

        Collective: every rank, with the same objects in the same order.

        Raises:
            UsageError: nothing in it is known.
            DesyncError: the ranks were given different models or data.
        """
        placement = device_placement or [None] * len(args)
        if len(placement) != len(args):
            raise UsageError(
                f"device_placement has {len(placement)} entries for {len(args)} arguments",
                do="give one for each argument",
            )
        found: list[tuple[Any, bool]] = []
        for argument, place in zip(args, placement):
            collect_known(argument, self.device_placement if place is None else place, found)
        if not found:
            raise UsageError(
                f"prepare() was given nothing that it knows: {', '.join(type(a).__name__ for a in args) or 'no argument'}",
                do="give it a torch.nn.Module, a torch Optimizer, a learning-rate scheduler or a DataLoader",
            )
        self._prepare_found(found)
        results = tuple(replace_prepared(argument, self._originals) for argument in args)
        return results[0] if len(results) == 1 else results

    def _prepare_found(self, found: list[tuple[Any, bool]]) -> None:
        new = [(o, place) for o, place in found if id(o) not in self._originals]
        for loader, place in new:
            if isinstance(loader, DataLoader) and not isinstance(loader, PreparedLoader):
                self._note(loader, self._prepare_loader(loader, place))
        models = [(o, place) for o, place in new if isinstance(o, nn.Module) and o not in self._models]
        optimizers: list[Any] = [
            o for o, _ in new if isinstance(o, (Optimizer, DummyOptim)) and not isinstance(o, AcceleratedOptimizer)
        ]
        schedulers = [o for o, _ in new if isinstance(o, (LRScheduler, DummyScheduler))]
        if not self._deepspeed.options:
            refuse_stand_ins([*optimizers, *schedulers])
        for model, place in models:
            if self.use_distributed and self.verify_device_map(model):
                raise UsageError(
                    f"{type(model).__name__} was loaded over several devices (its hf_device_map has several entries), so "
                    "the ranks cannot each train a copy",
                    do="load it on one device: leave device_map out",
                )
            arrives_later = self._arrives_later(model)
            if place and self.device.type != "cpu" and not arrives_later:
                model.to(self.device)
            if self.ao_recipe_handler is not None:
                recipe = self.ao_recipe_handler
                convert_model_to_fp8_ao(uncompiled(model), recipe.config, recipe.module_filter_func)
            self._precision.wrap_forward(model)
        if self._ledger is not None:
            self._ledger.note_prepared([model for model, _ in models], optimizers)
        if self._ledger is not None and self.use_distributed:
            agree_on_models([model for model, _ in models])
        if models:
            self._fill_deepspeed([model for model, _ in models], optimizers, schedulers)
        given = [self._compile(model, by_regions=True) for model, _ in models]
        prepared = self._engine.prepare(given, optimizers, schedulers)
        self._watcher = watched(prepared.models, world=self._world)
        for (model, _), shaped, wrapped in zip(models, given, prepared.models):
            self._models.append(wrapped)
            if self.capabilities.shards_parameters:  # its layers wait for every rank, in the forward pass already
                wrapped.register_forward_pre_hook(self._before_forward, prepend=True)
            elif self.use_distributed and self.capabilities.joins_uneven and wrapped is not shaped:
                wrapped.register_forward_pre_hook(self._before_training_forward, prepend=True)
            # Whole models are compiled around the engine's wrapper: torch then cuts the graph where DDP sends gradients.
            became = wrapped if is_compiled(shaped) else self._compile(wrapped, by_regions=False)
            if became is not wrapped:
                self._compiled[id(became)] = wrapped
            time_forward(became)
            for one in (model, wrapped, became):
                self._note(one, became)
        for optimizer, inner in zip(optimizers, prepared.optimizers):
            self._optimizers.append(
                AcceleratedOptimizer(
                    inner,
                    engine=self._engine,
                    gradient_state=self.gradient_state,
                    scaler=self.scaler,
                    clipping=self._deepspeed.clipping,
                    guard=self._guard,
                    world=self._world,
                )
            )
            self._guard.note_prepared(inner)
            self._note(optimizer, self._optimizers[-1])
        for scheduler, inner in zip(schedulers, prepared.schedulers):
            self._schedulers.append(self._wrap_scheduler(inner))
            self._note(scheduler, self._schedulers[-1])

    def _fill_deepspeed(self, models: list[nn.Module], optimizers: list[Any], schedulers: list[Any]) -> None:
        """Give DeepSpeed's config the numbers of this run."""
        sizes = [loader.batch_size for loader in self._dataloaders]
        shares = self.num_processes if self.split_batches or self._ledger is not None else 1
        origin = self._config.origins["gradient_accumulation_steps"]
        self._deepspeed.fill(
            world_size=self.num_processes,
            accumulation=Setting(self.gradient_accumulation_steps, origin),
            batch_sizes=[size // shares or 1 for size in sizes if size],
            models=models,
            optimizers=optimizers,
            schedulers=schedulers,
            split_batches=self.split_batches,
        )

    def _arrives_later(self, model: nn.Module) -> bool:
        """Tell whether the engine brings values to ``model``, part by part: on the device it would not have room whole."""
        on_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        if self.capabilities.shards_parameters:
            return on_meta or (self.fsdp_plugin is not None and self.fsdp_plugin.cpu_ram_efficient_loading)
        if on_meta and self.device.type != "meta":
            raise UsageError(
                f"{type(model).__name__} is on the meta device: it has no values",
                where=f"prepare(), engine {self.capabilities.name}",
                do="call load_checkpoint_in_model(model, folder) before prepare(); where parameters are sharded, after it",
            )
        return False

    def _compile(self, model: nn.Module, *, by_regions: bool) -> nn.Module:
        plugin = self.dynamo_plugin
        if not compiles(plugin, model, by_regions=by_regions):
            return model
        return compile_regions(model, **plugin.to_kwargs()) if by_regions else compile_whole(model, plugin)

    def _engine_model(self, model: nn.Module) -> nn.Module:
        """Return what the engine made of a prepared model; what else is given stays as it is."""
        return self._compiled.get(id(model), model)

    def _note(self, given: object, became: Any) -> None:
        self._originals[id(given)] = (given, became)

    def _prepare_loader(
        self, loader: DataLoader[Any], place: bool, slice_fn: Any = None, already_sharded: bool | None = None
    ) -> PreparedLoader:
        config = self.dataloader_config
        options = LoaderOptions(
            split_batches=config.split_batches,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            already_sharded=config.already_sharded if already_sharded is None else already_sharded,
            exact=None if self._ledger is None else self._ledger.options(config),
            rng_types=rng_type_names(self.rng_types),
        )
        prepared = prepare_loader(
            loader,
            world=self._world,
            options=options,
            reading=self.gradient_state.reading,
            place=place,
            slice_fn=slice_fn,
        )
        self._dataloaders.append(prepared)
        if self._ledger is not None:
            self._ledger.tell_batch(prepared.total_batch_size)
        return prepared

    def _wrap_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        owner = getattr(scheduler, "optimizer", None)
        own = [o for o in self._optimizers if o is owner or o.optimizer is owner]
        if not isinstance(scheduler, DrivenScheduler):
            self._tell_factor(type(scheduler))
        return AcceleratedScheduler(
            scheduler,
            own or self._optimizers,
            gradient_state=self.gradient_state,
            num_processes=self.num_processes if self._ledger is None else 1,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.dataloader_config.split_batches,
        )

    def _tell_factor(self, kind: type) -> None:
        follows = self.step_scheduler_with_optimizer and not self.split_batches and self._ledger is None
        if self.num_processes == 1 or not follows or kind in self._told:
            return
        self._told.add(kind)
        _logger.info(
            "%s advances %d times with each update, once for each process: %d processes use that many batches in it. "
            "Accelerator(step_scheduler_with_optimizer=False) advances it once for each call of its step().",
            kind.__name__,
            self.num_processes,
            self.num_processes,
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; with ``evaluation_mode`` it is moved and cast, but not spread over the ranks.

        Collective: unless ``evaluation_mode``.
        """
        if not evaluation_mode:
            prepared: nn.Module = self.prepare(model, device_placement=[device_placement])
            return prepared
        if self.device_placement if device_placement is None else device_placement:
            model.to(self.device)
        self._precision.wrap_forward(model)
        return self._compile(self._compile(model, by_regions=True), by_regions=False)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare one optimizer."""
        prepared: AcceleratedOptimizer = self.prepare(optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare one learning-rate scheduler."""
        prepared: AcceleratedScheduler = self.prepare(scheduler)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
        *,
        already_sharded: bool | None = None,
    ) -> PreparedLoader:
        """Prepare one DataLoader.

        Args:
            data_loader: the user's, or one that was prepared before.
            device_placement: move its batches to the device; None: as the Accelerator.
            slice_fn_for_dispatch: cuts a dispatched batch.
            already_sharded: it gives each process its own part already (True), or it does not, whatever it looks like
                (False); None: as ``DataLoaderConfiguration`` says, else as it is recognised.

        Collective: every rank.
        """
        is_asked = slice_fn_for_dispatch is not None or already_sharded is not None
        if not is_asked or id(data_loader) in self._originals or isinstance(data_loader, PreparedLoader):
            prepared: PreparedLoader = self.prepare(data_loader, device_placement=[device_placement])
            return prepared
        place = self.device_placement if device_placement is None else device_placement
        self._note(data_loader, self._prepare_loader(data_loader, place, slice_fn_for_dispatch, already_sharded))
        return self._dataloaders[-1]

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return ``dataloader`` without the first ``num_batches`` of its next pass; map-style data is not read for it."""
        return skip_first_batches(dataloader, num_batches)

    # ---- talking to the other ranks ----------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of nested data over the processes. Collective. See ``echelon.distributed.gather``."""
        self._require_every_rank("gather()")
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of one step of a prepared loader: each sample exactly once, in the order of the data.

        Args:
            input_data: nested tensors whose first dimension is the batch, or objects (a list with one per sample).
            use_gather_object: gather as objects even if all leaves are tensors.

        Collective: every process, once per batch.
        """
        loader = self.gradient_state.active_dataloader
        if self.num_processes == 1:
            return self.trim_for_metrics(input_data)  # a canonical shard without samples has one on loan
        self._require_every_rank("gather_for_metrics()")
        last = None if loader is None else loader.step_to_trim()
        return gather_samples(input_data, last, objects=use_gather_object)

    def trim_for_metrics(self, input_data: Any) -> Any:
        """Return the results of one step of a prepared loader without samples that another process counts, too.

        For metrics that each process adds up by itself, and that are brought together once after the loop
        (``accelerator.reduce``, torchmetrics). A process without samples in a step borrows one of another's; here its
        results become empty.

        Args:
            input_data: nested tensors whose first dimension is the batch, or a list with one item per sample.
        """
        loader = self.gradient_state.active_dataloader
        return input_data if loader is None else own_samples(input_data, loader.step_to_trim())

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or average nested tensors over the processes. Collective. See ``echelon.distributed.reduce``."""
        self._require_every_rank("reduce()")
        return collectives.reduce(tensor, reduction, scale)  # type: ignore[arg-type]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad nested tensors to the largest size of any process. Collective."""
        self._require_every_rank("pad_across_processes()")
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """Wait until every process is here; who does not come is named. Collective."""
        self.gradient_state.reading.metrics.check()
        control.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on one process of each machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def slow(self, what: str) -> AbstractContextManager[None]:
        """Return a context that may take long on this process, while others wait: ``echelon launch`` says nothing of it
        before ``--slow_timeout`` (600 s).

        Args:
            what: the work, for reports.
        """
        return slow(what)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let rank zero run the block alone, then the others. Collective."""
        with control.main_first():
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let one process of each machine run the block alone, then its others. Collective."""
        with control.main_first(scope="machine"):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its part of a list, tuple, dict, tensor or dataset; equal parts when ``apply_padding``."""
        with split_between_processes(
            inputs, apply_padding, rank=self.process_index, world_size=self.num_processes, device=self.device
        ) as part:
            yield part

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let processes run out of batches at different steps: the others train on.

        Args:
            joinables: prepared models (optimizers need nothing).
            even_batches: of the prepared loaders, inside the block; None: as it is.

        Collective: every process enters.

        Raises:
            UsageError: (on several processes) one of ``joinables`` was not prepared.
        """
        prepared = [*self._models, *self._optimizers, *(optimizer.optimizer for optimizer in self._optimizers)]
        strangers = [j for j in joinables if self.use_distributed and all(j is not known for known in prepared)]
        if strangers:
            raise UsageError(
                f"join_uneven_inputs() was given what this Accelerator has not prepared: "
                f"{', '.join(type(stranger).__name__ for stranger in strangers)}",
                do="give it the models that prepare() returned",
            )
        reading = self.gradient_state.reading
        before = [(loader, loader.even_batches) for loader in self._dataloaders]
        if even_batches is not None:
            for loader in self._dataloaders:
                loader.even_batches = even_batches
        reading.joined = self.capabilities.joins_uneven
        try:
            with self._engine.join([self._engine_model(model) for model in joinables if isinstance(model, nn.Module)]):
                yield
        finally:
            reading.joined = False
            for loader, value in before:
                loader.even_batches = value

    def set_trigger(self) -> None:
        """Raise a flag on this process, for ``check_trigger`` on all of them."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Tell every process whether any of them raised the flag, and lower it. Collective."""
        raised = control.agree(self._triggered)
        if raised:
            self._triggered = False
        return raised

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Make ``function`` run on the process ``local_process_index`` of each machine; alone, a process takes every part."""
        return only_if(self.local_process_index == local_process_index or not self.use_distributed, function)

    def on_main_process(self, function: F | None = None) -> Any:
        """Make ``function`` run on rank zero only; elsewhere it returns None."""
        return only_if(self.is_main_process, function)

    def on_local_main_process(self, function: F | None = None) -> Any:
        """Make ``function`` run on one process of each machine only."""
        return only_if(self.is_local_main_process, function)

    def on_last_process(self, function: F) -> Any:
        """Make ``function`` run on the highest rank only."""
        return only_if(self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Make ``function`` run on the rank ``process_index`` only; a process that is alone takes every part."""
        return only_if(self.process_index == process_index or not self.use_distributed, function)

    # ---- models ------------------------------------------------------------------------------------------------------

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the mixed-precision context, for losses and other work outside the model's forward."""
        return self._precision.autocast(None if autocast_handler is None else autocast_handler.to_kwargs())

    def verify_device_map(self, model: nn.Module) -> bool:
        """Tell whether ``model``, or a part of it, was loaded over several devices (transformers' ``device_map``)."""
        parts: Iterable[object] = model.modules()
        return any(isinstance(part, HasDeviceMap) and len(part.hf_device_map) > 1 for part in parts)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module inside a prepared one.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: leave its forward under autocast; False: give it its own forward back.
            keep_torch_compile: leave a compiled module compiled.
        """
        inner: nn.Module = without_wrappers(self._engine.unwrap(self._engine_model(model)))
        bare = uncompiled(inner)
        if not keep_fp32_wrapper:
            unwrap_forward(inner)
            unwrap_forward(bare)
        if not keep_torch_compile:
            return bare
        if id(model) not in self._compiled:
            return inner
        return model if uncompiled(model) is inner else moved_to(inner, model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any] | None:
        """Return the whole state dict of a prepared model, by plain parameter names (``unwrap=False``: the wrapper's).

        Where parameters are sharded, rank zero gets it, on the host, and the others None.

        Collective: where parameters are sharded.
        """
        if not unwrap:
            return model.state_dict()
        if self.capabilities.shards_parameters:
            monitored_barrier("get_state_dict()", advice="It returns the state on rank zero, and None on the others.")
        return self._engine.full_state_dict(self._engine_model(model))

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write ``obj`` to ``f`` on rank zero (``save_on_each_node``: of each machine). Call it on every rank.

        Args:
            obj: what ``torch.save`` takes; a dict of tensors with ``safe_serialization``.
            f: a path, or an open file.
            safe_serialization: write safetensors.
        """
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of ``model`` into a folder, by plain parameter names, for other programs.

        Args:
            model: prepared or not.
            save_directory: it is made where it is missing; what else is in it stays.
            max_shard_size: of one file, such as ``"5GB"``; an index is written where there are several.
            safe_serialization: safetensors; False: by ``torch.save``.

        Collective: every rank.
        """
        monitored_barrier("save_model()", advice="Rank zero writes.")
        folder = Path(save_directory).expanduser()
        with within(Phase.SAVE):
            self._checkpoints.save_model(self, model, folder, max_shard_size=max_shard_size, safe=safe_serialization)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def _custom_objects(self) -> list[Any]:
        """What is saved beside models, optimizers, schedulers and loaders; Accelerate's name, which scripts read."""
        return self._checkpoints.custom_objects

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of ``objects``, too.

        Raises:
            UsageError: one has no ``state_dict`` and ``load_state_dict``, or holds what is no plain data.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank when ``save_state`` writes.

        What it takes out of ``weights`` is not written; what it writes into ``output_dir`` becomes a part of the
        checkpoint. The folder has another name while it is written. ``handle.remove()`` of the result removes the hook.
        """
        return self._checkpoints.add_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` reads.

        What it takes out of ``models`` is not loaded. ``handle.remove()`` of the result removes the hook.
        """
        return self._checkpoints.add_hook(self._checkpoints.load_hooks, hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        metric: float | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Write everything that resuming needs: what was prepared or registered, random states, ``step``. Returns where.

        An error on any rank is raised on all, and leaves what was there before as it was. A disk that is full, or fails,
        is reported, and does not end the run until ``max_failed_saves`` in a row (docs/checkpoints.md).

        Args:
            output_dir: a folder. An older state in it is replaced whole; other files stay. With
                ``automatic_checkpoint_naming`` it is ``project_dir/checkpoints/checkpoint_<iteration>`` instead.
            safe_serialization: weights as safetensors; False: by ``torch.save``, in Accelerate's layout.
            blocking: False: return when the state is copied, and write it in a thread; the next save waits for it.
            metric: how good the state is, for ``ProjectConfiguration(keep_best=)``; rank zero's counts.
            save_model_func_kwargs: of engines that write by themselves; none of this version does.

        Collective: every rank.

        Raises:
            UsageError: no folder, one that is there already (numbered) or cannot be replaced, or an unknown argument.
            CheckpointError: a state holds what could not be loaded without running code.
            DesyncError: some ranks failed; they are named.
        """
        if save_model_func_kwargs:
            raise UsageError(
                f"save_state() was given {', '.join(save_model_func_kwargs)}, which the engine "
                f"{self.capabilities.name} does not know",
                do="leave it out",
            )
        monitored_barrier("save_state()", advice="Each rank writes its part; rank zero what is one for all.")
        self.gradient_state.reading.metrics.check()
        with saving(self.progress.step):
            return self._checkpoints.save(
                self, output_dir, safe_serialization=safe_serialization, blocking=blocking, metric=metric
            )

    @property
    def best_checkpoint(self) -> Path | None:
        """Of the automatically named checkpoints that are there, the one saved with the best ``metric``; None: none was."""
        return self._checkpoints.best()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_missing: Collection[str] = (),
        allow_changed_data: bool | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what ``save_state`` wrote, here or in Accelerate. No code of the files runs.

        In echelon's own format every file is verified before anything is loaded, and the checkpoint may be of another
        engine and another number of processes (docs/checkpoints.md).

        Args:
            input_dir: the folder; None: of the automatically named ones the newest that is whole; what was passed over is told.
            load_kwargs: of ``torch.load``, for everything but the models; in Accelerate's layout.
            allow_missing: pieces that the checkpoint and this run need not both have: ``"scheduler"``, ``"loader[0]"``,
                ``"model[0].head"`` (weights whose names begin so), ... In echelon's own format.
            allow_changed_data: a checkpoint of the middle of an epoch is gone on with although the number of samples, the batch
                size, the order or the contents of the data are others now; from where is told. None: as the configuration
                says (``echelon launch --allow_changed_data``), else such a change is an error. Between two epochs it is told.
            load_model_func_kwargs: ``map_location`` (``cpu`` or ``on_device``), and ``strict`` and others of
                ``load_state_dict``, for the models.

        Collective: every rank.

        Raises:
            UsageError: there is no such folder.
            CheckpointError: a file is missing, damaged, holds code, or is another model's; it is of the middle of an epoch
                over other data.
            DesyncError: some ranks failed; they are named.
        """
        monitored_barrier("load_state()")
        options = {
            "allow_missing": allow_missing,
            "allow_changed_data": allow_changed_data,
            **load_model_func_kwargs,
        }
        with within(Phase.LOAD):
            self._checkpoints.load(self, input_dir, load_kwargs, options)
        note_loaded(self.progress.step)

    def resume(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        allow_missing: Collection[str] = (),
        must_exist: bool = False,
        allow_changed_data: bool | None = None,
    ) -> bool:
        """Go on where an earlier start of the run has saved; call it after ``prepare``. False: nothing is there to go on with.

        What ``load_state`` loads, and then: the next pass of a training loader begins in the middle of its epoch where
        the checkpoint is of that, evaluations begin at their beginning, and ``save_state`` numbers on. A training loader
        is one whose last pass began with gradients on and a prepared model in training mode. Half an update is made again
        (docs/checkpoints.md, "Going on").

        Args:
            path: a folder that ``save_state`` was given; None: of the automatically named ones the newest that is whole,
                and what was passed over is told.
            strict: a model has every weight of the checkpoint, and the other way round.
            allow_missing: as of ``load_state``.
            allow_changed_data: as of ``load_state``.
            must_exist: a run that finds no checkpoint ends with an error; else it starts from scratch, which is logged.

        Collective: every rank.

        Raises:
            UsageError: no path, and checkpoints are not named automatically; with ``must_exist``, nothing was saved; the path
                is a file, or a symbolic link that leads nowhere.
            CheckpointError: there are checkpoints and none is whole, it is another model's, or (``parity="off"``) of the
                middle of an epoch on another number of processes.
            DesyncError: some ranks failed; they are named.
        """
        monitored_barrier("resume()")
        if not self.preemption.is_driven:
            # Of now: the script may change its working directory before it is asked to save there.
            self.preemption.folder = None if path is None else Path(path).expanduser().absolute()
            self.preemption.join()
        with within(Phase.LOAD):
            is_there = self._checkpoints.resume(
                self,
                path,
                must_exist=must_exist,
                strict=strict,
                allow_missing=allow_missing,
                allow_changed_data=allow_changed_data,
            )
        if is_there:
            note_loaded(self.progress.step)
        return is_there

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Iterate over the epochs that the run still has to make, up to ``num_epochs`` in all: ``range(num_epochs)`` at first.

        The loop goes on where the run is, after ``resume`` as after a ``break`` out of it: in the middle of an epoch, the
        first pass of each training loader is the rest of its pass. An epoch is over when the loop comes back here.
        ``progress.epoch`` is the present one, and each loader's order is that of it (or of a later one, if it has had more
        passes).
        """
        first = self._go_on()
        with self.preemption.during(self):
            yield from self._epochs.loop(first, num_epochs)

    def _go_on(self) -> int:
        """Let loaders go on where the run is; return its epoch."""
        epoch, is_half = self._epochs.go_on()
        if is_half:
            self.step -= self.step % self.gradient_accumulation_steps
        return epoch

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared, and empty the device's cache; returns a None for each of ``objects``."""
        self._models.clear()
        self._steps_before += self._num_steps()
        self._optimizers.clear()
        self._schedulers.clear()
        self._dataloaders.clear()
        self._originals.clear()
        self._compiled.clear()
        self._guard.release()
        self._engine.release()
        self.step = 0
        if self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context of torch's profiler. Collective where a trace is written (``output_trace_dir``)."""
        return profile(profile_handler or self.profile_handler or ProfileKwargs(), rank=self.process_index)

    # ---- trackers ----------------------------------------------------------------------------------------------------

    @property
    def log_with(self) -> Any:
        """The trackers that were asked for."""
        return self._tracking.log_with

    @property
    def trackers(self) -> Any:
        """The trackers that run."""
        return self._tracking.trackers

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers; each decides on which processes it writes.

        Args:
            project_name: the name of the experiment.
            config: settings to store with it.
            init_kwargs: by tracker name, more arguments of its start.
        """
        self._tracking.init(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a running tracker, or (``unwrap``) the foreign object inside it."""
        return self._tracking.get(name, unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Give ``values`` of ``step`` to every tracker; call it on every process."""
        self._tracking.log(values, step, log_kwargs)

    def end_training(self) -> None:
        """Finish the trackers and end the process group. Collective."""
        self.gradient_state.reading.metrics.check()
        self._checkpoints.close()
        self._tracking.finish()
        if self._watcher is not None:
            self._watcher.close(f"end_training() at {here()}")
        cleanup()


def _as_iterable(parameters: Any) -> Iterable[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else parameters
