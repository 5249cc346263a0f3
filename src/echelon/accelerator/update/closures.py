"""``optimizer.step(closure)`` in updates of several micro-steps, on several ranks: what a closure is evaluated for, and when.

A plain loop gives a closure to each step, and the optimizer evaluates it: once (SGD), or as often as it likes (LBFGS). Here
an update may consist of several micro-steps, each with a closure of its own batch. Each is evaluated in its own micro-step,
while its batch is there; the optimizer, which steps in the last one, is told the mean loss of all of them on all ranks.
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

__all__ = ["Closures"]


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """What a closure returned in a micro-step, and what it counts."""

    value: float
    weight: float
    place: int
    """Where it is added."""


class Closures:
    """The closures of one optimizer.

    Args:
        state: the counters of the accumulation window.
        world: whose losses are averaged.
    """

    def __init__(self, state: GradientState, world: World | None) -> None:
        self._state = state
        self._world = world
        self._waiting: list[_Evaluated] = []  # of the micro-steps whose step was left to the end of the update
        self.clears: bool | None = None
        """Inside a closure: does ``zero_grad`` clear, because the update has no gradients of other micro-steps? None: outside."""

    def forget(self) -> None:
        """The update was given up, with its gradients."""
        self._waiting = []
        if self._state.closures_waiting is self:
            self._state.closures_waiting = None

    # ---- a micro-step whose update is not complete -------------------------------------------------------------------

    def evaluate_for_later(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Evaluate ``closure`` for an update that is still to come; return what it returns."""
        number = self._micro_step()
        if number and len(self._waiting) >= number:
            raise UsageError(
                f"step(closure) of {type(optimizer).__name__} is called a second time in micro-step {number}, and all steps of "
                "an update are taken in the last one: the second closure would not see what the first step did",
                where=self._where(),
                do="call it once in each micro-step, or let an update be one micro-step (no gradient_accumulation_steps and "
                "no max_micro_batch_size)",
            )
        self._require_each(optimizer)
        self._require_alone(optimizer)
        had_loss = self._state.has_loss
        value = self._evaluate(closure, clears=not self._waiting)
        if had_loss and self._state.has_loss_in_closure:
            raise UsageError(
                "the closure backpropagates the batch a second time, after a backward() of it outside the closure: an "
                f"optimizer of two steps ({type(optimizer).__name__}) needs the gradients of the whole update in between",
                where=self._where(),
                do="let an update be one micro-step: no gradient_accumulation_steps and no max_micro_batch_size (more "
                "processes instead), or call backward() in the closure alone",
            )
        self._waiting.append(self._evaluated(value))
        self._state.closures_waiting = self
        return value

    # ---- the last micro-step -----------------------------------------------------------------------------------------

    def of_update(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        *,
        finish: Callable[[], None],
        averages: bool,
    ) -> UpdateClosure:
        """Return the closure that ``optimizer`` is to be given.

        Args:
            optimizer: it.
            closure: of the last micro-step.
            finish: called after each evaluation: the gradients are there.
            averages: over the ranks; False: each steps by its own gradients.
        """
        self._require_each(optimizer)
        self._require_alone(optimizer)
        waiting, self._waiting = self._waiting, []
        self._state.closures_waiting = None
        return UpdateClosure(self, optimizer, closure, waiting, finish=finish, averages=averages)

    def _require_each(self, optimizer: Optimizer) -> None:
        number = self._micro_step()
        if number > 1 and len(self._waiting) != number - 1:
            raise UsageError(
                f"step(closure) of {type(optimizer).__name__} is called in micro-step {number} of an update, and in "
                f"{len(self._waiting)} of the {number - 1} before: a closure is evaluated for the batch of its own micro-step, "
                "so the batches of the others would not count",
                where=self._where(),
                do="call step(closure) in each micro-step, not only where accelerator.sync_gradients is true: all steps but "
                "the last evaluate the closure and leave the parameters alone",
            )

    def _require_alone(self, optimizer: Optimizer) -> None:
        others = self._state.closures_waiting
        if others is None or others is self:
            return
        raise UsageError(
            f"step(closure) of {type(optimizer).__name__} is called in an update of several micro-steps in which another "
            "optimizer has evaluated closures, too: the gradients of both would be added up, and each would step with those "
            "of the other",
            where=self._where(),
            do="let an update be one micro-step (no gradient_accumulation_steps and no max_micro_batch_size; more processes "
            "instead), or give each optimizer a loop of its own",
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

    def _evaluated(self, value: Any) -> _Evaluated:
        driver = self._driver()
        num_items = None if driver is None else driver.num_items
        place = 0 if driver is None else driver.place[0]
        return _Evaluated(_number(value), 1.0 if num_items is None else num_items, place)

    def _driver(self) -> PassDriver[Any] | None:
        driver = self._state.reading.driver
        return driver if driver is not None and driver.drives else None

    @staticmethod
    def _where() -> str:
        return "optimizer.step(closure), in an update of several micro-steps"


class UpdateClosure:
    """What an optimizer evaluates in the place of the closure of the last micro-step: the loss of the whole update.

    Collective: each evaluation, on several ranks.
    """

    def __init__(
        self,
        closures: Closures,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        waiting: Sequence[_Evaluated],
        *,
        finish: Callable[[], None],
        averages: bool,
    ) -> None:
        self._closures = closures
        self._optimizer = optimizer
        self._closure = closure
        self._waiting = waiting
        self._finish = finish
        self._averages = averages
        self._ahead: list[Any] = []
        self._versions: list[tuple[int, int]] = []
        self.num_evaluations = 0
        self.first: Any = None
        """What the first evaluation returned."""
        if waiting:
            # Before the step: the gradients of all micro-steps are complete, and reduced, when the step guard looks at them.
            self._ahead.append(self._evaluate())
            self._versions = self._now()

    def __call__(self) -> Any:
        if self._ahead:
            if self._now() != self._versions:
                raise self._refused("changes the parameters before it evaluates its closure")
            return self._ahead.pop()
        if self._waiting:
            raise self._refused("evaluates its closure again, at other parameters")
        return self._evaluate()

    def require_evaluated(self) -> None:
        """After the step: an optimizer that leaves its closure alone has not seen the last micro-step."""
        if self._ahead:
            raise self._refused("does not evaluate its closure")

    def _evaluate(self) -> Any:
        closures = self._closures
        driver = closures._driver()
        is_first = self.num_evaluations == 0
        with nullcontext() if is_first or driver is None else driver.evaluating_again(type(self._optimizer).__name__):
            value = closures._evaluate(self._closure, clears=not self._waiting)
        self._finish()
        value = self._mean(value)
        if self.num_evaluations == 0:
            self.first = value
        self.num_evaluations += 1
        return value

    def _mean(self, value: Any) -> Any:
        """Return the mean of what the closures of the update returned on all ranks, as a tensor where ``value`` is one."""
        world = self._closures._world
        is_alone = world is None or world.world_size == 1 or not self._averages
        if value is None or (is_alone and not self._waiting):
            return value
        own = [*self._waiting, self._closures._evaluated(value)]
        driver = self._closures._driver()
        sums = [0.0] * (1 if driver is None else driver.place[1])
        for one in own:
            if one.weight:  # else a piece without items, whose mean is NaN
                sums[one.place] += one.value * one.weight
        sums.append(sum(one.weight for one in own))
        if not is_alone:
            assert world is not None
            summed = torch.tensor(sums, dtype=torch.float64, device=world.device)
            dist.all_reduce(summed)
            sums = summed.tolist()  # on the host: optimizers that look at losses do so there
        mean = math.fsum(sums[:-1]) / sums[-1] if sums[-1] else float("nan")
        return value.detach().new_tensor(mean) if isinstance(value, torch.Tensor) else mean

    def _now(self) -> list[tuple[int, int]]:
        own = [getattr(p, "_local_tensor", p) for group in self._optimizer.param_groups for p in group["params"]]
        return [(p._version, p.data_ptr()) for p in own]

    def _refused(self, does: str) -> UsageError:
        return UsageError(
            f"{type(self._optimizer).__name__} {does}, and this update consists of {len(self._waiting) + 1} micro-steps: the "
            "batches of the earlier ones are gone, so their closures cannot be evaluated there",
            where=self._closures._where(),
            do="let an update be one micro-step (no gradient_accumulation_steps and no max_micro_batch_size, more processes "
            "instead); or use an optimizer that evaluates its closure once, at the parameters it finds (LBFGS: max_iter=1)",
        )


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value) if value is not None else float("nan")
