"""Handles a sharded model's parameters that ``fully_shard`` ignores or that were added after ``prepare``."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.distributed.ddp.replica import Structure, require_same_parameters
from echelon.distributed.monitored_barrier import monitored_barrier

__all__ = ["UnshardedParameters"]

_dtype_of = attrgetter("dtype")


class UnshardedParameters:
    """Tracks a model's unsharded parameters, and broadcasts new ones from rank zero."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure = Structure(model)
        self._known = self._find()
        self._sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        self._dtypes: list[torch.dtype] = []  # of the buffers that torch makes in the first forward pass
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
            self._require_dtypes()
            self._update()

    def _require_dtypes(self) -> None:
        """Raise UsageError if sharded parameters were cast after the first forward pass, of which torch keeps its buffers."""
        now = list(map(_dtype_of, self._sharded))
        if not self._dtypes:
            self._dtypes = now
        if now == self._dtypes:
            return
        number = next(i for i, (dtype, before) in enumerate(zip(now, self._dtypes)) if dtype is not before)
        names = {id(p): name for name, p in self._model.named_parameters()}
        raise UsageError(
            f"{names.get(id(self._sharded[number]), 'a parameter')} was cast from {self._dtypes[number]} to {now[number]} after "
            "the first forward pass, but the buffers in which fully_shard gathers it have the former dtype",
            where="the forward pass, fsdp2 engine",
            do="cast the model before prepare(), or before its first forward pass",
        )

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
