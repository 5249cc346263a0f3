"""The state of a training in echelon's own checkpoint format: by parameter names, so that any layout reads any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.accelerator.optimizer import AcceleratedOptimizer
from echelon.accelerator.random_states import current_random_states, restore_random_states
from echelon.base.errors import CheckpointError
from echelon.base.warnings import warn
from echelon.checkpoint.reading import Checkpoint
from echelon.checkpoint.regions import box_of
from echelon.checkpoint.save import Content
from echelon.data.loader import PreparedLoader
from echelon.engines.shards import from_parts
from echelon.engines.stepping import load_plain_state_dict, plain_parameters, plain_state_dict

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator

__all__ = ["content_of", "load_content", "model_prefix", "state_keys", "state_name", "state_values"]

_KERNELS = ("foreach", "fused")


@runtime_checkable
class _SharesOut(Protocol):
    """An optimizer of which each rank keeps the state of its own parameters."""

    rank: int

    def owner(self, parameter: torch.Tensor) -> int:
        """Return the rank that keeps the state of ``parameter``."""
        ...


def model_prefix(index: int) -> str:
    """Return what the names of a model's tensors begin with."""
    return f"models.{index}."


def content_of(
    accelerator: Accelerator, models: Sequence[nn.Module], *, custom_objects: Sequence[Any], random_states: Any
) -> Content:
    """Return what this rank brings to a checkpoint.

    Args:
        accelerator: whose objects are saved.
        models: the user's own, as they were prepared.
        custom_objects: registered for checkpointing.
        random_states: of this process; None: those of now.
    """
    tensors: dict[str, Any] = {}
    extras: list[dict[str, Any]] = []
    for i, model in enumerate(models):
        state = plain_state_dict(model)
        tensors |= {f"{model_prefix(i)}{name}": value for name, value in state.items() if _is_tensor(value)}
        extras.append({name: value for name, value in state.items() if not _is_tensor(value)})
    names = _names(models)
    groups, values = [], []
    for i, optimizer in enumerate(accelerator._optimizers):
        inner = _inner(optimizer)
        groups.append(_groups(inner, names))
        rest: dict[str, dict[str, Any]] = {}
        for name, parameter in _named(inner, names):
            for key, value in inner.state.get(parameter, {}).items():
                if _is_tensor(value):
                    tensors[state_name(i, name, key)] = value
                else:
                    rest.setdefault(name, {})[key] = value
        values.append(rest)
    loaders = [loader for loader in accelerator._dataloaders if isinstance(loader, PreparedLoader)]
    objects = {
        "accelerator": {"step": accelerator.step, "num_models": len(models)},
        "extra_states": extras,
        "optimizer_groups": groups,
        "schedulers": [scheduler.state_dict() for scheduler in accelerator._schedulers],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "orders": [loader.order_state() for loader in loaders],
        **{f"custom.{i}": one.state_dict() for i, one in enumerate(custom_objects)},
    }
    config = accelerator._config
    return Content(
        tensors=tensors,
        objects=objects,
        rank_objects={
            "random": random_states or current_random_states(),
            "positions": [loader.state_dict() if loader.is_stateful else None for loader in loaders],
            "pass": accelerator._epochs.own_state(),
            **({"optimizer_values": values} if any(values) else {}),
        },
        progress={**accelerator.progress.to_json(), "micro_step": 0},
        config={
            name: [_readable(value), str(config.origins.get(name))] for name, value in asdict(config.value).items()
        },
        layout={"engine": accelerator.capabilities.name, "world_size": accelerator.num_processes},
    )


def load_content(
    accelerator: Accelerator,
    checkpoint: Checkpoint,
    models: Sequence[nn.Module | None],
    *,
    custom_objects: Sequence[Any],
    strict: bool = True,
) -> dict[str, Any]:
    """Load ``checkpoint``, which was verified, and return ``step`` and ``progress``.

    Args:
        accelerator: whose objects are loaded.
        checkpoint: of any engine and number of ranks.
        models: the user's own; None in the place of one that a hook has loaded.
        custom_objects: registered for checkpointing.
        strict: the model has every weight of the checkpoint, and the other way round.

    Raises:
        CheckpointError: something is missing, too much, or of another shape.
    """
    objects = checkpoint.objects()
    _require_counts(accelerator, checkpoint, objects, custom_objects)
    names = _names(models)
    plans = [
        _match_groups(_inner(optimizer), names, objects["optimizer_groups"][i], i, checkpoint)
        for i, optimizer in enumerate(accelerator._optimizers)
    ]
    for i, model in enumerate(models):
        if model is not None:
            _load_model(checkpoint, model, i, objects["extra_states"], strict=strict)
    for i, optimizer in enumerate(accelerator._optimizers):
        _load_optimizer(checkpoint, _inner(optimizer), names, plans[i], i)
    for scheduler, state in zip(accelerator._schedulers, objects["schedulers"]):
        scheduler.load_state_dict(state)
    if accelerator.scaler is not None and objects["scaler"] is not None:
        accelerator.scaler.load_state_dict(objects["scaler"])
    own = checkpoint.rank_objects(accelerator.process_index)
    _load_loaders(accelerator, checkpoint, objects["orders"], own)
    for i, one in enumerate(custom_objects):
        one.load_state_dict(objects[f"custom.{i}"])
    if own is not None:
        restore_random_states(own["random"])
    if accelerator.num_processes > checkpoint.manifest.world_size:
        warn(
            f"{checkpoint.folder} has random states of {checkpoint.manifest.world_size} processes: those of the other "
            "ranks go on from where they are"
        )
    return {"step": objects["accelerator"]["step"], "progress": checkpoint.manifest.progress}


def _require_counts(
    accelerator: Accelerator, checkpoint: Checkpoint, objects: Mapping[str, Any], custom_objects: Sequence[Any]
) -> None:
    num_custom = sum(name.startswith("custom.") for name in objects)
    counts = {
        "models": (objects["accelerator"]["num_models"], len(accelerator._models)),
        "optimizers": (len(objects["optimizer_groups"]), len(accelerator._optimizers)),
        "schedulers": (len(objects["schedulers"]), len(accelerator._schedulers)),
        "objects registered for checkpointing": (num_custom, len(custom_objects)),
    }
    wrong = [f"{saved} {what}, and {here} are here" for what, (saved, here) in counts.items() if saved != here]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} holds {'; '.join(wrong)}",
            do="prepare and register the same objects, in the same order, as when it was saved",
        )


# ---- models ----------------------------------------------------------------------------------------------------------


def _load_model(
    checkpoint: Checkpoint, model: nn.Module, index: int, extras: Sequence[Mapping[str, Any]], *, strict: bool
) -> None:
    prefix = model_prefix(index)
    state = plain_state_dict(model)
    targets = {f"{prefix}{name}": value for name, value in state.items() if _is_tensor(value)}
    on_meta = [name for name, value in targets.items() if value.is_meta]
    if on_meta:
        raise CheckpointError(
            f"{on_meta[0]} is on the meta device: there is nothing to load into",
            do="prepare the model first, or give it values by to_empty()",
        )
    saved = {name for name in checkpoint.names() if name.startswith(prefix)}
    surplus = sorted(saved - targets.keys())
    if surplus and strict:
        raise CheckpointError(
            f"{checkpoint.folder} has {', '.join(name.removeprefix(prefix) for name in surplus[:5])}, which the model has not",
            do="load the checkpoint of this model, or give strict=False",
        )
    # Tied weights are there under one of their names alone where another program wrote them.
    there = {_address(targets[name]) for name in saved & targets.keys()}
    tied = tuple(name for name, value in targets.items() if name not in saved and _address(value) in there)
    optional = tied if strict else tuple(targets)
    own = {_address(value) for value in (*model.parameters(), *model.buffers())}
    if all(_address(value) in own for value in targets.values()) and not extras[index]:
        checkpoint.read_into(targets, optional=optional)  # in place: nothing is there twice
        return
    # A module that gives copies in its state dict, or more than tensors, takes them back by load_state_dict.
    copies = {name: torch.empty_like(value) for name, value in targets.items()}
    missing = set(checkpoint.read_into(copies, optional=optional))
    read = {name.removeprefix(prefix): value for name, value in copies.items() if name not in missing}
    load_plain_state_dict(model, {**state, **read, **extras[index]})


def _address(value: torch.Tensor) -> tuple[int, int]:
    local = value.to_local() if isinstance(value, DTensor) else value
    return (local.data_ptr(), local.numel()) if local.numel() else (0, 0)


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _names(models: Sequence[nn.Module | None]) -> dict[int, str]:
    """Return the name of each parameter of all models, by its identity."""
    return {
        id(parameter): f"{model_prefix(i)}{name}"
        for i, model in enumerate(models)
        if model is not None
        for name, parameter in plain_parameters(model)
    }


def _named(optimizer: Any, names: Mapping[int, str]) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of an optimizer in their order; those of no model are named by their place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(names.get(id(parameter), f"parameter.{i}"), parameter) for i, parameter in enumerate(parameters)]


def _groups(optimizer: Any, names: Mapping[int, str]) -> list[dict[str, Any]]:
    named = iter(_named(optimizer, names))
    return [{**group, "params": [next(named)[0] for _ in group["params"]]} for group in optimizer.param_groups]


def state_name(index: int, parameter: str, key: str) -> str:
    """Return the name of a tensor in the state of an optimizer."""
    return f"optimizers.{index}.{parameter}.{key}"


def _match_groups(
    optimizer: Any, names: Mapping[int, str], saved: Sequence[dict[str, Any]], index: int, checkpoint: Checkpoint
) -> Sequence[dict[str, Any]]:
    """Return the saved groups; each must hold the parameters that the group has here, in whatever order."""
    here = _groups(optimizer, names)
    if [set(group["params"]) for group in saved] != [set(group["params"]) for group in here]:
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, here)]
        differing = sorted(
            {name for g in saved for name in g["params"]} ^ {name for g in here for name in g["params"]}
        ) or ["the same parameters, in other groups"]
        raise CheckpointError(
            f"optimizer {index} of {checkpoint.folder} has groups of {sizes[0]} parameters, and here they are of {sizes[1]}; "
            f"they differ in {', '.join(differing[:3])}",
            do="make the optimizer with the parameter groups that it had when it was saved",
        )
    return saved


def _load_optimizer(
    checkpoint: Checkpoint, optimizer: Any, names: Mapping[int, str], groups: Sequence[dict[str, Any]], index: int
) -> None:
    named = _named(optimizer, names)
    wanted = [
        (number, name, parameter)
        for number, (name, parameter) in enumerate(named)
        if not isinstance(optimizer, _SharesOut) or optimizer.owner(parameter) == optimizer.rank
    ]
    by_parameter = state_keys(checkpoint, index, [name for name, _ in named])
    values = state_values(checkpoint, index)
    state: dict[int, dict[str, Any]] = {}
    for number, name, parameter in wanted:
        entries = {key: _read_like(checkpoint, state_name(index, name, key), parameter) for key in by_parameter[name]}
        entries |= values.get(name, {})
        if entries:
            state[number] = entries
    counted = iter(range(len(named)))
    numbered = [
        # How the step is computed is this program's choice, and may depend on the layout.
        {
            **saved,
            **{key: here[key] for key in _KERNELS if key in here},
            "params": [next(counted) for _ in here["params"]],
        }
        for saved, here in zip(groups, optimizer.param_groups)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": numbered})


def state_keys(checkpoint: Checkpoint, index: int, parameters: Sequence[str]) -> dict[str, list[str]]:
    """Return which tensors the saved state of each parameter has."""
    prefix = f"optimizers.{index}."
    found: dict[str, list[str]] = {name: [] for name in parameters}
    for name in checkpoint.names():
        if name.startswith(prefix):
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            found.setdefault(parameter, []).append(key)
    return found


def state_values(checkpoint: Checkpoint, index: int) -> dict[str, dict[str, Any]]:
    """Return what is no tensor in the state of the parameters, of whichever rank had it."""
    found: dict[str, dict[str, Any]] = {}
    for rank in range(checkpoint.manifest.world_size):
        values = (checkpoint.rank_objects(rank) or {}).get("optimizer_values")
        if values is None:
            break  # nobody has such values
        found = {**values[index], **found}
    return found


def _read_like(checkpoint: Checkpoint, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharded as ``parameter`` is; what has another shape is whole."""
    if checkpoint.layout(name).shape != tuple(parameter.shape) or not isinstance(parameter, DTensor):
        return checkpoint.read(name)
    _, box, _ = box_of(parameter)
    sharded: torch.Tensor = from_parts({"values": checkpoint.read(name, box)}, parameter)
    return sharded


# ---- loaders ---------------------------------------------------------------------------------------------------------


def _load_loaders(
    accelerator: Accelerator, checkpoint: Checkpoint, orders: Sequence[Any], own: Mapping[str, Any] | None
) -> None:
    loaders = [loader for loader in accelerator._dataloaders if isinstance(loader, PreparedLoader)]
    num_saved = checkpoint.manifest.world_size
    positions: Sequence[Any] = () if own is None else own["positions"]
    for i, loader in enumerate(loaders):
        if i < len(orders):
            loader.load_order_state(orders[i])
        if not loader.is_stateful:
            continue
        if num_saved != accelerator.num_processes:  # samples would come twice, or never
            raise CheckpointError(
                f"{checkpoint.folder} says where {num_saved} processes were in their data, and this is rank "
                f"{accelerator.process_index} of {accelerator.num_processes}",
                do="resume on as many processes, or without use_stateful_dataloader",
            )
        if i < len(positions) and positions[i] is not None:
            loader.load_state_dict(positions[i])
    accelerator._epochs.load_own_state(own["pass"] if own and num_saved == accelerator.num_processes else None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _readable(value: Any) -> Any:
    """Return a setting as people read it: plain data as it is, anything else as its text."""
    return value if value is None or type(value) in (bool, int, float, str) else str(value)
