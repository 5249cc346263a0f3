"""Averages of the weights over the steps of training (EMA, SWA), stored as the optimizer stores its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.swa_utils import get_ema_multi_avg_fn

from echelon.base.errors import CheckpointError, ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.engines.base import Engine
from echelon.engines.optimizer_copy import ShardsState
from echelon.engines.shards import local_tensors
from echelon.precision.policy import LOW_PRECISION

if TYPE_CHECKING:
    from echelon.accelerator.update.optimizer import AcceleratedOptimizer


class WeightAverage(ABC):
    """An average of the trained weights of prepared models, updated after their optimizers' steps.

    Pass it to ``Accelerator.prepare``, alone or with the models. It then averages the parameters of the optimizers of the same call, or,
    if that has none, of all that were prepared before. Each rank stores the averages of the parameters, or of its shards of them; with ZeRO
    stage 1, of those of which it has the optimizer state. Buffers are not averaged. Averages of bf16 and fp16 weights are float32.

    Args:
        every: update after every N-th optimizer step. Steps that fp16 loss scaling skips do not count.
    """

    _starts_from_initial: bool
    """Whether the average starts with the weights before the first step."""

    def __init__(self, *, every: int) -> None:
        self._require_count("every", every)
        self.every = every
        self._parts: list[_OptimizerAverage] = []
        self._engine: Engine | None = None
        self._is_applied = False

    def _require_count(self, name: str, value: object) -> None:
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                _(
                    "{kind}({name}={value!r}) is not a number of steps",
                    kind=type(self).__name__,
                    name=name,
                    value=value,
                ),
                do=_("set {name} to an integer of 1 or more", name=name),
            )

    @abstractmethod
    def weight_of_update(self, num_updates: int) -> float:
        """Return the weight of the current weights in the average, after ``num_updates`` earlier updates."""

    @abstractmethod
    def is_due(self, num_steps: int) -> bool:
        """Return whether to update the average after optimizer step number ``num_steps`` (from 1)."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the arguments, which checkpoints store for comparison."""

    @property
    def num_updates(self) -> int:
        """Number of updates so far (the largest number, if there are several optimizers)."""
        return max((part.counts["num_updates"] for part in self._parts), default=0)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Return a context in which the models have the averaged weights, for evaluation and ``save_model``.

        At the end, the weights are again those of training. ``save_state`` inside it saves those, too. Before the first update, the
        weights do not change.

        Collective: enter on every rank if the engine shards parameters or optimizer state.

        Raises:
            UsageError: the average was not prepared, the models have another average of the same optimizers, or an optimizer steps inside
                the context.
        """
        if self._is_applied:
            yield
            return
        self._apply()
        try:
            yield
        finally:
            self._restore()

    @contextmanager
    def training_parameters(self) -> Iterator[None]:
        """Return a context in which the models have the weights of training, also inside ``average_parameters``."""
        if not self._is_applied:
            yield
            return
        self._restore()
        try:
            yield
        finally:
            self._apply()

    def copy_to_models(self) -> None:
        """Replace the models' weights with their averages, at the end of training.

        Collective: call on every rank if the engine shards parameters or optimizer state.
        """
        if not self._is_applied:
            self._apply()
        for part in self._parts:
            part.restored.clear()
        self._is_applied = False

    # ---- for the Accelerator -----------------------------------------------------------------------------------------

    def attach(self, optimizers: Sequence[AcceleratedOptimizer], engine: Engine) -> None:
        """Average the parameters of ``optimizers`` from now on.

        Raises:
            UsageError: there is no optimizer, the average is already in use, or the engine does not expose the weights.
        """
        kind = type(self).__name__
        if self._parts:
            raise UsageError(
                _("prepare() got an {kind} that another Accelerator has prepared", kind=kind),
                do=_("create an {kind} for each Accelerator", kind=kind),
            )
        if not engine.capabilities.exposes_state:
            raise UsageError(
                _(
                    "{kind} does not work with the {engine} engine, which keeps the weights in buffers of its own",
                    kind=kind,
                    engine=engine.capabilities.name,
                ),
                where="prepare()",
                do=_(
                    "use the fsdp2 engine, which shards the averages with the weights, or remove the {kind}", kind=kind
                ),
            )
        if not optimizers:
            raise UsageError(
                _("prepare() got an {kind}, but no optimizer whose parameters it can average", kind=kind),
                do=_(
                    "pass it with the optimizer, or after it: model, optimizer, average = accelerator.prepare(model, "
                    "optimizer, {kind}(...))",
                    kind=kind,
                ),
            )
        for optimizer in optimizers:
            inner = type(optimizer.optimizer)
            if hasattr(inner, "eval"):
                raise UsageError(
                    _(
                        "{kind} does not work with {optimizer}, whose eval() sets the models' weights to an average of its own",
                        kind=kind,
                        optimizer=inner.__name__,
                    ),
                    where="prepare()",
                    do=_("remove the {kind}, or use another optimizer", kind=kind),
                )
        self._engine = engine
        for optimizer in optimizers:
            part = _OptimizerAverage(self, optimizer, engine)
            optimizer.averages.append(part)
            self._parts.append(part)

    def release(self) -> None:
        """Forget the optimizers and the averages of their parameters."""
        for part in self._parts:
            part.optimizer.averages.remove(part)
        self._parts.clear()
        self._engine = None
        self._is_applied = False

    def require_not_applied(self, operation: str) -> None:
        """Raise if the models currently have the averaged weights."""
        if self._is_applied:
            raise UsageError(
                _(
                    "{operation} was called inside average_parameters(), where the models have the averaged weights",
                    operation=operation,
                ),
                do=_("call it outside this block"),
            )

    def parts(self) -> Sequence[tuple[AcceleratedOptimizer, dict[torch.Tensor, torch.Tensor | None]]]:
        """Return each optimizer and its averages by parameter: local tensors, or None if another rank holds the average."""
        return [(part.optimizer, part.values) for part in self._parts]

    def state(self, optimizers: Sequence[AcceleratedOptimizer]) -> dict[str, Any]:
        """Return the settings and the counters, which are the same on every rank, by number in ``optimizers``."""
        counters = {
            str(number): [part.counts["num_steps"], part.counts["num_updates"]]
            for number, optimizer in enumerate(optimizers)
            for part in self._parts
            if part.optimizer is optimizer
        }
        return {"kind": type(self).__name__, "settings": self.settings(), "counters": counters}

    def load(
        self,
        state: Mapping[str, Any],
        optimizers: Sequence[AcceleratedOptimizer],
        read: Callable[[int, int, bool], torch.Tensor | None],
        *,
        source: object,
    ) -> None:
        """Continue from the ``state`` of a checkpoint.

        Args:
            state: a result of ``state``.
            optimizers: all prepared optimizers.
            read: ``read(number, i, is_needed)`` returns this rank's part of the saved average of parameter ``i`` of optimizer
                ``number``; None if the checkpoint has none. Without ``is_needed``, it may return an empty tensor.
            source: the checkpoint, for messages.
        """
        kind = type(self).__name__
        if state["kind"] != kind:
            raise CheckpointError(
                _(
                    "{source} holds an average of the weights by {saved}, but this run has {kind}",
                    source=source,
                    saved=state["kind"],
                    kind=kind,
                ),
                do=_("use {saved}, as the saved run", saved=state["kind"]),
            )
        if changed := {name: value for name, value in state["settings"].items() if self.settings().get(name) != value}:
            warn(
                _(
                    "the average of the weights continues with this run's {own}; {source} was saved with {saved}",
                    own=self,
                    source=source,
                    saved=", ".join(f"{name}={value}" for name, value in changed.items()),
                )
            )
        for number, optimizer in enumerate(optimizers):
            for part in self._parts:
                if part.optimizer is optimizer:
                    part.load(state["counters"].get(str(number), (0, 0)), number, read)

    def start_anew(self, folder: object) -> None:
        """Start with the current weights, because a checkpoint without averages was loaded from ``folder``."""
        for part in self._parts:
            part.load((0, 0), 0, lambda *_: None)
        warn(
            _(
                "{folder} has no averages of the weights, so the {average} starts with its weights",
                folder=folder,
                average=self,
            )
        )

    def _apply(self) -> None:
        if self._engine is None:
            raise UsageError(
                _("the {kind} was not prepared, so it has no averages", kind=type(self).__name__),
                do=_("pass it to accelerator.prepare()"),
            )
        for part in self._parts:
            for other in part.optimizer.averages:
                # It would take the other average for the weights of training, and a checkpoint would hold that.
                if isinstance(other, _OptimizerAverage):
                    other.average.require_not_applied(f"{self}.average_parameters()")
        capabilities = self._engine.capabilities
        if capabilities.shards_parameters or capabilities.shards_optimizer_state:
            monitored_barrier("average_parameters()", advice="Each rank holds a part of the averages.")
        self._engine.free_gathered_weights()
        for part in self._parts:
            part.apply()
        self._is_applied = True

    def _restore(self) -> None:
        assert self._engine is not None
        self._engine.free_gathered_weights()
        for part in self._parts:
            part.restore()
        self._is_applied = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"


class EMA(WeightAverage):
    """An exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    It starts with the weights before the first step.

    Args:
        decay: the weight of the previous average in an update.
        every: update after every N-th optimizer step; ``decay`` applies to each update.
        warmup: in update n (from 0), use ``min(decay, (1 + n) / (10 + n))``, so that the initial weights are forgotten sooner.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; the warm-up is that of TensorFlow's
    ``ExponentialMovingAverage(num_updates=)``.
    """

    _starts_from_initial = True

    def __init__(self, decay: float = 0.999, *, every: int = 1, warmup: bool = False) -> None:
        super().__init__(every=every)
        if not isinstance(decay, (float, int)) or not 0.0 <= decay <= 1.0:
            raise ConfigError(
                _("EMA(decay={decay!r}) is not between 0 and 1", decay=decay),
                where="EMA(decay=), or TrainingArguments.ema_decay",
                do=_("set a decay such as 0.999"),
            )
        self.decay = decay
        self.warmup = warmup

    def weight_of_update(self, num_updates: int) -> float:
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates)) if self.warmup else self.decay
        return 1.0 - decay

    def is_due(self, num_steps: int) -> bool:
        return num_steps % self.every == 0

    def settings(self) -> dict[str, Any]:
        return {"decay": self.decay, "every": self.every, "warmup": self.warmup}


class SWA(WeightAverage):
    """The mean of the weights after the steps ``start``, ``start + every``, ``start + 2 * every``, ... (stochastic weight averaging).

    If the model has batch normalization, compute its statistics for the averaged weights before you evaluate or save the model:
    ``with swa.average_parameters(): torch.optim.swa_utils.update_bn(loader, model)``.

    Args:
        start: the first optimizer step after which the weights are averaged (from 1).
        every: average after every N-th step.

    Source: Izmailov et al., "Averaging weights leads to wider optima and better generalization", 2018.
    """

    _starts_from_initial = False

    def __init__(self, start: int, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._require_count("start", start)
        self.start = start

    def weight_of_update(self, num_updates: int) -> float:
        return 1.0 / (num_updates + 1)

    def is_due(self, num_steps: int) -> bool:
        return num_steps >= self.start and (num_steps - self.start) % self.every == 0

    def settings(self) -> dict[str, Any]:
        return {"start": self.start, "every": self.every}


class _OptimizerAverage:
    """The averages of one optimizer's parameters, as far as this rank holds them."""

    def __init__(self, average: WeightAverage, optimizer: AcceleratedOptimizer, engine: Engine) -> None:
        self.average = average
        self.optimizer = optimizer
        self._engine = engine
        inner = optimizer.optimizer
        # Of a parameter that is sharded itself, each rank averages its shard, no matter which rank steps it.
        self._owners: ShardsState | None = None
        if isinstance(inner, ShardsState) and not engine.capabilities.shards_parameters:
            self._owners = inner
        self.values: dict[torch.Tensor, torch.Tensor | None] = {}
        """By parameter: the average of what this rank holds of it; None if another rank owns the parameter."""
        self.counts = {"num_steps": 0, "num_updates": 0}
        self.restored: list[tuple[torch.Tensor, torch.Tensor]] = []
        """While the averages are applied: local tensors, and their values of training."""

    def before_step(self) -> None:
        """Add parameters that begin to be trained: until now, their average is their value."""
        self.average.require_not_applied("optimizer.step()")
        if self.optimizer.unsynced or self.optimizer.gradient_state.reading.joined:
            kind = type(self.average).__name__
            raise UsageError(
                _(
                    "{kind} cannot average the weights of steps that differ between ranks (LocalSGD, no_sync(unsynced=True), "
                    "join_uneven_inputs())",
                    kind=kind,
                ),
                where="optimizer.step()",
                do=_("train without these, or without {kind}", kind=kind),
            )
        if self.counts["num_updates"] or self.average._starts_from_initial:
            self._add_trained()

    @torch.no_grad()
    def after_step(self) -> None:
        """Update the averages if an update is due."""
        self.counts["num_steps"] += 1
        if not self.average.is_due(self.counts["num_steps"]):
            return
        self._add_trained()
        weight = self.average.weight_of_update(self.counts["num_updates"])
        self.counts["num_updates"] += 1
        grouped: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # one dtype and device for each call
        for parameter, value in self.values.items():
            if value is None:
                continue
            (local,) = local_tensors([parameter])
            if local.dtype != value.dtype:
                value.lerp_(local.to(value.dtype), weight)
            elif value.numel():
                own, current = grouped.setdefault((value.device, value.dtype), ([], []))
                own.append(value)
                current.append(local)
        update = get_ema_multi_avg_fn(1.0 - weight)  # type: ignore[no-untyped-call]
        for own, current in grouped.values():
            update(own, current, None)

    @torch.no_grad()
    def _add_trained(self) -> None:
        for group in self._engine.parameter_groups(self.optimizer.optimizer):
            for parameter in group:
                if parameter.requires_grad and parameter not in self.values:
                    (local,) = local_tensors([parameter])
                    is_owned = self._is_owned(parameter)
                    self.values[parameter] = local.to(_dtype_for(parameter), copy=True) if is_owned else None

    def _is_owned(self, parameter: torch.Tensor) -> bool:
        return self._owners is None or self._owners.owner(parameter) == self._owners.rank

    def load(self, counters: Sequence[int], number: int, read: Callable[[int, int, bool], torch.Tensor | None]) -> None:
        """Replace the averages by those of a checkpoint. See ``WeightAverage.load``."""
        self.counts.update(zip(("num_steps", "num_updates"), counters))
        self.values.clear()
        flat = [p for group in self._engine.parameter_groups(self.optimizer.optimizer) for p in group]
        for i, parameter in enumerate(flat):
            is_owned = self._is_owned(parameter)
            saved = read(number, i, is_owned)
            if saved is None:
                continue
            (local,) = local_tensors([parameter])
            self.values[parameter] = saved.to(local.device, _dtype_for(parameter), copy=True) if is_owned else None

    @torch.no_grad()
    def apply(self) -> None:
        """Give the parameters their averages. Collective if each rank owns some of them."""
        for parameter, value in self.values.items():
            (local,) = local_tensors([parameter])
            self.restored.append((local, local.clone()))
            if value is not None:
                local.copy_(value)
            if self._owners is not None:
                dist.broadcast(local, src=self._owners.owner(parameter))

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters their values of training."""
        for local, value in self.restored:
            local.copy_(value)
        self.restored.clear()


def _dtype_for(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the average: in the dtype of low-precision weights, small differences would be lost."""
    return torch.float32 if parameter.dtype in LOW_PRECISION else parameter.dtype
