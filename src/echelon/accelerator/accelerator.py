"""The Accelerator, which runs a training loop written for one device on any number of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from echelon.accelerator import pipeline, sequences
from echelon.accelerator.checkpoint.checkpoints import Checkpoints
from echelon.accelerator.current import register_accelerator
from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.metrics import gather_samples, is_repeated, trim_for_metrics
from echelon.accelerator.models.save_objects import get_state_dict, is_on_several_devices, save, unwrap_model
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
)
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.preemption import PreemptionHandler
from echelon.accelerator.prepare.data_loaders import skip_first_batches
from echelon.accelerator.prepare.prepare_objects import prepare_arguments, prepare_for_evaluation, prepare_one_loader
from echelon.accelerator.process import ProcessMembers
from echelon.accelerator.profiling import ProfileKwargs, profile
from echelon.accelerator.setup.build_session import build_session, dynamo_settings, joined_names, resolve_settings
from echelon.accelerator.state import AcceleratorState
from echelon.accelerator.tracking import Tracking, record_settings
from echelon.accelerator.update.micro_step import LocalBackward, MicroStep, join_uneven_inputs, trigger_sync_in_backward
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.accelerator.update.update_policy import UpdatePolicy
from echelon.accelerator.views import axis_rank, delegate, given_handler, view
from echelon.base.capabilities import Capabilities
from echelon.base.errors import ConfigError, UsageError
from echelon.base.keywords import suggest_keywords
from echelon.base.messages.translation import gettext as _
from echelon.base.progress import Progress
from echelon.base.warnings import warn
from echelon.checkpoint.object_store import Location
from echelon.compat.enums import DistributedType, FP8BackendType
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.data.loader import PreparedLoader
from echelon.distributed import collectives, control
from echelon.distributed.record.log import log_hyperparameters
from echelon.distributed.setup import cleanup
from echelon.distributed.uncompiled import uncompiled_methods
from echelon.engines.base import Engine
from echelon.status.call_site import current_call_site
from echelon.status.notes import slow
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
    from echelon.plan.verdict import PlanVerdict

T = TypeVar("T")


@suggest_keywords
@uncompiled_methods(but=("autocast",))
class Accelerator(ProcessMembers):
    """Prepares models, optimizers, schedulers and loaders for the ranks, and runs the rank-dependent parts of a training loop.

    Names, defaults and semantics match Hugging Face Accelerate, except where Accelerate is provably wrong. Several
    Accelerators in one process do not interfere with each other.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``. None: from the environment or launcher, else ``no``.
        gradient_accumulation_steps: micro-batches per update.
        gradient_accumulation_plugin: replaces ``gradient_accumulation_steps``.
        cpu: use the CPU even if an accelerator is available.
        device_placement: move models and batches to the device.
        step_scheduler_with_optimizer: step schedulers num_processes times per update. False: once per call.
        kwargs_handlers: handlers with options for torch components; at most one of each type.

    Args: Equal results on any number of processes
        parity: ``off``: the batch grows with the number of processes. ``exact``: the batch size is global, and each update equals
            the one-process update (docs/parity.md). ``bitwise``: as ``exact``, and bit-identical. None: environment, or ``off``.
        seed: seed for random numbers and, in the exact modes, the data order. None: the script's seed on rank zero.
        max_micro_batch_size: largest micro-batch per process (exact modes). None: the process's share of the batch.
        canonical_shards: shards per update with ``parity="bitwise"``; at least the number of processes. None: 8.
        verify_every: compare every N-th update with that of one process on the same batch (docs/verify.md). None: never.
        verify_action: what to do on a difference: ``stop`` with an error (default), or ``warn``.
        master_weights: with mixed precision, how weights that were loaded in bf16 or fp16 are trained: as ``float32`` copies, ``keep``
            (as they are), or ``stochastic`` (rounded by torchao's optimizers; docs/guides/precision.md). None: ``float32``.
        activation_checkpointing: what each block keeps for the backward pass, which recomputes the rest: ``none`` (all), ``full`` (its
            inputs), ``selective`` (also matrix products) or ``offload`` (its inputs, on the CPU). None: ``none`` (docs/engines.md).
        activation_checkpointing_blocks: class names of the blocks. None: the model's ``_no_split_modules``.

    Args: Sharding and parallelism
        engine: engine name or ``Engine``. None: chosen from the number of processes and the sharding settings.
        fsdp_plugin: how to shard the model across ranks. None: from the environment (``ACCELERATE_USE_FSDP``).
        deepspeed_plugin: DeepSpeed settings (implemented by torch if ``engine="fsdp2"``). None: from the environment.
        deepspeed_plugins: alias of ``deepspeed_plugin``.
        parallelism_config: number and size of the shard groups. None: from the environment.
        torch_tp_plugin: not supported; use ``parallelism_config``.
        megatron_lm_plugin: not supported.

    Args: Data
        dataloader_config: how loaders are sharded.
        split_batches: see ``DataLoaderConfiguration``.
        rng_types: random number generators to synchronize at the start of each pass. None: the sampler's generator.

    Args: Speed
        speed: ``safe`` uses only settings whose results are bit-identical to the plain loop's, ``max`` also faster ones, ``off``
            none (docs/speed.md). None: ``safe``.
        dynamo_backend: ``torch.compile`` backend. None: from the environment or launcher, else do not compile.
        dynamo_plugin: ``torch.compile`` settings, used instead of ``dynamo_backend``.

    Args: Logging and folders
        log_with: trackers for ``log``: names, ``"all"``, or ``GeneralTracker`` objects (docs/tracking.md).
        project_dir: folder for automatically named checkpoints and trackers.
        project_config: names and limits of the checkpoints in that folder, as a ``ProjectConfiguration``.
        spike_guard: what to do if an update's loss is a spike or not finite: ``warn``, or ``skip`` the update
            (docs/spike_guard.md). None: losses are not watched.
        spike_factor: how many standard deviations above the median a loss must be to count as a spike. None: 10.

    Collective: construct on every rank, because the first Accelerator creates the process group.

    Raises:
        ConfigError: settings are invalid, contradictory, or not supported.
    """

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
        speed: str | None = None,
        verify_every: int | None = None,
        verify_action: str | None = None,
        master_weights: str | None = None,
        spike_guard: str | None = None,
        spike_factor: float | None = None,
        activation_checkpointing: str | None = None,
        activation_checkpointing_blocks: str | Sequence[str] | None = None,
    ) -> None:
        for name, value in {"torch_tp_plugin": torch_tp_plugin, "megatron_lm_plugin": megatron_lm_plugin}.items():
            if value is not None:
                raise ConfigError(
                    _("Accelerator({name}=) is not supported by this version of echelon", name=name),
                    where=f"code Accelerator({name}=)",
                    do=_("remove {name}", name=name),
                )
        settings = {
            **dynamo_settings(dynamo_backend, dynamo_plugin),
            "engine": engine if isinstance(engine, str) else None,
            "parity": parity,
            "seed": seed,
            "max_micro_batch_size": max_micro_batch_size,
            "canonical_shards": canonical_shards,
            "speed": speed,
            "verify_every": verify_every,
            "verify_action": verify_action,
            "master_weights": master_weights,
            "spike_guard": spike_guard,
            "spike_factor": spike_factor,
            "activation_checkpointing": activation_checkpointing,
            "activation_checkpointing_blocks": joined_names(activation_checkpointing_blocks),
        }
        plugin = gradient_accumulation_plugin
        config = resolve_settings(mixed_precision, gradient_accumulation_steps, cpu, plugin, more=settings)
        loading = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            loading.split_batches = split_batches
        project = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and project.project_dir is None:
            project.set_directories(project_dir)
        self.session = build_session(
            config,
            engine=engine if isinstance(engine, Engine) else None,
            handlers=kwargs_handlers or (),
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            parallelism_config=parallelism_config,
            accumulation=plugin,
            dynamo_plugin=dynamo_plugin,
            dataloader_config=loading,
            project=project,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=["generator"] if rng_types is None else list(rng_types),
        )
        self._world = self.session.world
        self._tracking = Tracking(log_with, project)
        self.checkpoints = Checkpoints(self.session)
        self._triggered = False
        state, capabilities = self.session.gradient_state, self.session.capabilities
        record_settings(self.session.config, engine=capabilities.name, accumulation=state.num_steps)
        self._announce()

    def _announce(self) -> None:
        self.preemption.save_and_end = weakref.WeakMethod(self._save_and_end)
        self.checkpoints.use_methods(
            unwrap_model=self.unwrap_model,
            get_state_dict=self.get_state_dict,
            is_overridden=type(self).get_state_dict is not Accelerator.get_state_dict,
        )
        register_accelerator(self)

    def _save_and_end(self) -> NoReturn:
        self.checkpoints.save_and_end(self.save_state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._announce()  # AcceleratorState() must find it in the process that unpickled it

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Return this object itself, so that copying its owner does not create a second view of the process group."""
        return self

    world: World = view("session.world", "Rank, world size and device of this process.")
    capabilities: Capabilities = view("session.engine.capabilities", "The capabilities of the engine.")
    distributed_type: DistributedType = view(
        "session.distributed_type",
        "Accelerate's ``DistributedType`` of this run, for scripts that print or compare it.",
    )
    multi_device: bool = property(  # type: ignore[assignment]
        lambda self: self.use_distributed and self.device.type != "cpu",
        doc="Whether several processes each use an accelerator; as in Accelerate, False on CPUs.",
    )
    should_save_model: bool = view("is_local_main_process", "Whether this process writes the model.")

    @property
    def state(self) -> AcceleratorState:
        """The rank, device and settings of this process as an ``AcceleratorState``."""
        return AcceleratorState.of(self)

    # ---- settings ----------------------------------------------------------------------------------------------------

    config: Resolved[RunConfig] = view("session.config", "The run's settings and where each one was set.")
    parity: str = view("session.config.value.parity", "The parity mode: ``off``, ``exact`` or ``bitwise``.")
    mixed_precision: str = view("session.config.value.mixed_precision", "``no``, ``fp16``, ``bf16`` or ``fp8``.")
    native_amp: bool = property(  # type: ignore[assignment]
        lambda self: self.mixed_precision != "no", doc="Whether models run under autocast."
    )
    fp8_backend: FP8BackendType = property(  # type: ignore[assignment]
        lambda self: FP8BackendType.NO if self.ao_recipe_handler is None else FP8BackendType.AO,
        doc="The fp8 backend: torchao, or ``NO`` without fp8.",
    )
    scaler: torch.amp.GradScaler | None = view("session.update.scaler", "The fp16 gradient scaler.", is_settable=True)
    device_placement: bool = view(
        "session.device_placement", "Whether models and batches are moved to the device.", is_settable=True
    )
    step_scheduler_with_optimizer: bool = view(
        "session.step_scheduler_with_optimizer", "Whether schedulers step with the optimizer.", is_settable=True
    )
    rng_types: list[Any] = view("session.rng_types", "RNGs synchronized at the start of each pass.", is_settable=True)
    dataloader_config: DataLoaderConfiguration = view(
        "session.dataloader_config", "How loaders are sharded.", is_settable=True
    )
    split_batches: bool = view("dataloader_config.split_batches", "See ``DataLoaderConfiguration``.")
    even_batches: bool = view("dataloader_config.even_batches", "See ``DataLoaderConfiguration``.", is_settable=True)
    use_seedable_sampler: bool = view("dataloader_config.use_seedable_sampler", "See ``DataLoaderConfiguration``.")
    dispatch_batches: bool | None = view("dataloader_config.dispatch_batches", "See ``DataLoaderConfiguration``.")
    use_stateful_dataloader: bool = view(
        "dataloader_config.use_stateful_dataloader", "See ``DataLoaderConfiguration``."
    )
    non_blocking: bool = view("dataloader_config.non_blocking", "See ``DataLoaderConfiguration``.")
    project_configuration: ProjectConfiguration = view("session.project", "The run's folders.", is_settable=True)
    project_dir: Any = view("project_configuration.project_dir", "The folder for the run's files.")
    logging_dir: Any = view("project_configuration.logging_dir", "The folder for trackers.")
    save_iteration: int = view("project_configuration.iteration", "Number of the next automatically named checkpoint.")
    # Handlers passed as kwargs_handlers; None: torch's defaults.
    autocast_handler: AutocastKwargs | None = given_handler(AutocastKwargs)
    ddp_handler: DistributedDataParallelKwargs | None = given_handler(DistributedDataParallelKwargs)
    init_handler: InitProcessGroupKwargs | None = given_handler(InitProcessGroupKwargs)
    profile_handler: ProfileKwargs | None = given_handler(ProfileKwargs)
    scaler_handler: GradScalerKwargs | None = given_handler(GradScalerKwargs)
    ao_recipe_handler: AORecipeKwargs | None = view(
        "session.ao_recipe_handler", "torchao settings for fp8; None without fp8.", is_settable=True
    )
    dynamo_plugin: TorchDynamoPlugin = view("session.dynamo_plugin", "``torch.compile`` settings.", is_settable=True)
    deepspeed_plugin: DeepSpeedPlugin | None = view("session.deepspeed.plugin", "DeepSpeed settings; None without it.")
    fsdp_plugin: FullyShardedDataParallelPlugin | None = view(
        "session.fsdp_plugin", "Model sharding settings; None without sharding.", is_settable=True
    )

    is_fsdp2: bool = view("session.engine.capabilities.replaces_parameters", "Whether parameters are sharded.")
    is_composable_parallelism_enabled: bool = view(
        "session.engine.capabilities.replaces_parameters", "Whether sharding can be combined with other axes."
    )
    parallelism_config: ParallelismConfig | None = view(
        "session.layout", "Number of ranks on each mesh axis; None if not configured."
    )
    torch_device_mesh: DeviceMesh | None = property(  # type: ignore[assignment]
        lambda self: None if self.parallelism_config is None else self.parallelism_config.device_mesh,
        doc="Device mesh built from ``parallelism_config``; None without it or if no axis has more than one rank.",
    )
    data_parallel_rank: int = axis_rank("data_parallel_rank", "dp_replicate")
    data_parallel_shard_rank: int = axis_rank("data_parallel_shard_rank", "dp_shard")
    tensor_parallel_rank: int = axis_rank("tensor_parallel_rank", "tp")
    context_parallel_rank: int = axis_rank("context_parallel_rank", "cp")
    pipeline_parallel_rank: int = axis_rank("pipeline_parallel_rank", "pp")

    context_parallel = sequences.context_parallel
    maybe_context_parallel = sequences.maybe_context_parallel

    def deepspeed_ulysses_dl_adapter(self, dl: T, model: nn.Module) -> T:
        """Return ``dl`` unchanged, because sequence parallelism is not supported."""
        return dl

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raise, because LOMO, which updates the parameters inside the backward pass, is not supported."""
        raise UsageError(
            "lomo_backward() is not supported: LOMO updates the parameters inside the backward pass, separately on each rank",
            do="use an optimizer with a step() method, and call accelerator.backward(loss)",
        )

    # ---- accumulation ------------------------------------------------------------------------------------------------

    gradient_state: GradientState = view("session.gradient_state", "The gradient accumulation state.")
    step: int = view("session.update.step", "Micro-batches so far, counted as in Accelerate.", is_settable=True)
    progress: Progress = view("session.progress", "The position of the run.")
    preemption: PreemptionHandler = view("session.preemption", "Handles preemption of the run.")
    sync_gradients: bool = view(
        "gradient_state.sync_gradients", "Whether this micro-batch is the last of its update.", is_settable=True
    )

    gradient_accumulation_steps: int = view("gradient_state.num_steps", "Micro-batches per update.", is_settable=True)
    optimizer_step_was_skipped: bool = view(
        "session.objects.step_was_skipped", "Whether loss scaling or ``spike_guard`` skipped any optimizer's last step."
    )
    trigger_sync_in_backward = staticmethod(trigger_sync_in_backward)
    update_loss = delegate(UpdatePolicy.update_loss, "session.update")
    unscale_gradients = delegate(UpdatePolicy.unscale_gradients, "session.update")

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context for one micro-step; the last one of an update synchronizes gradients and lets optimizers step.

        Args:
            models: models trained in this micro-step; by default all.

        Examples:
            >>> for x, y in loader:
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        return MicroStep(self.session.update, models)

    def no_sync(self, model: nn.Module, *, unsynced: bool = False) -> AbstractContextManager[None]:
        """Return a context in which backward passes of the prepared ``model`` stay local.

        Args:
            model: a prepared model.
            unsynced: let optimizers step with local gradients inside the context, so that the ranks diverge. Otherwise
                a step inside the context first averages the gradients across ranks.

        Examples:
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(torch.nn.functional.mse_loss(model(x), y))  # stays on this process
            >>> accelerator.backward(torch.nn.functional.mse_loss(model(x), y))  # averages both
        """
        session = self.session
        steppers: list[Any] = [*self._optimizers, session.guard] if unsynced else []
        return LocalBackward(session.engine.no_sync(session.objects.engine_model(model)), steppers)

    def backward(self, loss: torch.Tensor, num_items: float | None = None, **kwargs: Any) -> None:
        """Run the backward pass of ``loss``, weighted by its share of the update.

        Args:
            loss: scalar mean loss that requires grad.
            num_items: number of items (samples or tokens) that ``loss`` averages over on this process. The update then
                averages over all items of all processes and micro-steps, however they are split. None: equal weights
                for all processes and micro-steps, as in Accelerate.
            kwargs: passed to ``torch.Tensor.backward``.

        Collective: call on every rank in the last micro-step of an update.

        Raises:
            UsageError: the loss is not a scalar that requires grad, weights contradict each other, or a loader was
                not prepared (checked only in the first call, with multiple processes).

        Examples:
            >>> accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        """
        self.session.backward(loss, num_items, kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return the previous norm.

        In the exact modes, only an update's last micro-step scales gradients; earlier calls return the norm so far.

        Collective: call on every rank if parameters are sharded, or if gradients have not been averaged over the ranks yet.

        Examples:
            >>> accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            >>> if accelerator.sync_gradients:
            ...     norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
        """
        update = self.session.update
        if update.is_unfinished:
            return update.unfinished_grad_norm(parameters, norm_type)
        self.unscale_gradients()
        return update.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``; in the exact modes once per update, at its end.

        Collective: call on every rank if gradients have not been averaged over the ranks yet.

        Examples:
            >>> accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            >>> if accelerator.sync_gradients:
            ...     accelerator.clip_grad_value_(model.parameters(), clip_value=0.5)
        """
        if not self.session.update.is_unfinished:
            self.unscale_gradients()
            self.session.update.clip_grad_value(parameters, clip_value)

    # ---- prepare -----------------------------------------------------------------------------------------------------

    # Accelerate's private names, which scripts read.
    _models: list[nn.Module] = view("session.objects.models", "The prepared models.")
    _optimizers: list[AcceleratedOptimizer] = view("session.objects.optimizers", "The prepared optimizers.")
    _schedulers: list[AcceleratedScheduler] = view("session.objects.schedulers", "The prepared schedulers.")
    _dataloaders: list[PreparedLoader] = view("session.objects.loaders", "The prepared loaders.")
    _custom_objects: list[Any] = view("checkpoints.custom_objects", "Objects registered for checkpointing.")

    def allow_unsharded(self, loader: DataLoader[T]) -> DataLoader[T]:
        """Allow every process to read all of ``loader``; return ``loader``.

        Examples:
            >>> for x, y in accelerator.allow_unsharded(small_loader):
            ...     prediction = model(x)
        """
        self.session.unprepared.allow(loader)
        return loader

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Return ``args`` prepared for the ranks, in the same order; objects of other types are returned unchanged.

        Args:
            args: models, optimizers, schedulers and DataLoaders, possibly nested; prepared ones are returned unchanged.
            device_placement: whether to move each argument to the device. None: use the Accelerator's setting.

        Collective: call on every rank, with the same objects in the same order.

        Raises:
            UsageError: no argument can be prepared.
            DesyncError: the ranks passed different models or data.

        Examples:
            >>> model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        return prepare_arguments(self.session, args, device_placement, is_on_several_devices=self.verify_device_map)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; with ``evaluation_mode`` it is moved and cast, but not distributed across ranks.

        Collective: call on every rank unless ``evaluation_mode``.

        Examples:
            >>> teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        """
        if evaluation_mode:
            place = self.device_placement if device_placement is None else device_placement
            return prepare_for_evaluation(self.session, model, place=place)
        return self.prepare(model, device_placement=[device_placement])  # type: ignore[no-any-return]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare one optimizer.

        Examples:
            >>> optimizer = accelerator.prepare_optimizer(optimizer)
        """
        return self.prepare(optimizer)  # type: ignore[no-any-return]

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare one learning-rate scheduler.

        Examples:
            >>> scheduler = accelerator.prepare_scheduler(scheduler)
        """
        return self.prepare(scheduler)  # type: ignore[no-any-return]

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
            data_loader: prepared or not.
            device_placement: move batches to the device. None: use the Accelerator's setting.
            slice_fn_for_dispatch: function that splits a dispatched batch.
            already_sharded: whether each process already reads its own shard. None: see ``DataLoaderConfiguration``.

        Collective: call on every rank.

        Examples:
            >>> loader = accelerator.prepare_data_loader(loader, already_sharded=True)
        """
        is_plain = slice_fn_for_dispatch is None and already_sharded is None
        if is_plain or id(data_loader) in self.session.objects.originals or isinstance(data_loader, PreparedLoader):
            return self.prepare(data_loader, device_placement=[device_placement])  # type: ignore[no-any-return]
        place = self.device_placement if device_placement is None else device_placement
        return prepare_one_loader(
            self.session, data_loader, place=place, slice_fn=slice_fn_for_dispatch, already_sharded=already_sharded
        )

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader without its first ``num_batches`` batches. See ``echelon.skip_first_batches``.

        Examples:
            >>> for x, y in accelerator.skip_first_batches(loader, num_batches=2):
            ...     loss = torch.nn.functional.mse_loss(model(x), y)
        """
        return skip_first_batches(dataloader, num_batches)

    join_uneven_inputs = delegate(join_uneven_inputs, "session")
    prepare_pipeline = delegate(pipeline.prepare_pipeline, "session")

    # ---- collectives -------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor in nested data across processes. Collective. See ``echelon.distributed.gather``.

        Examples:
            >>> losses = accelerator.gather(loss.detach())  # one from each process
        """
        self.session.update.require_every_rank("gather()")
        return collectives.gather(tensor, mesh=self.session.data_world.mesh)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results for one batch of a prepared loader: each sample exactly once, in dataset order.

        Args:
            input_data: nested tensors whose first dimension is the batch, or objects (a list with one item per sample).
            use_gather_object: gather as objects even if all leaves are tensors.

        Collective: call on every process, once per batch.

        Examples:
            >>> for x, y in eval_loader:
            ...     predictions, labels = accelerator.gather_for_metrics((model(x), y))
        """
        loader = self.gradient_state.active_dataloader
        if self.session.data_world.world_size == 1:
            return self.trim_for_metrics(input_data)  # an empty canonical shard has a padding sample
        self.session.update.require_every_rank("gather_for_metrics()")
        last, world = None if loader is None else loader.step_to_trim(), self.session.data_world
        gathered = gather_samples(input_data, last, world=world, objects=use_gather_object)
        if loader is None and is_repeated(gathered, world):
            warn(
                _(
                    "gather_for_metrics() got the same rows from each of {number} processes, outside the loop of a prepared loader: "
                    "each sample counts {number} times. Pass the evaluation loader to prepare()",
                    number=world.world_size,
                )
            )
        return gathered

    trim_for_metrics = delegate(trim_for_metrics, "gradient_state")

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or average nested tensors across processes. Collective. See ``echelon.distributed.reduce``.

        Examples:
            >>> mean_loss = accelerator.reduce(loss.detach(), "mean")
        """
        self.session.update.require_every_rank("reduce()")
        return collectives.reduce(tensor, reduction, scale, mesh=self.session.data_world.mesh)  # type: ignore[arg-type]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad nested tensors to the largest size on any process. Collective.

        Examples:
            >>> tokens = accelerator.gather(accelerator.pad_across_processes(tokens, dim=1))
        """
        self.session.update.require_every_rank("pad_across_processes()")
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, mesh=self.session.data_world.mesh)

    def wait_for_everyone(self) -> None:
        """Wait for all processes; if some do not arrive, the error names them. Collective.

        Examples:
            >>> if accelerator.is_main_process:
            ...     torch.save({"vocabulary": 100}, "vocabulary.pt")
            >>> accelerator.wait_for_everyone()
            >>> vocabulary = torch.load("vocabulary.pt")
        """
        control.barrier()

    slow = staticmethod(slow)

    def set_trigger(self) -> None:
        """Set a flag on this process that ``check_trigger`` reads on all processes.

        Examples:
            >>> if loss.isnan():  # on any process
            ...     accelerator.set_trigger()
            >>> if accelerator.check_trigger():  # on every process
            ...     raise RuntimeError("the loss is NaN")
        """
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether any process has set the flag, and reset it. Collective.

        Examples:
            >>> accelerator.check_trigger()
            False
        """
        raised = control.agree(self._triggered)
        self._triggered = self._triggered and not raised
        return raised

    # ---- models ------------------------------------------------------------------------------------------------------

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the mixed-precision context for losses and other computations outside the model's forward.

        Examples:
            >>> with accelerator.autocast():
            ...     loss = torch.nn.functional.mse_loss(model(x), y)
        """
        return self.session.precision.autocast(None if autocast_handler is None else autocast_handler.to_kwargs())

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether ``model`` or a submodule was loaded across several devices (transformers' ``device_map``)."""
        return is_on_several_devices(model)

    unwrap_model = delegate(unwrap_model, "session")
    get_state_dict = delegate(get_state_dict, "session")

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write ``obj`` to the path or file ``f`` with ``torch.save`` or as safetensors, on rank zero
        (``save_on_each_node``: on one rank per machine). Call it on every rank.

        Examples:
            >>> accelerator.save({"threshold": 0.5}, "threshold.pt")
        """
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    save_model = delegate(Checkpoints.save_model, "checkpoints")
    register_for_checkpointing = delegate(Checkpoints.register_for_checkpointing, "checkpoints")
    register_save_state_pre_hook = delegate(Checkpoints.register_save_state_pre_hook, "checkpoints")
    register_load_state_pre_hook = delegate(Checkpoints.register_load_state_pre_hook, "checkpoints")
    save_state = delegate(Checkpoints.save_state, "checkpoints")
    load_state = delegate(Checkpoints.load_state, "checkpoints")
    resume = delegate(Checkpoints.resume, "checkpoints")
    best_checkpoint: Location | None = property(  # type: ignore[assignment]
        lambda self: self.checkpoints.store.best(),
        doc="The automatically named checkpoint with the best ``metric``; None if no checkpoint has a metric.",
    )

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Iterate over the remaining epochs of the run, up to ``num_epochs`` in total; initially ``range(num_epochs)``.

        After ``resume`` or a ``break``, the loop continues at the current position. In the middle of an epoch, each
        training loader first yields the rest of its interrupted pass. An epoch ends when the loop requests the next
        one. ``progress.epoch`` is the current epoch; it also determines each loader's order (later passes in an epoch
        use later epochs' orders).

        Examples:
            >>> accelerator.resume()
            False
            >>> for epoch in accelerator.epochs(2):
            ...     for x, y in loader:
            ...         accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...     folder = accelerator.save_state()
        """
        first = self.session.resume_epochs()
        with self.preemption.during(self.session.watcher):
            yield from self.session.epochs.loop(first, num_epochs)

    def plan(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batch: Any,
        compute_loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
        *,
        gpus: int | None = None,
        nodes: int | None = None,
        device: str | None = None,
        gpu_memory: int | str | None = None,
        interconnect: str | None = None,
    ) -> PlanVerdict:
        """Say whether a training step fits into the memory of GPUs, and what to change if it does not (docs/plan.md).

        A copy of ``model`` without data runs the step; nothing is trained, and no memory for weights is allocated. The settings are
        those of this Accelerator. Call it before ``prepare``; with an engine that does not shard, it may be called afterwards, too.

        Args:
            model: the model, unchanged.
            optimizer: the optimizer of its parameters, unchanged.
            batch: one batch, as the loader of a process returns it.
            compute_loss: ``compute_loss(model, batch)`` returns the loss, and must call the model that it is given. None:
                ``model(**batch).loss``.
            gpus: devices of each machine. None: processes of this machine.
            nodes: number of machines. None: those of this run.
            device: name of the device, such as ``H100``, which also gives its memory.
            gpu_memory: memory of a device: bytes, or a text such as ``80GB``. None: that of this machine's first accelerator.
            interconnect: links between devices and between machines, such as ``nvlink,400Gb``.

        Returns:
            The verdict: ``print(verdict)`` shows what ``echelon plan`` does; ``verdict.fits``, ``verdict.best`` and
            ``verdict.changes`` are for programs.

        Raises:
            ConfigError: the device or a link is unknown.
            UsageError: the memory is unknown, the model or the optimizer is sharded or cannot be copied, or ``compute_loss`` calls
                another model.

        Examples:
            >>> def compute_loss(model, batch):
            ...     return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
            >>> verdict = accelerator.plan(model, optimizer, (x, y), compute_loss, gpus=8, gpu_memory="80GB")
            >>> verdict.fits
            True
        """
        from echelon.accelerator.step_plan import plan_step  # noqa: PLC0415 - torch's fake tensors take a second to import

        return plan_step(
            self.session,
            model,
            optimizer,
            batch,
            compute_loss,
            gpus=gpus,
            nodes=nodes,
            device=device,
            gpu_memory=gpu_memory,
            interconnect=interconnect,
        )

    def free_memory(self, *objects: Any) -> Any:
        """Release all prepared objects and empty the device's cache; return None for each of ``objects``.

        Examples:
            >>> model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        """
        self.session.forget_objects()
        if self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a ``torch.profiler`` context. Collective if a trace is written (``output_trace_dir``).

        Examples:
            >>> with accelerator.profile() as profiler:
            ...     output = model(x)
            >>> table = profiler.key_averages().table(sort_by="cpu_time_total", row_limit=5)
        """
        return profile(profile_handler or self.profile_handler or ProfileKwargs(), rank=self.process_index)

    # ---- trackers ----------------------------------------------------------------------------------------------------

    log_with: Any = view("_tracking.log_with", "The configured trackers.")
    trackers: Any = view("_tracking.trackers", "The active trackers.")
    init_trackers = delegate(Tracking.init_trackers, "_tracking")
    get_tracker = delegate(Tracking.get_tracker, "_tracking")
    log = delegate(Tracking.log, "_tracking")
    log_hyperparameters = staticmethod(log_hyperparameters)

    def end_training(self) -> None:
        """Finish the trackers and end the process group. Collective.

        Examples:
            >>> accelerator.end_training()
        """
        self.session.run_final_checks()
        self.checkpoints.store.close()
        self._tracking.finish()
        if self.session.watcher is not None:
            self.session.watcher.close(f"end_training() at {current_call_site()}")
        cleanup()
