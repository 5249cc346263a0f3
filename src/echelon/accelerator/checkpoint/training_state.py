"""Training state in echelon's own format, keyed by parameter name so that any engine and rank count can read it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from echelon.accelerator.checkpoint.changed_data import DataPolicy, positions_error, reconcile_data
from echelon.accelerator.models.weight_check import require_model_of_checkpoint
from echelon.accelerator.rng_states import current_random_states, restore_random_states
from echelon.accelerator.session import Session
from echelon.accelerator.state_names import (
    KERNEL_OPTIONS,
    START_OVER,
    Allowed,
    NamedOptimizer,
    frozen_names,
    names_of,
)
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.translation import gettext as _, in_english
from echelon.base.progress import progress_bar
from echelon.base.sharded import is_dtensor
from echelon.base.warnings import warn
from echelon.checkpoint.formats.optimizer_states import SavedStates, rests_in
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import box_of
from echelon.checkpoint.save import Content
from echelon.checkpoint.tensor_names import (
    average_name,
    model_prefix,
    rest_of_state,
    state_keys,
    state_name,
    state_values,
)
from echelon.data.loader import PreparedLoader
from echelon.distributed.tree import leaves
from echelon.engines.base import Engine
from echelon.engines.fsdp.pipeline_state import group_names
from echelon.engines.optimizer_copy import ShardsState
from echelon.engines.quantized_weights import flat_state
from echelon.engines.shards import address_of, local_as, local_tensors, shard_like
from echelon.engines.state_dicts import load_plain_state_dict, plain_name, plain_state_dict
from echelon.precision.policy import LOW_PRECISION

_AT_ONCE_BYTES = 1 << 30
"""Maximum size of the weights that loading keeps in host memory at once, in addition to one module."""


def content_of(
    session: Session,
    models: Sequence[nn.Module],
    *,
    custom_objects: Sequence[Any],
    random_states: Any,
    metric: float | None = None,
    world_size: int,
) -> Content:
    """Return this rank's checkpoint content.

    Args:
        models: the unwrapped models, in the order of preparation.
        random_states: RNG states of this process. None: the current ones.

    Collective: call on every rank if the engine gathers its state, or with a pipeline.
    """
    engine, is_gathered = session.engine, not session.capabilities.exposes_state
    tensors: dict[str, Any] = {}
    extras: list[dict[str, Any]] = []
    others: set[str] = set()  # tensors of models that are no parameters
    for i, model in enumerate(models):
        state = (engine.full_state_dict(session.objects.models[i]) or {}) if is_gathered else plain_state_dict(model)
        state = flat_state(state)
        tensors |= {f"{model_prefix(i)}{name}": value for name, value in state.items() if _is_tensor(value)}
        extras.append({name: value for name, value in state.items() if not _is_tensor(value)})
        own = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
        others |= {f"{model_prefix(i)}{name}" for name in state.keys() - own}
    names = names_of(models) | _names_of_copies(session)
    tensors |= _averages(session, names, names_of(models))
    groups, values, rests = [], [], []
    for i, optimizer in enumerate(session.objects.optimizers):
        named = NamedOptimizer.of(optimizer, names, engine)
        groups.append(_with_other_stages(session, named))
        by_name, rest = _gathered_optimizer_state(named, engine) if is_gathered else _own_state(named)
        rests.append(rest)
        tensors |= {
            state_name(i, name, key): value
            for name, entries in by_name.items()
            for key, value in entries.items()
            if _is_tensor(value)
        }
        plain = {name: {k: v for k, v in entries.items() if not _is_tensor(v)} for name, entries in by_name.items()}
        values.append({name: entries for name, entries in plain.items() if entries})
    loaders = session.objects.loaders
    objects = {
        "accelerator": {
            "step": session.update.step,
            "num_models": len(models),
            "num_loaders": len(loaders),
            "bits": session.update.record(),
            **({} if metric is None else {"metric": metric}),
        },
        "extra_states": extras,
        "optimizer_groups": groups,
        **({"optimizer_rests": rests} if any(rests) else {}),
        **(
            {"averages": [average.state(session.objects.optimizers) for average in session.objects.averages]}
            if session.objects.averages
            else {}
        ),
        "schedulers": [scheduler.state_dict() for scheduler in session.objects.schedulers],
        "scaler": None if session.update.scaler is None else session.update.scaler.state_dict(),
        "orders": [loader.order_state() for loader in loaders],
        **({} if session.update.spikes is None else {"spike_guard": session.update.spikes.state_dict()}),
        **{f"custom.{i}": one.state_dict() for i, one in enumerate(custom_objects)},
    }
    config = session.config
    return Content(
        tensors=tensors,
        may_differ=others,
        objects=objects,
        rank_objects={
            "random": random_states or current_random_states(),
            "positions": [loader.state_dict() if loader.is_stateful else None for loader in loaders],
            "pass": session.epochs.own_state(),
            **({"optimizer_values": values} if any(values) else {}),
        },
        progress={**session.progress.to_json(), "micro_step": 0},
        config={
            name: [_readable(value), in_english(str(config.origins.get(name)))]
            for name, value in asdict(config.value).items()
        },
        layout={"engine": session.capabilities.name, "world_size": world_size},
    )


def load_content(
    session: Session,
    checkpoint: Checkpoint,
    models: Sequence[nn.Module],
    *,
    loaded: Sequence[nn.Module] = (),
    custom_objects: Sequence[Any],
    strict: bool = True,
    allowed: Allowed | None = None,
    data: DataPolicy | None = None,
) -> dict[str, Any]:
    """Load the verified ``checkpoint``; return ``step`` and ``progress``.

    Args:
        checkpoint: may come from any engine and number of ranks.
        models: the unwrapped models.
        loaded: models whose weights a hook has loaded.
        strict: require the checkpoint to contain exactly the model's weights.
        data: how to handle changed data. None: a change in the middle of an epoch raises an error.

    Collective: call on every rank if the engine shards parameters.

    Raises:
        CheckpointError: an entry is missing or unexpected, or has a different shape.
    """
    allowed = allowed or Allowed()
    objects = checkpoint.objects()
    own = checkpoint.rank_objects(session.world.rank)
    loaders = session.objects.loaders
    _require_pieces(session, checkpoint, objects, custom_objects, loaders, allowed)
    orders, changed = reconcile_data(
        loaders,
        objects["orders"],
        source=checkpoint.folder,
        num_saved=checkpoint.manifest.world_size,
        num_ranks=session.world.world_size,
        policy=data or DataPolicy(),
    )
    session.update.require_record(objects["accelerator"].get("bits", {}), checkpoint.folder)
    _load_models_and_optimizers(
        session, checkpoint, models, objects=objects, loaded=loaded, strict=strict, allowed=allowed
    )
    for scheduler, state in zip(session.objects.schedulers, objects["schedulers"]):
        scheduler.load_state_dict(state)
    if session.update.scaler is not None and objects["scaler"] is not None:
        session.update.scaler.load_state_dict(objects["scaler"])
    if session.update.spikes is not None and "spike_guard" in objects:
        session.update.spikes.load_state_dict(objects["spike_guard"])
    _load_loaders(session, checkpoint, loaders, orders, own or {}, changed=changed)
    for i, one in enumerate(custom_objects):
        if f"custom.{i}" in objects:
            state = objects[f"custom.{i}"]
            one.load_state_dict(
                _sharded_as(state, one.state_dict()) if session.capabilities.shards_parameters else state
            )
    if own is not None and own.get("random") is not None:
        restore_random_states(own["random"])
    session.engine.share_random_states()
    num_readers = session.data_world.world_size
    # The first of the ranks that share samples gives the others its state.
    if (num_readers - 1) * (session.world.world_size // num_readers) >= checkpoint.manifest.world_size:
        warn(
            _(
                "{folder} contains RNG states for {world_size} processes; the other ranks keep their current RNG "
                "states",
                folder=checkpoint.folder,
                world_size=checkpoint.manifest.world_size,
            )
        )
    return {"step": objects["accelerator"]["step"], "progress": checkpoint.manifest.progress}


def _sharded_as(saved: Any, current: Any) -> Any:
    """Return a registered object's ``saved`` state, with shards of the tensors that are sharded in its ``current`` state."""
    if isinstance(saved, torch.Tensor) and is_dtensor(current):
        return shard_like(saved, current)
    if isinstance(saved, dict) and isinstance(current, Mapping):
        for key in saved.keys() & current.keys():
            saved[key] = _sharded_as(saved[key], current[key])
    elif isinstance(saved, (list, tuple)) and isinstance(current, (list, tuple)) and len(saved) == len(current):
        items = [_sharded_as(*pair) for pair in zip(saved, current)]
        return tuple(items) if isinstance(saved, tuple) else items
    return saved


def _load_models_and_optimizers(
    session: Session,
    checkpoint: Checkpoint,
    models: Sequence[nn.Module],
    *,
    objects: Mapping[str, Any],
    loaded: Sequence[nn.Module],
    strict: bool,
    allowed: Allowed,
) -> None:
    """Load models and optimizers after checking that all of them match."""
    engine, is_gathered = session.engine, not session.capabilities.exposes_state
    ours = [
        (i, model)
        for i, model in enumerate(models[: objects["accelerator"]["num_models"]])
        if not any(model is one for one in loaded)
    ]
    missing = {  # checked first, because a different model also has different optimizer groups
        i: require_model_of_checkpoint(
            checkpoint, model, i, engine=engine, strict=strict, allowed=allowed, elsewhere=_names_elsewhere(session)
        )
        for i, model in ours
    }
    names, frozen = names_of(models) | _names_of_copies(session), frozen_names(models)
    optimizers = [
        NamedOptimizer.of(optimizer, names, engine)
        for optimizer, _ in zip(session.objects.optimizers, objects["optimizer_groups"])
    ]
    plans = [
        optimizer.matching(_own_part(session, objects["optimizer_groups"][i]), frozen, i, checkpoint)
        for i, optimizer in enumerate(optimizers)
    ]
    load_model = _load_gathered_model if is_gathered else _load_model
    for i, model in ours:
        load_model(checkpoint, model, i, objects["extra_states"][i], missing=missing[i])
    for i, optimizer in enumerate(optimizers):
        rest = rests_in(objects)[i]
        if is_gathered:
            _load_gathered_optimizer(checkpoint, optimizer, _numbered(optimizer, plans[i]), i, rest, engine=engine)
        else:
            _load_optimizer(checkpoint, optimizer, plans[i], i, rest)
    _load_averages(session, checkpoint, objects.get("averages", ()), optimizers)


# ---- pipelines -------------------------------------------------------------------------------------------------------


def _names_of_copies(session: Session) -> dict[int, str]:
    """Return the names of tied weights whose first name is on another stage, by the ids of this rank's copies."""
    copied = {} if session.stages is None else session.stages.copied_names()
    return {key: f"{model_prefix(0)}{name}" for key, name in copied.items()}


def _names_elsewhere(session: Session) -> set[str]:
    return set() if session.stages is None else session.stages.names_elsewhere()


def _with_other_stages(session: Session, optimizer: NamedOptimizer) -> list[dict[str, Any]]:
    """Return the groups with the parameters of all stages. Collective with a pipeline."""
    if session.stages is None:
        return list(optimizer.groups)
    names = group_names(session.stages, optimizer.inner)
    return [
        {**group, "params": [f"{model_prefix(0)}{name}" for name in own]} for group, own in zip(optimizer.groups, names)
    ]


def _own_part(session: Session, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return saved optimizer groups without the parameters of other stages."""
    elsewhere = {f"{model_prefix(0)}{name}" for name in _names_elsewhere(session)}
    elsewhere -= {*_names_of_copies(session).values()}
    return [{**group, "params": [name for name in group["params"] if name not in elsewhere]} for group in groups]


def _require_pieces(
    session: Session,
    checkpoint: Checkpoint,
    objects: Mapping[str, Any],
    custom_objects: Sequence[Any],
    loaders: Sequence[PreparedLoader],
    allowed: Allowed,
) -> None:
    """Raise if the checkpoint and this run have different entries (except loaders) that ``allowed`` does not cover."""
    facts = objects["accelerator"]
    has_scaler = objects["scaler"] is not None
    counts = [
        ("model", "models", facts["num_models"], len(session.objects.models)),
        ("optimizer", "optimizers", len(objects["optimizer_groups"]), len(session.objects.optimizers)),
        ("scheduler", "schedulers", len(objects["schedulers"]), len(session.objects.schedulers)),
        # An imported checkpoint does not record all loaders, and a script may prepare more of them later.
        ("loader", "loaders", min(facts.get("num_loaders", len(loaders)), len(loaders)), len(loaders)),
        ("average", "averages of the weights", len(objects.get("averages", ())), len(session.objects.averages)),
        (
            "custom",
            "objects registered for checkpointing",
            sum(name.startswith("custom.") for name in objects),
            len(custom_objects),
        ),
    ]
    wrong, pieces = [], []
    for kind, what, saved, here in counts:
        missing = [f"{kind}[{i}]" for i in range(min(saved, here), max(saved, here))]
        missing = [piece for piece in missing if not allowed.covers(piece)]
        if missing:
            wrong.append(f"{saved} {what}, but this run has {here}")
            pieces += missing
    if session.update.scaler is not None and not has_scaler and "num_loaders" in facts and not allowed.covers("scaler"):
        wrong.append("no loss scaler state, but this run has a loss scaler")
        pieces.append("scaler")
    if wrong:
        advice = _("train with the same settings, optimizers and callbacks as in the saved run")
        if allowed.is_argument:
            advice = _(
                "prepare and register the same objects in the same order as in the saved run, or load without them: "
                "allow_missing=({names},)",
                names=", ".join(map(repr, pieces)),
            )
        raise CheckpointError(
            _("{folder} contains {wrong}", folder=checkpoint.folder, wrong=_("; ").join(wrong)),
            do=_("{advice}; {start_over}", advice=advice, start_over=_(START_OVER)),
        )


# ---- models ----------------------------------------------------------------------------------------------------------


def _load_model(
    checkpoint: Checkpoint, model: nn.Module, index: int, extras: Mapping[str, Any], *, missing: Collection[str]
) -> None:
    prefix = model_prefix(index)
    state = flat_state(plain_state_dict(model))
    tensors = {f"{prefix}{name}": value for name, value in state.items() if _is_tensor(value)}
    on_meta = [name for name, value in tensors.items() if value.is_meta]
    if on_meta:
        raise CheckpointError(
            f"{on_meta[0]} is on the meta device and has no storage to load into",
            do="prepare the model first, or allocate storage with to_empty()",
        )
    targets = {name: value for name, value in tensors.items() if name.removeprefix(prefix) not in missing}
    _warn_of_rounding(checkpoint, targets)
    own = {address_of(value) for value in (*model.parameters(), *model.buffers())}
    if all(address_of(value) in own for value in targets.values()) and not extras:
        checkpoint.read_into(targets, show=progress_bar)  # in place, without a second copy
        return
    # A module whose state dict holds copies or non-tensors is restored with load_state_dict.
    copies = {name: torch.empty_like(value) for name, value in targets.items()}
    checkpoint.read_into(copies, show=progress_bar)
    read = {name.removeprefix(prefix): value for name, value in copies.items()}
    load_plain_state_dict(model, {**state, **read, **extras})


def _warn_of_rounding(checkpoint: Checkpoint, targets: Mapping[str, torch.Tensor]) -> None:
    """Warn if float32 weights are loaded into low-precision ones, so that the run does not continue where it was."""
    rounded = [
        name
        for name, value in targets.items()
        if value.dtype in LOW_PRECISION and checkpoint.layout(name).dtype == "float32"
    ]
    if rounded:
        name = rounded[0].partition(".")[2] or rounded[0]
        warn(
            _(
                "{folder} holds float32 values of {number} tensors that are {dtype} in this run ({name}, ...), so they are "
                "rounded. To continue exactly, resume with master_weights='float32' and the mixed_precision of the saved run",
                folder=checkpoint.folder,
                number=len(rounded),
                dtype=targets[rounded[0]].dtype,
                name=name,
            )
        )


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _own_state(optimizer: NamedOptimizer) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
    """Return this rank's part of the state by parameter name, and all else that ``state_dict`` has."""
    inner = optimizer.inner
    by_name = {name: inner.state[parameter] for name, parameter in optimizer.parameters if parameter in inner.state}
    kinds = {type(local) for local in local_tensors(filter(_is_tensor, leaves(by_name)))}
    quantized = sorted(kind.__name__ for kind in kinds - {torch.Tensor, torch.nn.Parameter})
    if quantized:  # of torchao; its blocks are those of a rank's shard
        raise UsageError(
            f"the optimizer's state has tensors of the class {quantized[0]}, which a checkpoint cannot hold",
            where="save_state",
            do="use an optimizer whose state has ordinary tensors (AdamW, or the 8-bit optimizers of bitsandbytes), or save only the "
            "weights, with save_model()",
        )
    rest = rest_of_state(inner.own_state() if isinstance(inner, ShardsState) else inner.state_dict())
    if any(is_dtensor(value) for value in leaves(rest)):
        raise UsageError(
            f"the state of {type(inner).__name__} has sharded tensors that do not belong to one of its parameters: "
            f"{', '.join(map(str, rest.get('state', rest)))}",
            where="save_state",
            do="keep them in optimizer.state[parameter], or use an engine that does not shard (ddp, zero1)",
        )
    return by_name, rest


def _load_optimizer(
    checkpoint: Checkpoint,
    optimizer: NamedOptimizer,
    groups: Sequence[Mapping[str, Any]],
    index: int,
    rest: Mapping[str, Any],
) -> None:
    inner = optimizer.inner
    owners = [inner.owner(p) if isinstance(inner, ShardsState) else None for _, p in optimizer.parameters]
    wanted = [
        (number, name, parameter)
        for number, ((name, parameter), owner) in enumerate(zip(optimizer.parameters, owners))
        if owner is None or owner == inner.rank
    ]
    by_parameter = state_keys(checkpoint, index, [name for name, _ in optimizer.parameters])
    values = state_values(checkpoint, index)
    state: dict[Any, Any] = {}
    sizes = [
        sum(checkpoint.num_bytes(state_name(index, name, key)) for key in by_parameter[name]) for _, name, _ in wanted
    ]
    with progress_bar(f"loading {checkpoint.folder.name} (optimizer)", sum(sizes)) as progress:
        for (number, name, parameter), num_bytes in zip(wanted, sizes):
            entries = {
                key: _read_like(checkpoint, state_name(index, name, key), parameter if owners[number] is None else None)
                for key in by_parameter[name]
            }
            entries |= values.get(name, {})
            if entries:
                state[number] = entries
            progress(num_bytes)
    whole = {"state": {**rest.get("state", {}), **state}, "param_groups": _numbered(optimizer, groups)}
    inner.load_state_dict({**rest, **whole})


def _numbered(optimizer: NamedOptimizer, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved ``groups`` with this run's parameter numbers."""
    counted = iter(range(len(optimizer.parameters)))
    return [
        # The kernels of a step are chosen by this run and may depend on the layout.
        {
            **saved,
            **{key: here[key] for key in KERNEL_OPTIONS if key in here},
            "params": [next(counted) for _ in here["params"]],
        }
        for saved, here in zip(groups, optimizer.groups)
    ]


def _read_like(checkpoint: Checkpoint, name: str, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor sharded like ``parameter``, or in full if there is none or its shape differs."""
    if parameter is None or checkpoint.layout(name).shape != tuple(parameter.shape) or not is_dtensor(parameter):
        return checkpoint.read(name)
    _, box, _ = box_of(parameter)
    return local_as(checkpoint.read(name, box), parameter)


# ---- averages of the weights -----------------------------------------------------------------------------------------


def _averages(session: Session, names: Mapping[int, str], own: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Return this rank's part of the averages, by their names in a checkpoint.

    Args:
        names: names of parameters by id, of tied weights the first one.
        own: their names in this rank's models, under which those who load only the weights look for the average.
    """
    found: dict[str, torch.Tensor] = {}
    for i, average in enumerate(session.objects.averages):
        for prepared, values in average.parts():
            number = session.objects.optimizers.index(prepared)
            named = NamedOptimizer.of(prepared, names, session.engine)
            found |= {
                average_name(i, number, each): local_as(value, parameter)
                for name, parameter in named.parameters
                if (value := values.get(parameter)) is not None
                for each in (name, own.get(id(parameter), name))
            }
    return found


def _load_averages(
    session: Session,
    checkpoint: Checkpoint,
    saved: Sequence[Mapping[str, Any]],
    optimizers: Sequence[NamedOptimizer],
) -> None:
    """Load the averages that the checkpoint has; others start with the loaded weights."""
    names = set(checkpoint.names())
    if len(saved) > len(session.objects.averages):
        kinds = ", ".join(state["kind"] for state in saved[len(session.objects.averages) :])
        warn(
            _(
                "{folder} holds averages of the weights ({kinds}), which this run does not continue",
                folder=checkpoint.folder,
                kinds=kinds,
            )
        )
    for i, average in enumerate(session.objects.averages):
        if i >= len(saved):
            average.start_anew(checkpoint.folder)
            continue

        def read(number: int, j: int, is_needed: bool, i: int = i) -> torch.Tensor | None:
            name, parameter = optimizers[number].parameters[j]
            full = average_name(i, number, name)
            if full not in names:
                return None
            if not is_needed:
                return parameter.new_empty(0)
            (local,) = local_tensors([_read_like(checkpoint, full, parameter)])
            return local

        average.load(saved[i], session.objects.optimizers, read, source=checkpoint.folder)


# ---- engines that gather their state ---


def _gathered_optimizer_state(
    optimizer: NamedOptimizer, engine: Engine
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return an optimizer's full state by parameter name, and its remaining entries.

    If the state is sharded, both are empty except on rank zero.

    Collective: call on every rank if the state is sharded.
    """
    whole = engine.full_optimizer_state(optimizer.inner) or {"state": {}, "param_groups": []}
    rest = rest_of_state(whole)
    numbered = {number: entries for number, entries in whole["state"].items() if number not in rest.get("state", {})}
    return {optimizer.parameters[number][0]: dict(entries) for number, entries in numbered.items()}, rest


def _load_gathered_model(
    checkpoint: Checkpoint, model: nn.Module, index: int, extras: Mapping[str, Any], *, missing: Collection[str]
) -> None:
    """Load a model whose engine supports ``load_state_dict``, except for ``missing``, in parts of bounded size.

    Collective: call on every rank if parameters are sharded.
    """
    prefix = model_prefix(index)
    state = flat_state(plain_state_dict(model))
    there = [name for name, value in state.items() if isinstance(value, torch.Tensor) and name not in missing]
    num_bytes = {name: checkpoint.num_bytes(f"{prefix}{name}") for name in there}
    with progress_bar(f"loading {checkpoint.folder.name}", sum(num_bytes.values())) as progress:
        for names in _in_parts(there, num_bytes):
            load_plain_state_dict(model, {name: checkpoint.read(f"{prefix}{name}") for name in names}, strict=False)
            progress(sum(num_bytes[name] for name in names))
    if extras:
        load_plain_state_dict(model, extras, strict=False)


def _in_parts(names: Sequence[str], num_bytes: Mapping[str, int]) -> Iterator[list[str]]:
    """Split ``names`` at module boundaries into parts of bounded size."""
    part: list[str] = []
    size, module = 0, ""
    for name in names:
        if size > _AT_ONCE_BYTES and name.rpartition(".")[0] != module:
            yield part
            part, size = [], 0
        part.append(name)
        size += num_bytes[name]
        module = name.rpartition(".")[0]
    if part:
        yield part


def _load_gathered_optimizer(
    checkpoint: Checkpoint,
    optimizer: NamedOptimizer,
    groups: Sequence[Mapping[str, Any]],
    index: int,
    rest: Mapping[str, Any],
    *,
    engine: Engine,
) -> None:
    """Load an optimizer's state and its remaining entries, if the checkpoint has any.

    Collective: call on every rank if the state is sharded.
    """
    names = [name for name, _ in optimizer.parameters]
    states = SavedStates(checkpoint, names, index, others=rest.get("state", {}))
    engine.load_full_optimizer_state(optimizer.inner, {**rest, "state": states, "param_groups": list(groups)})


# ---- loaders ---------------------------------------------------------------------------------------------------------


def _load_loaders(
    session: Session,
    checkpoint: Checkpoint,
    loaders: Sequence[PreparedLoader],
    orders: Sequence[Any],
    own: Mapping[str, Any],
    *,
    changed: Collection[int],
) -> None:
    num_saved = checkpoint.manifest.world_size
    positions: Sequence[Any] = own.get("positions") or ()
    for i, loader in enumerate(loaders):
        order = orders[i] if i < len(orders) else None
        if not loader.is_stateful or i in changed:  # the inner loader's state belongs to other data
            loader.load_saved(order, None)
            continue
        if num_saved != session.world.world_size:  # samples would be repeated or skipped
            raise positions_error(
                checkpoint.folder, num_saved, rank=session.world.rank, world_size=session.world.world_size
            )
        loader.load_saved(order, positions[i] if i < len(positions) else None)
    session.epochs.load_own_state(own.get("pass") if num_saved == session.world.world_size else None)
    for i in changed:
        loaders[i].load_rng_state(None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _readable(value: Any) -> Any:
    """Return a setting in readable form: plain values unchanged, anything else as text."""
    return value if value is None or type(value) in (bool, int, float, str) else str(value)
