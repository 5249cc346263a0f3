"""A checkpoint as the files that Accelerate's ``load_state`` or the Trainer of transformers reads, made without processes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.accelerator.checkpoint.accelerate_layout import (
    TrainingState,
    is_state_file,
    write_custom_state,
    write_state,
)
from echelon.base.errors import CheckpointError
from echelon.base.warnings import warn
from echelon.checkpoint.formats.layouts import TRAINER_STATE
from echelon.checkpoint.formats.torch_files import refused_in, write_pickled
from echelon.checkpoint.formats.weight_files import weight_files
from echelon.checkpoint.manifest import is_part
from echelon.checkpoint.merge_weights import Weights, weights_in, weights_of, write_weights
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.storage import LocalStorage
from echelon.checkpoint.tensor_file import write_file
from echelon.checkpoint.tensor_names import model_prefix, state_keys, state_name, state_values
from echelon.compat.constants import SAFE_MODEL_NAME, SCALER_NAME

__all__ = [
    "PARAMETER_NAMES",
    "REST",
    "copy_others",
    "export_accelerate",
    "export_transformers",
    "num_models_in",
    "weights_beside",
]

PARAMETER_NAMES = "param_names"
"""Where torch keeps the names of a group's parameters; loading does not look at them."""

REST = "echelon_rest"
"""Under which key of a rank's random states stands what has no place in Accelerate's layout; Accelerate skips it."""

# What has a place there. The positions have one, too; but of what is read back it would not be known whose keys are whose.
_OWN = frozenset({"random", "optimizer_values"})
_SHARED = re.compile(r"accelerator|extra_states|optimizer_groups|schedulers|scaler|orders|custom\.\d+")
_OF_TRAINING = re.compile(r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
_OF_TRANSFORMERS = re.compile(
    rf"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|{_OF_TRAINING.pattern}"
)
_MAX_SHARD_BYTES = 50 * 10**9  # as transformers cuts
_EVERY_STEPS = 500  # transformers' default; a resumed Trainer takes it from the file, and fails where it is null
_COPY_BYTES = 4 << 20


def export_accelerate(checkpoint: Checkpoint, folder: Path, *, tell: Callable[[int], None] = lambda _: None) -> None:
    """Write the files of Accelerate's layout into ``folder``, which is empty.

    The weights are copied in parts; the state of each optimizer is in memory while it is written.

    Raises:
        CheckpointError: something in the checkpoint has no place in that layout.
    """
    objects = _objects(checkpoint)
    ranks = _ranks(checkpoint)
    if not num_models_in(checkpoint):
        write_weights(weights_beside(checkpoint), folder, name=SAFE_MODEL_NAME, tell=tell)
    for i in range(num_models_in(checkpoint)):
        name = f"{SAFE_MODEL_NAME}_{i}" if i else SAFE_MODEL_NAME
        write_weights(weights_of(checkpoint, model_prefix(i)), folder, name=name, tell=tell)
    positions = [list(of_loader) for of_loader in zip(*(own["positions"] for own in ranks.values()))]
    shared = {
        "weights": [],
        "schedulers": objects["schedulers"],
        "orders": objects["orders"],
        "positions": [[] if None in of_loader else of_loader for of_loader in positions],
        "scaler": objects["scaler"],
        "step": objects["accelerator"]["step"],
        "progress": checkpoint.manifest.progress,
        "num_processes": checkpoint.manifest.world_size,
    }
    optimizers = [_optimizer_state(checkpoint, objects, i) for i in range(len(objects["optimizer_groups"]))]
    for rank, own in ranks.items():
        rest = {"own": {key: value for key, value in own.items() if key not in _OWN}}
        rest |= {"shared": {key: value for key, value in objects.items() if not _SHARED.fullmatch(key)}}
        state = TrainingState(**shared, optimizers=optimizers, random_states={**own["random"], REST: rest})
        write_state(folder, state, rank=rank, writes_shared=rank == min(ranks))
    for i, state in enumerate(_custom(objects)):
        write_custom_state(_Holds(state), folder, i)
    # By a Trainer's state a folder is known to be of transformers' layout.
    copy_others(
        checkpoint.folder, folder, without=lambda name: is_part(name) or is_state_file(name) or name == TRAINER_STATE
    )


def export_transformers(checkpoint: Checkpoint, folder: Path, *, tell: Callable[[int], None] = lambda _: None) -> None:
    """Write the files from which the Trainer of transformers resumes into ``folder``, which is empty.

    It finds its place in the data by the number of steps; what the checkpoint says of its loaders is not needed.

    Raises:
        CheckpointError: something in the checkpoint has no place in that layout.
    """
    objects = _objects(checkpoint)
    is_of_trainer = (checkpoint.folder / TRAINER_STATE).exists()
    has_files = not num_models_in(checkpoint) and bool(weight_files(checkpoint.folder))  # a Trainer writes weights once
    counts = {
        "models": (1 if has_files else num_models_in(checkpoint), 1, 1),
        "optimizers": (len(objects["optimizer_groups"]), 0, 1),
        "schedulers": (len(objects["schedulers"]), 0, 1),
        "registered objects": (len(_custom(objects)), 0, int(is_of_trainer)),  # its place in the data
    }
    wrong = [f"{count} {what}" for what, (count, least, most) in counts.items() if not least <= count <= most]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} holds {', '.join(wrong)}: a Trainer's checkpoint is one model, one optimizer and one "
            "scheduler",
            do="export it with --format accelerate, or its weights alone with echelon checkpoint merge",
        )
    ranks = _ranks(checkpoint)
    if not has_files:
        write_weights(weights_of(checkpoint, model_prefix(0)), folder, max_shard_bytes=_MAX_SHARD_BYTES, tell=tell)
    if objects["optimizer_groups"]:
        _write(_optimizer_state(checkpoint, objects, 0), folder / "optimizer.pt")
    for scheduler in objects["schedulers"]:
        _write(scheduler, folder / "scheduler.pt")
    if objects["scaler"] is not None:
        _write(objects["scaler"], folder / SCALER_NAME)
    is_alone = checkpoint.manifest.world_size == 1
    for rank, own in ranks.items():
        _write(
            _random_states(own["random"], is_alone), folder / ("rng_state.pth" if is_alone else f"rng_state_{rank}.pth")
        )
    written = _OF_TRAINING if has_files else _OF_TRANSFORMERS
    copy_others(checkpoint.folder, folder, without=lambda name: is_part(name) or written.fullmatch(name))
    if not (folder / TRAINER_STATE).exists():
        progress = checkpoint.manifest.progress or {}
        state = {
            "global_step": progress.get("step", 0),
            "epoch": progress.get("epoch", 0),
            # Not known. transformers divides it, and says that its own arguments differ and are used.
            "train_batch_size": 0,
            **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), _EVERY_STEPS),
            "log_history": [],
            # Its next save looks this one up.
            "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},
        }
        write_file(LocalStorage(), folder / TRAINER_STATE, [(json.dumps(state, indent=2) + "\n").encode()])


def num_models_in(checkpoint: Checkpoint) -> int:
    """Return how many models of an Accelerator a checkpoint has the tensors of."""
    found = {match[1] for name in checkpoint.names() if (match := re.match(r"models\.(\d+)\.", name))}
    return max(map(int, found), default=-1) + 1


def weights_beside(checkpoint: Checkpoint) -> Weights:
    """Return the weights in the files that a Trainer has written for others; they are not among its own tensors then.

    Raises:
        CheckpointError: there are none, as where adapters alone are trained.
    """
    files = weight_files(checkpoint.folder)
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise CheckpointError(
            f"{checkpoint.folder} holds no weights of a model", do="see with echelon checkpoint show what it holds"
        )
    return weights_in(files)


def copy_others(source: Path, target: Path, *, without: Callable[[str], object]) -> None:
    """Copy the files and folders in ``source`` to ``target``, but those that ``without`` names; links are told and left out."""
    storage = LocalStorage()
    for name in storage.entries(source):
        kind = storage.kind(source / name)
        if without(name):
            continue
        if kind == "folder":
            storage.make_folder(target / name)
            copy_others(source / name, target / name, without=lambda _: False)
        elif kind == "file":
            with (source / name).open("rb") as file:
                write_file(storage, target / name, iter(lambda: file.read(_COPY_BYTES), b""))
        else:
            warn(f"{source / name} is a link or no plain file, and is not copied")
    storage.sync_folder(target)


@dataclass(frozen=True, slots=True)
class _Holds:
    """An object with a state."""

    state: Any

    def state_dict(self) -> Any:
        return self.state


def _objects(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what was saved beside tensors, if it is an Accelerator's."""
    objects = checkpoint.objects()
    missing = [name for name in ("accelerator", "optimizer_groups", "schedulers", "orders") if name not in objects]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder} was not saved by an Accelerator: it has no {', '.join(missing)}",
            do="merge its weights instead, or read it with echelon.checkpoint.read",
        )
    extras = [i for i, extra in enumerate(objects["extra_states"]) if extra]
    if extras:
        raise CheckpointError(
            f"model {extras[0]} of {checkpoint.folder} has states that are no tensors ({', '.join(objects['extra_states'][extras[0]])}), "
            "which safetensors cannot hold",
            do="load it in the training script, and save there with safe_serialization=False",
        )
    return objects


def _ranks(checkpoint: Checkpoint) -> dict[int, Any]:
    """Return what was each rank's own; some are missing where every machine keeps a checkpoint of its own."""
    world_size = checkpoint.manifest.world_size
    found = {rank: own for rank in range(world_size) if (own := checkpoint.rank_objects(rank)) is not None}
    if len(found) < world_size:
        warn(
            f"{checkpoint.folder} has random states of {len(found)} of {world_size} processes: the others will go without"
        )
    return found


def _custom(objects: Mapping[str, Any]) -> Sequence[Any]:
    return [objects[f"custom.{i}"] for i in range(sum(name.startswith("custom.") for name in objects))]


def _optimizer_state(checkpoint: Checkpoint, objects: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the state dict that a plain optimizer of torch would give: parameters are numbers."""
    groups = objects["optimizer_groups"][index]
    names = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    keys, values = state_keys(checkpoint, index, names), state_values(checkpoint, index)
    state = {}
    for name, number in numbers.items():
        entries = {key: checkpoint.read(state_name(index, name, key)) for key in keys[name]} | values.get(name, {})
        if entries:
            state[number] = entries
    # The names of the model that the parameters are of, as optimizers that were given named parameters have them.
    models = {match[0] for name in names if (match := re.match(r"models\.\d+\.", name))}
    prefix = models.pop() if len(models) == 1 else ""
    named = [
        {
            **group,
            "params": [numbers[name] for name in group["params"]],
            PARAMETER_NAMES: [name.removeprefix(prefix) for name in group["params"]],
        }
        for group in groups
    ]
    return {"state": state, "param_groups": named}


def _random_states(states: Mapping[str, Any], is_alone: bool) -> dict[str, Any]:
    """Return random states under the keys of transformers."""
    others = {
        match[1]: value[0] if is_alone and len(value) == 1 else value
        for key, value in states.items()
        if (match := re.fullmatch(r"torch_(\w+)_manual_seed", key))
    }
    return {
        "python": states["random_state"],
        "numpy": states["numpy_random_seed"],
        "cpu": states["torch_manual_seed"],
        **others,
    }


def _write(value: Any, path: Path) -> None:
    write_pickled(value, path)
    refused = refused_in(path)
    if refused:
        raise CheckpointError(
            f"what is to be written to {path.name} holds {', '.join(refused)}, which could not be loaded without running code",
            do="export it with --format accelerate, or load it in the training script",
        )
