"""Accelerate's layout: file names, a reader and a writer, and conversion to and from echelon's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError
from echelon.checkpoint.formats.conversion import (
    ImportedCheckpoint,
    build_import,
    copy_other_files,
    custom_states_in,
    num_models_in,
    rank_objects_in,
    training_objects_in,
    weights_beside,
)
from echelon.checkpoint.formats.layouts import TRAINER_STATE
from echelon.checkpoint.formats.optimizer_states import numbered_state, rests_in
from echelon.checkpoint.formats.torch_files import load, read_all_ranks, write_plain
from echelon.checkpoint.formats.weight_files import write_tensors
from echelon.checkpoint.manifest import is_part
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.stored_weights import weights_of, write_weights
from echelon.checkpoint.tensor_names import model_prefix
from echelon.compat.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)

OURS = "echelon"
"""Key under which echelon stores additional data in two of the files. Accelerate ignores unknown keys."""
POSITION_NAME = "dl_state_dict"
_CUSTOM_NAME = "custom_checkpoint"
# Key in the RNG states of a rank for data that this layout cannot represent.
_REST = "echelon_rest"
RANDOM_STATES = re.compile(rf"{RNG_STATE_NAME}_(\d+)\.pkl")
_POSITIONS = re.compile(rf"{POSITION_NAME}(?:_(\d+))?\.bin")
_FILES = re.compile(
    rf"({SAFE_MODEL_NAME}(_\d+)?\.safetensors|({MODEL_NAME}|{OPTIMIZER_NAME}|{SCHEDULER_NAME}|{SAMPLER_NAME}|{POSITION_NAME})"
    rf"(_\d+)?\.bin|{re.escape(SCALER_NAME)}|({RNG_STATE_NAME}|{_CUSTOM_NAME})_\d+\.pkl)"
)
# Rank objects that the layout can represent exactly. Files of positions merge the keys of two states, which reading cannot undo.
_OWN = frozenset({"random", "optimizer_values"})
_SHARED = re.compile(r"accelerator|extra_states|optimizer_groups|optimizer_rests|schedulers|scaler|orders|custom\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The training state that one rank writes."""

    weights: Sequence[Mapping[str, Any] | None]
    """Each model's weights by name; None on ranks that do not hold the whole model."""
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    orders: Sequence[dict[str, Any]]
    """For each loader, the state that determines the sample order of its next pass."""
    positions: Sequence[list[dict[str, Any]]]
    """Each loader's position in its pass, by rank; empty for a loader without a position."""
    scaler: dict[str, Any] | None
    random_states: dict[str, Any]
    """This process's RNG states."""
    step: int
    progress: dict[str, Any] | None
    """Counters of the run."""
    num_processes: int


# ---- names -----------------------------------------------------------------------------------------------------------


def is_state_file(name: str) -> bool:
    """Return whether a file with this name belongs to the layout."""
    return _FILES.fullmatch(name) is not None


def state_path(folder: Path, name: str, index: int, *, suffix: str = ".bin") -> Path:
    """Return the path of a numbered state file: ``optimizer.bin``, ``optimizer_1.bin``, ..."""
    return folder / (f"{name}_{index}{suffix}" if index else f"{name}{suffix}")


def weights_path(folder: Path, index: int) -> Path:
    """Return the path of a model's weights: the ``torch.save`` file if only that file exists, else the safetensors file."""
    safe, other = (
        state_path(folder, SAFE_MODEL_NAME, index, suffix=".safetensors"),
        state_path(folder, MODEL_NAME, index),
    )
    return other if other.exists() and not safe.exists() else safe


def random_path(folder: Path, rank: int) -> Path:
    """Return the path of the file with the RNG states of ``rank``."""
    return folder / f"{RNG_STATE_NAME}_{rank}.pkl"


def custom_path(folder: Path, index: int) -> Path:
    """Return the path of a registered object's state."""
    return folder / f"{_CUSTOM_NAME}_{index}.pkl"


def custom_paths(folder: Path) -> list[Path]:
    """Return the paths of all registered objects' states in ``folder``, sorted by name."""
    return sorted(path for path in folder.glob(f"{_CUSTOM_NAME}_*.pkl") if is_state_file(path.name))


def missing_files(
    folder: Path, *, num_models: int, num_optimizers: int, num_schedulers: int, has_scaler: bool
) -> list[str]:
    """Return the names of files that are needed to load this number of objects but are missing from ``folder``."""
    needed = [
        *(weights_path(folder, i) for i in range(num_models)),
        *(state_path(folder, OPTIMIZER_NAME, i) for i in range(num_optimizers)),
        *(state_path(folder, SCHEDULER_NAME, i) for i in range(num_schedulers)),
        *([folder / SCALER_NAME] if has_scaler else []),
        random_path(folder, 0),
    ]
    return [path.name for path in needed if not path.exists()]


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_state(
    folder: Path, state: TrainingState, *, rank: int, writes_shared: bool, safe_serialization: bool = True
) -> None:
    """Write this rank's files to ``folder``.

    Args:
        writes_shared: whether this rank writes the files shared by all ranks.
        safe_serialization: whether to write weights as safetensors instead of with ``torch.save``.

    Raises:
        CheckpointError: a state contains data that would be rejected when it is loaded.
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
            assert weights is not None, "rank zero must hold every model in full"
            if safe_serialization:
                write_tensors(weights, state_path(folder, SAFE_MODEL_NAME, i, suffix=".safetensors"))
            else:
                write_plain(weights, state_path(folder, MODEL_NAME, i))
        numbered = {
            OPTIMIZER_NAME: dict(enumerate(state.optimizers)),
            SCHEDULER_NAME: dict(enumerate(state.schedulers)),
            SAMPLER_NAME: dict(enumerate(state.orders)),
            POSITION_NAME: positions,
        }
        for name, states in numbered.items():
            for i, one in states.items():
                write_plain(one, state_path(folder, name, i))
        if state.scaler is not None:
            write_plain(state.scaler, folder / SCALER_NAME)
    write_plain({"step": state.step, **state.random_states, OURS: ours}, random_path(folder, rank))


def _position_file(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return positions: rank zero's in torchdata's format, as Accelerate expects; the other ranks' under echelon's key."""
    first = states[0]
    rest = {key: value for key, value in first.items() if key not in ("inner", "_iterator_finished")}
    others = [state["inner"] for state in states[1:]]
    return {
        **first["inner"],
        "_iterator_finished": first["_iterator_finished"],
        OURS: {**rest, "num_given": [state["num_given"] for state in states], "inner_of_others": others},
    }


# ---- reading ---------------------------------------------------------------------------------------------------------


def num_ranks_in_position(file: Mapping[str, Any]) -> int | None:
    """Return how many ranks have a position in a loader's file, or None for Accelerate's files, which contain only one."""
    return len(file[OURS]["inner_of_others"]) + 1 if OURS in file else None


def position_on_rank(file: Mapping[str, Any], rank: int, *, iteration: int = 0) -> dict[str, Any]:
    """Return a loader's state on ``rank`` from its file. ``iteration`` is required for files written by Accelerate."""
    inner = {key: value for key, value in file.items() if key != OURS}
    finished = bool(file.get("_iterator_finished"))
    ours = file.get(OURS)
    if ours is not None:
        inners = [inner, *ours["inner_of_others"]]
        shared = {key: value for key, value in ours.items() if key not in ("num_given", "inner_of_others")}
        own = {"num_given": ours["num_given"][rank], "inner": inners[rank], "_iterator_finished": finished}
        return {**shared, **own}
    if "_num_yielded" in file:
        given = file["_num_yielded"]
    else:
        given = file["_snapshot"]["_snapshot_step"] + file["_steps_since_snapshot"]
    return {"iteration": iteration, "num_given": given, "order": None, "inner": inner, "_iterator_finished": finished}


def _read_numbered(path_of: Callable[[int], Path]) -> list[Any]:
    """Load all files of one kind, numbered 0, 1, ..."""
    found: list[Any] = []
    while (path := path_of(len(found))).is_file():
        found.append(load(path, map_location="cpu"))
    return found


def _read_positions(folder: Path, num_orders: int, num_ranks: int) -> list[list[Any]]:
    """Return each loader's position on each rank, or None if the folder contains no positions."""
    files = {int(match[1] or 0): path for path in folder.iterdir() if (match := _POSITIONS.fullmatch(path.name))}
    found: list[list[Any]] = []
    for i in range(max([*files, num_orders - 1], default=-1) + 1):
        file = load(files[i], map_location="cpu") if i in files else None
        found.append([None if file is None else position_on_rank(file, rank) for rank in range(num_ranks)])
    return found


# ---- conversion ------------------------------------------------------------------------------------------------------


def export_accelerate(
    checkpoint: Checkpoint, folder: Path, *, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write ``checkpoint`` in Accelerate's layout to the empty ``folder``.

    Weights are copied in blocks. Each optimizer's state is kept in memory while it is being written.

    Raises:
        CheckpointError: the layout cannot represent part of the checkpoint.
    """
    objects = training_objects_in(checkpoint)
    ranks = rank_objects_in(checkpoint)
    if not num_models_in(checkpoint):
        write_weights(weights_beside(checkpoint), folder, name=SAFE_MODEL_NAME, progress=progress)
    for i in range(num_models_in(checkpoint)):
        name = f"{SAFE_MODEL_NAME}_{i}" if i else SAFE_MODEL_NAME
        write_weights(weights_of(checkpoint, model_prefix(i)), folder, name=name, progress=progress)
    positions = [list(of_loader) for of_loader in zip(*(own["positions"] for own in ranks.values()))]
    state = TrainingState(
        weights=[],
        optimizers=[
            numbered_state(checkpoint, groups, i, rest)
            for i, (groups, rest) in enumerate(zip(objects["optimizer_groups"], rests_in(objects)))
        ],
        schedulers=objects["schedulers"],
        orders=objects["orders"],
        positions=[[] if None in of_loader else of_loader for of_loader in positions],
        scaler=objects["scaler"],
        random_states={},
        step=objects["accelerator"]["step"],
        progress=checkpoint.manifest.progress,  # type: ignore[arg-type]
        num_processes=checkpoint.manifest.world_size,
    )
    for rank, own in ranks.items():
        rest = {
            "own": {key: value for key, value in own.items() if key not in _OWN},
            "shared": {key: value for key, value in objects.items() if not _SHARED.fullmatch(key)},
        }
        of_rank = replace(state, random_states={**own["random"], _REST: rest})
        write_state(folder, of_rank, rank=rank, writes_shared=rank == min(ranks))
    for i, one in enumerate(custom_states_in(objects)):
        write_plain(one, custom_path(folder, i))
    # With a Trainer's state file, the folder would be detected as transformers' layout.
    copy_other_files(
        checkpoint.local_folder,
        folder,
        without=lambda name: is_part(name) or is_state_file(name) or name == TRAINER_STATE,
    )


def import_accelerate(folder: Path, *, parameters: Sequence[Sequence[str]] = ()) -> ImportedCheckpoint:
    """Read a checkpoint in Accelerate's layout, written by Accelerate's or echelon's ``save_state``.

    Args:
        parameters: for each optimizer, its parameter names in the order of its parameter groups. Required unless the
            optimizer was created with named parameters, in which case its file contains the names.

    Raises:
        CheckpointError: a file is missing or damaged, or can be read only by unpickling it.
    """
    return build_import(
        folder,
        "accelerate",
        optimizers=_read_numbered(lambda i: state_path(folder, OPTIMIZER_NAME, i)),
        parameters=parameters,
        read=is_state_file,
        **_state_beside_models(folder),
    )


def state_beside_models(folder: Path) -> dict[str, Any]:
    """Return what Accelerate's ``save_state`` stores beside models and optimizers, as arguments of ``build_import``; empty if nothing.

    Raises:
        CheckpointError: a file is missing or damaged, or can be read only by unpickling it.
    """
    return _state_beside_models(folder) if any(RANDOM_STATES.fullmatch(path.name) for path in folder.iterdir()) else {}


def _state_beside_models(folder: Path) -> dict[str, Any]:
    random = read_all_ranks(folder, RANDOM_STATES)
    ours = random[0].get(OURS, {})
    if ours and len(random) != ours["num_processes"]:
        raise CheckpointError(
            f"{folder} contains RNG states for {len(random)} process{'es' if len(random) != 1 else ''}, but it was "
            f"saved by {ours['num_processes']}",
            do="import a complete checkpoint",
        )
    num_orders = ours.get("orders", 0)
    positions = _read_positions(folder, num_orders, len(random))
    custom = _read_numbered(lambda i: custom_path(folder, i))
    return {
        "objects": {
            "schedulers": _read_numbered(lambda i: state_path(folder, SCHEDULER_NAME, i)),
            "scaler": load(folder / SCALER_NAME) if (folder / SCALER_NAME).is_file() else None,
            "orders": [load(state_path(folder, SAMPLER_NAME, i)) for i in range(num_orders)],
            **{f"custom.{i}": state for i, state in enumerate(custom)},
            **random[0].get(_REST, {}).get("shared", {}),
        },
        "ranks": [
            {
                "random": {key: value for key, value in states.items() if key not in ("step", OURS, _REST)},
                "positions": [of_loader[rank] for of_loader in positions],
                **states.get(_REST, {}).get("own", {}),
            }
            for rank, states in enumerate(random)
        ],
        "step": random[0].get("step", 0),
        "progress": ours.get("progress"),
    }
