"""An engine that reports its operations while an update is observed, and otherwise is the inner engine at no cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.engines.base import Engine
from echelon.engines.delegating_engine import DelegatingEngine
from echelon.world.world import World

__all__ = ["EngineObserver", "WatchedEngine"]

_WATCHED = (
    "backward",
    "backward_zeros",
    "step",
    "zero_grad",
    "unscale",
    "clip_grad_norm",
    "clip_grad_value",
    "finish_gradients",
)


class EngineObserver(Protocol):
    """Runs the watched operations of an engine."""

    def run_backward(self, loss: torch.Tensor, *, parameters: Iterable[torch.Tensor] | None, **options: Any) -> None:
        """Run ``Engine.backward`` or, with ``parameters``, ``Engine.backward_zeros``."""

    def run_step(self, optimizer: Optimizer, *, closure: Any, unsynced: bool) -> bool:
        """Run ``Engine.step``."""

    def note_zero_grad(self, optimizer: Optimizer) -> None:
        """Note ``Engine.zero_grad``, which has run."""

    def run_unscale(self, optimizer: Optimizer, *, unsynced: bool) -> None:
        """Run ``Engine.unscale``."""

    def run_clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool
    ) -> torch.Tensor:
        """Run ``Engine.clip_grad_norm``."""

    def note_clip_grad_value(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note ``Engine.clip_grad_value``, which has run."""

    def note_drop_update(self) -> None:
        """Note ``Engine.drop_update``, which has run."""

    def note_finish_gradients(self, model: nn.Module, factor: float) -> None:
        """Note ``Engine.finish_gradients``, which has run."""


class WatchedEngine(DelegatingEngine):
    """Between observed updates, the watched methods are those of ``inner`` (attributes of the instance), with no call in between."""

    observer: EngineObserver
    """Set by the live check."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.num_no_sync = 0
        """Number of ``no_sync`` contexts that are open."""
        self.watch(False)

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> WatchedEngine:
        """See ``Engine.from_options``; ``options["inner"]`` is the engine to watch."""
        return cls(options["inner"])

    def watch(self, is_on: bool) -> None:
        """Start or stop reporting."""
        for name in _WATCHED:
            if is_on:
                vars(self).pop(name, None)
            else:
                vars(self)[name] = getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WatchedEngine.__init__(self, state["inner"])

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """See ``Engine.no_sync``."""
        self.num_no_sync += 1
        try:
            with self.inner.no_sync(model):
                yield
        finally:
            self.num_no_sync -= 1

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """See ``Engine.backward``."""
        self.observer.run_backward(loss, parameters=None, **options)

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """See ``Engine.backward_zeros``."""
        self.observer.run_backward(loss, parameters=parameters, **options)

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """See ``Engine.step``."""
        return self.observer.run_step(optimizer, closure=closure, unsynced=unsynced)

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """See ``Engine.zero_grad``."""
        self.inner.zero_grad(optimizer, set_to_none=set_to_none)
        self.observer.note_zero_grad(optimizer)

    def drop_update(self) -> None:
        """See ``Engine.drop_update``."""
        self.inner.drop_update()
        self.observer.note_drop_update()

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """See ``Engine.unscale``."""
        self.observer.run_unscale(optimizer, unsynced=unsynced)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """See ``Engine.clip_grad_norm``."""
        return self.observer.run_clip_grad_norm(parameters, max_norm, norm_type, unsynced=unsynced)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """See ``Engine.clip_grad_value``."""
        chosen = list(parameters)
        self.inner.clip_grad_value(chosen, clip_value, unsynced=unsynced)
        self.observer.note_clip_grad_value(chosen)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """See ``Engine.finish_gradients``."""
        self.inner.finish_gradients(model, factor)
        self.observer.note_finish_gradients(model, factor)
