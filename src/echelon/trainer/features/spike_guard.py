"""Drops updates whose loss is a spike, and undoes the update that caused it (``spike_guard``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from echelon.accelerator.rng_states import current_random_states, restore_random_states
from echelon.accelerator.update.kept_state import KeptState, copy_buffers, restore_buffers
from echelon.accelerator.update.spike_guard import SpikeGuard, UpdatePosition
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.loss_window import MeanLoss
from echelon.trainer.trainer_methods import TrainerMethods

_STATE = ("global_step", "max_steps", "best_metric", "best_global_step", "best_model_checkpoint")


class SpikeResponse:
    """Decides for each update of a run whether its step is taken.

    A spike has two possible causes: the samples of the update itself, or the update before, whose loss was computed before it
    changed the weights. With ``rollback``, the update is computed again with the weights before the last step. If its loss is none
    then, the last step caused the spike: it stays undone, and its samples count as skipped. Otherwise, this update is dropped.

    Args:
        trainer: the Trainer.
        guard: judges the losses.
        losses: the losses to log.
        cursor: the run's position.
    """

    def __init__(self, trainer: TrainerMethods, guard: SpikeGuard, *, losses: MeanLoss, cursor: TrainCursor) -> None:
        self._trainer = trainer
        self.guard = guard
        """Judges the losses."""
        self._losses = losses
        self._cursor = cursor
        self._device_type = trainer.accelerator.device.type
        self.can_undo = guard.mode == "rollback"
        """Whether ``settle`` may compute an update again."""
        self._kept = KeptState(trainer.accelerator.session.objects)
        self._start: dict[str, Any] = {}  # what else is as it was before the current update
        self._start_before: dict[str, Any] = {}  # the same before the last step
        self._position_before: UpdatePosition | None = None  # of the last step

    def begin_update(self) -> None:
        """Note the state before the first forward pass of an update."""
        if self.guard.mode == "warn":
            return
        trainer = self._trainer
        session, state = trainer.accelerator.session, trainer.state
        self._start = {
            "random": current_random_states(self._device_type),
            "buffers": copy_buffers(session.objects),
            "losses": self._losses.snapshot(),
        }
        if self.can_undo:
            scaler = session.update.scaler
            if scaler is not None:
                session.engine.update_loss_scale()
            self._start |= {
                "schedule": copy.deepcopy(trainer.lr_scheduler.state_dict()),
                "scaler": None if scaler is None else scaler.state_dict(),
                "state": {name: getattr(state, name) for name in _STATE},
                "num_logs": len(state.log_history),
                "num_steps_beyond": self._cursor.num_steps_beyond,
            }

    def settle(self, position: UpdatePosition | None, *, repeat: Callable[[], None]) -> bool:
        """Return whether the update whose gradients have been computed is to be stepped; otherwise drop it.

        Args:
            position: where its samples are. None: where the loader is.
            repeat: computes its gradients again, with the current weights.

        Collective: call on every rank.

        Raises:
            LossSpikeError: too many updates in a row were dropped.
        """
        guard, update = self.guard, self._trainer.accelerator.session.update
        position = position or guard.position()
        spike = guard.judge(step=self._trainer.state.global_step + 1, position=position)
        if guard.mode == "warn":
            return True
        if spike is not None and self._kept.is_there and self._undo_last_step(position, repeat):
            before = self._position_before
            guard.record_skipped(spike, samples=None if before is None else before.samples(), undone=True)
            spike = None
        if spike is None:
            if self.can_undo:
                self._kept.keep()
                self._start_before, self._position_before = self._start, position
            return True
        update.drop_update()
        self._return_to(self._start)
        guard.record_skipped(spike)
        return False

    def _undo_last_step(self, position: UpdatePosition | None, repeat: Callable[[], None]) -> bool:
        """Return to the weights before the last step and compute the update again; take back both if its loss is still a spike."""
        trainer, guard = self._trainer, self.guard
        accelerator, step = trainer.accelerator, trainer.state.global_step + 1
        update, counts = accelerator.session.update, accelerator.progress.to_json()
        logs = trainer.state.log_history[self._start_before["num_logs"] :]
        update.drop_update()
        self._kept.swap()
        self._return_to(self._start_before)
        loss = guard.take_back()
        repeat()
        accelerator.progress.load_json(counts)  # repeating has counted the samples twice
        if guard.judge(step=step, position=position) is None:
            self._start = self._start_before
            return True
        guard.put_back(loss)
        trainer.state.log_history += logs
        self._kept.swap()
        return False

    def _return_to(self, start: dict[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        restore_random_states(start["random"])
        restore_buffers(start["buffers"])
        self._losses.return_to(start["losses"])
        if not self.can_undo:
            return
        trainer.lr_scheduler.load_state_dict(copy.deepcopy(start["schedule"]))
        scaler = trainer.accelerator.session.update.scaler
        if scaler is not None:
            scaler.load_state_dict(start["scaler"])
        for name, value in start["state"].items():
            setattr(state, name, value)
        del state.log_history[start["num_logs"] :]
        self._cursor.num_steps_beyond = start["num_steps_beyond"]
