"""A checkpoint of Accelerate or of the Trainer of transformers in echelon's own format; nothing in it is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.accelerator.checkpoint.accelerate_layout import is_state_file
from echelon.accelerator.checkpoint.export_layouts import PARAMETER_NAMES, REST, copy_others
from echelon.base.errors import CheckpointError
from echelon.base.progress import Progress
from echelon.checkpoint import typed_json
from echelon.checkpoint.formats.layouts import TRAINER_STATE
from echelon.checkpoint.formats.torch_files import load
from echelon.checkpoint.formats.weight_files import aliases_of, read_weights, weight_files
from echelon.checkpoint.manifest import rank_objects_file
from echelon.checkpoint.save import Content, begin_save
from echelon.checkpoint.tensor_names import model_prefix, state_name
from echelon.compat.constants import OPTIMIZER_NAME, RNG_STATE_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME
from echelon.world.world import World

__all__ = ["Imported", "import_accelerate", "import_transformers", "write_imported"]

_OURS = "echelon"  # what our own files of Accelerate's layout hold besides
_SHAPED_LIKE_PARAMETERS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum", "exp_inf"}
)
_NAMES_FILE = """names = {id(p): n for n, p in model.named_parameters()}
           print(*[names[id(p)] for g in optimizer.param_groups for p in g["params"]], sep="\\n")"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What was read of another layout."""

    content: Content
    """What is one for all ranks, and what is rank 0's own."""
    ranks: Sequence[Mapping[str, Any]]
    """What is each rank's own."""
    others: frozenset[str]
    """Files that were read; the rest is copied."""


def import_accelerate(folder: Path, *, parameters: Sequence[Sequence[str]] = ()) -> Imported:
    """Read what ``save_state`` of Accelerate (or of echelon, in its layout) wrote.

    Args:
        folder: the checkpoint.
        parameters: of each optimizer, the names of its parameters in the order of its groups; only needed when the file
            does not say them (torch's own does, when the optimizer was given named parameters).

    Raises:
        CheckpointError: something is missing, damaged, or would have to be unpickled.
    """
    tensors, extras = _models(folder)
    optimizers = _numbered(folder, OPTIMIZER_NAME)
    groups, values = _optimizers(folder, optimizers, tensors, parameters)
    random = _ranks_of(folder, re.compile(rf"{RNG_STATE_NAME}_(\d+)\.pkl"))
    ours = random[0].get(_OURS, {})
    step = random[0].get("step", 0)
    if ours and len(random) != ours["num_processes"]:
        raise CheckpointError(
            f"{folder} has random states of {len(random)} processes, and was saved by {ours['num_processes']}",
            do="import a whole checkpoint",
        )
    orders = [load(folder / _file(SAMPLER_NAME, i)) for i in range(ours.get("orders", 0))]
    positions = _positions(folder, ours, len(random))
    custom = _numbered(folder, "custom_checkpoint", first="custom_checkpoint_0", suffix=".pkl")
    objects = {
        "accelerator": {"step": step, "num_models": len(extras)},
        "extra_states": extras,
        "optimizer_groups": groups,
        "schedulers": _numbered(folder, SCHEDULER_NAME),
        "scaler": load(folder / SCALER_NAME) if (folder / SCALER_NAME).is_file() else None,
        "orders": orders,
        **{f"custom.{i}": state for i, state in enumerate(custom)},
        **random[0].get(REST, {}).get("shared", {}),
    }
    ranks = [
        {
            "random": {key: value for key, value in states.items() if key not in ("step", _OURS, REST)},
            "positions": [of_loader[rank] for of_loader in positions],
            "pass": None,
            **states.get(REST, {}).get("own", {}),
            **({"optimizer_values": values} if rank == 0 and any(values) else {}),
        }
        for rank, states in enumerate(random)
    ]
    content = Content(
        tensors=tensors,
        objects=objects,
        progress=ours.get("progress"),
        layout={"imported_from": "accelerate", "world_size": len(random)},
    )
    read = frozenset(path.name for path in folder.iterdir() if is_state_file(path.name))
    return Imported(content=content, ranks=ranks, others=read)


def import_transformers(folder: Path, *, parameters: Sequence[Sequence[str]] = ()) -> Imported:
    """Read a checkpoint of the Trainer of transformers; see ``import_accelerate``."""
    tensors, extras = _models(folder)
    optimizers = [load(folder / "optimizer.pt")] if (folder / "optimizer.pt").is_file() else []
    groups, values = _optimizers(folder, optimizers, tensors, parameters)
    random = _ranks_of(folder, re.compile(r"rng_state(?:_(\d+))?\.pth"))
    state = typed_json.read_json(folder / TRAINER_STATE)
    progress = Progress(epoch=int(state.get("epoch") or 0), step=int(state.get("global_step") or 0))
    objects = {
        "accelerator": {"step": 0, "num_models": len(extras)},
        "extra_states": extras,
        "optimizer_groups": groups,
        "schedulers": [load(folder / "scheduler.pt")] if (folder / "scheduler.pt").is_file() else [],
        "scaler": load(folder / SCALER_NAME) if (folder / SCALER_NAME).is_file() else None,
        "orders": [],
    }
    ranks = [
        {
            "random": _random_states(states),
            "positions": [],
            "pass": None,
            **({"optimizer_values": values} if rank == 0 and any(values) else {}),
        }
        for rank, states in enumerate(random)
    ]
    content = Content(
        tensors=tensors,
        objects=objects,
        progress=progress.to_json(),
        layout={"imported_from": "transformers", "world_size": len(random)},
    )
    read = {path.name for path in weight_files(folder)} | {
        path.name for path in folder.iterdir() if re.fullmatch(r".*\.(pt|pth|safetensors\.index\.json|bin)", path.name)
    }
    return Imported(content=content, ranks=ranks, others=frozenset(read))


def write_imported(imported: Imported, target: Path, *, source: Path) -> Path:
    """Write ``imported``, and the other files in ``source``, as the checkpoint ``target``; this process does it for all ranks."""
    world = World(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        device=torch.device("cpu"),
        backend="gloo",
    )
    tensors: dict[str, Any] = dict(imported.content.tensors)
    encoded = [
        {
            name: typed_json.encode(value, name=f"rank {rank} {name}", put_tensor=tensors.__setitem__)
            for name, value in own.items()
        }
        for rank, own in enumerate(imported.ranks)
    ]
    save = begin_save(target, replace(imported.content, tensors=tensors), world=world, gather=lambda told: [told])
    try:
        save.objects |= {rank_objects_file(rank): typed_json.to_bytes(own) for rank, own in enumerate(encoded)}
        save.manifest = replace(save.manifest, world_size=len(encoded))
        copy_others(source, save.folder, without=lambda name: name in imported.others)
    except BaseException:
        save.give_up()
        raise
    return save.finish(lambda told: [told])


# ---- models ----------------------------------------------------------------------------------------------------------


def _models(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the tensors of all models by their names in a checkpoint, and what else is in their state dicts."""
    tensors: dict[str, Any] = {}
    extras: list[dict[str, Any]] = []
    while files := weight_files(folder, len(extras)):
        state: dict[str, Any] = {}
        for file in files:
            state |= read_weights(file)
            if file.suffix == ".safetensors":
                state |= {name: state[target] for name, target in aliases_of(file, state).items()}
        state = _plain(state)
        prefix = model_prefix(len(extras))
        tensors |= {f"{prefix}{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
        extras.append({name: value for name, value in state.items() if not isinstance(value, torch.Tensor)})
    if not extras:
        raise CheckpointError(f"{folder} holds no weights of a model", do="give the folder of a whole checkpoint")
    return tensors, extras


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` by the names of the bare model, without what DDP and torch.compile put into them."""
    plain = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    while plain and all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): value for name, value in plain.items()}
    return plain


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _optimizers(
    folder: Path, states: Sequence[Mapping[str, Any]], tensors: dict[str, Any], parameters: Sequence[Sequence[str]]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Put the tensors of optimizers to ``tensors``, and return their groups and what is no tensor in their states."""
    if parameters and len(parameters) != len(states):
        raise CheckpointError(
            f"{folder} has {len(states)} optimizers, and names of parameters are given for {len(parameters)}",
            do="give --parameters once for each optimizer, in their order",
        )
    all_groups, all_values = [], []
    for index, state in enumerate(states):
        groups = state["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        given = parameters[index] if parameters else [n for group in groups for n in group.get(PARAMETER_NAMES, ())]
        given = given or [
            name for name in numbers if isinstance(name, str)
        ]  # whole states of FSDP have names for numbers
        names = dict(zip(numbers, _parameter_names(folder, index, given, len(numbers), tensors)))
        values: dict[str, Any] = {}
        for number, entries in state["state"].items():
            name = names[number]
            for key, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    values.setdefault(name, {})[key] = value
                    continue
                own = tensors.get(name)
                if key in _SHAPED_LIKE_PARAMETERS and own is not None and own.shape != value.shape:
                    raise CheckpointError(
                        f"{key} of {name} in optimizer {index} of {folder} is {list(value.shape)}, and the parameter "
                        f"{list(own.shape)}",
                        do="give the names of the parameters in the order of the optimizer's groups",
                    )
                tensors[state_name(index, name, key)] = value
        all_values.append(values)
        all_groups.append(
            [
                {
                    **{key: value for key, value in group.items() if key != PARAMETER_NAMES},
                    "params": [names[number] for number in group["params"]],
                }
                for group in groups
            ]
        )
    return all_groups, all_values


def _parameter_names(
    folder: Path, index: int, given: Sequence[str], count: int, tensors: Mapping[str, Any]
) -> Sequence[str]:
    """Return the names of an optimizer's parameters as a checkpoint has them: with their model before them."""
    if not given:
        raise CheckpointError(
            f"optimizer {index} of {folder} does not say which parameters its states are of: they are only numbered",
            do="give --parameters FILE, which the training script writes with\n"
            f"           {_NAMES_FILE}\n"
            "         or load the checkpoint in the script (accelerator.load_state reads this layout) and save it there",
        )
    if len(given) != count or len(set(given)) != count:
        raise CheckpointError(
            f"optimizer {index} of {folder} has {count} parameters, and {len(set(given))} names are given",
            do="give each of its parameters one name, in the order of its groups",
        )
    names = list(_plain(dict.fromkeys(given)))
    models = {match[0] for name in tensors if (match := re.match(r"models\.\d+\.", name))}
    for prefix in ("", model_prefix(index), *sorted(models)):
        full = [name if name == f"parameter.{i}" else f"{prefix}{name}" for i, name in enumerate(names)]
        if all(name in tensors or name == f"parameter.{i}" for i, name in enumerate(full)):
            return full
    unknown = [name for name in names if not any(f"{prefix}{name}" in tensors for prefix in ("", *models))]
    raise CheckpointError(
        f"no model in {folder} has all parameters of optimizer {index}: {', '.join((unknown or names)[:3])}",
        do="give the names that the model's own named_parameters() has",
    )


# ---- the rest --------------------------------------------------------------------------------------------------------


def _file(name: str, index: int, suffix: str = ".bin") -> str:
    return f"{name}_{index}{suffix}" if index else f"{name}{suffix}"


def _numbered(folder: Path, name: str, *, first: str | None = None, suffix: str = ".bin") -> list[Any]:
    """Return what the files ``name``, ``name_1``, ... hold."""
    found: list[Any] = []
    while True:
        path = folder / (f"{first}{suffix}" if first and not found else _file(name, len(found), suffix))
        if not path.is_file():
            return found
        found.append(load(path, map_location="cpu"))


def _ranks_of(folder: Path, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return what the files of the ranks hold, in the order of the ranks."""
    found = {int(match[1] or 0): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"{folder} has random states of the ranks {sorted(found)}",
            do="import a whole checkpoint, with those of all ranks",
        )
    return [load(found[rank], map_location="cpu") for rank in range(len(found))]


def _positions(folder: Path, ours: Mapping[str, Any], num_ranks: int) -> list[list[Any]]:
    """Return of each loader how far each rank had come, None where it is not told."""
    indices = {
        int(match[1] or 0)
        for path in folder.iterdir()
        if (match := re.fullmatch(r"dl_state_dict(?:_(\d+))?\.bin", path.name))
    }
    found: list[list[Any]] = []
    for i in range(max([*indices, ours.get("orders", 0) - 1], default=-1) + 1):
        path = folder / _file("dl_state_dict", i)
        found.append(_position(load(path, map_location="cpu"), num_ranks) if i in indices else [None] * num_ranks)
    return found


def _position(file: Mapping[str, Any], num_ranks: int) -> list[Any]:
    """Return a loader's state for each rank; Accelerate writes one for all."""
    inner = {key: value for key, value in file.items() if key != _OURS}
    finished = bool(file.get("_iterator_finished"))
    ours = file.get(_OURS)
    if ours is not None:
        states = [inner, *ours["inner_of_others"]]
        shared = {key: value for key, value in ours.items() if key not in ("num_given", "inner_of_others")}
        return [
            {**shared, "num_given": ours["num_given"][rank], "inner": states[rank], "_iterator_finished": finished}
            for rank in range(num_ranks)
        ]
    given = (
        file["_num_yielded"]
        if "_num_yielded" in file
        else file["_snapshot"]["_snapshot_step"] + file["_steps_since_snapshot"]
    )
    one = {"iteration": 0, "num_given": given, "order": None, "inner": inner, "_iterator_finished": finished}
    return [one] * num_ranks


def _random_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return random states of transformers under Accelerate's keys, as an Accelerator keeps them."""
    names = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}
    return {
        names.get(key, f"torch_{key}_manual_seed"): [value]
        if key not in names and isinstance(value, torch.Tensor)
        else value
        for key, value in states.items()
    }
