"""Converts optimizer states between torch's parameter indices and the parameter names in echelon's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError
from echelon.checkpoint.formats.weight_files import plain_names
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.tensor_names import model_prefix, rest_of_state, state_keys, state_name, state_values

# torch's key for the names of a group's parameters, which loading ignores.
_PARAMETER_NAMES = "param_names"
_MODEL = re.compile(r"models\.\d+\.")
_SHAPED_LIKE_PARAMETERS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum", "exp_inf"}
)
_NAMES_FILE = """names = {id(p): n for n, p in model.named_parameters()}
           print(*[names[id(p)] for g in optimizer.param_groups for p in g["params"]], sep="\\n")"""


def rests_in(objects: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return each optimizer's state in a checkpoint that belongs to no parameter."""
    return objects.get("optimizer_rests") or [{} for _ in objects["optimizer_groups"]]


def numbered_state(
    checkpoint: Checkpoint, groups: Sequence[Mapping[str, Any]], index: int, rest: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state dict of optimizer ``index`` in torch's format, given ``groups`` with parameter names and its ``rest``."""
    names = list(dict.fromkeys(name for group in groups for name in group["params"]))
    numbers = {name: number for number, name in enumerate(names)}
    state = dict(SavedStates(checkpoint, names, index, others=rest.get("state", {})))
    # An optimizer that was given named parameters has their names in the model.
    models = {match[0] for name in names if (match := _MODEL.match(name))}
    prefix = models.pop() if len(models) == 1 else ""
    numbered = [
        {
            **group,
            "params": [numbers[name] for name in group["params"]],
            _PARAMETER_NAMES: [name.removeprefix(prefix) for name in group["params"]],
        }
        for group in groups
    ]
    return {**rest, "state": state, "param_groups": numbered}


class SavedStates(Mapping[Any, Any]):
    """Per-parameter optimizer state by parameter number, read from the checkpoint on access, and state of no parameter."""

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], index: int, *, others: Mapping[Any, Any]) -> None:
        self._checkpoint, self._names, self._index = checkpoint, names, index
        self._keys = state_keys(checkpoint, index, names)
        self._values = state_values(checkpoint, index)
        self._numbers = [i for i, name in enumerate(names) if self._keys[name] or name in self._values]
        self._others = others

    def __getitem__(self, number: Any) -> Any:
        if number in self._others:
            return self._others[number]
        name = self._names[number]
        tensors = {key: self._checkpoint.read(state_name(self._index, name, key)) for key in self._keys[name]}
        return tensors | self._values.get(name, {})

    def __contains__(self, number: object) -> bool:
        return number in self._numbers or number in self._others

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._numbers, *self._others])

    def __len__(self) -> int:
        return len(self._numbers) + len(self._others)


def named_states(
    folder: Path, states: Sequence[Mapping[str, Any]], tensors: dict[str, Any], parameters: Sequence[Sequence[str]]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Add all optimizers' tensors to ``tensors``, and return their parameter groups and the entries that are not tensors.

    Args:
        tensors: the models' tensors by checkpoint name. This function adds the optimizers' tensors.
        parameters: for each optimizer, its parameter names in the order of its parameter groups; empty if the states contain
            the names.

    Raises:
        CheckpointError: the names are missing or do not match the parameters.
    """
    if parameters and len(parameters) != len(states):
        raise CheckpointError(
            f"{folder} has {len(states)} optimizers, but parameter names are given for {len(parameters)}",
            do="pass --parameters once for each optimizer, in the optimizers' order",
        )
    all_groups, all_values = [], []
    for index, state in enumerate(states):
        groups = state["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        given = parameters[index] if parameters else [n for group in groups for n in group.get(_PARAMETER_NAMES, ())]
        given = given or [
            name for name in numbers if isinstance(name, str)
        ]  # FSDP's full state dicts are keyed by name
        names = dict(zip(numbers, _full_names(folder, index, given, len(numbers), tensors)))
        values: dict[str, Any] = {}
        others = rest_of_state(state).get("state", {})
        for number, entries in state["state"].items():
            if number in others:
                continue
            name = names[number]
            for key, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    values.setdefault(name, {})[key] = value
                    continue
                own = tensors.get(name)
                if key in _SHAPED_LIKE_PARAMETERS and own is not None and own.shape != value.shape:
                    raise CheckpointError(
                        f"{key} of {name} in optimizer {index} of {folder} has shape {list(value.shape)}, but the parameter has "
                        f"shape {list(own.shape)}",
                        do="list the parameter names in the order of the optimizer's parameter groups",
                    )
                tensors[state_name(index, name, key)] = value
        all_values.append(values)
        all_groups.append(
            [
                {
                    **{key: value for key, value in group.items() if key != _PARAMETER_NAMES},
                    "params": [names[number] for number in group["params"]],
                }
                for group in groups
            ]
        )
    return all_groups, all_values


def _full_names(
    folder: Path, index: int, given: Sequence[str], count: int, tensors: Mapping[str, Any]
) -> Sequence[str]:
    """Return an optimizer's parameter names in a checkpoint, which include their model's prefix."""
    if not given:
        raise CheckpointError(
            f"optimizer {index} of {folder} identifies its parameters by number, not by name",
            do="pass --parameters FILE, a file that the training script can write with\n"
            f"           {_NAMES_FILE}\n"
            "         or load the checkpoint in the script (accelerator.load_state reads this layout) and save it there",
        )
    if len(given) != count or len(set(given)) != count:
        raise CheckpointError(
            f"optimizer {index} of {folder} has {count} parameters, but {len(set(given))} different names were given",
            do="list one name for each of its parameters, in the order of its parameter groups",
        )
    names = list(plain_names(dict.fromkeys(given)))
    models = {match[0] for name in tensors if (match := _MODEL.match(name))}
    for prefix in ("", model_prefix(index), *sorted(models)):
        full = [name if name == f"parameter.{i}" else f"{prefix}{name}" for i, name in enumerate(names)]
        if all(name in tensors or name == f"parameter.{i}" for i, name in enumerate(full)):
            return full
    unknown = [name for name in names if not any(f"{prefix}{name}" in tensors for prefix in ("", *models))]
    raise CheckpointError(
        f"no model in {folder} has all parameters of optimizer {index}: {', '.join((unknown or names)[:3])}",
        do="use the names returned by the model's named_parameters()",
    )
