"""The models, optimizers, schedulers and loaders that ``prepare`` returned."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.accelerator.weight_average import WeightAverage
from echelon.data.loader import PreparedLoader


class PreparedObjects:
    """Prepared objects, in order of preparation. The list objects are never replaced.

    Pickling yields an empty object, because prepared objects are identified by id, which a copy does not share.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        """Models as returned by the engine."""
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.averages: list[WeightAverage] = []
        self.originals: dict[int, tuple[object, Any]] = {}
        """Original and prepared object, by the original's id."""
        self._compiled: dict[int, nn.Module] = {}  # id of a model compiled as a whole -> the engine's model in it
        self.has_compiled = False
        """Whether ``engine_model`` returns another model for any of the prepared ones."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        PreparedObjects.__init__(self)

    def record(self, original: object, prepared: Any) -> None:
        """Record that ``prepare`` turned ``original`` into ``prepared``."""
        self.originals[id(original)] = (original, prepared)

    def record_compiled(self, compiled: nn.Module, model: nn.Module) -> None:
        """Record which engine model is inside a model that was compiled as a whole."""
        self._compiled[id(compiled)] = model
        self.has_compiled = True

    def is_compiled_whole(self, model: nn.Module) -> bool:
        """Return whether ``prepare`` compiled ``model`` as a whole."""
        return id(model) in self._compiled

    def engine_model(self, model: nn.Module) -> nn.Module:
        """Return the engine's model inside a prepared model; return any other model unchanged."""
        return self._compiled.get(id(model), model)

    def num_steps(self) -> int:
        """Return how many steps the optimizers have taken."""
        most = 0
        for optimizer in self.optimizers:  # called for each batch; a generator expression would be slower
            if optimizer.num_steps > most:
                most = optimizer.num_steps
        return most

    @property
    def step_was_skipped(self) -> bool:
        """Whether loss scaling skipped any optimizer's last step."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all models and optimizers, each once."""
        held = [parameter for model in self.models for parameter in model.parameters()]
        owned = [parameter for o in self.optimizers for g in o.param_groups for parameter in g["params"]]
        return list({id(parameter): parameter for parameter in [*held, *owned]}.values())

    def stray_parameters(self) -> list[nn.Parameter]:
        """Return the optimizers' parameters that belong to no model."""
        held = {id(parameter) for model in self.models for parameter in model.parameters()}
        return [p for o in self.optimizers for g in o.param_groups for p in g["params"] if id(p) not in held]

    def drop_update(self) -> None:
        """Clear all gradients of an update that is not completed."""
        for optimizer in self.optimizers:
            optimizer.drop_update()
        for model in self.models:
            # DeepSpeed's zero_grad() takes no arguments, and the engine has dropped its own
            for parameter in model.parameters():
                parameter.grad = None

    def forget_loader(self, loader: Any) -> None:
        """Forget a prepared loader, so that checkpoints do not store its state."""
        self.loaders[:] = [one for one in self.loaders if one is not loader]
        for key, (_, prepared) in list(self.originals.items()):
            if prepared is loader:
                del self.originals[key]

    def forget_average(self, average: WeightAverage) -> None:
        """Stop updating an average of the weights, and forget it; checkpoints no longer store it."""
        average.release()
        self.averages[:] = [one for one in self.averages if one is not average]
        self.originals.pop(id(average), None)

    def clear(self) -> None:
        """Forget all prepared objects."""
        for average in self.averages:
            average.release()
        for held in (
            self.averages,
            self.models,
            self.optimizers,
            self.schedulers,
            self.loaders,
            self.originals,
            self._compiled,
        ):
            held.clear()
        self.has_compiled = False
