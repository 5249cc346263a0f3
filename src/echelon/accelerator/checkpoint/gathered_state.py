"""Gathers engine-specific state in full for a checkpoint, and restores it piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.accelerator.state_names import (
    Allowed,
    NamedOptimizer,
    optional_names,
)
from echelon.base.progress import progress_bar
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.tensor_names import model_prefix, rest_of_state, state_keys, state_name, state_values
from echelon.engines.base import Engine
from echelon.engines.state_dicts import load_plain_state_dict, plain_name, plain_state_dict

__all__ = ["gathered_optimizer_state", "load_gathered_model", "load_gathered_optimizer"]

_AT_ONCE_BYTES = 1 << 30
"""Maximum size of the weights that loading keeps in host memory at once, in addition to one module."""


def gathered_optimizer_state(
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


def load_gathered_model(
    checkpoint: Checkpoint,
    model: nn.Module,
    index: int,
    extras: Mapping[str, Any],
    *,
    engine: Engine,
    strict: bool,
    allowed: Allowed,
) -> None:
    """Load a model whose engine supports ``load_state_dict``, in parts of bounded size.

    Collective: call on every rank if parameters are sharded.

    Raises:
        CheckpointError: an entry is missing or unexpected, or has a different shape; raised before anything is loaded.
    """
    prefix = model_prefix(index)
    parameters = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    shapes = {
        name: tuple(engine.full_shape(parameters[name]) if name in parameters else value.shape)
        for name, value in plain_state_dict(model).items()
        if isinstance(value, torch.Tensor)
    }
    optional = optional_names(checkpoint, model, shapes, index, strict=strict, allowed=allowed)
    missing = checkpoint.require_fit({f"{prefix}{name}": shape for name, shape in shapes.items()}, optional=optional)
    there = [name for name in shapes if f"{prefix}{name}" not in missing]
    num_bytes = {name: checkpoint.num_bytes(f"{prefix}{name}") for name in there}
    with progress_bar(f"loading {checkpoint.folder.name}", sum(num_bytes.values())) as progress:
        for names in _in_parts(there, checkpoint, prefix):
            load_plain_state_dict(model, {name: checkpoint.read(f"{prefix}{name}") for name in names}, strict=False)
            progress(sum(num_bytes[name] for name in names))
    if extras:
        load_plain_state_dict(model, extras, strict=False)


def _in_parts(names: Sequence[str], checkpoint: Checkpoint, prefix: str) -> Iterator[list[str]]:
    """Split ``names`` at module boundaries into parts of bounded size."""
    part: list[str] = []
    num_bytes, module = 0, ""
    for name in names:
        if num_bytes > _AT_ONCE_BYTES and name.rpartition(".")[0] != module:
            yield part
            part, num_bytes = [], 0
        part.append(name)
        num_bytes += checkpoint.num_bytes(f"{prefix}{name}")
        module = name.rpartition(".")[0]
    if part:
        yield part


def load_gathered_optimizer(
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
    states = _SavedStates(checkpoint, names, index, others=rest.get("state", {}))
    engine.load_full_optimizer_state(optimizer.inner, {**rest, "state": states, "param_groups": list(groups)})


class _SavedStates(Mapping[Any, Any]):
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
