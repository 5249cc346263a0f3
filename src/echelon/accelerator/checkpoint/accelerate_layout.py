"""The state of a training in Accelerate's own layout: which file holds what, written and read."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.accelerator.checkpoint.changed_data import DataPolicy, reconcile_data
from echelon.accelerator.checkpoint.rng_states import current_random_states, restore_random_states
from echelon.accelerator.models.save_weights import load_weights
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.warnings import warn
from echelon.checkpoint.formats.torch_files import PLAIN_DATA, load, refused_in, write_plain
from echelon.checkpoint.formats.weight_files import read_weights, write_tensors
from echelon.compat.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from echelon.data.loader import PreparedLoader
from echelon.distributed.collectives import gather_object
from echelon.world.world import World

__all__ = [
    "TrainingState",
    "collect_state",
    "is_state_file",
    "load_accelerator_state",
    "load_custom_state",
    "missing_files",
    "require_custom_states",
    "require_plain",
    "save_accelerator_state",
    "save_custom_state",
    "write_custom_state",
    "write_state",
]

_POSITION_NAME = "dl_state_dict"
_CUSTOM_NAME = "custom_checkpoint"
# Accelerate reads the keys that it knows of a file; ours, in two of them, stand under this one.
_OURS = "echelon"
_FILES = re.compile(
    rf"({SAFE_MODEL_NAME}(_\d+)?\.safetensors|({MODEL_NAME}|{OPTIMIZER_NAME}|{SCHEDULER_NAME}|{SAMPLER_NAME}|{_POSITION_NAME})"
    rf"(_\d+)?\.bin|{re.escape(SCALER_NAME)}|({RNG_STATE_NAME}|{_CUSTOM_NAME})_\d+\.pkl)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What a checkpoint holds, whatever its layout."""

    weights: Sequence[Mapping[str, Any] | None]
    """Of each model, by name; None on ranks that do not have it whole."""
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    orders: Sequence[dict[str, Any]]
    """Of each loader: what the order of its next pass depends on."""
    positions: Sequence[list[dict[str, Any]]]
    """Of each loader: how far its pass has come, by rank; empty when it cannot say."""
    scaler: dict[str, Any] | None
    random_states: dict[str, Any]
    """Of this process."""
    step: int
    progress: dict[str, Any] | None
    """The counters of the run."""
    num_processes: int


def is_state_file(name: str) -> bool:
    """Tell whether a file of this name belongs to the layout."""
    return _FILES.fullmatch(name) is not None


def collect_state(
    *,
    weights: Sequence[Mapping[str, Any] | None],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    scaler: torch.amp.GradScaler | None,
    step: int,
    progress: dict[str, Any] | None = None,
    random_states: dict[str, Any] | None = None,
) -> TrainingState:
    """Return the state of these objects and of the random number generators of this process (of now, unless given).

    Collective: every rank, with the same objects in the same order.
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
        random_states=random_states or current_random_states(),
        step=step,
        progress=progress,
        num_processes=World.current().world_size,
    )


def _whole_state(optimizer: Any) -> Any:
    return optimizer.full_state_dict() if isinstance(optimizer, AcceleratedOptimizer) else optimizer.state_dict()


def write_state(
    folder: Path, state: TrainingState, *, rank: int, writes_shared: bool, safe_serialization: bool = True
) -> None:
    """Write the files of this rank into ``folder``.

    Args:
        folder: it exists.
        state: what to write.
        rank: of this process.
        writes_shared: whether this rank writes what is one for all ranks.
        safe_serialization: weights as safetensors; False: by ``torch.save``.

    Raises:
        CheckpointError: a state could be written, but would be refused when it is read.
    """
    positions = {i: _position_file(states) for i, states in enumerate(state.positions) if states and states[0]["inner"]}
    ours = {
        "num_processes": state.num_processes,
        "orders": len(state.orders),
        "positions": sorted(positions),
        "progress": state.progress,
    }
    if writes_shared:
        for i, weights in enumerate(state.weights):
            assert weights is not None, "rank zero has every model whole"
            path = folder / _weights_name(i, safe=safe_serialization)
            write_tensors(weights, path) if safe_serialization else write_plain(weights, path)
        for name, states in ((OPTIMIZER_NAME, state.optimizers), (SCHEDULER_NAME, state.schedulers)):
            for i, one in enumerate(states):
                write_plain(one, folder / _numbered(name, i))
        for i, order in enumerate(state.orders):
            write_plain(order, folder / _numbered(SAMPLER_NAME, i))
        for i, position in positions.items():
            write_plain(position, folder / _numbered(_POSITION_NAME, i))
        if state.scaler is not None:
            write_plain(state.scaler, folder / SCALER_NAME)
    write_plain({"step": state.step, **state.random_states, _OURS: ours}, folder / _random_name(rank))


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
    """Write the files of this rank into a folder that exists; ``Accelerator.save_state`` does it so that it can fail.

    Collective: every rank.
    """
    state = collect_state(
        weights=model_states,
        optimizers=optimizers,
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler=scaler,
        step=step,
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
    """Load the files of this rank, Accelerate's or ours; nothing in them is run. Returns ``step`` and ``progress``.

    Args:
        input_dir: the folder.
        models: prepared or not.
        optimizers: as ``models``.
        schedulers: as ``models``.
        dataloaders: as ``models``.
        process_index: the rank.
        scaler: the loss scaler, if there is one.
        map_location: ``cpu`` (as None), or ``on_device``: where tensors are read to, before they are copied.
        load_kwargs: of ``torch.load``, for everything but the models.
        data: what a change of the data means; None: in the middle of an epoch, an error.
        load_model_func_kwargs: ``strict``, and others of ``load_state_dict``, for the models.

    Raises:
        CheckpointError: a file is missing, damaged, holds code, or does not fit; before anything is loaded when it is
            missing.
    """
    folder = Path(input_dir)
    if map_location not in (None, "cpu", "on_device"):
        raise UsageError(f"map_location={map_location!r} is not one of None, 'cpu', 'on_device'", do="give one of them")
    place = World.current().device if map_location == "on_device" else torch.device("cpu")
    options = {"map_location": place, **(load_kwargs or {})}
    weights = [
        _first_of(folder / _weights_name(i, safe=True), folder / _weights_name(i, safe=False))
        for i in range(len(models))
    ]
    optimizer_files = [folder / _numbered(OPTIMIZER_NAME, i) for i in range(len(optimizers))]
    scheduler_files = [folder / _numbered(SCHEDULER_NAME, i) for i in range(len(schedulers))]
    scaler_files = [] if scaler is None else [folder / SCALER_NAME]
    _require(folder, [*weights, *optimizer_files, *scheduler_files, *scaler_files])
    random_states = _read_random_states(folder, process_index)
    ours = random_states.get(_OURS)
    orders, changed = _read_orders(folder, dataloaders, ours, load_kwargs or {}, data or DataPolicy())

    for model, path in zip(models, weights):
        load_weights(model, read_weights(path, map_location=place), source=path, **load_model_func_kwargs)
    for optimizer, path in zip(optimizers, optimizer_files):
        state = load(path, **options)
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer.load_full_state_dict(state)
        else:
            optimizer.load_state_dict(state)
    for scheduler, path in zip(schedulers, scheduler_files):
        scheduler.load_state_dict(load(path, **(load_kwargs or {})))
    _load_loaders(folder, dataloaders, process_index, ours, load_kwargs or {}, orders=orders, changed=changed)
    if scaler is not None:
        scaler.load_state_dict(load(folder / SCALER_NAME))
    if "random_state" in random_states:
        restore_random_states(random_states)
    of_accelerator = {"step": random_states.get("step"), "progress": random_states.get(_OURS, {}).get("progress")}
    return {name: value for name, value in of_accelerator.items() if value is not None}


def missing_files(
    folder: Path, *, num_models: int, num_optimizers: int, num_schedulers: int, has_scaler: bool
) -> list[str]:
    """Return the names of the files that loading so many objects needs and ``folder`` lacks."""
    weights = [
        _first_of(folder / _weights_name(i, safe=True), folder / _weights_name(i, safe=False))
        for i in range(num_models)
    ]
    others = [
        *(_numbered(OPTIMIZER_NAME, i) for i in range(num_optimizers)),
        *(_numbered(SCHEDULER_NAME, i) for i in range(num_schedulers)),
        *([SCALER_NAME] if has_scaler else []),
        _random_name(0),
    ]
    return [path.name for path in (*weights, *(folder / name for name in others)) if not path.exists()]


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of ``obj`` to ``custom_checkpoint_{index}.pkl`` in the folder ``path``, on rank zero.

    Raises:
        CheckpointError: its state holds what would be refused when it is read.
    """
    if _is_writer(save_on_each_node):
        write_custom_state(obj, Path(path), index)


def write_custom_state(obj: Any, folder: Path, index: int) -> None:
    """Write the state of ``obj``, on this rank."""
    write_plain(obj.state_dict(), folder / f"{_CUSTOM_NAME}_{index}.pkl")


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load the state of ``obj`` from ``custom_checkpoint_{index}.pkl`` in the folder ``path``; nothing in it is run.

    Raises:
        CheckpointError: the file is missing, damaged, or holds code.
    """
    file = Path(path) / f"{_CUSTOM_NAME}_{index}.pkl"
    _require(Path(path), [file])
    obj.load_state_dict(load(file, map_location="cpu"))


def require_custom_states(folder: Path, num_objects: int) -> None:
    """Raise unless ``folder`` holds the states of ``num_objects`` registered objects.

    Raises:
        CheckpointError: it holds more or fewer.
    """
    found = sorted(path.name for path in folder.glob(f"{_CUSTOM_NAME}_*.pkl") if is_state_file(path.name))
    if len(found) != num_objects:
        raise CheckpointError(
            f"{folder} holds the states of {len(found)} registered objects ({', '.join(found) or 'none'}), and "
            f"{num_objects} are registered",
            do="register the same objects, in the same order, as when it was saved: register_for_checkpointing",
        )


def require_plain(obj: Any) -> None:
    """Raise when the state of ``obj`` could be written, but would be refused when it is read.

    Raises:
        UsageError: what it holds is named.
    """
    buffer = io.BytesIO()
    torch.save(_without_data(obj.state_dict()), buffer)
    buffer.seek(0)
    refused = refused_in(buffer)
    if refused:
        raise UsageError(
            f"the state of {type(obj).__name__} holds {', '.join(refused)}, which is not plain data: it could not be loaded "
            "again without running code",
            do=f"in its state_dict(), {PLAIN_DATA}",
        )


def _without_data(value: Any) -> Any:
    """Return ``value`` with small tensors in the place of its tensors: looking at a state must not copy it."""
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


def _numbered(name: str, index: int, *, suffix: str = ".bin") -> str:
    return f"{name}_{index}{suffix}" if index else f"{name}{suffix}"


def _weights_name(index: int, *, safe: bool) -> str:
    return _numbered(SAFE_MODEL_NAME, index, suffix=".safetensors") if safe else _numbered(MODEL_NAME, index)


def _random_name(rank: int) -> str:
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def _first_of(path: Path, other: Path) -> Path:
    return other if other.exists() and not path.exists() else path


def _require(folder: Path, files: Sequence[Path]) -> None:
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{folder} has no {', '.join(missing)}",
            do="load a whole checkpoint, saved with as many models, optimizers and schedulers as were prepared here",
        )


# ---- loaders ---------------------------------------------------------------------------------------------------------


def _read_orders(
    folder: Path,
    dataloaders: Sequence[Any],
    ours: Mapping[str, Any] | None,
    load_kwargs: dict[str, Any],
    policy: DataPolicy,
) -> tuple[Sequence[Mapping[str, Any]], frozenset[int]]:
    """Return the orders that the checkpoint has, for the data of now, and which loaders have other data; Accelerate writes none."""
    loaders = [loader for loader in dataloaders if isinstance(loader, PreparedLoader)]
    files = [folder / _numbered(SAMPLER_NAME, i) for i in range(min(len(loaders), (ours or {}).get("orders", 0)))]
    _require(folder, files)
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
    """Restore the orders, and the positions that the checkpoint has."""
    known = {"positions": [], **(ours or {})}
    for i, loader in enumerate(loader for loader in dataloaders if isinstance(loader, PreparedLoader)):
        position = folder / _numbered(_POSITION_NAME, i)
        if i < len(orders):
            loader.load_order_state(dict(orders[i]))
        if i in known["positions"] and loader.is_stateful:
            _require(folder, [position])
        if loader.is_stateful and position.exists() and i not in changed:
            loader.load_state_dict(_position_of(load(position, **load_kwargs), rank, loader, position))


def _position_file(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rank zero's state in the form of torchdata, as Accelerate reads it, and what we need beside."""
    first = states[0]
    rest = {key: value for key, value in first.items() if key not in ("inner", "_iterator_finished")}
    others = [state["inner"] for state in states[1:]]
    return {
        **first["inner"],
        "_iterator_finished": first["_iterator_finished"],
        _OURS: {**rest, "num_given": [state["num_given"] for state in states], "inner_of_others": others},
    }


def _position_of(file: dict[str, Any], rank: int, loader: PreparedLoader, path: Path) -> dict[str, Any]:
    """Return the state of ``rank`` for the loader, from our file or from Accelerate's."""
    inner = {key: value for key, value in file.items() if key != _OURS}
    finished = bool(file.get("_iterator_finished"))
    ours = file.get(_OURS)
    if ours is None:
        given = (
            file["_num_yielded"]
            if "_num_yielded" in file
            else file["_snapshot"]["_snapshot_step"] + file["_steps_since_snapshot"]
        )
        return {
            "iteration": loader.iteration,
            "num_given": given,
            "order": None,
            "inner": inner,
            "_iterator_finished": finished,
        }
    num_saved, num_processes = len(ours["inner_of_others"]) + 1, World.current().world_size
    if rank >= num_saved or num_saved > num_processes:  # with fewer, samples would come twice
        raise CheckpointError(
            f"{path} says where {num_saved} processes were in their data, and this is rank {rank} of {num_processes}",
            do="resume on as many processes, or without use_stateful_dataloader",
        )
    return {
        "iteration": ours["iteration"],
        "num_given": ours["num_given"][rank],
        "order": ours["order"],
        "inner": ours["inner_of_others"][rank - 1] if rank else inner,
        "_iterator_finished": finished,
    }


# ---- random numbers --------------------------------------------------------------------------------------------------


def _read_random_states(folder: Path, rank: int) -> dict[str, Any]:
    """Return the file of ``rank``; of a rank that the saved run did not have, what is one for all.

    Raises:
        CheckpointError: it is missing, and should not be.
    """
    path, first = folder / _random_name(rank), folder / _random_name(0)
    _require(folder, [first])
    states: dict[str, Any] = load(path if path.exists() else first)
    files = re.compile(rf"{RNG_STATE_NAME}_\d+\.pkl")
    num_files = sum(1 for entry in folder.iterdir() if files.fullmatch(entry.name))
    num_processes = states.get(_OURS, {}).get("num_processes", num_files)  # Accelerate does not say it
    if rank < num_processes:
        _require(folder, [path])
    if World.current().world_size > num_processes:
        warn(
            f"{folder} has random states of {num_processes} processes: those of the other ranks go on from where they are"
        )
    return states if path.exists() else {key: states[key] for key in ("step", _OURS) if key in states}
