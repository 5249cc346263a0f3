"""A scheduler wrapper that steps only if its optimizers stepped."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import user_line, warn
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.distributed.small_messages import gather_bytes
from echelon.distributed.uncompiled import uncompiled_methods

_DO = (
    "pass the same metric on every rank: use accelerator.reduce(metric, 'mean'), or compute it from "
    "accelerator.gather_for_metrics(...)"
)


def steps_with_metric(scheduler: Any) -> bool:
    """Return whether ``scheduler.step`` requires a metric, as in ``ReduceLROnPlateau``."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    kinds = inspect.Parameter
    positional = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    wanted = inspect.signature(scheduler.step).parameters.values()
    return any(one.kind in positional and one.default is kinds.empty for one in wanted)


def _accepts_metric(scheduler: Any) -> bool:
    """Return whether the first argument of ``scheduler.step`` is a metric, also one with a default; torch's is the epoch."""
    kinds = inspect.Parameter
    first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
    return (
        first is not None
        and first.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        and first.name != "epoch"
    )


@uncompiled_methods()
class AcceleratedScheduler:
    """Wraps a learning-rate scheduler.

    With ``step_with_optimizer``, the scheduler does not step while gradients are being accumulated or if an optimizer
    step was skipped. Unless ``split_batches`` is set, it steps ``num_processes`` times per update, because that many
    batches have been used.

    A scheduler that follows a metric, or is called with one, steps once per call, because it counts evaluations, not batches.
    If the ranks pass different metrics, it uses their mean.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        *,
        gradient_state: GradientState,
        num_processes: int,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        is_exact: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = [optimizers] if isinstance(optimizers, AcceleratedOptimizer) else list(optimizers)
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = gradient_state
        self._follows_metric = steps_with_metric(scheduler)
        self._accepts_metric = self._follows_metric or _accepts_metric(scheduler)
        self._times = 1 if split_batches or self._follows_metric else num_processes
        self._is_exact = is_exact
        self._is_warned = False
        self._has_end = hasattr(scheduler, "total_steps")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler if its optimizers stepped.

        Collective: call on every rank if the scheduler follows a metric.

        Raises:
            UsageError: the ranks pass different metrics in an exact mode.
            DesyncError: only some ranks step a scheduler that follows a metric.
        """
        scheduler, times = self.scheduler, self._times
        if self._accepts_metric and (args or kwargs):
            args, kwargs = self._with_common_metric(args, kwargs)
            times = 1
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        for _time in range(times):
            # OneCycleLR raises beyond total_steps, and the last update of an epoch may contain padding.
            if not self._has_end or scheduler._step_count <= scheduler.total_steps:
                scheduler.step(*args, **kwargs)

    def _with_common_metric(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the ``step`` arguments, with the metric replaced by its mean if it differs between ranks. Collective."""
        name = next(iter(inspect.signature(self.scheduler.step).parameters))
        if not args and name not in kwargs:
            return args, kwargs  # the scheduler raises
        monitored_barrier("scheduler.step(metric)")
        metric = args[0] if args else kwargs[name]
        messages = gather_bytes(struct.pack("d", float(metric)))
        if len(set(messages)) == 1:
            return args, kwargs
        metrics = [struct.unpack("d", message)[0] for message in messages]
        mean = sum(metrics) / len(metrics)
        self._report_difference(metrics, mean)
        return ((mean, *args[1:]), kwargs) if args else (args, {**kwargs, name: mean})

    def _report_difference(self, metrics: list[float], mean: float) -> None:
        shown = ", ".join(f"rank {rank}: {metric:.6}" for rank, metric in enumerate(metrics[:4]))
        kind = type(self.scheduler).__name__
        what = f"{kind}.step() got different metrics on different ranks ({shown}{', ...' if metrics[4:] else ''})"
        if self._is_exact:
            raise UsageError(
                f"{what}, none of which is the one-process metric",
                where=f"step() at {user_line()}, an exact mode",
                do=_DO,
            )
        if not self._is_warned:
            self._is_warned = True
            warn(
                _(
                    "{what}, which would have led to different learning rates. echelon uses their mean, {mean:.6}. To "
                    "fix this, {do}",
                    what=what,
                    mean=mean,
                    do=_DO,
                )
            )

    def get_last_lr(self) -> Any:
        """Return the learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> Any:
        """Return the state of the wrapped scheduler."""
        state = self.scheduler.state_dict()
        if isinstance(self.scheduler, SWALR):
            # Torch 2.7 adds a function here, which a checkpoint cannot store and the restored scheduler already has.
            return {key: value for key, value in state.items() if key != "anneal_func"}
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # not set yet while unpickling
        return getattr(self.scheduler, name)
