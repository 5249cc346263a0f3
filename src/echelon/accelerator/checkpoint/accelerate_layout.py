"""Saves and loads prepared objects in Accelerate's layout; ``checkpoint/formats/accelerate.py`` defines the files."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.accelerator.checkpoint.changed_data import DataPolicy, positions_error, reconcile_data
from echelon.accelerator.models.save_weights import load_weights
from echelon.accelerator.rng_states import current_random_states, restore_random_states
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.checkpoint.formats.accelerate import (
    OURS,
    POSITION_NAME,
    RANDOM_STATES,
    TrainingState,
    custom_path,
    custom_paths,
    missing_files,
    num_ranks_in_position,
    position_on_rank,
    random_path,
    state_path,
    weights_path,
    write_state,
)
from echelon.checkpoint.formats.torch_files import PLAIN_DATA, load, refused_in, write_plain
from echelon.checkpoint.formats.weight_files import read_weights
from echelon.compat.constants import OPTIMIZER_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME
from echelon.data.loader import PreparedLoader
from echelon.distributed.collectives import gather_object
from echelon.world.world import World


def collect_state(
    *,
    weights: Sequence[Mapping[str, Any] | None],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    scaler: torch.amp.GradScaler | None,
    step: int,
    progress: dict[str, Any] | None = None,
    num_processes: int,
) -> TrainingState:
    """Return the state of these objects and this process's current RNG states.

    Collective: call on every rank, with the same objects in the same order.
    """
    loaders = [loader for loader in dataloaders if isinstance(loader, PreparedLoader)]
    positions = [gather_object(loader.state_dict()) if loader.is_stateful else [] for loader in loaders]
    return TrainingState(
        weights=weights,
        optimizers=[_whole_state(optimizer) for optimizer in optimizers],
        schedulers=[scheduler.state_dict() for scheduler in schedulers],
        orders=[loader.order_state() for loader in loaders],
        positions=positions,
        scaler=None if scaler is None else scaler.state_dict(),
        random_states=current_random_states(),
        step=step,
        progress=progress,
        num_processes=num_processes,
    )


def _whole_state(optimizer: Any) -> Any:
    return optimizer.full_state_dict() if isinstance(optimizer, AcceleratedOptimizer) else optimizer.state_dict()


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write this rank's files into an existing folder; ``Accelerator.save_state`` also handles failures.

    Collective: call on every rank.
    """
    state = collect_state(
        weights=model_states,
        optimizers=optimizers,
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler=scaler,
        step=step,
        num_processes=World.current().world_size,
    )
    write_state(
        Path(output_dir),
        state,
        rank=process_index,
        writes_shared=_is_writer(save_on_each_node),
        safe_serialization=safe_serialization,
    )
    return Path(output_dir)


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    *,
    data: DataPolicy | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load this rank's files, written by Accelerate or echelon, without running code from them. Returns ``step`` and
    ``progress``.

    Args:
        input_dir: checkpoint folder.
        models: prepared or not.
        optimizers: prepared or not.
        schedulers: prepared or not.
        dataloaders: prepared or not.
        process_index: rank of this process.
        scaler: loss scaler, if any.
        map_location: where tensors are loaded before they are copied: ``cpu`` (default) or ``on_device``.
        load_kwargs: ``torch.load`` options for everything except the models.
        data: how to handle changed data. None: a change in the middle of an epoch raises an error.
        load_model_func_kwargs: ``strict`` and other options of ``load_state_dict``, for the models.

    Raises:
        CheckpointError: a file is missing (raised before anything is loaded), is damaged, contains code, or does not
            match.
    """
    folder = Path(input_dir)
    if map_location not in (None, "cpu", "on_device"):
        raise UsageError(
            f"map_location must be None, 'cpu' or 'on_device', but got {map_location!r}", do="pass one of them"
        )
    place = World.current().device if map_location == "on_device" else torch.device("cpu")
    options = {"map_location": place, **(load_kwargs or {})}
    missing = missing_files(
        folder,
        num_models=len(models),
        num_optimizers=len(optimizers),
        num_schedulers=len(schedulers),
        has_scaler=scaler is not None,
    )
    _require(folder, missing)
    random_states = _read_random_states(folder, process_index)
    ours = random_states.get(OURS)
    orders, changed = _read_orders(folder, dataloaders, ours, load_kwargs or {}, data or DataPolicy())

    for i, model in enumerate(models):
        path = weights_path(folder, i)
        advice = N_(
            "load the weights into the model they were saved from, or pass strict=False; to start over, use another folder "
            "for the checkpoints"
        )
        weights = read_weights(path, map_location=place)
        load_weights(model, weights, source=path, advice=advice, **load_model_func_kwargs)
    for i, optimizer in enumerate(optimizers):
        state = load(state_path(folder, OPTIMIZER_NAME, i), **options)
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer.load_full_state_dict(state)
        else:
            optimizer.load_state_dict(state)
    for i, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(load(state_path(folder, SCHEDULER_NAME, i), **(load_kwargs or {})))
    _load_loaders(folder, dataloaders, process_index, ours, load_kwargs or {}, orders=orders, changed=changed)
    if scaler is not None:
        scaler.load_state_dict(load(folder / SCALER_NAME))
    if "random_state" in random_states:
        restore_random_states(random_states)
    of_accelerator = {"step": random_states.get("step"), "progress": random_states.get(OURS, {}).get("progress")}
    return {name: value for name, value in of_accelerator.items() if value is not None}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of ``obj`` to ``custom_checkpoint_{index}.pkl`` in the folder ``path``, on rank zero.

    Raises:
        CheckpointError: the state contains objects that loading would refuse.
    """
    if _is_writer(save_on_each_node):
        write_plain(obj.state_dict(), custom_path(Path(path), index))


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load the state of ``obj`` from ``custom_checkpoint_{index}.pkl`` in the folder ``path`` without running code.

    Raises:
        CheckpointError: the file is missing, is damaged, or contains code.
    """
    file = custom_path(Path(path), index)
    _require_files(Path(path), [file])
    obj.load_state_dict(load(file, map_location="cpu"))


def require_custom_states(folder: Path, num_objects: int) -> None:
    """Raise unless ``folder`` contains the states of exactly ``num_objects`` registered objects.

    Raises:
        CheckpointError: ``folder`` contains more or fewer states.
    """
    found = [path.name for path in custom_paths(folder)]
    if len(found) != num_objects:
        raise CheckpointError(
            f"{folder} contains the states of {len(found)} registered objects ({', '.join(found) or 'none'}), but "
            f"{num_objects} are registered",
            do="call register_for_checkpointing with the same objects in the same order as in the saved run",
        )


def require_plain(obj: Any) -> None:
    """Raise if the state of ``obj`` could be saved but not loaded again.

    Raises:
        UsageError: the state is not plain data; the message names the types.
    """
    buffer = io.BytesIO()
    torch.save(_without_data(obj.state_dict()), buffer)
    buffer.seek(0)
    refused = refused_in(buffer)
    if refused:
        raise UsageError(
            f"the state of {type(obj).__name__} contains {', '.join(refused)}, which is not plain data, so loading it "
            "would require running code",
            do=f"in its state_dict(), {PLAIN_DATA}",
        )


def _without_data(value: Any) -> Any:
    """Replace the tensors in ``value`` with empty ones, so that checking a state does not copy it."""
    if isinstance(value, torch.Tensor):
        return torch.empty(0, dtype=value.dtype) if type(value) in (torch.Tensor, nn.Parameter) else value
    if type(value) in (list, tuple):
        return type(value)(map(_without_data, value))
    if type(value) is dict:
        return {key: _without_data(item) for key, item in value.items()}
    return value


def _is_writer(save_on_each_node: bool) -> bool:
    world = World.current()
    return world.is_local_rank_zero if save_on_each_node else world.is_rank_zero


def _require_files(folder: Path, files: Sequence[Path]) -> None:
    _require(folder, [path.name for path in files if not path.exists()])


def _require(folder: Path, missing: Sequence[str]) -> None:
    if missing:
        raise CheckpointError(
            f"{folder} has no {', '.join(missing)}",
            do="load a complete checkpoint that was saved with the same number of models, optimizers and schedulers "
            "as prepared here",
        )


# ---- loaders ---------------------------------------------------------------------------------------------------------


def _read_orders(
    folder: Path,
    dataloaders: Sequence[Any],
    ours: Mapping[str, Any] | None,
    load_kwargs: dict[str, Any],
    policy: DataPolicy,
) -> tuple[Sequence[Mapping[str, Any]], frozenset[int]]:
    """Return the saved orders (Accelerate saves none) for the current data, and the loaders whose data changed."""
    loaders = [loader for loader in dataloaders if isinstance(loader, PreparedLoader)]
    files = [state_path(folder, SAMPLER_NAME, i) for i in range(min(len(loaders), (ours or {}).get("orders", 0)))]
    _require_files(folder, files)
    return reconcile_data(
        loaders,
        [load(file, **load_kwargs) for file in files],
        source=folder,
        num_saved=(ours or {}).get("num_processes", 0),
        num_ranks=World.current().world_size,
        policy=policy,
    )


def _load_loaders(
    folder: Path,
    dataloaders: Sequence[Any],
    rank: int,
    ours: Mapping[str, Any] | None,
    load_kwargs: dict[str, Any],
    *,
    orders: Sequence[Mapping[str, Any]],
    changed: Collection[int],
) -> None:
    """Restore the loaders' sample orders and saved positions."""
    known = {"positions": [], **(ours or {})}
    for i, loader in enumerate(loader for loader in dataloaders if isinstance(loader, PreparedLoader)):
        position, saved = state_path(folder, POSITION_NAME, i), None
        order = dict(orders[i]) if i < len(orders) else None
        if i in known["positions"] and loader.is_stateful:
            _require_files(folder, [position])
        if loader.is_stateful and position.exists() and i not in changed:
            iteration = (order or {}).get("iteration", loader.iteration)
            saved = _read_position(position, rank, iteration, load_kwargs)
        loader.load_saved(order, saved)


def _read_position(path: Path, rank: int, iteration: int, load_kwargs: dict[str, Any]) -> dict[str, Any]:
    file = load(path, **load_kwargs)
    num_saved, num_processes = num_ranks_in_position(file), World.current().world_size
    # with fewer processes samples would be repeated
    if num_saved is not None and not rank < num_saved <= num_processes:
        raise positions_error(path, num_saved, rank=rank, world_size=num_processes)
    return position_on_rank(file, rank, iteration=iteration)


# ---- random numbers --------------------------------------------------------------------------------------------------


def _read_random_states(folder: Path, rank: int) -> dict[str, Any]:
    """Return the contents of rank ``rank``'s file; if the saved run had no such rank, only the shared entries.

    Raises:
        CheckpointError: the file is missing even though the saved run had this rank.
    """
    path, first = random_path(folder, rank), random_path(folder, 0)
    _require_files(folder, [first])
    states: dict[str, Any] = load(path if path.exists() else first)
    num_files = sum(1 for entry in folder.iterdir() if RANDOM_STATES.fullmatch(entry.name))
    num_processes = states.get(OURS, {}).get("num_processes", num_files)  # Accelerate's file lacks it
    if rank < num_processes:
        _require_files(folder, [path])
    if World.current().world_size > num_processes:
        warn(
            _(
                "{folder} contains RNG states for {num_processes} process{es}; the other ranks keep their current "
                "RNG states",
                folder=folder,
                num_processes=num_processes,
                es="es" if num_processes != 1 else "",
            )
        )
    return states if path.exists() else {key: states[key] for key in ("step", OURS) if key in states}
