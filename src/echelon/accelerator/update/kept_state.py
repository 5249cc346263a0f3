"""Copies of weights, their averages, optimizer states and buffers in memory, to return to a state before an optimizer step."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer

from echelon.accelerator.prepared_objects import PreparedObjects
from echelon.engines.shards import local_tensors

_MISSING: Any = object()


class KeptState:
    """One earlier state of the trained parameters, of their averages and of the optimizers: this rank's part of each.

    It occupies as much memory of the same devices as these of this rank together.
    """

    def __init__(self, objects: PreparedObjects) -> None:
        self._objects = objects
        self._weights: dict[Any, Any] = {}
        self._averages: list[dict[Any, Any]] = []
        self._optimizers: list[tuple[dict[Any, Any], list[dict[Any, Any]]]] = []

    @property
    def is_there(self) -> bool:
        """Whether ``keep`` has been called."""
        return bool(self._weights)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current state."""
        inner = self._inner()
        self._optimizers += [({}, []) for _ in inner[len(self._optimizers) :]]
        _copy_into(self._weights, self._live_weights())
        averages = self._live_averages()
        self._averages += [{} for _ in averages[len(self._averages) :]]
        for kept, average in zip(self._averages, averages):
            _copy_into(kept, average)
        for optimizer, (states, groups) in zip(inner, self._optimizers):
            for key in [key for key in states if key not in optimizer.state]:
                del states[key]
            for key, state in optimizer.state.items():
                if isinstance(state, MutableMapping):
                    _copy_into(states.setdefault(key, {}), state)
                else:  # of the optimizer as a whole
                    states[key] = copy.deepcopy(state)
            groups += [{} for _ in optimizer.param_groups[len(groups) :]]
            for kept, group in zip(groups, optimizer.param_groups):
                _copy_into(kept, _settings(group))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the current state with the copy. A second call undoes this."""
        _exchange(self._live_weights(), self._weights)
        for average, kept in zip(self._live_averages(), self._averages):
            _exchange(average, kept)
        for optimizer, (states, groups) in zip(self._inner(), self._optimizers):
            for key in {*states, *optimizer.state}:
                if isinstance(optimizer.state.get(key), MutableMapping) and isinstance(states.get(key), MutableMapping):
                    _exchange(optimizer.state[key], states[key])
                else:
                    _exchange_entry(optimizer.state, states, key)
            for kept, group in zip(groups, optimizer.param_groups):
                settings = _settings(group)
                _exchange(settings, kept)
                group.update(settings)

    def _inner(self) -> list[Optimizer]:
        return [optimizer.optimizer for optimizer in self._objects.optimizers]

    def _live_weights(self) -> dict[Any, Any]:
        return {p: p for o in self._objects.optimizers for g in o.param_groups for p in g["params"]}

    def _live_averages(self) -> list[dict[Any, Any]]:
        parts = [average for optimizer in self._objects.optimizers for average in optimizer.averages]
        return [mapping for part in parts for mapping in (part.values, part.counts)]


def copy_buffers(objects: PreparedObjects) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each buffer of the models, such as the statistics of BatchNorm, with a copy of its current value."""
    buffers = [buffer for model in objects.models for buffer in model.buffers() if not buffer.is_meta]
    return [(buffer, buffer.detach().clone()) for buffer in buffers]


@torch.no_grad()
def restore_buffers(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Set each buffer to its copy."""
    for buffer, kept in copies:
        buffer.copy_(kept)


def _settings(group: dict[str, Any]) -> dict[Any, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _are_alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _copy_into(kept: dict[Any, Any], live: Any) -> None:
    for name in [name for name in kept if name not in live]:
        del kept[name]
    for name, value in live.items():
        before: Any = kept.get(name)
        if _are_alike(before, value):
            # Operations on shards are faster than those on DTensors, and never communicate.
            target, source = local_tensors([before, value])
            target.copy_(source)
        else:
            kept[name] = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _exchange(live: Any, kept: dict[Any, Any]) -> None:
    """Exchange the values of two mappings. Tensors that are alike exchange their elements, so that references to them stay valid."""
    for name in {*live, *kept}:
        one, other = live.get(name, _MISSING), kept.get(name, _MISSING)
        if _are_alike(one, other):
            one, other = local_tensors([one, other])
            before = one.clone()
            one.copy_(other)
            other.copy_(before)
            continue
        _exchange_entry(live, kept, name)


def _exchange_entry(live: Any, kept: Any, name: Any) -> None:
    one, other = live.get(name, _MISSING), kept.get(name, _MISSING)
    for mapping, value in ((live, other), (kept, one)):
        if value is _MISSING:
            mapping.pop(name, None)
        else:
            mapping[name] = value
