"""The layout of transformers' Trainer: file names, a reader and a writer, and conversion to and from echelon's format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError
from echelon.base.progress import Progress
from echelon.checkpoint.commit import place_of
from echelon.checkpoint.formats.conversion import (
    ImportedCheckpoint,
    build_import,
    copy_other_files,
    custom_states_in,
    num_models_in,
    rank_objects_in,
    training_objects_in,
)
from echelon.checkpoint.formats.layouts import TRAINER_STATE, weight_files
from echelon.checkpoint.formats.optimizer_states import numbered_state, rests_in
from echelon.checkpoint.formats.torch_files import load, read_all_ranks, refused_in, write_pickled
from echelon.checkpoint.manifest import is_part
from echelon.checkpoint.object_store import Location
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.stored_weights import weights_of, write_weights
from echelon.checkpoint.tensor_file import write_file
from echelon.checkpoint.tensor_names import model_prefix
from echelon.checkpoint.typed_json import read_json
from echelon.compat.constants import SCALER_NAME

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
ARGUMENTS = "training_args.bin"
ECHELON_DATA = "echelon_data.json"
"""File for the state that determines the position in the data. transformers ignores this file."""
ECHELON_WEIGHTS = "echelon_weights.safetensors"
"""File for everything that training can change in a model whose own files hold only adapters. transformers ignores it."""

_RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")
_OF_TRAINING = re.compile(rf"(optimizer|scheduler|scaler)\.pt|{_RANDOM.pattern}")
_WITH_WEIGHTS = re.compile(
    rf"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|{_OF_TRAINING.pattern}"
)
_IMPORTED = re.compile(r".*\.(pt|pth|safetensors\.index\.json|bin)")
# All files that a Trainer writes to a checkpoint. They are not kept when a checkpoint is replaced.
_FILES = re.compile(
    rf"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|.*\.json|{_OF_TRAINING.pattern}"
    r"|echelon_weights\.safetensors|training_args\.bin|.*\.(txt|model|jinja)|rank_\d+\.(safetensors|json)"
)
# Keys of RNG states here and in Accelerate's layout. For a device they are "cuda" and "torch_cuda_manual_seed".
_RNG_KEYS: Mapping[str, str] = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}
_DEVICE_KEY = re.compile(r"torch_(\w+)_manual_seed")
_MAX_SHARD_BYTES = 50 * 10**9  # limit of transformers
_EVERY_STEPS = 500  # transformers' default; a resumed Trainer reads it from the file and fails if it is null


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationState:
    """The state dicts saved alongside the weights; None for objects that do not exist."""

    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None


def is_state_file(name: str) -> bool:
    """Return whether a file with this name belongs to the layout."""
    return _FILES.fullmatch(name) is not None


# ---- reading and writing ---------------------------------------------------------------------------------------------


def write_state(folder: Path, state: OptimizationState) -> None:
    """Write the files of ``state`` to ``folder``. Call it on one rank."""
    files = ((OPTIMIZER, state.optimizer), (SCHEDULER, state.scheduler), (SCALER_NAME, state.scaler))
    for name, one in files:
        if one is not None:
            write_pickled(one, folder / name)


def evaluated_metric(folder: Location, name: str) -> float | None:
    """Return the metric ``name`` of the evaluation at a Trainer checkpoint's step; None if there is none or it cannot be read."""
    try:
        state = read_json(place_of(folder) / TRAINER_STATE)
        logs = [entry for entry in state["log_history"] if entry.get("step") == state["global_step"] and name in entry]
        return float(logs[-1][name]) if logs else None
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        return None


def read_state(folder: Path) -> OptimizationState:
    """Load the state dicts in ``folder``, without the weights.

    Raises:
        CheckpointError: a file is damaged or contains code.
    """

    def read(name: str) -> Any:
        return load(folder / name, map_location="cpu") if (folder / name).is_file() else None

    return OptimizationState(optimizer=read(OPTIMIZER), scheduler=read(SCHEDULER), scaler=read(SCALER_NAME))


def write_random_states(folder: Path, states: Mapping[str, Any], *, rank: int, num_ranks: int) -> None:
    """Write the RNG states of ``rank``; ``states`` has Accelerate's keys."""
    is_alone = num_ranks == 1
    devices = {
        match[1]: value[0] if is_alone and len(value) == 1 else value
        for key, value in states.items()
        if (match := _DEVICE_KEY.fullmatch(key))
    }
    named = {name: states[key] for name, key in _RNG_KEYS.items()} | devices
    write_pickled(named, folder / ("rng_state.pth" if is_alone else f"rng_state_{rank}.pth"))


def read_random_states(folder: Path, *, rank: int) -> Mapping[str, Any] | None:
    """Return the RNG states of ``rank`` under Accelerate's keys, or None if the run that saved them had fewer ranks."""
    for name in (f"rng_state_{rank}.pth", *(["rng_state.pth"] if rank == 0 else [])):
        if (folder / name).is_file():
            return _with_accelerate_keys(load(folder / name, map_location="cpu"))
    return None


def num_ranks_in(folder: Path) -> int:
    """Return the number of ranks that saved ``folder``, which equals its number of RNG state files."""
    return sum(_RANDOM.fullmatch(path.name) is not None for path in folder.iterdir())


def _with_accelerate_keys(states: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _RNG_KEYS.get(key, f"torch_{key}_manual_seed"): [value]
        if key not in _RNG_KEYS and isinstance(value, torch.Tensor)
        else value
        for key, value in states.items()
    }


# ---- conversion ------------------------------------------------------------------------------------------------------


def export_transformers(
    checkpoint: Checkpoint, folder: Path, *, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write the files that transformers' Trainer needs for resuming to the empty ``folder``.

    transformers' Trainer derives its position in the data from the number of steps, so it does not need the loaders' states.

    Raises:
        CheckpointError: the layout cannot represent part of the checkpoint.
    """
    objects = training_objects_in(checkpoint)
    is_of_trainer = (checkpoint.local_folder / TRAINER_STATE).exists()
    # a Trainer writes the weights only to these files
    has_files = not num_models_in(checkpoint) and bool(weight_files(checkpoint.local_folder))
    _require_one_of_each(checkpoint, objects, num_models=1 if has_files else num_models_in(checkpoint))
    ranks = rank_objects_in(checkpoint)
    if not has_files:
        weights = weights_of(checkpoint, model_prefix(0))
        write_weights(weights, folder, max_shard_bytes=_MAX_SHARD_BYTES, progress=progress)
    groups, schedulers = objects["optimizer_groups"], objects["schedulers"]
    write_state(
        folder,
        OptimizationState(
            optimizer=numbered_state(checkpoint, groups[0], 0, rests_in(objects)[0]) if groups else None,
            scheduler=schedulers[0] if schedulers else None,
            scaler=objects["scaler"],
        ),
    )
    for rank, own in ranks.items():
        write_random_states(folder, own["random"], rank=rank, num_ranks=checkpoint.manifest.world_size)
    for path in sorted(folder.glob("*.pt*")):
        _require_readable(path)
    written = _OF_TRAINING if has_files else _WITH_WEIGHTS
    copy_other_files(checkpoint.local_folder, folder, without=lambda name: is_part(name) or written.fullmatch(name))
    if not is_of_trainer:
        _write_trainer_state(folder, checkpoint.manifest.progress or {})


def _require_one_of_each(checkpoint: Checkpoint, objects: Mapping[str, Any], *, num_models: int) -> None:
    is_of_trainer = (checkpoint.local_folder / TRAINER_STATE).exists()
    counts = {
        "models": (num_models, 1, 1),
        "optimizers": (len(objects["optimizer_groups"]), 0, 1),
        "schedulers": (len(objects["schedulers"]), 0, 1),
        "registered objects": (len(custom_states_in(objects)), 0, int(is_of_trainer)),  # its position in the data
    }
    wrong = [f"{count} {what}" for what, (count, least, most) in counts.items() if not least <= count <= most]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} contains {', '.join(wrong)}, but a Trainer checkpoint has one model, one "
            "optimizer and one scheduler",
            do="pass --format accelerate, or export only its weights with `echelon checkpoint merge`",
        )


def _require_readable(path: Path) -> None:
    refused = refused_in(path)
    if refused:
        raise CheckpointError(
            f"the state for {path.name} contains {', '.join(refused)}, which could not be loaded without running code",
            do="pass --format accelerate, or load the checkpoint in the training script",
        )


def _write_trainer_state(folder: Path, progress: Mapping[str, Any]) -> None:
    state = {
        "global_step": progress.get("step", 0),
        "epoch": progress.get("epoch", 0),
        # Unknown. transformers divides this value, and reports that its own arguments differ and take precedence.
        "train_batch_size": 0,
        **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), _EVERY_STEPS),
        "log_history": [],
        # The next save of transformers accesses this entry.
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},
    }
    write_file(folder / TRAINER_STATE, [(json.dumps(state, indent=2) + "\n").encode()])


def import_transformers(folder: Path, *, parameters: Sequence[Sequence[str]] = ()) -> ImportedCheckpoint:
    """Read a checkpoint written by transformers' Trainer. The arguments are the same as for ``import_accelerate``."""
    state = read_state(folder)
    trainer = read_json(folder / TRAINER_STATE)
    weights = {path.name for path in weight_files(folder)}
    return build_import(
        folder,
        "transformers",
        optimizers=[] if state.optimizer is None else [state.optimizer],
        parameters=parameters,
        objects={
            "schedulers": [] if state.scheduler is None else [state.scheduler],
            "scaler": state.scaler,
            "orders": [],
        },
        ranks=[{"random": _with_accelerate_keys(states)} for states in read_all_ranks(folder, _RANDOM)],
        progress=Progress(epoch=int(trainer.get("epoch") or 0), step=int(trainer.get("global_step") or 0)).to_json(),
        read=lambda name: name in weights or _IMPORTED.fullmatch(name),
    )
