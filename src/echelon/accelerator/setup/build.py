"""Builds a run's settings, process group and engine from the ``Accelerator()`` arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from echelon.accelerator.plugins.configuration import GradientAccumulationPlugin, TorchDynamoPlugin
from echelon.accelerator.plugins.kwargs_handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.profiling import ProfileKwargs
from echelon.accelerator.setup.choose_precision import choose_precision
from echelon.base.cores import bind, cores_of_node, share_of
from echelon.base.device import numa_node_of
from echelon.base.errors import ConfigError
from echelon.base.fork_repair import repair_fork
from echelon.base.logging import get_logger
from echelon.base.messages.terminal import say
from echelon.base.rank import known_rank
from echelon.base.warnings import warn
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
from echelon.world.environment import detect
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin

__all__ = [
    "dynamo_settings",
    "handlers_by_kind",
    "build_engine",
    "build_sharding",
    "build_world",
    "resolve_settings",
]

_logger = get_logger(__name__)


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
        warn("sharding settings have no effect on a single process")
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
