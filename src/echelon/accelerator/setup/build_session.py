"""Builds a run's ``Session`` from the ``Accelerator()`` arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

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
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.plugins.tensor_parallel_config import TorchTensorParallelConfig
from echelon.accelerator.prepare.build_deepspeed import DeepSpeedSettings, build_deepspeed
from echelon.accelerator.prepare.canonical_chunks import canonical_chunks_of
from echelon.accelerator.prepared_objects import PreparedObjects
from echelon.accelerator.session import Session
from echelon.accelerator.setup.build import (
    build_engine,
    build_sharding,
    build_world,
    handlers_by_kind,
)
from echelon.accelerator.unprepared_model import UnpreparedModelCheck
from echelon.accelerator.update.bitwise_update import build_shard_split
from echelon.accelerator.update.exact_update import ExactUpdate, RankSplit
from echelon.accelerator.update.update_parts import UpdateParts
from echelon.accelerator.update.update_policy import UpdatePolicy
from echelon.base.errors import ConfigError
from echelon.base.progress import Progress
from echelon.config.derive import check_sections
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import Precision, RunConfig
from echelon.engines.base import Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.tensor_parallel.options import TensorParallelOptions
from echelon.precision.policy import PrecisionPolicy
from echelon.world.mesh import DATA_AXES, LOSS_AXES
from echelon.world.seed import set_seed
from echelon.world.world import World, mesh_along

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
    from echelon.accelerator.update.live_check.live_check import LiveCheck

__all__ = ["build_session"]


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
    precision = _build_precision(settings.mixed_precision, world, kinds[AutocastKwargs])
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
    objects = PreparedObjects()
    scaler = None if built.capabilities.owns_loss_scaling else scaler
    live_check = _build_live_check(
        built,
        config,
        has_other_axes=_has_other_axes(layout),
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
        unprepared=UnpreparedModelCheck(num_processes=data_world.world_size, state=state),
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


def _build_precision(mode: Precision, world: World, autocast: AutocastKwargs) -> PrecisionPolicy:
    return PrecisionPolicy(mode=mode, device_type=world.device.type, autocast_options=autocast.to_kwargs())


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


def _has_other_axes(layout: ParallelismConfig | None) -> bool:
    return layout is not None and (bool(layout.non_dp_dim_names) or layout.ep_enabled)


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
