"""``Accelerator.prepare``: prepares models, optimizers, schedulers and loaders for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from echelon.accelerator.compile import compile_regions, compile_whole, compiles, is_compiled, uncompiled
from echelon.accelerator.current import living_accelerators
from echelon.accelerator.plugins.configuration import TorchDynamoPlugin
from echelon.accelerator.prepare.activations import recompute_blocks
from echelon.accelerator.prepare.build_deepspeed import reject_placeholders
from echelon.accelerator.prepare.canonical_chunks import prepare_canonical_chunks
from echelon.accelerator.prepare.data_loaders import rng_type_names
from echelon.accelerator.prepare.low_precision_weights import cast_trained_weights, check_stepped_weights
from echelon.accelerator.prepare.prepare_arguments import check_unprepared_data, known_objects, replace_prepared
from echelon.accelerator.prepare.speed import choose_kernels, choose_memory_format
from echelon.accelerator.sequences import attach_sequence_parallel
from echelon.accelerator.session import Session
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.scheduler import AcceleratedScheduler, steps_with_metric
from echelon.accelerator.update.step_timing import time_forward
from echelon.accelerator.weight_average import WeightAverage
from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _
from echelon.base.sharded import is_dtensor
from echelon.base.warnings import warn
from echelon.config.origin import Setting
from echelon.data.active_loaders import LoaderOptions
from echelon.data.loader import PreparedLoader
from echelon.data.prepare_loader import prepare_loader
from echelon.distributed.ddp.unused_parameters_warning import silence_unused_parameters_warning
from echelon.distributed.peer_responder import Watcher
from echelon.distributed.record.log import record_object
from echelon.distributed.record.object_facts import loader_facts, model_facts, optimizer_facts
from echelon.engines.base import Prepared
from echelon.engines.deepspeed.options import DrivenScheduler, DummyOptim, DummyScheduler
from echelon.engines.expert_parallel.moe import find_routers
from echelon.engines.expert_parallel.routers import RoutingGaps, balance_over_ranks
from echelon.precision.float8 import convert_model_to_fp8_ao
from echelon.world.world import World

_logger = get_logger(__name__)


def prepare_arguments(
    session: Session,
    arguments: Sequence[Any],
    placement: Sequence[bool | None] | None,
    *,
    is_on_several_devices: Callable[[nn.Module], bool],
) -> Any:
    """Prepare ``arguments`` as ``Accelerator.prepare`` does.

    Args:
        session: the run's session, whose ``objects`` record the results.
        arguments: objects of any type, possibly nested.
        placement: whether to move each argument to the device. None: use the session's setting.
        is_on_several_devices: returns whether a model was loaded across several devices.

    Collective: call on every rank, with the same objects in the same order.
    """
    found = known_objects(arguments, placement, default=session.device_placement)
    check_unprepared_data(arguments, num_processes=session.data_world.world_size, is_exact=session.parity != "off")
    if found:
        _prepare_unprepared(session, found, is_on_several_devices=is_on_several_devices)
    results = tuple(replace_prepared(argument, session.objects.originals) for argument in arguments)
    return results[0] if len(results) == 1 else results


def _prepare_unprepared(
    session: Session, found: Sequence[tuple[Any, bool]], *, is_on_several_devices: Callable[[nn.Module], bool]
) -> None:
    """Prepare the objects that have not been prepared before.

    Args:
        session: the run's session, whose ``objects`` record the results.
        found: objects of known types, each with a flag that says whether to move it to the device.
        is_on_several_devices: returns whether a model was loaded across several devices.

    Collective: call on every rank, with the same objects in the same order.
    """
    objects = session.objects
    new = [(o, place) for o, place in found if id(o) not in objects.originals]
    for one, _place in new:
        _refuse_anothers(session, one)
    for loader, place in new:
        if isinstance(loader, DataLoader) and not isinstance(loader, PreparedLoader):
            prepare_one_loader(session, loader, place=place)
    models = [(o, place) for o, place in new if isinstance(o, nn.Module) and o not in objects.models]
    optimizers: list[Any] = [
        o for o, _ in new if isinstance(o, (Optimizer, DummyOptim)) and not isinstance(o, AcceleratedOptimizer)
    ]
    schedulers = [o for o, _ in new if isinstance(o, (LRScheduler, DummyScheduler))]
    if not session.deepspeed.options:
        reject_placeholders([*optimizers, *schedulers])
    if models and session.layout is not None and session.layout.pp_enabled:
        raise UsageError(
            f"prepare() got a {type(models[0][0]).__name__}, but with pp_size={session.layout.pp_size} each rank computes only some of "
            "a model's layers",
            do="call pipeline = accelerator.prepare_pipeline(model), and pass only the optimizer, loaders and schedulers to prepare()",
        )
    if models and session.update.window.is_open and not session.gradient_state.in_dataloader:
        session.update.drop_update()
        warn(
            _(
                "prepare() got a new model ({kind}) while gradients were being accumulated, outside of "
                "all loops over prepared loaders: a new training begins, and the gradients of the "
                "incomplete update are dropped. To complete it, leave the loop when "
                "accelerator.sync_gradients is true",
                kind=type(models[0][0]).__name__,
            )
        )
    for model, place in models:
        if session.world.world_size > 1 and is_on_several_devices(model):
            raise UsageError(
                _(
                    "{name} was loaded across several devices (its hf_device_map has several entries), so each rank "
                    "cannot train its own copy",
                    name=type(model).__name__,
                ),
                do=_("remove device_map to load it on one device"),
            )
        _place_and_cast(session, model, optimizers, place=place)
        recompute_blocks(session, model)
        choose_memory_format(session, model)
    bare = [model for model, _ in models]
    session.update.check_prepared(bare, optimizers)
    for model in bare:  # now, because an engine may shard them
        record_object("model", model_facts(model))
    if models:
        _prepare_experts(session, bare)
        prepare_canonical_chunks(session, bare)
        _fill_deepspeed(session, bare, optimizers, schedulers)
    given = [_compile(session.dynamo_plugin, model, by_regions=True) for model in bare]
    prepared = _distribute(session, given, optimizers, schedulers)
    check_stepped_weights(session, prepared.optimizers)
    session.watcher = _build_watcher(prepared.models, world=session.world)
    for model, shaped, wrapped in zip(bare, given, prepared.models):
        _add_model(session, model, shaped, wrapped)
    for optimizer, inner in zip(optimizers, prepared.optimizers):
        _add_optimizer(session, optimizer, inner)
    for scheduler, inner in zip(schedulers, prepared.schedulers):
        objects.schedulers.append(_wrap_scheduler(session, inner))
        objects.record(scheduler, objects.schedulers[-1])
    given_optimizers = [own for o, _ in found if (own := _prepared_optimizer(session, o)) is not None]
    for average in [o for o, _place in new if isinstance(o, WeightAverage)]:
        average.attach(given_optimizers or objects.optimizers, session.engine)
        objects.averages.append(average)
        objects.record(average, average)


def _prepared_optimizer(session: Session, one: Any) -> AcceleratedOptimizer | None:
    """Return the prepared optimizer of ``one``, itself prepared or not; None for objects of other types."""
    prepared = session.objects.originals.get(id(one), (one, one))[1]
    return prepared if isinstance(prepared, AcceleratedOptimizer) else None


def _refuse_anothers(session: Session, one: Any) -> None:
    """Raise UsageError if another Accelerator has prepared ``one``, whose accumulation window and engine would then be used."""
    state = session.gradient_state
    if isinstance(one, PreparedLoader):
        is_anothers, how = one.gradient_state not in (None, state), "loader.original"
    elif isinstance(one, (AcceleratedOptimizer, AcceleratedScheduler)):
        kind = "optimizer" if isinstance(one, AcceleratedOptimizer) else "scheduler"
        is_anothers, how = one.gradient_state is not state, f"{kind}.{kind}"
    elif isinstance(one, nn.Module):
        others = (other.session for other in living_accelerators() if other.session is not session)
        is_anothers = any(
            one is model and other.engine.unwrap(model) is not model
            for other in others
            for model in other.objects.models
        )
        how = "accelerator.unwrap_model(model)"
    else:
        return
    if is_anothers:
        raise UsageError(
            f"prepare() got a {type(one).__name__} that another Accelerator has prepared",
            do=f"pass the object that was given to that Accelerator ({how}), or use one Accelerator for both",
        )


def prepare_stages(session: Session, model: nn.Module) -> None:
    """Prepare ``model``, of which each rank has a part (pipeline parallelism), in place.

    Collective: call on every rank.
    """
    _place_and_cast(session, model, (), place=session.device_placement)
    recompute_blocks(session, model)
    prepared = _distribute(session, [model], (), ())
    if session.precision.mode != "no":  # on all ranks, because only some may have weights that were cast
        session.masters.follow_stages(model, session.world.world_size)
    session.watcher = _build_watcher(prepared.models, world=session.world)
    session.objects.models.append(model)
    session.objects.record(model, model)


def _distribute(
    session: Session, models: Sequence[nn.Module], optimizers: Sequence[Any], schedulers: Sequence[Any]
) -> Prepared:
    """Distribute the objects by the engine, which may replace parameters. Collective: call on every rank."""
    engine, masters = session.engine, session.masters
    if not masters:
        return engine.prepare(models, optimizers, schedulers)
    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer):
            masters.cast_state(optimizer)
    before = [dict(model.named_parameters()) for model in models]
    prepared = engine.prepare(models, optimizers, schedulers)
    for old, model in zip(before, models):
        masters.follow(old, model)
    return prepared


def _build_watcher(models: Sequence[nn.Module], *, world: World) -> Watcher | None:
    """Return the watcher that answers other ranks; it also counts the collectives across shards of ``models``."""
    if world.world_size == 1:
        return None
    watcher = Watcher.of_process(world.device)
    meshes = {p.device_mesh for model in models for p in model.parameters() if is_dtensor(p)}
    watcher.watch(group for mesh in meshes for group in mesh.get_all_groups())
    return watcher


# ---- models ----------------------------------------------------------------------------------------------------------


def prepare_for_evaluation(session: Session, model: nn.Module, *, place: bool) -> nn.Module:
    """Move, cast and compile ``model`` without distributing it across ranks."""
    if place:
        model.to(session.world.device)
    session.precision.wrap_forward(model)
    plugin = session.dynamo_plugin
    return _compile(plugin, _compile(plugin, model, by_regions=True), by_regions=False)


def search_silently(session: Session) -> None:
    """Keep torch from warning that DDP's search finds no unused parameters: the user did not ask for the search."""
    if session.world.world_size > 1 and session.capabilities.replicates:
        silence_unused_parameters_warning(session.world.device)


def _place_and_cast(session: Session, model: nn.Module, optimizers: Sequence[Any], *, place: bool) -> None:
    device, recipe = session.world.device, session.ao_recipe_handler
    arrives_later = _arrives_later(session, model)
    if place and device.type != "cpu" and not arrives_later:
        model.to(device)
    cast_trained_weights(session, model, optimizers)
    if recipe is not None:
        convert_model_to_fp8_ao(uncompiled(model), recipe.config, recipe.module_filter_func)
    session.precision.wrap_forward(model)


def _arrives_later(session: Session, model: nn.Module) -> bool:
    """Return whether the engine materializes ``model`` in parts, because the whole model may not fit on the device."""
    on_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    if session.capabilities.shards_parameters:
        return on_meta or (session.fsdp_plugin is not None and session.fsdp_plugin.cpu_ram_efficient_loading)
    if on_meta and session.world.device.type != "meta":
        raise UsageError(
            _("{name} is on the meta device and has no values", name=type(model).__name__),
            where=f"prepare(), engine {session.capabilities.name}",
            do=_(
                "call load_checkpoint_in_model(model, folder) before prepare(), or after it if parameters are sharded"
            ),
        )
    return False


def _compile(plugin: TorchDynamoPlugin, model: nn.Module, *, by_regions: bool) -> nn.Module:
    if not compiles(plugin, model, by_regions=by_regions):
        return model
    return compile_regions(model, **plugin.to_kwargs()) if by_regions else compile_whole(model, plugin)


def _add_model(session: Session, model: nn.Module, shaped: nn.Module, wrapped: nn.Module) -> None:
    """Record ``wrapped``, which the engine returned for ``shaped`` (``model`` or its compiled copy)."""
    objects, update, capabilities = session.objects, session.update, session.capabilities
    objects.models.append(wrapped)
    attach_sequence_parallel(session, wrapped)
    if capabilities.shards_parameters:  # its forward pass already waits for every rank
        wrapped.register_forward_pre_hook(update.before_forward, prepend=True)
    elif session.world.world_size > 1 and capabilities.joins_uneven and wrapped is not shaped:
        wrapped.register_forward_pre_hook(update.before_training_forward, prepend=True)
    # Whole models are compiled around the engine's wrapper, so that torch splits the graph where DDP reduces gradients.
    final = wrapped if is_compiled(shaped) else _compile(session.dynamo_plugin, wrapped, by_regions=False)
    if final is not wrapped:
        objects.record_compiled(final, wrapped)
    # one process: from a batch to its backward pass, without hooks in the user's model
    if session.world.world_size > 1:
        time_forward(final)
    for one in (model, wrapped, final):
        objects.record(one, final)


def _prepare_experts(session: Session, models: Iterable[nn.Module]) -> None:
    """Watch the routers of ``models`` under ``parity="exact"``, and let load-balancing losses count the tokens of all ranks.

    The latter also holds with expert parallelism. In other runs each rank's loss counts its own tokens, as with Accelerate.
    """
    is_exact = session.config.value.parity == "exact"
    is_divided = session.layout is not None and session.layout.ep_enabled
    if not is_exact and not is_divided:
        return
    world = session.update.loss_world
    for model in models:
        routers = find_routers(model)
        if not routers:
            continue
        if is_exact:
            session.routing = session.routing or RoutingGaps()
            for name, router in routers.items():
                session.routing.watch(name, router)
        group = world.group or dist.group.WORLD
        if world.world_size > 1 and group is not None:
            balance_over_ranks(model, group, has_samples=lambda: not _is_padding(session))


def _is_padding(session: Session) -> bool:
    """Return whether this rank's batch is a copy of other samples, because there are fewer samples than ranks."""
    driver = session.update.driver
    contribution = None if driver is None else driver.contribution()
    return contribution is not None and contribution.is_padding


# ---- optimizers and schedulers ---------------------------------------------------------------------------------------


def _add_optimizer(session: Session, optimizer: Any, inner: Optimizer) -> None:
    choose_kernels(session, inner)
    prepared = AcceleratedOptimizer(
        inner,
        engine=session.engine,
        gradient_state=session.gradient_state,
        scaler=session.update.scaler,
        clipping=session.deepspeed.clipping,
        guard=session.guard,
        world=session.update.loss_world,
        direct_backward=session.direct_backward,
        spikes=session.update.spikes,
    )
    session.objects.optimizers.append(prepared)
    if session.update.spikes is not None:
        session.update.spikes.begin()
    session.guard.add_prepared(inner)
    session.objects.record(optimizer, prepared)
    record_object("optimizer", *optimizer_facts(optimizer if isinstance(optimizer, Optimizer) else inner))


def _wrap_scheduler(session: Session, scheduler: LRScheduler) -> AcceleratedScheduler:
    optimizers = session.objects.optimizers
    owner = getattr(scheduler, "optimizer", None)
    own = [o for o in optimizers if o is owner or o.optimizer is owner]
    num_times = 1 if session.update.uses_global_batches else session.data_world.world_size
    follows = session.step_scheduler_with_optimizer and not session.dataloader_config.split_batches
    if not isinstance(scheduler, DrivenScheduler) and num_times > 1 and follows and not steps_with_metric(scheduler):
        _log_num_times(session, type(scheduler), num_times)
    return AcceleratedScheduler(
        scheduler,
        own or optimizers,
        gradient_state=session.gradient_state,
        num_processes=num_times,
        step_with_optimizer=session.step_scheduler_with_optimizer,
        split_batches=session.dataloader_config.split_batches,
        is_exact=session.parity != "off",
    )


def _log_num_times(session: Session, kind: type, num_times: int) -> None:
    if kind in session.logged_schedulers:
        return
    session.logged_schedulers.add(kind)
    _logger.info(
        "%s steps %d times per update, once for each process, because %d processes use that many batches per update. "
        "Pass Accelerator(step_scheduler_with_optimizer=False) to step it once per step() call.",
        kind.__name__,
        num_times,
        num_times,
    )


def _fill_deepspeed(session: Session, models: list[nn.Module], optimizers: list[Any], schedulers: list[Any]) -> None:
    """Fill DeepSpeed's config with this run's values."""
    sizes = [loader.batch_size for loader in session.objects.loaders]
    world_size, split_batches = session.world.world_size, session.dataloader_config.split_batches
    shares = world_size if split_batches or session.update.uses_global_batches else 1
    origin = session.config.origins["gradient_accumulation_steps"]
    session.deepspeed.fill(
        world_size=world_size,
        accumulation=Setting(session.gradient_state.num_steps, origin),
        batch_sizes=[size // shares or 1 for size in sizes if size],
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        split_batches=split_batches,
    )


# ---- loaders ---------------------------------------------------------------------------------------------------------


def prepare_one_loader(
    session: Session,
    loader: DataLoader[Any],
    *,
    place: bool,
    slice_fn: Any = None,
    already_sharded: bool | None = None,
) -> PreparedLoader:
    """Prepare a loader that was not prepared before. Collective: call on every rank.

    Args:
        session: the run's session.
        loader: the user's loader.
        place: whether to move batches to the device.
        slice_fn: function that splits a dispatched batch.
        already_sharded: whether the loader already yields a different shard on each process. None: use
            ``DataLoaderConfiguration``.
    """
    config, by_sample = session.dataloader_config, session.config.value.speed == "off"
    exact = session.update.loader_options(config)
    options = LoaderOptions(
        split_batches=config.split_batches,
        dispatch_batches=config.dispatch_batches,
        even_batches=config.even_batches,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
        already_sharded=config.already_sharded if already_sharded is None else already_sharded,
        by_sample=by_sample,
        exact=None if exact is None else replace(exact, by_sample=by_sample),
        rng_types=rng_type_names(session.rng_types),
    )
    prepared = prepare_loader(
        loader,
        world=session.data_world,
        options=options,
        active=session.gradient_state.reading,
        place=place,
        slice_fn=slice_fn,
    )
    session.objects.loaders.append(prepared)
    session.update.log_batch_size(prepared.total_batch_size)
    record_object("dataloader", loader_facts(loader, total_batch_size=prepared.total_batch_size))
    session.objects.record(loader, prepared)
    return prepared
