"""Handles a sharded model's parameters that ``fully_shard`` ignores or that were added after ``prepare``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.base.warnings import warn
from echelon.distributed.ddp.replica import Structure, require_same_parameters
from echelon.distributed.monitored_barrier import monitored_barrier

__all__ = ["UnshardedParameters"]


class UnshardedParameters:
    """Tracks a model's unsharded parameters, and broadcasts new ones from rank zero."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure = Structure(model)
        self._known = self._find()
        self._hook = model.register_forward_pre_hook(self._before_forward, prepend=True)

    def current(self) -> list[nn.Parameter]:
        """Return the unsharded parameters. Collective if the model's parameters were added or replaced since the last call."""
        self._update()
        return self._known

    def release(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._update()

    def _update(self) -> None:
        if not self._structure.is_changed:
            return
        known = set(map(id, self._known))
        self._known = self._find()
        new = [p for p in self._known if id(p) not in known]
        self._structure.renew(self._model)
        if not new:
            return
        monitored_barrier("the first forward pass after a prepared model's parameters changed")
        require_same_parameters(self._model)
        names = {id(p): name for name, p in self._model.named_parameters()}
        large = [names[id(p)] for p in new if p.dim()]
        if large:
            warn(
                f"fully_shard does not shard parameters that were added to the model after prepare() ({', '.join(large[:3])}"
                f"{' and others' if len(large) > 3 else ''}). echelon averages their gradients across ranks at each step. To "
                "shard these parameters, add them before prepare()"
            )
        for parameter in new:
            dist.broadcast(parameter.data, src=0)

    def _find(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if not isinstance(p, DTensor)]
