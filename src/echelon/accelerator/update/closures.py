"""``optimizer.step(closure)`` with gradient accumulation and several ranks.

In a plain loop, the optimizer evaluates the closure passed to each step once (SGD) or several times (LBFGS). Here, an
update may have several micro-steps, each with a closure for its own batch. Each closure is evaluated in its own
micro-step; the optimizer steps in the last one and receives the mean loss over all micro-steps and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from echelon.accelerator.gradient_state import GradientState
from echelon.base.errors import UsageError
from echelon.data.active_loaders import PassDriver
from echelon.world.world import World


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """A closure's return value in one micro-step, and its weight."""

    value: float
    weight: float
    place: int
    """Index of the partial sum that the value is added to."""


class Closures:
    """One optimizer's closures.

    Args:
        state: counters of the accumulation window.
        world: the ranks across which losses are averaged.
    """

    def __init__(self, state: GradientState, world: World | None) -> None:
        self._state = state
        self._world = world
        self._pending: list[_Evaluation] = []  # micro-steps of the update so far
        self.clears: bool | None = None
        """Whether ``zero_grad`` clears gradients in the running closure: True in the update's first micro-step, False in
        later ones, and None outside a closure."""

    def forget(self) -> None:
        """Drop the evaluations after an abandoned update."""
        self._pending = []
        if self._state.closures_waiting is self:
            self._state.closures_waiting = None

    # ---- a micro-step whose update is not complete -------------------------------------------------------------------

    def evaluate_early(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Evaluate ``closure`` in a micro-step that does not end the update; return its value."""
        number = self._micro_step()
        if number and len(self._pending) >= number:
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) was called a second time in micro-step {number}, but "
                "optimizers only step in an update's last micro-step, so the second closure would not see the effect "
                "of the first step",
                where=self._where(),
                do="call it once per micro-step, or use one micro-step per update (remove gradient_accumulation_steps "
                "and max_micro_batch_size)",
            )
        self._require_every_micro_step(optimizer)
        self._require_sole_optimizer(optimizer)
        had_loss = self._state.has_loss
        value = self._evaluate(closure, clears=not self._pending)
        if had_loss and self._state.has_loss_in_closure:
            raise UsageError(
                "backward() was called for this batch both outside and inside the closure passed to "
                f"{type(optimizer).__name__}. An optimizer that steps twice per update (such as SAM) needs the gradients "
                "of the whole update for its first step, but this batch is only one of the update's micro-steps",
                where=self._where(),
                do="use one micro-step per update (remove gradient_accumulation_steps and max_micro_batch_size, and "
                "start more processes), or call backward() only in the closure",
            )
        self._pending.append(self._evaluated(value))
        self._state.closures_waiting = self
        return value

    # ---- the last micro-step -----------------------------------------------------------------------------------------

    def build_update_closure(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        *,
        finish: Callable[[], None],
        averages: bool,
    ) -> UpdateClosure:
        """Return the closure to pass to ``optimizer``.

        Args:
            optimizer: optimizer that steps.
            closure: the last micro-step's closure.
            finish: called after each evaluation, when the gradients are complete.
            averages: whether losses are averaged across ranks; otherwise each rank uses its own loss.
        """
        self._require_every_micro_step(optimizer)
        self._require_sole_optimizer(optimizer)
        pending, self._pending = self._pending, []
        self._state.closures_waiting = None
        return UpdateClosure(self, optimizer, closure, pending, finish=finish, averages=averages)

    def _require_every_micro_step(self, optimizer: Optimizer) -> None:
        number = self._micro_step()
        if number > 1 and len(self._pending) != number - 1:
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) was called in micro-step {number} of an update, but in "
                f"only {len(self._pending)} of the {number - 1} earlier ones. Each closure is evaluated on "
                "its own micro-step's batch, so the other batches would be ignored",
                where=self._where(),
                do="call step(closure) in every micro-step, not only when accelerator.sync_gradients is true; all "
                "calls except the last evaluate the closure without changing the parameters",
            )

    def _require_sole_optimizer(self, optimizer: Optimizer) -> None:
        others = self._state.closures_waiting
        if others is None or others is self:
            return
        raise UsageError(
            f"{type(optimizer).__name__}.step(closure) was called in an update that has several micro-steps and in which "
            "another optimizer also evaluated a closure. The gradients of both would accumulate, and each optimizer would "
            "step with the sum",
            where=self._where(),
            do="use one micro-step per update (remove gradient_accumulation_steps and max_micro_batch_size, and start "
            "more processes), or give each optimizer its own loop",
        )

    def _evaluate(self, closure: Callable[[], Any], *, clears: bool) -> Any:
        state = self._state
        self.clears, state.in_closure, state.has_loss_in_closure = clears, True, False
        try:
            with torch.enable_grad():
                return closure()
        finally:
            self.clears, state.in_closure = None, False

    def _micro_step(self) -> int:
        driver = self._driver()
        return self._state.micro_step if driver is None else driver.micro_step

    def _evaluated(self, value: Any) -> _Evaluation:
        driver = self._driver()
        num_items = None if driver is None else driver.num_items
        place = 0 if driver is None else driver.place[0]
        return _Evaluation(_number(value), 1.0 if num_items is None else num_items, place)

    def _driver(self) -> PassDriver[Any] | None:
        driver = self._state.reading.driver
        return driver if driver is not None and driver.drives else None

    @staticmethod
    def _where() -> str:
        return "optimizer.step(closure), in an update with several micro-steps"


class UpdateClosure:
    """The closure passed to the optimizer in the last micro-step, which returns the whole update's loss.

    Collective: evaluate on every rank.
    """

    def __init__(
        self,
        closures: Closures,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        pending: Sequence[_Evaluation],
        *,
        finish: Callable[[], None],
        averages: bool,
    ) -> None:
        self._closures = closures
        self._optimizer = optimizer
        self._closure = closure
        self._pending = pending
        self._finish = finish
        self._averages = averages
        self._ahead: list[Any] = []
        self._versions: list[tuple[int, int]] = []
        self.num_evaluations = 0
        self.first: Any = None
        """Value returned by the first evaluation."""
        if pending:
            # Evaluate before the step, so that the gradients of all micro-steps are reduced before the step guard checks them.
            self._ahead.append(self._evaluate())
            self._versions = self._parameter_versions()

    def __call__(self) -> Any:
        if self._ahead:
            if self._parameter_versions() != self._versions:
                raise self._unsupported_error("changes the parameters before it evaluates its closure")
            return self._ahead.pop()
        if self._pending:
            raise self._unsupported_error("evaluates its closure again with different parameters")
        return self._evaluate()

    def require_evaluated(self) -> None:
        """Raise if the optimizer stepped without evaluating its closure, and therefore without the last micro-step."""
        if self._ahead:
            raise self._unsupported_error("does not evaluate its closure")

    def _evaluate(self) -> Any:
        closures = self._closures
        driver = closures._driver()
        is_first = self.num_evaluations == 0
        with nullcontext() if is_first or driver is None else driver.evaluating_again(type(self._optimizer).__name__):
            value = closures._evaluate(self._closure, clears=not self._pending)
        self._finish()
        value = self._mean(value)
        if self.num_evaluations == 0:
            self.first = value
        self.num_evaluations += 1
        return value

    def _mean(self, value: Any) -> Any:
        """Return the mean over the update's micro-steps and ranks, as a tensor if ``value`` is one."""
        world = self._closures._world
        is_alone = world is None or world.world_size == 1 or not self._averages
        if value is None or (is_alone and not self._pending):
            return value
        own = [*self._pending, self._closures._evaluated(value)]
        driver = self._closures._driver()
        sums = [0.0] * (1 if driver is None else driver.place[1])
        for one in own:
            if one.weight:  # a micro-batch without items has a NaN mean
                sums[one.place] += one.value * one.weight
        sums.append(sum(one.weight for one in own))
        if not is_alone:
            assert world is not None
            summed = torch.tensor(sums, dtype=torch.float64, device=world.device)
            dist.all_reduce(summed, group=world.group)
            sums = summed.tolist()  # on the host, because optimizers compare losses there
        mean = math.fsum(sums[:-1]) / sums[-1] if sums[-1] else float("nan")
        return value.detach().new_tensor(mean) if isinstance(value, torch.Tensor) else mean

    def _parameter_versions(self) -> list[tuple[int, int]]:
        own = [getattr(p, "_local_tensor", p) for group in self._optimizer.param_groups for p in group["params"]]
        return [(p._version, p.data_ptr()) for p in own]

    def _unsupported_error(self, does: str) -> UsageError:
        return UsageError(
            f"{type(self._optimizer).__name__} {does}, but this update has {len(self._pending) + 1} micro-steps, and "
            "the earlier batches are no longer available to their closures",
            where=self._closures._where(),
            do="use one micro-step per update (remove gradient_accumulation_steps and max_micro_batch_size, and start "
            "more processes), or an optimizer that evaluates its closure once, with the current parameters (LBFGS: "
            "max_iter=1)",
        )


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value) if value is not None else float("nan")
