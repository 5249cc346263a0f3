"""A run's epochs: the current epoch, the progress within it, and the loop that resumes from that position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.preemption import PreemptionHandler
from echelon.accelerator.prepared_objects import PreparedObjects
from echelon.accelerator.rng_states import current_random_states, restore_random_states
from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.progress import Progress
from echelon.data.active_loaders import PassFacts, PassTracker
from echelon.data.loader import PreparedLoader

_logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)  # not frozen, which would triple the construction time
class _Update:
    """The position at which the current update started."""

    owner: PreparedLoader
    """Loader that yielded the update's first batch."""
    records: dict[int, dict[str, Any] | None]
    """Each loader's position, by the id of its source."""
    draws: dict[int, dict[str, Any] | None]
    """RNG state from which each loader drew its next batch, by the id of its source."""
    random_states: dict[str, Any]


class Epochs(PassTracker[PreparedLoader]):
    """The epochs of one Accelerator.

    Args:
        state: gradient accumulation state; its loaders report to this object.
        progress: progress of the run; outside the exact modes, this object sets its epoch.
        objects: the prepared objects.
        preemption: handler that may stop the run at the end of an update or epoch.
        is_exact: whether the update policy itself tracks the position of an update.
        device_type: the type of this process's device.
        on_batch: observes the loaders' batches.
    """

    def __init__(
        self,
        *,
        state: GradientState,
        progress: Progress,
        objects: PreparedObjects,
        preemption: PreemptionHandler,
        is_exact: bool,
        device_type: str,
        on_batch: Callable[[PreparedLoader, Any], None] | None = None,
    ) -> None:
        self._on_batch = on_batch
        self._state = state
        self._progress = progress
        self._objects = objects
        self._preemption = preemption
        self._is_exact = is_exact
        self._device_type = device_type
        self._num_at_boundary = 0  # steps at the last boundary
        self._epoch: int | None = None  # of the active loop over epochs
        self._next: int | None = None  # epoch in which a run without training loaders continues
        self.update_begin: _Update | None = None
        """Where the current update started; None if it has only one micro-step, or after its last one."""
        self._loaded_random_states: dict[str, Any] | None = None  # from the start of an incomplete update
        state.reading.tracker = self

    # ---- PassTracker: events of the loaders --------------------------------------------------------------------------

    def begin_pass(self, loader: PreparedLoader) -> PassFacts:
        trains = torch.is_grad_enabled() and (
            not self._objects.models or any(model.training for model in self._objects.models)
        )
        epoch = loader.iteration if self._epoch is None else self._epoch
        if trains and not self._is_exact:
            self._progress.epoch = epoch
        before = loader.facts
        return PassFacts(epoch=epoch, trains=trains, outlives_epochs=before is not None and before.outlives_epochs)

    def begin_batch(self, loader: PreparedLoader, batch: Any) -> None:
        """Record where an update with several micro-steps starts; the exact modes do this themselves."""
        if self._on_batch is not None:
            self._on_batch(loader, batch)
        state = self._state
        if self._is_exact or not state.sync_gradients or (state.plugin.num_steps or 1) == 1:
            return
        facts = loader.facts
        if facts is None or not facts.trains:
            return
        if self.update_begin is not None and self.update_begin.owner is not loader:
            return  # a batch of another loader for the same update
        reading = state.reading.loaders
        self.update_begin = _Update(
            owner=loader,
            records={id(one.source): one.record_now(num_unused=int(one is loader)) for one in reading},
            draws={id(one.source): one.rng_state(num_unused=int(one is loader)) for one in reading},
            random_states=current_random_states(self._device_type),
        )

    def end_batch(self, loader: PreparedLoader) -> None:
        """See ``PassTracker``; the run may stop here, between two updates."""
        state = self._state
        if not state.sync_gradients:
            return
        optimizers = self._objects.optimizers
        num_steps = optimizers[0].num_steps if len(optimizers) == 1 else self._objects.num_steps()
        is_new_step, self._num_at_boundary = num_steps != self._num_at_boundary, num_steps
        if self._preemption.member is None:
            return
        facts = loader.facts
        is_inner = len(state.reading.loaders) > 1  # the iteration of an outer loop is not finished
        is_whole = is_new_step and facts is not None and facts.trains and not loader.end_of_dataloader and not is_inner
        self._preemption.stop_if_requested(is_new_step=is_new_step, is_whole=is_whole)

    def end_pass(self, loader: PreparedLoader) -> None:
        state, fetched = self._state, loader.fetched
        if self._is_exact or state.sync_gradients or not fetched.reuses or fetched.waits:
            return
        if state.plugin.sync_with_dataloader:
            num_steps = state.num_steps
            raise UsageError(
                f"the last update of this pass has only {state.micro_step} of {num_steps} micro-steps; several accumulate() blocks train "
                "one batch, so it was unknown which of them was the last one",
                where=f"gradient_accumulation_steps={num_steps}",
                do="make the number of accumulate() blocks in a pass a multiple of gradient_accumulation_steps (drop_last=True, and "
                "batches that are split into equal parts), or use GradientAccumulationPlugin(sync_with_dataloader=False) to "
                "continue the update in the next pass",
            )

    def unfinished_update(self, loader: PreparedLoader) -> dict[str, Any] | None:
        update = self._partial_update()
        return None if update is None else update.records.get(id(loader.source))

    def _partial_update(self) -> _Update | None:
        return None if self._state.sync_gradients else self.update_begin

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Return what this process needs to resume, in addition to its loaders' records."""
        update = self._partial_update()
        draws = {id(loader.source): loader.rng_state() for loader in self._objects.loaders} | (
            update.draws if update else {}
        )
        return {
            "draws": [draws[id(loader.source)] for loader in self._objects.loaders],
            "random": None if update is None else update.random_states,
        }

    def load_own_state(self, state: dict[str, Any] | None) -> None:
        """Restore the result of ``own_state``; ``state`` is None if this process has no saved state."""
        draws = [] if state is None else state["draws"]
        for i, loader in enumerate(self._objects.loaders):
            loader.load_rng_state(draws[i] if i < len(draws) else None)
        self._loaded_random_states = None if state is None else state["random"]
        self._next = None

    def saved_position(self) -> str:
        """Return where in its epoch the loaded checkpoint was saved, such as ", after 8 batches"; "" between two epochs."""
        records = [loader.record() for loader in self._objects.loaders]
        found = [record for record in records if record is not None and record["trains"] and record["is_within"]]
        if not found:
            return ""
        latest = max(found, key=lambda record: int(record["epoch"]))
        if latest["is_exact"]:
            return _(", after {samples} samples", samples=self._progress.position)
        return _(", after {batches} batches of each process", batches=latest["num_given"])

    def resume_passes(self) -> tuple[int, bool]:
        """Make the next pass of each training loader continue at its saved position.

        Returns the current epoch, and whether an incomplete update is repeated.

        The current epoch is the one in which the latest training pass started, or the next one if all training loaders
        have finished it. Evaluations start over.

        Raises:
            CheckpointError: the saved position is invalid for this number of processes or this ``parity``.
        """
        records = [(loader, loader.record()) for loader in self._objects.loaders]
        training = [record for _, record in records if record is not None and record["trains"]]
        if not training:
            return (self._progress.epoch if self._next is None else self._next), False
        epoch: int = max(record["epoch"] for record in training)
        of_epochs = [record for record in training if not record["outlives_epochs"]] or training
        is_over = all(record["epoch"] == epoch and not record["is_within"] for record in of_epochs)
        if epoch == 0 and self._next != 1:  # a shuffling loader that has not been read may be a training loader
            is_over = is_over and not any(record is None and loader.shuffles for loader, record in records)
        for loader, record in records:
            if record is None:
                continue
            if record["trains"] and record["epoch"] == epoch and (not is_over or record["is_within"]):
                loader.resume_pass()
            else:
                loader.end_pass()
        states, self._loaded_random_states = self._loaded_random_states, None
        if states is not None:
            restore_random_states(states)
        return epoch + is_over, states is not None

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def loop(self, first: int, num_epochs: int) -> Iterator[int]:
        """Yield the epochs starting with ``first``. See ``Accelerator.epochs``."""
        if first >= max(num_epochs, 1):
            # A warning is visible by default: the rerun of a finished script would otherwise end without a word.
            _logger.warning(
                N_("epochs(%d): the run has already completed %d epochs, so there is nothing to train"),
                num_epochs,
                first,
            )
        try:
            for epoch in range(first, num_epochs):
                self._epoch = self._next = self._progress.epoch = epoch
                for loader in self._objects.loaders:
                    loader.enter_epoch(epoch)
                if epoch > first:  # after enter_epoch, which discards the rest of an abandoned pass
                    self._preemption.stop_if_requested(is_new_step=False, is_whole=True)
                yield epoch
                self._next = epoch + 1
            for loader in self._objects.loaders:  # discard the rest of a pass abandoned in the last epoch
                loader.enter_epoch(num_epochs)
            if self._objects.loaders:
                self._preemption.stop_if_requested(is_new_step=False, is_whole=True)
        finally:
            self._epoch = None
