"""Decides which updates are checked, observes them, and reports what differs from the update of one process.

An update is observed from the last backward pass of the update before it (batches, forward passes) to the first backward pass of the
one after it, when the ranks compare what they saw: every rank reaches the same backward passes, even if it steps too often or not at
all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.prepared_objects import PreparedObjects
from echelon.accelerator.update.live_check.comparison import UpdateComparison, allowed_factor, those
from echelon.accelerator.update.live_check.gradient_ledger import GradientLedger, roundoff, watched_parameters
from echelon.accelerator.update.live_check.observation import (
    ClipCall,
    LossWeight,
    Observation,
    OptimizerSteps,
)
from echelon.accelerator.update.live_check.optimizer_twin import OptimizerTwin
from echelon.accelerator.update.update_policy import UpdatePolicy
from echelon.base.errors import VerificationError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import user_line, warn
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.data.global_batch_slices import Contribution
from echelon.data.loader import PreparedLoader
from echelon.distributed.checks.data_fingerprint import row_fingerprints
from echelon.distributed.checks.finding import Finding
from echelon.distributed.checks.sketch import NUM_BUCKETS, generator_hash
from echelon.engines.base import Engine
from echelon.engines.delegating_engine import DelegatingEngine
from echelon.world.world import World


class LiveCheck(DelegatingEngine):
    """Checks every N-th update of one run: wraps its engine, and the backward passes of its update policy.

    Args:
        inner: the run's engine.
        config: the run's settings, with ``verify_every`` and ``verify_action``.
        world: the ranks.
        state: gradient accumulation state.
        objects: the prepared objects.
        scaler: gradient scaler, in an fp16 run.
    """

    def __init__(
        self,
        inner: Engine,
        *,
        config: Resolved[RunConfig],
        world: World,
        state: GradientState,
        objects: PreparedObjects,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__(inner)
        self._config = config
        self._world = world
        self._state = state
        self._objects = objects
        self._scaler = scaler
        self._is_exact = config.value.parity != "off"
        self._every = config.value.verify_every or 0
        self.num_checks = 0
        """Number of updates compared so far."""
        self.compared: set[str] = set()
        """Stages for which the latest checks had something to compare."""
        self._warned_of_masks = False
        self._restart()

    def _restart(self) -> None:
        self._num_synced = 0  # backward passes that ended an update
        self._next = self._every - 1  # value of _num_synced after which the next update is observed
        self._pending: Observation | None = None  # has seen no backward pass
        self._current: Observation | None = None
        self._missing: set[int] = set()  # optimizers that this check has not seen stepping
        self._num_left = 0  # updates in which they may still step
        self._carried_rows: list[Any] = []
        self._was_joined = False
        self._steps_counted = -1
        self._hooked: list[Any] = []
        self._loss: torch.Tensor | None = None  # of the running backward pass
        self._num_items: float | None = None
        self._is_finished = False
        self._factor = 1.0  # by which the gradients of the last backward pass were multiplied
        self._num_no_sync = 0  # open ``no_sync`` contexts

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> LiveCheck:
        """See ``Engine.from_options``; ``options`` has the other arguments of the constructor."""
        return cls(world=world, scaler=scaler, **options)

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("_contribution", "_policy", "_pending", "_current", "_hooked", "_carried_rows")
        return {name: value for name, value in vars(self).items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._restart()

    def attach(self, policy: UpdatePolicy, contribution: Callable[[], Contribution | None] | None) -> None:
        """Set the policy whose updates are checked.

        Args:
            policy: runs the backward passes.
            contribution: returns the current batch's share of its update. None outside the exact modes.
        """
        self._policy = policy
        self._contribution = contribution
        if self._next == 0:
            self._prepare()

    # ---- which updates -----------------------------------------------------------------------------------------------

    def run_backward(self, loss: torch.Tensor, num_items: float | None, kwargs: Mapping[str, Any]) -> None:
        """Run the policy's ``backward``, observed if it belongs to an update that is checked.

        Collective in the first backward pass after such an update.

        Raises:
            VerificationError: the update was not the update of one process, and ``verify_action`` is ``stop``.
        """
        if self._state.reading.joined:  # the ranks may run different numbers of updates
            self.forget()
        if self._current is None and self._pending is None:
            self._policy.backward(loss, num_items, kwargs)
        else:
            self._run_observed(loss, num_items, kwargs)
        if self._state.sync_gradients and not self._num_no_sync:
            self._count()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self._num_no_sync += 1
        try:
            with self.inner.no_sync(model):
                yield
        finally:
            self._num_no_sync -= 1

    def _count(self) -> None:
        """Count a backward pass that ends an update; they are the same on all ranks."""
        if self._state.reading.joined:
            self._was_joined = True
            return
        if self._state.in_closure:
            num_steps = sum(optimizer.num_steps for optimizer in self._objects.optimizers)
            if num_steps == self._steps_counted:
                return  # the optimizer evaluates its closure again
            self._steps_counted = num_steps
        if self._was_joined:
            self._was_joined, self._num_synced, self._next = False, 0, self._every - 1
        self._num_synced += 1
        if self._num_synced >= self._next:
            # With several optimizers that take turns, the same one would be checked each time.
            self._next = self._num_synced + self._every + (len(self._objects.optimizers) > 1)
            self._missing = set(range(len(self._objects.optimizers)))
            self._num_left = 2 * len(self._missing)
            self._prepare()

    def _prepare(self) -> None:
        """Observe the batches and forward passes that come before the update's first backward pass."""
        if self._pending is None:
            self._pending = Observation()
            self._hook_models()

    def _hook_models(self) -> None:
        if self._world.world_size == 1 or self._hooked:
            return
        for number, model in enumerate(self._objects.models):
            prefix = f"model {number}: " if len(self._objects.models) > 1 else ""
            inner = self.inner.unwrap(model)
            self._hooked.append(inner.register_forward_pre_hook(_BeforeForward(self, prefix, model)))

    def before_forward(self, prefix: str, model: nn.Module, inner: nn.Module) -> None:
        """Observe a forward pass of the module ``inner`` in the prepared ``model``."""
        observed = self._pending
        if observed is None or not inner.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if not any(name.startswith(prefix) for name in observed.forward.buffers) or not observed.forward.is_complete:
            observed.forward.add(prefix, model, self.inner, self._world.device)

    def drop_update(self) -> None:
        self.inner.drop_update()
        self.forget()

    def forget(self) -> None:
        """Drop what was observed."""
        self._pending = self._current = None
        for hook in self._hooked:
            hook.remove()
        self._hooked.clear()

    def finish(self) -> None:
        """Check an update that is still open at the end of the run. Collective."""
        current = self._current
        if current is not None and current.is_synced and not self._state.reading.joined:
            self._end(current)
        self.forget()

    # ---- a backward pass of an observed update -----------------------------------------------------------------------

    def _run_observed(self, loss: torch.Tensor, num_items: float | None, kwargs: Mapping[str, Any]) -> None:
        current = self._current
        if current is not None and current.is_synced and not (self._state.in_closure and not current.num_steps):
            self._end(current)
        if self._current is None:
            self._current, self._pending = self._pending, None
            if self._current is None and self._missing and self._num_left > 0:
                self._current = Observation()
            if self._current is None:
                self.forget()
                self._policy.backward(loss, num_items, kwargs)
                return
            self._begin(self._current)
        observed = self._current
        if observed.forward.is_complete and not observed.draws_masks:
            observed.draws_masks = generator_hash(self._world.device) != observed.forward.generator
        observed.ledger.begin_backward(keeps_gradients=self._policy.averages_gradients)
        if not self._policy.averages_gradients:
            observed.ledger.undo_multiply()
            observed.losses = [replace(one, weight=one.weight / self._factor) for one in observed.losses]
        self._factor = 1.0
        observed.ledger.is_reduced[:] = False
        self._loss, self._num_items, self._is_finished = loss, num_items, False
        try:
            self._policy.backward(loss, num_items, kwargs)
        finally:
            self._loss = None
        if self._state.sync_gradients and not self._num_no_sync:
            observed.is_synced = True
            is_inside = self._policy.accumulating is not None or self._policy.drives
            observed.num_micro_steps = self._policy.window.num_micro_steps if is_inside else None
            if all(self.inner.reduced(model) for model in self._objects.models):
                observed.ledger.take_reduced()

    def _begin(self, observed: Observation) -> None:
        stepped = (p for one in self._objects.optimizers for group in one.param_groups for p in group["params"])
        watched = watched_parameters(self.inner, self._objects.models, stepped)
        observed.ledger = GradientLedger(watched, self.inner)
        observed.update = self._objects.num_steps() + 1
        observed.is_whole = self._policy.window.num_micro_steps <= 1

    def _note_padding(self, observed: Observation) -> None:
        contribution = None if self._contribution is None else self._contribution()
        # At the end of a pass, samples may be repeated on purpose (even_batches).
        is_at_end = any(loader.end_of_dataloader for loader in self._state.reading.loaders)
        if is_at_end if contribution is None else contribution.is_padding:
            observed.has_padding = True

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        with self._observing(loss, is_zero=False):
            self.inner.backward(loss, model, **options)

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        with self._observing(loss, is_zero=True):
            self.inner.backward_zeros(loss, parameters, **options)

    @contextmanager
    def _observing(self, loss: torch.Tensor, *, is_zero: bool) -> Iterator[None]:
        observed = self._current
        if observed is None:
            yield
            return
        self._note_padding(observed)
        self._note_weight(observed, loss, is_zero=is_zero)
        with observed.ledger.observing(adds_zeros=is_zero):
            yield

    def _note_weight(self, observed: Observation, scaled: torch.Tensor, *, is_zero: bool) -> None:
        loss = self._loss
        if loss is None or loss.numel() != 1 or not observed.is_whole:
            return
        value = float(loss.detach())
        weight = 0.0 if is_zero else float(scaled.detach()) / value if value and math.isfinite(value) else math.nan
        contribution = None if self._contribution is None else self._contribution()
        num_items = self._num_items
        if contribution is not None:
            num_items = 0.0 if contribution.is_padding else contribution.num_items if num_items is None else num_items
        micro_step = self._policy.window.num_micro_steps
        line = str(user_line())
        observed.losses.append(LossWeight(micro_step, weight, num_items, roundoff(loss.dtype), line))

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        self.inner.finish_gradients(model, factor)
        observed = self._current
        if observed is not None:
            observed.ledger.multiply(model.parameters(), factor)
            if not self._is_finished:
                self._is_finished, self._factor = True, factor
                observed.ledger.multiply(self._objects.stray_parameters(), factor)
                observed.losses = [replace(one, weight=one.weight * factor) for one in observed.losses]

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        self.inner.zero_grad(optimizer, set_to_none=set_to_none)
        observed = self._current
        if observed is not None and not observed.num_steps:
            observed.ledger.clear(observed.ledger.numbers(_parameters_of(optimizer)))
            observed.losses.clear()

    # ---- between the backward pass and the step ----------------------------------------------------------------------

    def _synced(self) -> Observation | None:
        """Return the observed update if its gradients are reduced."""
        observed = self._current
        return observed if observed is not None and observed.is_synced and not observed.is_abandoned else None

    def _is_reduced(self) -> bool:
        return all(self.inner.reduced(model) for model in self._objects.models)

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        observed = self._synced()
        numbers = [] if observed is None else observed.ledger.numbers(_parameters_of(optimizer))
        if observed is not None:
            observed.ledger.note_changes(numbers)
        self.inner.unscale(optimizer, unsynced=unsynced)
        if observed is not None:
            observed.ledger.now(numbers)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        chosen, inner, observed = list(parameters), self.inner, self._current
        if observed is None or observed.is_abandoned:
            return inner.clip_grad_norm(chosen, max_norm, norm_type, unsynced=unsynced)
        ledger = observed.ledger
        numbers = ledger.numbers(chosen)
        if not observed.is_synced or unsynced:
            norm = inner.clip_grad_norm(chosen, max_norm, norm_type, unsynced=unsynced)
            self._note_early_clip(observed, chosen, float(norm), max_norm)
            return norm
        if not self._is_reduced():
            observed.is_abandoned = True  # the step guard is about to reduce the gradients
            return inner.clip_grad_norm(chosen, max_norm, norm_type)
        late = [i for i in numbers if ledger.watched[i].is_late]
        if late:
            inner.clip_grad_norm(chosen, math.inf, norm_type)  # reduces them, and changes nothing
            ledger.take_reduced(late)
        ledger.note_changes(numbers)
        before = ledger.now(numbers)
        own = self._power(ledger, numbers, before, norm_type)
        norm = inner.clip_grad_norm(chosen, max_norm, norm_type)
        num_present = sum(one.grad is not None for one in chosen)
        is_whole = num_present <= len(numbers) and not bool(ledger.is_unknown[numbers].any())
        if math.isfinite(own) and is_whole:
            observed.clips.append(
                ClipCall(
                    norm=float(norm),
                    norm_type=norm_type,
                    own=own,
                    num_elements=sum(ledger.watched[i].num_elements for i in numbers),
                    roundoff=max(roundoff(norm.dtype), *ledger.roundoffs[numbers].tolist()),
                    line=str(user_line()),
                )
            )
        self._compare_clipped(observed, numbers, before, float(norm), max_norm)
        return norm

    def _note_early_clip(
        self, observed: Observation, parameters: list[torch.Tensor], norm: float, max_norm: float
    ) -> None:
        """Note that gradients were clipped before they were complete."""
        coefficient = _coefficient(norm, max_norm)
        if coefficient == 1.0:
            return
        observed.ledger.multiply(parameters, coefficient)
        if self._world.world_size > 1:
            self._add(
                observed,
                stage="clip",
                what="clip_grad_norm_() was called in the middle of an update, so each rank clipped by the norm of its own "
                "gradients, before they were reduced",
                do="clip only if accelerator.sync_gradients is true",
            )

    def _add(self, observed: Observation, **facts: Any) -> None:
        """Add what this rank finds alone."""
        rank, line = self._world.rank, str(user_line())
        observed.found.append(Finding(update=observed.update, **facts, ranks=[rank], line=line))

    def _power(self, ledger: GradientLedger, numbers: list[int], before: torch.Tensor, norm_type: float) -> float:
        """Return this rank's share of the sum of the elements' powers."""
        if norm_type != 2.0:
            return math.nan
        mean = 1 / self._world.world_size
        shares = [ledger.watched[i].share if ledger.watched[i].is_sharded else mean for i in numbers]
        return math.fsum(square * share for square, share in zip(before[:, NUM_BUCKETS].tolist(), shares))

    def _compare_clipped(
        self, observed: Observation, numbers: list[int], before: torch.Tensor, norm: float, max_norm: float
    ) -> None:
        """Compare the clipped gradients with the previous ones, multiplied by the coefficient."""
        ledger, coefficient = observed.ledger, _coefficient(norm, max_norm)
        after = ledger.now(numbers)[:, :NUM_BUCKETS]
        if coefficient == 1.0 and torch.equal(after, before[:, :NUM_BUCKETS]):
            return
        expected = before[:, :NUM_BUCKETS] * coefficient
        distances = torch.linalg.vector_norm(after - expected, dim=1)
        # The coefficient has 3 roundings (addition, division, its dtype), and its product with an element one.
        factor = allowed_factor(len(numbers) * NUM_BUCKETS, number=self.num_checks + 1)
        roundoffs = ledger.roundoffs[numbers].clamp(min=roundoff(torch.float32))
        allowed = factor * 4 * (roundoffs * before[:, NUM_BUCKETS].sqrt() * coefficient + ledger.spacings[numbers])
        bad = [numbers[place] for place in (distances > allowed).nonzero().flatten().tolist()]
        if bad and math.isfinite(norm):
            tensors = [ledger.watched[i].name for i in bad]
            self._add(
                observed,
                stage="clip",
                what=f"clip_grad_norm_() did not multiply the gradient of {those(tensors)} by min(1, max_norm / norm) = "
                f"{coefficient:.6g}",
                do="report this as a bug of echelon, with the engine and the loop",
                tensors=tensors,
            )

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        chosen = list(parameters)
        self.inner.clip_grad_value(chosen, clip_value, unsynced=unsynced)
        observed = self._synced()
        if observed is not None:
            observed.ledger.now(observed.ledger.numbers(chosen))

    # ---- the step ----------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        inner, observed = self.inner, self._current
        if closure is not None:
            has_stepped = inner.step(optimizer, closure=closure, unsynced=unsynced)
            observed = self._synced()  # the closure's backward pass may have begun the update
            if observed is not None:
                if unsynced:
                    observed.is_abandoned = True
                else:
                    steps = self._note_step(observed, optimizer, has_stepped=has_stepped)
                    steps.settings = _settings_of(optimizer)
            return has_stepped
        if observed is None or observed.is_abandoned:
            return inner.step(optimizer, unsynced=unsynced)
        if unsynced or not observed.is_synced or not self._is_reduced():
            observed.is_abandoned = True  # the step guard reduces the gradients, or nobody does
            return inner.step(optimizer, unsynced=unsynced)
        ledger = observed.ledger
        early = [i for i in ledger.numbers(_parameters_of(optimizer)) if not ledger.watched[i].is_late]
        if self._scaler is not None:
            self.unscale(optimizer)
        if self._world.world_size > 1:
            if not observed.steps:
                ledger.note_changes(range(len(ledger.watched)))  # to compare them with the changes on other ranks
            # Late parameters are shared by the first step.
            observed.hash_values("weights", early, [ledger.watched[i].parameter for i in early])
        is_first = not any(steps.optimizer is optimizer for steps in observed.steps.values())
        settings = _settings_of(optimizer) if is_first else {}
        candidates = [(i, ledger.watched[i].parameter) for i in early] if is_first else ()
        twin = OptimizerTwin(optimizer, inner.stepping_optimizer(optimizer), candidates, number=self.num_checks)
        has_stepped = inner.step(optimizer, unsynced=unsynced)
        steps = self._note_step(observed, optimizer, has_stepped=has_stepped)
        if is_first:
            steps.settings = settings
        if has_stepped:
            self._compare_twin(observed, optimizer, twin)
        return has_stepped

    def _note_step(self, observed: Observation, optimizer: Optimizer, *, has_stepped: bool) -> OptimizerSteps:
        ledger = observed.ledger
        wrapped = [one.optimizer for one in self._objects.optimizers]
        index = next((i for i, one in enumerate(wrapped) if one is optimizer), len(wrapped))
        numbers = ledger.numbers(_parameters_of(optimizer))
        steps = observed.steps.get(index)
        if steps is None:
            steps = observed.steps[index] = OptimizerSteps(optimizer, line=str(user_line()))
        steps.num_steps += 1
        steps.num_skipped += not has_stepped
        self._missing.discard(index)
        late = [i for i in numbers if ledger.watched[i].is_late and not ledger.is_reduced[i]]
        if late:
            ledger.take_reduced(late)
        if self._world.world_size > 1:
            parameters = [ledger.watched[i].parameter for i in numbers]
            if has_stepped:
                observed.hash_values("gradient", numbers, [parameter.grad for parameter in parameters])
            observed.hash_values("after", numbers, parameters)
        return steps

    def _compare_twin(self, observed: Observation, optimizer: Optimizer, twin: OptimizerTwin) -> None:
        different = twin.compare()
        if different:
            names = [observed.ledger.watched[i].name for i, _ in different]
            self._add(
                observed,
                stage="optimizer",
                what=f"{type(optimizer).__name__} did not update {those(names)} by what the same step gives on copies of weight, "
                "gradient and state",
                do="do not change weights or optimizer state inside step() (hooks, a replaced step method), and call it once",
                tensors=names,
                difference=max(difference for _, difference in different),
            )

    # ---- the comparison ----------------------------------------------------------------------------------------------

    def _end(self, observed: Observation) -> None:
        """Compare what the ranks observed, unless the update continues. Collective."""
        comparison = UpdateComparison(
            observed,
            number=self.num_checks + 1,
            rank=self._world.rank,
            world_size=self._world.world_size,
            averages=self._policy.averages_gradients,
            carried_rows=self._carried_rows,
        )
        found = comparison.run(is_exact=self._is_exact)
        if not comparison.is_over:
            return
        self._current = None
        self.num_checks += 1
        self.compared |= comparison.compared
        self._num_left -= 1
        self._carried_rows = [*self._carried_rows, *observed.rows] if comparison.suspects_duplicates else []
        if self._carried_rows:
            self._num_left, self._missing = 1, {-1}  # look at the next update, too
        else:
            self._missing.discard(-1)
        if comparison.has_equal_masks and not self._is_exact:
            self._warn_of_equal_masks()
        if found:
            self._report(found)

    def _warn_of_equal_masks(self) -> None:
        if not self._warned_of_masks:
            self._warned_of_masks = True
            warn(
                _(
                    "verify_every: the ranks draw the same dropout masks, because their generators have the same state. To draw a mask for "
                    "each sample as one process does, call set_seed(seed, device_specific=True) after the model is built"
                )
            )

    def _report(self, found: list[Finding]) -> None:
        first, *others = found
        stages = list(dict.fromkeys(one.stage for one in others if one.stage != first.stage))
        also = f" (later stages differ, too: {', '.join(stages)})" if stages else ""
        what = f"update {first.update} is not the update that one process makes with the same batch: {first.what}{also}"
        ranks = [those(first.ranks, "rank")] if first.ranks else []
        origin = self._config.origins["verify_every"]
        place = [f"stage {first.stage}", *ranks, *([first.line] if first.line else [])]
        where = f"{', '.join(place)}, verify_every={self._every} (from {origin})"
        if self._config.value.verify_action != "warn":
            self.forget()
            raise VerificationError(what, where=where, do=first.do)
        warn(_("{what}. Where: {where}. To fix it: {do}", what=what, where=where, do=first.do))

    def note_batch(self, loader: PreparedLoader, batch: Any) -> None:
        """Observe the samples of a batch that a loop receives."""
        observed = self._pending or self._current
        if observed is None or observed.is_synced or self._world.world_size == 1:
            return
        self._hook_models()  # they may have been prepared after the last backward pass
        facts = loader.facts
        if facts is None or facts.trains:
            rows = row_fingerprints(batch)
            if rows is not None:
                observed.rows.append(rows)


class _BeforeForward:
    """Forward pre-hook. Copies of a model, also pickled ones, have a hook that does nothing."""

    __slots__ = ("_check", "_model", "_prefix")

    def __init__(self, check: LiveCheck | None = None, prefix: str = "", model: nn.Module | None = None) -> None:
        self._check = check
        self._prefix = prefix
        self._model = model

    def __call__(self, inner: nn.Module, _inputs: Any) -> None:
        if self._check is not None and self._model is not None:
            self._check.before_forward(self._prefix, self._model, inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()


def _coefficient(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _settings_of(optimizer: Optimizer) -> dict[str, float]:
    """Return the numeric settings of the parameter groups, such as learning rates."""
    found: dict[str, float] = {}
    for i, group in enumerate(optimizer.param_groups):
        suffix = f" of parameter group {i}" if len(optimizer.param_groups) > 1 else ""
        for name, value in group.items():
            for place, number in enumerate(value if isinstance(value, tuple) and name != "params" else [value]):
                if isinstance(number, (int, float)) or (isinstance(number, torch.Tensor) and number.numel() == 1):
                    found[f"{name}{f'[{place}]' if isinstance(value, tuple) else ''}{suffix}"] = float(number)
    return found
