"""The models, optimizers, schedulers and loaders that ``prepare`` returned."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.data.loader import PreparedLoader

__all__ = ["PreparedObjects"]


class PreparedObjects:
    """What an Accelerator has prepared, in the order of preparation. The lists stay the same objects.

    A pickle holds nothing of it: prepared objects are known by their identity, which no copy has.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        """As the engine returned them."""
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.originals: dict[int, tuple[object, Any]] = {}
        """By the id of what was given: it, and what it became."""
        self._compiled: dict[int, nn.Module] = {}  # id of a whole compiled model -> the engine's model in it

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        PreparedObjects.__init__(self)

    def note(self, given: object, became: Any) -> None:
        """Remember what ``given`` became."""
        self.originals[id(given)] = (given, became)

    def note_compiled(self, compiled: nn.Module, model: nn.Module) -> None:
        """Remember the engine's model inside a model that was compiled as a whole."""
        self._compiled[id(compiled)] = model

    def is_compiled_whole(self, model: nn.Module) -> bool:
        """Tell whether ``prepare`` compiled ``model`` as a whole."""
        return id(model) in self._compiled

    def engine_model(self, model: nn.Module) -> nn.Module:
        """Return the engine's model of a prepared model; any other is returned as it is."""
        return self._compiled.get(id(model), model)

    def num_steps(self) -> int:
        """Return the steps taken by the optimizers."""
        return max((optimizer.num_steps for optimizer in self.optimizers), default=0)

    @property
    def step_was_skipped(self) -> bool:
        """Did loss scaling leave out the last step of any optimizer?"""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all models and optimizers, each once."""
        held = [parameter for model in self.models for parameter in model.parameters()]
        owned = [parameter for o in self.optimizers for g in o.param_groups for parameter in g["params"]]
        return list({id(parameter): parameter for parameter in [*held, *owned]}.values())

    def stray_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of optimizers that are in no model."""
        held = {id(parameter) for model in self.models for parameter in model.parameters()}
        return [p for o in self.optimizers for g in o.param_groups for p in g["params"] if id(p) not in held]

    def drop_gradients(self) -> None:
        """Clear all gradients: their update is given up."""
        for optimizer in self.optimizers:
            optimizer.drop_gradients()
        for model in self.models:
            model.zero_grad(set_to_none=True)

    def forget_loader(self, loader: Any) -> None:
        """Forget a prepared loader: checkpoints do not hold its state."""
        self.loaders[:] = [one for one in self.loaders if one is not loader]
        for key, (_, became) in list(self.originals.items()):
            if became is loader:
                del self.originals[key]

    def clear(self) -> None:
        """Forget everything."""
        for held in (self.models, self.optimizers, self.schedulers, self.loaders, self.originals, self._compiled):
            held.clear()
