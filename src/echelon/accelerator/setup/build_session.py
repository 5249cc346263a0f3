"""Builds a run's ``Session`` from the ``Accelerator()`` arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from echelon.accelerator.agreement import agree_on_settings
from echelon.accelerator.gradient_state import GradientState
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
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig, TorchTensorParallelConfig
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.prepare.build_deepspeed import DeepSpeedSettings, build_deepspeed
from echelon.accelerator.prepare.canonical_chunks import canonical_chunks_of
from echelon.accelerator.prepared_objects import PreparedObjects
from echelon.accelerator.profiling import ProfileKwargs
from echelon.accelerator.session import Session
from echelon.accelerator.setup.choose_precision import choose_master_weights, choose_precision
from echelon.accelerator.unprepared_model import UnpreparedModelCheck
from echelon.accelerator.update.bitwise_update import build_shard_split
from echelon.accelerator.update.exact_update import ExactUpdate, RankSplit
from echelon.accelerator.update.update_parts import UpdateParts
from echelon.accelerator.update.update_policy import UpdatePolicy
from echelon.base.cores import bind, cores_of_node, share_of
from echelon.base.device import numa_node_of
from echelon.base.errors import ConfigError
from echelon.base.fork_repair import repair_fork
from echelon.base.logging import get_logger
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.base.progress import Progress
from echelon.base.rank import known_rank
from echelon.base.warnings import warn
from echelon.config.derive import check_sections
from echelon.config.explain import overridden
from echelon.config.library_variables import configure_transformers
from echelon.config.origin import Origin, SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import current, from_code
from echelon.distributed.checks.coalescing import guard_coalescing
from echelon.distributed.setup import setup
from echelon.engines.base import Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.registry import GROUPLESS, SHARDING, default_engine, load_engine
from echelon.engines.tensor_parallel.options import TensorParallelOptions
from echelon.precision.policy import PrecisionPolicy
from echelon.world.environment import detect
from echelon.world.mesh import DATA_AXES, LOSS_AXES
from echelon.world.seed import set_seed
from echelon.world.world import World, mesh_along

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
    from echelon.accelerator.update.live_check.live_check import LiveCheck

_logger = get_logger(__name__)


def build_session(
    config: Resolved[RunConfig],
    *,
    engine: Engine | None,
    handlers: Sequence[KwargsHandler],
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
    deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    parallelism_config: ParallelismConfig | None,
    accumulation: GradientAccumulationPlugin | None,
    dynamo_plugin: TorchDynamoPlugin | None,
    dataloader_config: DataLoaderConfiguration,
    project: ProjectConfiguration,
    **given: Any,
) -> Session:
    """Build the parts of a run from the ``Accelerator()`` arguments.

    Collective: call on every rank, because the first call creates the process group.
    """
    kinds = handlers_by_kind(handlers)
    deepspeed, config = build_deepspeed(
        deepspeed_plugin, deepspeed_plugins, config, engine=engine or config.value.engine, fsdp_plugin=fsdp_plugin
    )
    settings = config.value
    world = build_world(settings, kinds[InitProcessGroupKwargs], deepspeed.engine)
    agree_on_settings()
    state = GradientState(accumulation or GradientAccumulationPlugin(num_steps=settings.gradient_accumulation_steps))
    autocast = kinds[AutocastKwargs].to_kwargs()
    precision = PrecisionPolicy(mode=settings.mixed_precision, device_type=world.device.type, autocast_options=autocast)
    recipe = fp8_recipe(kinds.get(AORecipeKwargs), config, device=world.device)
    scaler = _build_scaler(precision, handlers, deepspeed)
    fsdp_plugin, sharding, layout = build_sharding(
        deepspeed.fsdp_plugin,
        parallelism_config,
        world=world,
        settings=settings,
        engine=deepspeed.engine,
    )
    if sharding is None and deepspeed.plugin is None:
        check_sections(config)
    data_world, loss_world = _parts_of(world, layout)
    of_ddp: DistributedDataParallelKwargs = kinds[DistributedDataParallelKwargs]
    num_chunks = canonical_chunks_of(config, layout)
    sharding = _on_mesh(sharding, layout, world.device.type, num_chunks=num_chunks)
    options = deepspeed.options
    built = build_engine(
        deepspeed.engine, world, scaler, of_ddp, sharding, options, engine_from=config.origins["engine"]
    )
    config = choose_master_weights(config, built.capabilities)
    objects = PreparedObjects()
    scaler = None if built.capabilities.owns_loss_scaling else scaler
    live_check = _build_live_check(
        built,
        config,
        has_other_axes=layout is not None and (bool(layout.non_dp_dim_names) or layout.ep_enabled),
        world=world,
        state=state,
        objects=objects,
        scaler=scaler,
    )
    parts = UpdateParts(
        config=config,
        world=world,
        data_world=data_world,
        loss_world=loss_world,
        engine=live_check or built,
        scaler=scaler,
        state=state,
        progress=Progress(),
        objects=objects,
        unprepared=UnpreparedModelCheck(num_processes=data_world.world_size, state=state, loaders=objects.loaders),
    )
    return Session(
        config=config,
        world=world,
        data_world=data_world,
        engine=parts.engine,
        precision=precision,
        deepspeed=deepspeed,
        handlers=tuple(handlers),
        layout=layout,
        fsdp_plugin=fsdp_plugin,
        dynamo_plugin=dynamo_plugin or TorchDynamoPlugin(backend=settings.dynamo_backend),
        ao_recipe_handler=recipe,
        dataloader_config=dataloader_config,
        project=project,
        gradient_state=state,
        counters=parts.progress,
        objects=parts.objects,
        unprepared=parts.unprepared,
        update=_build_update(parts, layout, comm_hook=of_ddp.comm_hook, num_chunks=num_chunks),
        live_check=live_check,
        **given,
    )


def _on_mesh(
    sharding: ShardingOptions | None, layout: ParallelismConfig | None, device_type: str, *, num_chunks: int | None
) -> ShardingOptions | None:
    """Return ``sharding`` with the meshes of ``layout``, if it has axes that are not data-parallel or divides experts.

    Collective if it divides experts.
    """
    if sharding is None or layout is None:
        return sharding
    mesh = layout.parameter_mesh() if layout.non_dp_dim_names else None
    return replace(
        sharding,
        mesh=mesh,
        expert_mesh=layout.build_expert_mesh(device_type),
        exchanges_activations=layout.cp_enabled or layout.sp_enabled or layout.ep_enabled,
        tensor_parallel=_tensor_parallel(layout, num_chunks),
    )


def _tensor_parallel(layout: ParallelismConfig, num_chunks: int | None) -> TensorParallelOptions | None:
    if not layout.tp_enabled:
        return None
    assert layout.device_mesh is not None
    given = layout.tp_handler or TorchTensorParallelConfig()
    return TensorParallelOptions(
        mesh=layout.device_mesh["tp"],
        plan=given.plan or {},
        num_chunks=num_chunks,
        loss_parallel=given.loss_parallel,
    )


def _parts_of(world: World, layout: ParallelismConfig | None) -> tuple[World, World]:
    """Build the device mesh; return the ranks that read different samples, and those over which losses are averaged.

    Collective if ``layout`` is given.
    """
    if layout is None:
        return world, world
    layout.get_device_mesh(world.device.type)
    mesh = layout.mesh_layout(rank=world.rank)
    data_world = world.along(mesh_along(mesh, DATA_AXES, device_type=world.device.type))
    if mesh.size(LOSS_AXES) == mesh.size(DATA_AXES):
        return data_world, data_world
    return data_world, world.along(mesh_along(mesh, LOSS_AXES, device_type=world.device.type))


def _build_live_check(
    engine: Engine, config: Resolved[RunConfig], *, has_other_axes: bool, **parts: Any
) -> LiveCheck | None:
    """Return a live check that wraps ``engine``; None without ``verify_every``."""
    if config.value.verify_every is None:
        return None
    facts = engine.capabilities
    if has_other_axes:
        raise ConfigError(
            f"verify_every={config.value.verify_every} does not work if several ranks read the same samples or hold different experts "
            "(tensor, context, sequence, pipeline or expert parallelism)",
            where=str(config.origins["verify_every"]),
            do="remove verify_every, or use only data-parallel axes (dp_replicate_size, dp_shard_size)",
        )
    if not facts.exposes_state or facts.owns_loss_scaling:
        raise ConfigError(
            f"verify_every={config.value.verify_every} does not work with the {facts.name} engine, which keeps gradients and "
            "optimizer state to itself",
            where=str(config.origins["verify_every"]),
            do="remove verify_every, or use engine='ddp', 'zero1' or 'fsdp2' (DeepSpeed's settings also work with engine='fsdp2')",
        )
    # Runs without live checks do not import them.
    from echelon.accelerator.update.live_check.live_check import LiveCheck  # noqa: PLC0415

    return LiveCheck(engine, config=config, **parts)


def _build_scaler(
    precision: PrecisionPolicy, handlers: Sequence[KwargsHandler], deepspeed: DeepSpeedSettings
) -> torch.amp.GradScaler | None:
    given = next((handler for handler in handlers if isinstance(handler, GradScalerKwargs)), None)
    return precision.make_scaler((given or deepspeed.scaling or GradScalerKwargs()).to_kwargs())


def _build_update(
    parts: UpdateParts, layout: ParallelismConfig | None, *, comm_hook: object, num_chunks: int | None
) -> UpdatePolicy:
    """Return the update policy for the run's parity mode. Collective with ``bitwise``."""
    config, origins = parts.config.value, parts.config.origins
    if config.seed is not None and origins["seed"].source is SettingSource.CODE:
        set_seed(config.seed)
    if config.parity == "exact":
        return UpdatePolicy(parts, ExactUpdate(parts, RankSplit(parts)))
    if config.parity == "bitwise":
        others = () if layout is None else [axis for axis in layout.non_dp_dim_names if axis != "tp"]
        split = build_shard_split(parts, comm_hook=comm_hook, num_chunks=num_chunks, other_axes=others)
        return UpdatePolicy(parts, ExactUpdate(parts, split))
    if config.max_micro_batch_size is not None:
        raise ConfigError(
            f"max_micro_batch_size={config.max_micro_batch_size} (from {origins['max_micro_batch_size']}) only "
            "applies to the exact modes, but parity is 'off'",
            do="set parity='exact', or remove max_micro_batch_size",
        )
    return UpdatePolicy(parts)


# ---- settings ---


def resolve_settings(
    mixed_precision: str | None,
    steps: int,
    cpu: bool,
    plugin: GradientAccumulationPlugin | None,
    *,
    more: Mapping[str, object],
) -> Resolved[RunConfig]:
    """Return the run's settings; code takes precedence over the environment, and both over defaults."""
    if plugin is not None and steps != 1:
        raise ConfigError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin are both set",
            where="code Accelerator(gradient_accumulation_steps=, gradient_accumulation_plugin=)",
            do="pass one of the two",
        )
    given = {
        "mixed_precision": mixed_precision,
        "gradient_accumulation_steps": plugin.num_steps if plugin is not None else (steps if steps != 1 else None),
        "cpu": cpu or None,
        **more,
    }
    resolved = current(from_code("Accelerator", given))
    _report_overridden_requests(resolved)
    return choose_precision(resolved)


def _report_overridden_requests(resolved: Resolved[RunConfig]) -> None:
    """Print which flags, variables and file entries the script overrides; launchers export defaults, which nobody requested."""
    if known_rank() not in (None, 0):
        return
    default = RunConfig()
    for lost in resolved.shadowed:
        is_request = lost.origin.source is SettingSource.FLAG or lost.value != getattr(default, lost.name)
        if lost.winner.source is SettingSource.CODE and is_request:
            say(overridden(resolved, lost))


def dynamo_settings(backend: Any, plugin: TorchDynamoPlugin | None) -> dict[str, object]:
    """Return the ``torch.compile`` settings given in code."""
    if plugin is None:
        return {"dynamo_backend": backend}
    if backend is not None:
        raise ConfigError(
            f"dynamo_backend={str(backend)!r} and dynamo_plugin are both set",
            where="code Accelerator(dynamo_backend=, dynamo_plugin=)",
            do="pass only one of them; the plugin also sets the backend",
        )
    return {
        "dynamo_backend": plugin.backend,
        "dynamo_mode": plugin.mode,
        "dynamo_use_fullgraph": plugin.fullgraph,
        "dynamo_use_dynamic": plugin.dynamic,
        "dynamo_use_regional_compilation": plugin.use_regional_compilation,
    }


def joined_names(names: str | Sequence[str] | None) -> str | None:
    """Return class names as the settings have them, separated by commas.

    Raises:
        ConfigError: they are no names.
    """
    if names is None or isinstance(names, str):
        return names
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"activation_checkpointing_blocks={names!r} is not a list of class names",
            where="code (activation_checkpointing_blocks=)",
            do="pass the names of the classes, such as ['Block'], or remove it",
        )
    return ",".join(names)


def handlers_by_kind(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """Return one handler of each type; a subclass counts as its base."""
    kinds: tuple[type[KwargsHandler], ...] = (
        AORecipeKwargs,
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    found: dict[type, Any] = {}
    for handler in handlers:
        kind = next((kind for kind in kinds if isinstance(handler, kind)), None)
        if kind is None:
            raise ConfigError(
                f"kwargs_handlers contains a {type(handler).__name__}, which the Accelerator does not support",
                do=f"pass one of {', '.join(k.__name__ for k in kinds)}",
            )
        if kind in found:
            raise ConfigError(f"kwargs_handlers holds two {kind.__name__}", do="pass at most one of each type")
        found[kind] = handler
    # The fp8 recipe imports torchao, so it is only built if fp8 is configured.
    return {kind: found.get(kind) or kind() for kind in kinds if kind is not AORecipeKwargs or kind in found}


def build_world(config: RunConfig, options: InitProcessGroupKwargs, engine: Engine | str | None = None) -> World:
    """Create the process group if several processes or ``engine`` need one, unless the script has created it."""
    repair_fork()  # also for a group that the script has created
    needs_group = False
    if isinstance(engine, str) and engine not in GROUPLESS:
        load_engine(engine)  # raises for an unknown name before a group is created
        needs_group = True
    if dist.is_initialized() or (detect().world_size == 1 and not needs_group):
        world = World.current(cpu=config.cpu)
    else:
        # The default "nccl" stands for the backend of the device, as in Accelerate.
        world = setup(**options.to_kwargs())
    if dist.is_initialized():
        guard_coalescing()
    if config.enable_cpu_affinity:
        _bind_to_cores(world.device, world.local_rank, world.local_world_size)
    return world


@lru_cache  # once per process, because a second call would take a share of the share
def _bind_to_cores(device: torch.device, local_rank: int, local_world_size: int) -> None:
    """Bind this process to the cores near its device, or to an equal share of all cores if its NUMA node is unknown."""
    node = numa_node_of(device)
    cores = (cores_of_node(node) if node is not None else None) or share_of(local_rank, local_world_size)
    bind(cores)
    _logger.info("process %d on this machine is bound to cores %s", local_rank, sorted(cores), all_ranks=True)


def build_sharding(
    plugin: FullyShardedDataParallelPlugin | None,
    config: ParallelismConfig | None,
    *,
    world: World,
    settings: RunConfig,
    engine: Engine | str | None = None,
) -> tuple[FullyShardedDataParallelPlugin | None, ShardingOptions | None, ParallelismConfig | None]:
    """Return the plugin, its engine options, and the layout of the ranks; each is None if not configured.

    Args:
        plugin: sharding plugin. None: build it from the settings if they shard the model, or with defaults if ``config``
            or ``engine`` does.
        config: mesh sizes. None: build it from the settings if they say so.
        world: the ranks that the layout must cover.
        settings: the run's settings.
        engine: engine passed to the Accelerator.

    Raises:
        ConfigError: an argument has the wrong type, or the ranks cannot be divided as configured.
    """
    _check_kind("parallelism_config", config, ParallelismConfig)
    if plugin is not None or settings.sharded_by == "fsdp":
        plugin = _plugin(plugin)
    if config is None and settings.use_parallelism_config:
        config = ParallelismConfig()
    replicas = None
    if config is not None:
        config.check_covers(world.world_size)
        replicas = config.dp_replicate_size if config.total_size > 1 else None
    splits = config is not None and (config.dp_shard_enabled or bool(config.non_dp_dim_names))
    if plugin is None and (splits or engine in SHARDING):
        plugin = _plugin(None, fsdp_version=2)
    sharding = None
    if plugin is not None:
        num_holders = world.world_size if config is None else world.world_size // (config.pp_size * config.tp_size)
        sharding = plugin.sharding_options(
            world, mixed_precision=settings.mixed_precision, replicas=replicas, num_holders=num_holders
        )
        if sharding.ram_efficient_loading and world.world_size > 1:
            configure_transformers()
    if config is not None and config.total_size == 1:
        groups = sharding.replicas if sharding is not None else world.world_size
        config = replace(config, dp_replicate_size=groups, dp_shard_size=world.world_size // groups)
    return plugin, sharding, config


def _plugin(given: Any, **options: Any) -> FullyShardedDataParallelPlugin:
    # With torch's FSDP it takes half as long to import as torch itself, so only sharded runs import it.
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin  # noqa: PLC0415

    _check_kind("fsdp_plugin", given, FullyShardedDataParallelPlugin)
    return FullyShardedDataParallelPlugin(**options) if given is None else given


def _check_kind(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(
            f"{name} is a {type(value).__name__}",
            where=f"code Accelerator({name}=)",
            do=f"pass a {kind.__name__}, or omit it",
        )


def build_engine(
    engine: Engine | str | None,
    world: World,
    scaler: torch.amp.GradScaler | None,
    ddp_options: DistributedDataParallelKwargs,
    sharding: ShardingOptions | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
    *,
    engine_from: Origin | None = None,
) -> Engine:
    """Return ``engine``, or build the engine with that name. None: choose from the number of processes and sharding.

    ``more`` contains options for a specific engine; ``engine_from`` is the origin of the name.
    """
    if sharding is not None and engine is not None and engine not in SHARDING:
        shown = f"{type(engine).__name__}()" if isinstance(engine, Engine) else repr(engine)
        raise ConfigError(
            f"engine={shown} and sharding settings (fsdp_plugin, parallelism_config or ACCELERATE_USE_FSDP) are both set",
            where="code Accelerator(engine=)" if isinstance(engine, Engine) else str(engine_from),
            do="omit engine= to shard the model, or remove the sharding settings to use this engine",
        )
    if isinstance(engine, Engine):
        return engine
    name = engine or default_engine(world_size=world.world_size, shard=sharding is not None)
    if sharding is not None and name not in SHARDING:
        warn(_("sharding settings have no effect on a single process"))
    kind: Any = load_engine(name)
    # to_kwargs() returns DDP's arguments; the engine installs the communication hook itself.
    hook = {
        "comm_hook": str(ddp_options.comm_hook),
        "comm_wrapper": str(ddp_options.comm_wrapper),
        "comm_state_option": ddp_options.comm_state_option,
    }
    options = {**ddp_options.to_kwargs(), **hook, **more}
    if sharding is not None and name in SHARDING:
        options["sharding"] = sharding
    return kind.from_options(world, scaler=scaler, options=options)  # type: ignore[no-any-return]
