"""An optimizer wrapper that steps through the engine, and only when an update is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.update.closures import Closures
from echelon.accelerator.update.direct_backward import NO_STEP, DirectBackwardCheck
from echelon.accelerator.update.unprepared_optimizer import UnpreparedOptimizerGuard
from echelon.accelerator.views import view
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.distributed.record.recorder import recorder_of_process
from echelon.distributed.uncompiled import uncompiled_methods
from echelon.engines.base import Engine
from echelon.status.board import Phase
from echelon.status.notes import notes_of_process
from echelon.world.world import World

_OPTIMIZER, _TRAIN = Phase.OPTIMIZER, Phase.TRAIN  # looking up a member of an enum takes a tenth of a microsecond


class StepCheck(Protocol):
    """Decides whether the update whose gradients have been computed is applied (``spike_guard``)."""

    def allows_step(self, optimizer: Optimizer, *, unsynced: bool) -> bool:
        """Return whether ``optimizer`` may step. Collective: call on every rank."""
        ...


class StepObserver(Protocol):
    """What follows the steps of an optimizer (``weight_average.py``), and its state, which a step that is undone restores."""

    values: dict[torch.Tensor, torch.Tensor | None]
    counts: dict[str, int]

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """DeepSpeed's ``gradient_clipping``, applied by echelon for engines that do not clip themselves."""

    max_norm: float
    gives_way: bool
    """Whether this is a default that is skipped if the training loop clips gradients."""


@uncompiled_methods()
class AcceleratedOptimizer(Optimizer):
    """Wraps an optimizer: ``step`` and ``zero_grad`` do nothing while gradients are being accumulated.

    ``zero_grad`` works before the backward pass and after the step. If a loop starts with it, the first micro-step
    clears the previous update's gradients, and later micro-steps keep the current update's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        engine: Engine,
        gradient_state: GradientState,
        scaler: torch.amp.GradScaler | None,
        clipping: Clipping | None = None,
        guard: UnpreparedOptimizerGuard | None = None,
        world: World | None = None,
        direct_backward: DirectBackwardCheck | None = None,
        spikes: StepCheck | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: groups, state and hooks belong to the wrapped optimizer.
        self.optimizer = optimizer
        self.engine = engine
        self.gradient_state = gradient_state
        self.scaler = scaler
        self.clipping = clipping
        self.guard = guard
        self.direct_backward = direct_backward
        self.spikes = spikes
        self.is_clipped = False
        """Whether the training loop has clipped this update's gradients."""
        self.unsynced = False
        self.step_was_skipped = False
        """Whether loss scaling skipped the last step because of infinite gradients, or ``spike_guard`` dropped the update."""
        self._checks_gradients = engine.capabilities.exposes_state
        self._is_used = False  # a step has used the current gradients
        self._is_postponed = False  # a step() was postponed to the end of the window, and so is the next zero_grad()
        self._closures = Closures(gradient_state, world)
        self._used = NO_STEP
        self._notes = notes_of_process()
        self._recorder = recorder_of_process()
        if self._recorder is not None:
            self._recorder.leave_to_accelerator()
        self.averages: list[StepObserver] = []
        """The averages of the weights that each step updates (``EMA``, ``SWA``)."""
        self.num_postponed = 0
        """Number of ``step`` calls that were postponed to the end of an accumulation window."""
        self.num_steps = 0
        """Number of steps taken, excluding those that were skipped."""

    state: Any = view("optimizer.state", "State of the wrapped optimizer.", is_settable=True)
    param_groups: Any = view("optimizer.param_groups", "Parameter groups of the wrapped optimizer.", is_settable=True)
    defaults: Any = view("optimizer.defaults", "Defaults of the wrapped optimizer.", is_settable=True)

    def step(self, closure: Any = None) -> Any:
        """Take a step if the update is complete.

        Args:
            closure: computes the current micro-step's loss and calls backward. It is evaluated in each micro-step, on
                the micro-step's own batch (in the last micro-step, by the optimizer).

        Returns:
            The closure's value, if any; at the end of an update, the mean over its micro-steps and ranks.

        Collective: call on every rank with a closure, with ``spike_guard``, or if gradients have not been averaged over the ranks yet.

        Raises:
            UsageError: the closure cannot behave as in a plain loop (docs/parity.md), or ``spike_guard`` cannot judge the update.
            LossSpikeError: ``spike_guard`` dropped too many updates in a row.
        """
        if not self.gradient_state.sync_gradients:
            if closure is not None:
                return self._postpone(closure)
            self.num_postponed += 1
            self._is_postponed = True
            return None
        for average in self.averages:
            average.before_step()
        value, notes, direct = None, self._notes, self.direct_backward
        if closure is not None:
            self._require_closures()
        if notes is not None:
            notes.phase(_OPTIMIZER)
        if closure is None:
            if direct is not None and self.gradient_state.num_losses == self._used[0]:
                direct.before_step(self.optimizer, self._used)
            if self.clipping is not None:
                self._clip(self.clipping)
            if self.spikes is not None and not self.spikes.allows_step(self, unsynced=self.unsynced):
                self.step_was_skipped = True
                self.engine.drop_update()
                self.engine.zero_grad(self.optimizer)
            else:
                self.step_was_skipped = not self._step_by_engine(None)
                if self._checks_gradients:
                    self._check_gradients()
        else:
            value = self._step_by(closure)
        if direct is not None:
            self._used = direct.gradients_of(self.optimizer)
        self.num_steps += not self.step_was_skipped
        if self.averages and not self.step_was_skipped:
            for average in self.averages:
                average.after_step()
        self._is_used = True
        if notes is not None:
            notes.step(self.num_steps, _TRAIN)
        if self._recorder is not None and not self.step_was_skipped:
            self._recorder.step(self.num_steps, self.optimizer)
        self._is_postponed = not self.gradient_state.sync_gradients
        return value

    def _check_gradients(self) -> None:
        """Warn once of a step that finds no gradients at all."""
        for group in self.optimizer.param_groups:  # the first parameter has one, as a rule
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return
        self._checks_gradients = False
        warn(
            _(
                "step {number} of {name} finds no gradients, so it changes nothing: the loss was computed by other weights "
                "than those of the optimizer, for example by a model that was made after prepare(). Use the model that "
                "prepare() returned",
                number=self.num_steps + 1,
                name=type(self.optimizer).__name__,
            )
        )

    def _postpone(self, closure: Any) -> Any:
        self._require_closures()
        value = self._closures.evaluate_early(self.optimizer, closure)
        self.num_postponed += 1
        self._is_postponed = not self.gradient_state.sync_gradients
        return value

    def _step_by(self, closure: Any) -> Any:
        """Step with the last micro-step's closure; return the update's loss."""
        averages = not self.unsynced and not self.gradient_state.reading.joined
        whole = self._closures.build_update_closure(
            self.optimizer, closure, finish=self._finish_evaluation, averages=averages
        )
        self.step_was_skipped = not self._step_by_engine(whole)
        whole.require_evaluated()
        return whole.first

    def _finish_evaluation(self) -> None:
        """Unscale and clip the gradients after a closure, as is done before a step."""
        if self.direct_backward is not None:
            self.direct_backward.before_step(self.optimizer, self._used)
        self.engine.unscale(self.optimizer, unsynced=self.unsynced)
        if self.clipping is not None:
            self._clip(self.clipping)

    def _require_closures(self) -> None:
        kind = type(self.optimizer).__name__
        if not self.engine.capabilities.takes_closures:
            raise UsageError(
                f"the {self.engine.capabilities.name} engine does not support {kind}.step(closure)",
                where="optimizer.step(closure)",
                do="call backward() and step() without a closure, or use the ddp or fsdp2 engine",
            )
        if self.spikes is not None:
            raise UsageError(
                f"{kind}.step(closure) cannot be used with spike_guard, because the optimizer changes the weights before the loss is known",
                where="spike_guard, optimizer.step(closure)",
                do="call backward() and step() without a closure, or remove spike_guard",
            )
        if self.scaler is not None or self.engine.capabilities.owns_loss_scaling:
            raise UsageError(
                f"{kind}.step(closure) cannot be used with fp16 loss scaling, because gradients must be checked "
                "before the step, but the optimizer computes them inside it",
                where="mixed_precision='fp16', optimizer.step(closure)",
                do="use mixed_precision='bf16', or call backward() and step() without a closure",
            )

    def drop_update(self) -> None:
        """Drop the gradients of an update that is not completed, and what has been done with them."""
        self.engine.zero_grad(self.optimizer)
        self._closures.forget()
        self.is_clipped = self._is_used = self._is_postponed = False

    def _step_by_engine(self, closure: Any) -> bool:
        guard = self.guard
        if guard is None:
            return self.engine.step(self.optimizer, closure=closure, unsynced=self.unsynced)
        before, guard.is_stepping, guard.has_compared = guard.is_stepping, True, False
        try:
            return self.engine.step(self.optimizer, closure=closure, unsynced=self.unsynced)
        finally:
            guard.is_stepping = before

    def _clip(self, clipping: Clipping) -> None:
        if not (clipping.gives_way and self.is_clipped):
            self.engine.unscale(self.optimizer, unsynced=self.unsynced)
            parameters = [p for group in self.param_groups for p in group["params"]]
            self.engine.clip_grad_norm(parameters, clipping.max_norm, 2.0, unsynced=self.unsynced)
        self.is_clipped = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they belong to an incomplete update."""
        clears = self._closures.clears
        if clears is None:  # not in a closure
            clears = self._is_used or (self.gradient_state.sync_gradients and not self._holds_micro_steps())
            self._is_postponed = False
        driver = self.gradient_state.reading.driver
        if driver is not None:
            driver.note_zero_grad(self.optimizer, clears=clears)
        if clears:
            self.engine.zero_grad(self.optimizer, set_to_none=set_to_none)
            self._is_used = False

    def _holds_micro_steps(self) -> bool:
        """Return whether the gradients belong to earlier micro-steps and this call starts a new one."""
        state = self.gradient_state
        driver = state.reading.driver
        # A loop that steps under `if accelerator.sync_gradients` has postponed nothing.
        begins = state.micro_step > 1 and not state.has_loss
        return self._is_postponed or begins or (driver is not None and driver.awaits_loss)

    def add_param_group(self, param_group: Any) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> Any:
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def full_state_dict(self) -> Any:
        """Return the full state on rank zero; if it is sharded, None elsewhere. Collective if it is sharded."""
        if self.engine.capabilities.shards_optimizer_state:
            advice = "It returns the state on rank zero and None on the other ranks."
            monitored_barrier("the optimizer's full_state_dict()", advice=advice)
        return self.engine.full_optimizer_state(self.optimizer)

    def load_full_state_dict(self, state_dict: Any) -> None:
        """Load the state that ``full_state_dict`` returned on rank zero. Collective: call on every rank."""
        if self.engine.capabilities.shards_optimizer_state:
            monitored_barrier("the optimizer's load_full_state_dict()")
        self.engine.load_full_optimizer_state(self.optimizer, state_dict)

    def train(self) -> Any:
        """Switch a schedule-free optimizer to its training weights."""
        return self.optimizer.train() if hasattr(self.optimizer, "train") else None

    def eval(self) -> Any:
        """Switch a schedule-free optimizer to its evaluation weights."""
        return self.optimizer.eval() if hasattr(self.optimizer, "eval") else None

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)  # not set yet while unpickling
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Both identify optimizers by id, which a copy does not share.
        none = dict.fromkeys(("guard", "direct_backward", "spikes", "_recorder", "_notes"))
        return {**self.__dict__, **none, "_used": NO_STEP, "averages": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._notes = notes_of_process()
