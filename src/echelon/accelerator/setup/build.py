"""From the arguments of ``Accelerator()`` to settings, a process group and an engine."""

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
from echelon.accelerator.setup.transformers_environment import is_echelons_own, tell_transformers
from echelon.base.cores import bind, cores_of_node, share_of
from echelon.base.device import numa_node_of
from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.warnings import warn
from echelon.compat.variables import parse_flag_from_env
from echelon.config.origin import Origin
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import current, from_code, refuse_launchers_variables
from echelon.distributed.setup import setup
from echelon.engines.base import Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.registry import GROUPLESS, SHARDING, default_engine, load_engine
from echelon.world.environment import detect
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin

__all__ = [
    "dynamo_plugin_of",
    "dynamo_settings",
    "handlers_by_kind",
    "make_engine",
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
    """Return the settings of the run: what the code gave, over the environment, over the defaults."""
    if plugin is not None and steps != 1:
        raise ConfigError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin are both given",
            where="code Accelerator(gradient_accumulation_steps=, gradient_accumulation_plugin=)",
            do="give one of the two",
        )
    given = {
        "mixed_precision": mixed_precision,
        "gradient_accumulation_steps": plugin.num_steps if plugin is not None else (steps if steps != 1 else None),
        "cpu": cpu or None,
        **more,
    }
    resolved = current(from_code("Accelerator", given))
    refuse_launchers_variables(resolved)
    return resolved


def dynamo_settings(backend: Any, plugin: TorchDynamoPlugin | None) -> dict[str, object]:
    """Return the settings of ``torch.compile`` that the code gave."""
    if plugin is None:
        return {"dynamo_backend": backend}
    if backend is not None:
        raise ConfigError(
            f"dynamo_backend={str(backend)!r} and dynamo_plugin are both given",
            where="code Accelerator(dynamo_backend=, dynamo_plugin=)",
            do="give one of the two; the plugin has a backend, too",
        )
    return {
        "dynamo_backend": plugin.backend,
        "dynamo_mode": plugin.mode,
        "dynamo_use_fullgraph": plugin.fullgraph,
        "dynamo_use_dynamic": plugin.dynamic,
        "dynamo_use_regional_compilation": plugin.use_regional_compilation,
    }


def dynamo_plugin_of(config: RunConfig) -> TorchDynamoPlugin:
    """Return the settings of ``torch.compile`` as a plugin."""
    return TorchDynamoPlugin(
        backend=config.dynamo_backend,
        mode=config.dynamo_mode,
        fullgraph=config.dynamo_use_fullgraph,
        dynamic=config.dynamo_use_dynamic,
        use_regional_compilation=config.dynamo_use_regional_compilation,
    )


def handlers_by_kind(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """Return one handler of each kind; a subclass counts as its base."""
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
                f"kwargs_handlers holds a {type(handler).__name__}, which the Accelerator does not know",
                do=f"give one of {', '.join(k.__name__ for k in kinds)}",
            )
        if kind in found:
            raise ConfigError(f"kwargs_handlers holds two {kind.__name__}", do="give one of each kind")
        found[kind] = handler
    # The recipe for fp8 needs torchao: it is made when fp8 is asked for.
    return {kind: found.get(kind) or kind() for kind in kinds if kind is not AORecipeKwargs or kind in found}


def build_world(config: RunConfig, options: InitProcessGroupKwargs, engine: Engine | str | None = None) -> World:
    """Make the process group where there are several processes, or ``engine`` needs one, and none has been made by hand."""
    needs_group = False
    if isinstance(engine, str) and engine not in GROUPLESS:
        load_engine(engine)  # a name that no engine has is an error before a group is made for it
        needs_group = True
    if dist.is_initialized() or (detect().world_size == 1 and not needs_group):
        world = World.current(cpu=config.cpu)
    else:
        # Its defaults ("nccl") stand for the backend of the device, as in Accelerate.
        world = setup(**options.to_kwargs())
    if config.enable_cpu_affinity:
        _keep_to_cores(world.device, world.local_rank, world.local_world_size)
    return world


@lru_cache  # once in a process: a share of the share would be less
def _keep_to_cores(device: torch.device, local_rank: int, local_world_size: int) -> None:
    """Bind this process to the cores near its device; on the CPU, or where no device tells its place, to a share."""
    node = numa_node_of(device)
    cores = (cores_of_node(node) if node is not None else None) or share_of(local_rank, local_world_size)
    bind(cores)
    _logger.info("process %d of this machine keeps to the cores %s", local_rank, sorted(cores), all_ranks=True)


def build_sharding(
    plugin: FullyShardedDataParallelPlugin | None,
    config: ParallelismConfig | None,
    *,
    world: World,
    mixed_precision: str,
    engine: Engine | str | None = None,
) -> tuple[FullyShardedDataParallelPlugin | None, ShardingOptions | None, ParallelismConfig | None]:
    """Return the plugin, what it means for the engine, and the layout of the ranks: each None where nothing asks for it.

    Args:
        plugin: None: from the environment where ``ACCELERATE_USE_FSDP`` asks for it; one with its defaults where
            ``config`` or ``engine`` say that the model is sharded.
        config: None: from the environment where ``ACCELERATE_USE_PARALLELISM_CONFIG`` asks for it.
        world: its ranks must be covered.
        mixed_precision: of the run.
        engine: what was given to the Accelerator.

    Raises:
        ConfigError: something else than a plugin and a config, or ranks that cannot be divided so.
    """
    _check_kind("parallelism_config", config, ParallelismConfig)
    is_asked = parse_flag_from_env("ACCELERATE_USE_FSDP") and not is_echelons_own("ACCELERATE_USE_FSDP")
    if plugin is not None or is_asked:
        plugin = _plugin(plugin)
    if config is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        config = ParallelismConfig()
    replicas = None
    if config is not None:
        config.check_covers(world.world_size)
        replicas = config.dp_replicate_size if config.total_size > 1 else None
    if plugin is None and ((config is not None and config.dp_shard_enabled) or engine in SHARDING):
        plugin = _plugin(None, fsdp_version=2)
    sharding = None
    if plugin is not None:
        sharding = plugin.sharding_options(world, mixed_precision=mixed_precision, replicas=replicas)
        if sharding.ram_efficient_loading and world.world_size > 1:
            tell_transformers()
    if config is not None and config.total_size == 1:
        groups = sharding.replicas if sharding is not None else world.world_size
        config = replace(config, dp_replicate_size=groups, dp_shard_size=world.world_size // groups)
    return plugin, sharding, config


def _plugin(given: Any, **options: Any) -> FullyShardedDataParallelPlugin:
    # With torch's FSDP it takes half as long to import as torch itself: who shards pays for it.
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin  # noqa: PLC0415

    _check_kind("fsdp_plugin", given, FullyShardedDataParallelPlugin)
    return FullyShardedDataParallelPlugin(**options) if given is None else given


def _check_kind(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(
            f"{name} is a {type(value).__name__}",
            where=f"code Accelerator({name}=)",
            do=f"give a {kind.__name__}, or leave it out",
        )


def make_engine(
    engine: Engine | str | None,
    world: World,
    scaler: torch.amp.GradScaler | None,
    ddp_options: DistributedDataParallelKwargs,
    sharding: ShardingOptions | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
    *,
    engine_from: Origin | None = None,
) -> Engine:
    """Return ``engine``, or make the one of that name; None: by the number of processes and whether to shard.

    ``more``: options of engines that no other knows. ``engine_from``: who gave the name.
    """
    if sharding is not None and engine is not None and engine not in SHARDING:
        shown = f"{type(engine).__name__}()" if isinstance(engine, Engine) else repr(engine)
        raise ConfigError(
            f"engine={shown} and settings of sharding (fsdp_plugin, parallelism_config or ACCELERATE_USE_FSDP) are both given",
            where="code Accelerator(engine=)" if isinstance(engine, Engine) else str(engine_from),
            do="leave engine out to shard the model, or those settings to use the engine",
        )
    if isinstance(engine, Engine):
        return engine
    name = engine or default_engine(world_size=world.world_size, shard=sharding is not None)
    if sharding is not None and name not in SHARDING:
        warn("settings of sharding are without effect on one process: there is nothing to shard")
    kind: Any = load_engine(name)
    # to_kwargs() is what torch's DDP takes; the communication hook is the engine's own affair.
    hook = {
        "comm_hook": str(ddp_options.comm_hook),
        "comm_wrapper": str(ddp_options.comm_wrapper),
        "comm_state_option": ddp_options.comm_state_option,
    }
    options = {**ddp_options.to_kwargs(), **hook, **more}
    if sharding is not None and name in SHARDING:
        options["sharding"] = sharding
    return kind.from_options(world, scaler=scaler, options=options)  # type: ignore[no-any-return]
