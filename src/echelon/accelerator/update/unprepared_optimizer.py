"""Detects unprepared optimizers that step a prepared model's parameters, and corrects or rejects these steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.unprepared_model import UnpreparedModelCheck
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import user_line, warn
from echelon.distributed.checks.raw_ddp_guard import RawDDPGuard
from echelon.distributed.checks.replica_drift import ReplicaDriftCheck
from echelon.distributed.ddp.replica import average_loss
from echelon.distributed.torch_hooks import Closure, is_in_backward, owners_of_step_hooks, watch_optimizer_steps
from echelon.engines.base import Engine

_DO_KEEP_EQUAL = (
    "on every rank, compute gradients with accelerator.backward(), call step() the same number of times and with the "
    "same learning rate, and change weights in the same way (load them before prepare())"
)


class UnpreparedOptimizerGuard:
    """Observes every optimizer step in the process; steps by prepared optimizers or for other models are not changed.

    Args:
        engine: the run's engine.
        models: prepared models, as returned by the engine.
        state: gradient accumulation state.
        parity: the run's parity mode.
        scaler: gradient scaler, in an fp16 run.
        num_processes: number of processes in the run.
        unprepared: warns about an unprepared model.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        models: Sequence[nn.Module],
        state: GradientState,
        parity: str,
        scaler: torch.amp.GradScaler | None,
        num_processes: int,
        unprepared: UnpreparedModelCheck,
    ) -> None:
        self._engine = engine
        self._models = models
        self._state = state
        self._parity = parity
        self._scaler = scaler
        self._num_processes = num_processes
        self._unprepared = unprepared
        self.is_stepping = False
        """Whether a prepared optimizer is stepping."""
        self.has_compared = False
        """Whether the weights were compared in this step: DeepSpeed steps each parameter group and then gathers the weights."""
        self.unsynced = False
        """Whether steps intentionally use only local gradients."""
        self.drift = ReplicaDriftCheck(is_error=parity != "off")
        RawDDPGuard.leave_to_accelerator()
        self._inner: WeakSet[Optimizer] = WeakSet()  # optimizers wrapped by prepared ones
        # Parameter ids that were looked up, and whether a prepared model holds one of them.
        self._known: WeakKeyDictionary[Optimizer, tuple[list[int], bool]] = WeakKeyDictionary()
        self._warned: set[int] = set()  # ids of the parameters that a warning has covered
        watch_optimizer_steps(self, UnpreparedOptimizerGuard._before_step)

    def add_prepared(self, inner: Optimizer) -> None:
        """Register an optimizer that a prepared one wraps."""
        self._inner.add(inner)

    def release(self) -> None:
        """Forget the optimizers."""
        self._inner.clear()
        self._known.clear()
        self._warned.clear()

    def _before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        if not self._models:
            if self._unprepared.is_pending and not self.is_stepping and self._state.in_dataloader:
                self._unprepared.run_before_step()
            return None
        if self.is_stepping:
            if self._num_processes > 1:
                if is_in_backward():
                    self._refuse_inside_backward(optimizer)
                if not self.has_compared:
                    self.has_compared = True
                    self._compare_weights(optimizer)
            return None
        if self.unsynced or self._engine.is_shadow_step:
            return None
        holds_parameters = self._holds_parameters(optimizer)
        if holds_parameters:  # first, because the storage of replaced parameters may have been freed
            self._require_steppable(optimizer)
            self._average_unreduced_gradients(optimizer)
        self._compare_weights(optimizer)
        if not holds_parameters or closure is None:
            return None

        def evaluate() -> object:
            loss = closure()
            self._average_unreduced_gradients(optimizer)
            return loss if self._num_processes == 1 else average_loss(loss)

        return evaluate

    def _compare_weights(self, optimizer: Optimizer) -> None:
        """Compare the parameters of ``optimizer`` with the other ranks' parameters, if they should be equal."""
        if self.unsynced or self._num_processes == 1:
            return
        if self._state.reading.joined:  # the ranks step different numbers of times
            self.drift.stop()
        elif optimizer in self._inner:
            if self._engine.capabilities.replicates:
                self.drift.before_step(optimizer, _DO_KEEP_EQUAL, models=self._bare_models())
        elif not any(guard.is_stepping for guard in owners_of_step_hooks(UnpreparedOptimizerGuard)):
            do = (
                "pass the optimizer and the module that holds its parameters to accelerator.prepare(), which averages "
                "their gradients (ignore this warning if each rank intentionally trains them separately)"
            )
            self.drift.before_step(optimizer, do, must_be_equal=False)

    def compare_models(self, when: str, *, is_last: bool = False) -> None:
        """Compare the prepared models' weights across ranks, at a point that every rank reaches."""
        if self._engine.capabilities.replicates and not self._state.reading.joined and not self.unsynced:
            self.drift.compare_models(self._bare_models(), when, _DO_KEEP_EQUAL, is_last=is_last)

    def _bare_models(self) -> list[nn.Module]:
        return [self._engine.unwrap(model) for model in self._models]

    def _holds_parameters(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` holds a parameter of a prepared model."""
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        looked_up = [len(self._models), *ids]
        known = self._known.get(optimizer)
        if known is None or known[0] != looked_up:
            held = {id(p) for model in self._models for p in model.parameters()}
            held.update(map(id, self._engine.replaced_parameters()))
            known = self._known[optimizer] = (looked_up, not held.isdisjoint(ids))
        return known[1]

    def _require_steppable(self, optimizer: Optimizer) -> None:
        """Raise if this class cannot correct the gradients of the step."""
        if self._num_processes > 1 and is_in_backward():
            self._refuse_inside_backward(optimizer)
        if self._parity != "off":
            raise UsageError(
                _(
                    "{what}: its steps are not postponed to the end of an update, and they are neither counted nor saved",
                    what=self._describe(optimizer),
                ),
                where=f"step() at {user_line()}, parity={self._parity!r}",
                do=self._advice(optimizer),
            )
        if self._scaler is not None and _holds_scaled_gradients(optimizer, self._scaler):
            raise UsageError(
                _(
                    "{what}: its gradients have not been unscaled (fp16 loss scale {scale:g}), and infinite gradients would "
                    "be applied",
                    what=self._describe(optimizer),
                    scale=self._scaler.get_scale(),
                ),
                where=f"step() at {user_line()}, mixed_precision='fp16'",
                do=self._advice(optimizer),
            )

    def _average_unreduced_gradients(self, optimizer: Optimizer) -> None:
        """Average gradients that were not reduced; warn once about this and about a step in the middle of a window.

        Collective: call on every rank if gradients have not been reduced.
        """
        is_reduced = self._engine.reduce_gradients(optimizer)
        is_early = not self._state.sync_gradients
        if not (is_reduced or is_early):
            return
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if ids <= self._warned:  # also covers an optimizer wrapped by another one
            return
        self._warned |= ids
        parts: list[str] = []
        if is_early:
            text = N_("its step() is not postponed to the end of the accumulation window ({number} micro-steps)")
            parts.append(_(text, number=self._state.num_steps))
        if is_reduced:
            parts.append(_("its gradients were not averaged across ranks; echelon averages them before the step"))
        if optimizer not in self._inner:
            parts.append(_("save_state() does not save its state"))
        what, parts_text, do = self._describe(optimizer), _(", and ").join(parts), self._advice(optimizer)
        warn(_("{what}: {parts}. To fix this, {do}.", what=what, parts=parts_text, do=do))

    def _refuse_inside_backward(self, optimizer: Optimizer) -> None:
        if not self._engine.capabilities.replicates:
            return  # a sharded parameter receives its gradient after the reduction
        if any(hasattr(p, "_in_backward_optimizers") for group in optimizer.param_groups for p in group["params"]):
            return  # DDP steps these itself after the reduction
        raise UsageError(
            f"{type(optimizer).__name__} steps inside the backward pass, in a parameter hook, before the gradient is "
            f"averaged across {self._num_processes} ranks",
            where=f"step() at {user_line()}, engine {self._engine.capabilities.name}",
            do="call step() after backward(), or use engine='fsdp2', which runs such hooks with averaged gradients",
        )

    def _describe(self, optimizer: Optimizer) -> str:
        kind = type(optimizer).__name__
        if optimizer in self._inner:
            text = N_(
                "{kind} was stepped directly, instead of the optimizer that accelerator.prepare() returned for it"
            )
        else:
            text = N_("{kind} was not prepared by this Accelerator but contains parameters of a model that was")
        return _(text, kind=kind)

    def _advice(self, optimizer: Optimizer) -> str:
        if optimizer in self._inner:
            return _("call step() on the optimizer that accelerator.prepare() returned for it")
        return _("write optimizer = accelerator.prepare(optimizer), and call step() on the returned optimizer")


def _holds_scaled_gradients(optimizer: Optimizer, scaler: torch.amp.GradScaler) -> bool:
    """Return whether the gradients that the last backward pass computed for ``optimizer`` are still scaled."""
    if not scaler.is_enabled() or getattr(optimizer, "grad_scale", None) is not None:
        return False  # a fused optimizer unscales inside GradScaler.step
    states: Mapping[int, Mapping[str, Any]] = scaler._per_optimizer_states
    state = states.get(id(optimizer))
    return state is None or state["stage"].name == "READY"
