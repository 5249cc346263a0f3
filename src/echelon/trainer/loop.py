"""The training loop: epochs, updates, logging, evaluation and checkpoints."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.accelerator.memory import clear_device_cache
from echelon.accelerator.preemption import Preempted
from echelon.accelerator.rng_states import current_random_states, restore_random_states
from echelon.accelerator.update.step_timing import record_planned_steps
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsSetEpoch
from echelon.trainer.arguments.enums import SaveStrategy
from echelon.trainer.arguments.training_arguments import resolve_path
from echelon.trainer.build_accelerator import accumulation_options
from echelon.trainer.checkpoint.checkpoint_folders import (
    metric_for_best,
    point_to_best,
    remove_last_checkpoint,
    warn_of_unsaved_best,
)
from echelon.trainer.checkpoint.resume_point import ResumePoint
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data.epoch_batches import EpochBatches, warn_of_wrong_length
from echelon.trainer.features.auto_find_batch_size import evaluation_memory_error
from echelon.trainer.features.nonfinite import NonFiniteError, first_bad
from echelon.trainer.loss_window import MeanLoss
from echelon.trainer.optim.optimizers import set_optimizer_mode
from echelon.trainer.results import TrainOutput, speed_metrics
from echelon.trainer.session import TrainerSession
from echelon.trainer.signatures import takes
from echelon.trainer.trainer_methods import TrainerMethods, count_tokens, is_overridden, log, notify
from echelon.trainer.training_plan import TrainingPlan

__all__ = ["TrainingLoop"]

logger = get_logger(__name__)


class TrainingLoop:
    """The training loop of one ``Trainer.train`` call; owns this call's state, such as the losses to log."""

    def __init__(
        self,
        trainer: TrainerMethods,
        session: TrainerSession,
        plan: TrainingPlan,
        loader: Any,
        *,
        resume_point: ResumePoint,
        trial: Any,
        ignore_keys: list[str] | None,
    ) -> None:
        self.trainer = trainer
        self._session = session
        self._trial = trial
        self._accumulation_steps = session.update_size(trainer.args).accumulation_steps
        self._syncs_each_batch = bool(accumulation_options(trainer.args).get("sync_each_batch"))
        self.plan = plan
        self.loader = loader
        self.resume_point = resume_point
        self.cursor = session.cursor
        self.ignore_keys = ignore_keys
        self.is_exact = trainer.accelerator.parity != "off"
        self.is_update_abandoned = False
        """Whether a callback ended the last update before its last batch."""
        self.is_stepping = False
        """Whether an optimizer step (including its bookkeeping) is in progress."""
        self.batches = EpochBatches(())
        """The current epoch's batches."""
        self._is_length_warned = False
        self.last_saved_step: int | None = None
        self._is_ending = False  # saved after a signal; training ends
        self._boundary: dict[str, Any] | None = None  # state after the last complete step, to save after an error
        self.losses = session.losses = MeanLoss(trainer.accelerator, filtered=trainer.args.logging_nan_inf_filter)
        self.num_items: Any = None  # divisor of the losses of the update
        self.grad_norm: torch.Tensor | None = None
        self.learning_rate = 0.0
        args = trainer.args
        self._step_takes_items = takes(trainer.training_step, "num_items_in_batch")
        self.counts_tokens = args.include_num_input_tokens_seen != "no"
        self._prepares_update = self.counts_tokens or args.torch_empty_cache_steps is not None
        self.start_time = self.logged_at = time.time()
        self.first_step = session.initial_step = trainer.state.global_step
        session.initial_num_tokens = trainer.state.num_input_tokens_seen
        if trainer.state.global_step:
            self._restore(self.cursor)
        cursor, accelerator = self.cursor, trainer.accelerator
        cursor.batch_size, cursor.world_size, cursor.parity = (
            plan.batch_size,
            accelerator.session.num_readers,
            accelerator.parity,
        )
        cursor.canonical_shards = accelerator.config.value.canonical_shards
        cursor.is_within_update = False

    def run(self) -> TrainOutput:
        """Train and return the results.

        Collective: call on every rank.
        """
        trainer, args, plan, start = self.trainer, self.trainer.args, self.plan, self.resume_point
        self.start_time = self.logged_at = time.time()
        if trainer.state.epoch is None:
            trainer.state.epoch = 0.0
        record_planned_steps(plan.max_steps)
        notify(trainer, "on_train_begin")
        if args.eval_on_start:
            trainer._evaluate(self._trial, self.ignore_keys, skip_scheduler=True)
        elif self.cursor.is_within_evaluation:
            start = self.resume_point = self._repeat_evaluation(start)
        is_done = self._is_ending or (self._has_all_steps and not start.num_batches)
        # max_steps may need more epochs than planned if an epoch has fewer batches than its length.
        num_epochs = sys.maxsize if args.max_steps > 0 else plan.num_epochs
        for epoch in () if is_done else range(start.epoch, num_epochs):
            notify(trainer, "on_epoch_begin")
            trainer._run_epoch(
                model=trainer.model_wrapped,
                epoch=epoch,
                train_dataloader=self.loader,
                steps_in_epoch=plan.batches_per_epoch,
                num_update_steps_per_epoch=plan.steps_per_epoch,
                trial=self._trial,
                ignore_keys_for_eval=self.ignore_keys,
                start_time=self.start_time,
                resume_from_checkpoint=start.checkpoint,
                epochs_trained=start.epoch,
                steps_trained_in_current_epoch=start.num_batches,
            )
            if trainer.control.should_training_stop or self._has_all_steps:
                break
        return trainer._finalize_training(self._trial, plan.num_train_samples, self.start_time)

    def finalize(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Implement ``Trainer._finalize_training``."""
        trainer, args = self.trainer, self.trainer.args
        self.losses.end()
        trainer.store_flos()
        num_steps = trainer.state.global_step - self.first_step
        mean = self.losses.total(num_steps=num_steps)
        part = num_steps / max(self.plan.max_steps, 1)  # below 1 if training stopped early or was resumed
        num_samples = int(num_train_samples * part)
        metrics = speed_metrics("train", start_time, num_samples=num_samples, num_steps=num_steps)
        metrics |= {"total_flos": trainer.state.total_flos, "train_loss": mean, **self._session.memory.end("train")}
        log(trainer, metrics)
        run_dir = Path(trainer._get_output_dir(trial))
        # The best step may have been saved before it was evaluated.
        point_to_best(trainer.state, run_dir, saved=self._session.saved_steps)
        if args.load_best_model_at_end:
            warn_of_unsaved_best(args, trainer.state)
            if trainer.state.best_model_checkpoint is not None:
                trainer._load_best_model()
        remove_last_checkpoint(args, trainer.state, resolve_path(args, run_dir))
        notify(trainer, "on_train_end")
        trainer._finish_current_push()
        trainer.is_in_train = False
        return TrainOutput(trainer.state.global_step, mean, metrics)

    def run_epoch(self, epoch: int, loader: Any) -> None:
        """Implement ``Trainer._run_epoch``."""
        trainer, plan, cursor = self.trainer, self.plan, self.cursor
        is_first = epoch == self.resume_point.epoch
        start = self.resume_point if is_first else ResumePoint(epoch=epoch)
        self._train_mode()  # a pass that begins in eval mode counts as an evaluation
        if isinstance(loader, SupportsSetEpoch):
            loader.set_epoch(epoch)
        if start.num_to_skip:
            loader = trainer.accelerator.skip_first_batches(loader, start.num_to_skip)
        cursor.is_read &= start.num_batches > 0  # as saved
        cursor.epoch, cursor.num_batches, cursor.is_over = epoch, start.num_batches, False
        if start.checkpoint is not None and not start.restores_rng_after_reading:
            trainer._load_rng_state(start.checkpoint)
        after_reading = start.checkpoint if start.restores_rng_after_reading else None
        self._record_boundary()
        num_planned = sys.maxsize if self.is_exact else plan.batches_per_epoch - cursor.num_batches
        batches = self.batches = EpochBatches(loader, trainer.accelerator, num_planned=num_planned)
        num_made = 0
        try:
            while not self._has_all_steps and not cursor.is_read and self._has_more():
                made = (
                    self._exact_update(batches, after_reading)
                    if self.is_exact
                    else self._update(batches, after_reading)
                )
                if not made:
                    cursor.is_read = True
                    break
                num_made += 1
                after_reading = None
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    break
            if not num_made and start.random_states is not None:
                restore_random_states(start.random_states)  # reading an empty rest may have drawn random numbers
            has_more = not (cursor.is_read or trainer.control.should_epoch_stop)
            if has_more and (plan.is_sized or not self._has_all_steps):
                has_more = self._has_more()
            if not has_more:
                batches.close()
            if not cursor.num_batches and not self.is_update_abandoned:
                logger.warning(
                    "the training data yielded no batch in epoch %d, so training stops at step %d of %d",
                    epoch + 1,
                    trainer.state.global_step,
                    plan.max_steps,
                )
                trainer.control.should_training_stop = True
            elif not start.num_batches:
                self._warn_of_wrong_length(has_more=has_more)
            notify(trainer, "on_epoch_end")
            # A resumed run trains on the remaining batches.
            cursor.is_over, cursor.is_within_update = not has_more, has_more and self.is_update_abandoned
            self._end_step()
            self._stop_if_preempted(is_new_step=False)
        finally:
            batches.close()

    # ---- end of an epoch ---------------------------------------------------------------------------------------------

    @property
    def _has_all_steps(self) -> bool:
        """Whether all steps are done: ``max_steps`` of them, or those of a partial last epoch."""
        return not self.plan.ends_with_data and self.trainer.state.global_step >= self._num_steps

    @property
    def _num_steps(self) -> int:
        """Number of steps after which the run ends, unless its last epoch's data ends it."""
        num_beyond = 0 if self.trainer.args.max_steps > 0 else self.cursor.num_steps_beyond
        return self.plan.max_steps + num_beyond

    def _has_more(self, num_batches: int | None = None) -> bool:
        """Return whether the epoch has more than ``num_batches`` batches (default: the number already trained on).

        The data determines this, not the plan, unless the user has set a limit or the data seems infinite.

        Collective: call on every rank if ``EpochBatches.has_more`` is collective.
        """
        plan, cursor = self.plan, self.cursor
        num_batches = cursor.num_batches if num_batches is None else num_batches
        if num_batches < plan.batches_per_epoch:
            return True  # if the plan is wrong, reading detects it
        if plan.is_limited or cursor.has_no_end:
            return False
        if num_batches == cursor.num_batches and cursor.is_read:
            return False
        if not self.batches.has_more():
            return False
        num_workers = getattr(self.loader, "num_workers", 0)
        cursor.has_no_end = plan.is_sized and num_batches >= 2 * plan.batches_per_epoch + num_workers
        return not cursor.has_no_end

    def _is_last_step(self, num_batches: int) -> bool:
        """Return whether the current step, which ends after ``num_batches`` batches of the epoch, is the last one."""
        plan, cursor = self.plan, self.cursor
        if not plan.ends_with_data:
            return self.trainer.state.global_step + 1 >= self._num_steps
        return cursor.epoch + 1 >= plan.num_epochs and (
            self.batches.is_known_to_be_over or not self._has_more(num_batches)
        )

    def _warn_of_wrong_length(self, *, has_more: bool) -> None:
        """Warn once if an epoch has more or fewer batches than planned."""
        trainer, plan, cursor = self.trainer, self.plan, self.cursor
        if self._is_length_warned or not plan.is_sized or cursor.num_batches == plan.batches_per_epoch:
            return
        is_short = cursor.num_batches < plan.batches_per_epoch
        if is_short and (not cursor.is_read or plan.is_limited or trainer.control.should_epoch_stop):
            return  # the epoch was ended early
        self._is_length_warned = True
        warn_of_wrong_length(
            plan,
            self.loader,
            epoch=cursor.epoch,
            num_batches=cursor.num_batches,
            has_more=has_more or cursor.has_no_end,
            ends=cursor.has_no_end,
            max_steps=trainer.args.max_steps,
        )

    def _update(self, batches: EpochBatches, checkpoint: str | None) -> bool:
        """Take one optimizer step with the next batches; return False if there are none.

        Args:
            batches: the epoch's batches.
            checkpoint: restore this checkpoint's RNG states after the batches are read.
        """
        trainer, model, losses = self.trainer, self.trainer.model_wrapped, self.losses
        get, device = trainer.get_batch_samples, trainer.accelerator.device
        wanted, num_left = self._accumulation_steps, self.plan.batches_per_epoch - self.cursor.num_batches
        planned = min(wanted, num_left) if num_left > 0 else wanted
        group, num_items = get(batches, planned, device)
        # Batches beyond the planned ones belong to the update, too.
        if planned < wanted and len(group) == planned and not self.plan.is_limited and batches.has_more():
            more, num_more = get(batches, wanted - planned, device)
            group = [*group, *more]
            num_items = None if num_items is None or num_more is None else num_items + num_more
        self.num_items = num_items
        if not group:
            return False
        if checkpoint is not None:
            trainer._load_rng_state(checkpoint)
        notify(trainer, "on_step_begin")
        trainer.current_gradient_accumulation_steps = len(group)
        last = len(group) - 1
        if self._prepares_update:
            self._prepare_update(group)
        for i, inputs in enumerate(group):
            if i < last and not self._syncs_each_batch:  # gradients are synchronized in the last pass only
                with trainer.accelerator.no_sync(model):
                    losses.add(self._train_on(inputs, num_items))
            else:
                losses.add(self._train_on(inputs, num_items))
            if i < last:
                control = notify(trainer, "on_substep_end")
                if control.should_epoch_stop or control.should_training_stop:
                    self._abandon_update()
                    return True
        self._step(group, num_batches=len(group))
        return True

    def _train_on(self, inputs: Any, num_items: Any) -> torch.Tensor:
        """Run one batch's forward and backward pass, and return its loss."""
        trainer, model = self.trainer, self.trainer.model_wrapped
        if not (model.training and trainer.model.training):  # for example after an evaluation
            self._train_mode()
        if self._step_takes_items:
            loss = trainer.training_step(model, inputs, num_items)
        else:
            loss = trainer.training_step(model, inputs)
        # An override gets every batch; otherwise ``_prepare_update`` has counted those of the update with one reduction.
        if is_overridden(trainer, "_track_num_input_tokens"):
            trainer._track_num_input_tokens(inputs)
        return loss

    def _abandon_update(self) -> None:
        """Discard an update's losses and gradients after a callback ended it before its last batch."""
        self.losses.drop_open_step()
        self._zero_grad()
        self.is_update_abandoned = True

    def _zero_grad(self) -> None:
        """Zero the model's gradients, including those of weights that the optimizer does not contain."""
        has_others = self._session.optimizer.has_other_gradients
        (self.trainer.model_wrapped if has_others else self.trainer.optimizer).zero_grad()

    def _exact_update(self, batches: Any, checkpoint: str | None) -> bool:
        """Take one optimizer step with the loader's micro-batches; return False if there are none.

        The arguments are the same as for ``_update``.
        """
        trainer, model, accelerator = self.trainer, self.trainer.model_wrapped, self.trainer.accelerator
        trainer.current_gradient_accumulation_steps = 1  # losses are weighted by samples or labels instead
        group: list[Any] = []
        while not group or not accelerator.sync_gradients:
            if group:
                notify(trainer, "on_substep_end")
            group, num_items = trainer.get_batch_samples(batches, 1, accelerator.device)
            if not group:
                return False
            if checkpoint is not None:
                trainer._load_rng_state(checkpoint)
                checkpoint = None
            if accelerator.progress.micro_step <= 1:
                notify(trainer, "on_step_begin")
            if self._prepares_update:
                self._prepare_update([accelerator.trim_for_metrics(inputs) for inputs in group])
            with accelerator.accumulate(model):
                self._train_on(group[0], num_items)
        self.losses.add(torch.tensor(accelerator.update_loss(), dtype=torch.float64))
        self._step(group, num_batches=1)
        return True

    def _step(self, group: list[Any], *, num_batches: int) -> None:
        """Step the optimizer and the scheduler, then log, evaluate, save and stop as requested."""
        trainer, cursor = self.trainer, self.cursor
        args, state, model, losses = trainer.args, trainer.state, trainer.model_wrapped, self.losses
        if self._session.interface.counts_flops:
            trainer.current_flos += sum(float(trainer.floating_point_ops(inputs)) for inputs in group)
        optimizer = trainer.optimizer
        if args.max_grad_norm:
            self.grad_norm = trainer._clip_grad_norm(model)
        # Without clipping, the default would compute a norm, which is logged only if an override asks for it.
        if is_overridden(trainer, "_get_grad_norm"):
            self.grad_norm = trainer._get_grad_norm(model, grad_norm=self.grad_norm if args.max_grad_norm else None)
        if args.stop_on_nan:
            self._stop_on_nan(group)
        losses.end_step()
        notify(trainer, "on_pre_optimizer_step")
        self.is_stepping = True
        optimizer.step()
        notify(trainer, "on_optimizer_step")
        self.learning_rate = trainer._get_learning_rate()
        if cursor.num_batches >= self.plan.batches_per_epoch:
            cursor.num_steps_beyond += 1
        # Beyond its planned steps the scheduler keeps its last rate: a cosine would rise again.
        is_beyond = state.global_step + 1 >= self.plan.max_steps and not self._is_last_step(
            cursor.num_batches + num_batches
        )
        if (
            self._session.optimizer.steps_per_update
            and not is_beyond
            and not (args.fp16 and trainer.accelerator.optimizer_step_was_skipped)
        ):
            trainer.lr_scheduler.step()
        self._zero_grad()
        state.global_step += 1
        if is_beyond and state.global_step >= state.max_steps:
            state.max_steps = state.global_step + 1  # so that callbacks do not stop training yet
        cursor.num_batches += num_batches
        cursor.is_read = self.batches.is_known_to_be_over
        state.epoch = cursor.epoch + min(cursor.num_batches / self.plan.batches_per_epoch, 1.0)
        if args.save_on_exception:
            self._record_boundary()
        self.is_stepping = False
        notify(trainer, "on_step_end")
        self._end_step()
        self._stop_if_preempted(is_new_step=True)

    def _end_step(self) -> None:
        """Log, evaluate and save as requested, through the override of ``_maybe_log_save_evaluate`` if there is one."""
        trainer, state = self.trainer, self.trainer.state
        if not is_overridden(trainer, "_maybe_log_save_evaluate"):
            self.log_evaluate_save()  # without the sum of the losses, which waits for the device
            return
        trainer._maybe_log_save_evaluate(
            torch.tensor(self.losses.window_sum(), device=trainer.accelerator.device),
            self.grad_norm,
            trainer.model_wrapped,
            self._trial,
            self.cursor.epoch,
            self.ignore_keys,
            self.start_time,
            learning_rate=self.learning_rate if state.global_step > self.first_step else None,
        )

    def log_evaluate_save(self, grad_norm: Any = None, learning_rate: float | None = None) -> None:
        """Implement ``Trainer._maybe_log_save_evaluate``.

        Args:
            grad_norm: the norm to log (default: that of the last step).
            learning_rate: the learning rate to log (default: that of the last step).
        """
        trainer, state = self.trainer, self.trainer.state
        losses = self.losses
        if trainer.control.should_log and state.global_step > losses.last_logged_step:
            logs: dict[str, Any] = {"loss": losses.take()}
            norm = self.grad_norm if grad_norm is None else grad_norm
            if norm is not None:
                logs["grad_norm"] = norm.item() if isinstance(norm, torch.Tensor) else norm
            logs["learning_rate"] = self.learning_rate if learning_rate is None else learning_rate
            if trainer.args.log_throughput:
                logs |= self._throughput(state.global_step - losses.last_logged_step)
            losses.last_logged_step = state.global_step
            trainer.store_flos()
            log(trainer, logs, self.start_time if self.counts_tokens else None)
        if trainer.control.should_evaluate:
            metrics = trainer._evaluate(self._trial, self.ignore_keys)
            if metrics is None:
                return
            is_best = trainer._determine_best_metric(metrics=metrics, trial=self._trial)
            if trainer.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            self._save()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save a checkpoint. Collective: call on every rank."""
        trainer, cursor = self.trainer, self.cursor
        cursor.window = self.losses.state()
        cursor.last_logged_step, cursor.learning_rate = self.losses.last_logged_step, self.learning_rate
        cursor.grad_norm = None if self.grad_norm is None else float(self.grad_norm)
        cursor.schedule = trainer.lr_scheduler.state_dict() if self._session.optimizer.is_foreign_scheduler else None
        trainer._save_checkpoint(trainer.model, self._trial)
        self.last_saved_step = trainer.state.global_step
        notify(trainer, "on_save")

    def _restore(self, cursor: TrainCursor) -> None:
        """Restore the values to log from ``cursor``, if it comes from a checkpoint."""
        self.losses.last_logged_step = self.trainer.state.global_step
        if cursor.window:
            self.losses.restore(cursor.window["sums"], cursor.window["num_steps"])
            self.losses.last_logged_step, self.learning_rate = cursor.last_logged_step, cursor.learning_rate
            self.grad_norm = None if cursor.grad_norm is None else torch.tensor(cursor.grad_norm, dtype=torch.float64)

    def _record_boundary(self) -> None:
        """Record the state that ``save_last_step`` restores after an error in the next update."""
        if self.trainer.args.save_on_exception:
            self._boundary = {
                "random_states": current_random_states(),
                "progress": self.trainer.accelerator.progress.to_json(),
                "loader": self.loader.state_dict() if self.is_exact and hasattr(self.loader, "last_step") else None,
            }

    def save_last_step(self) -> None:
        """Save a checkpoint of the state after the last completed step. Collective: call on every rank."""
        trainer, boundary = self.trainer, self._boundary
        assert boundary is not None
        self.losses.drop_open_step()
        restore_random_states(boundary["random_states"])
        if boundary["loader"] is not None:
            self.loader.load_state_dict(boundary["loader"])
        trainer.accelerator.gradient_state.sync_gradients = True
        trainer.accelerator.progress.load_json(boundary["progress"])
        self.cursor.is_within_update = True
        self._save()

    def _stop_if_preempted(self, *, is_new_step: bool) -> None:
        """If the ranks have agreed to stop here, save and end the process (or, with
        ``enable_jit_checkpoint``, only the run).

        Collective: call on every rank, once the ranks have agreed to stop.

        Raises:
            Preempted: the checkpoint has been saved, and the process must end.
        """
        preemption, step = self.trainer.accelerator.preemption, self.trainer.state.global_step
        if self._is_ending or not preemption.at_boundary(is_new_step=is_new_step, is_whole=True):
            return
        self._save_and_end(is_needed=self.last_saved_step != step or self.cursor.is_over)

    def _save_and_end(self, *, is_needed: bool = True) -> None:
        trainer, step = self.trainer, self.trainer.state.global_step
        if is_needed:
            self._save()
        how = "saved a checkpoint" if trainer.accelerator.checkpoints.store.is_saved else "could not save a checkpoint"
        logger.warning("stopping after a signal: %s of step %d of %d", how, step, self.plan.max_steps)
        if not trainer.args.enable_jit_checkpoint or trainer.args.save_on_signal:
            raise Preempted
        self._is_ending = trainer.control.should_training_stop = True

    def _repeat_evaluation(self, start: ResumePoint) -> ResumePoint:
        """Repeat the evaluation that preemption interrupted, and return the new resume point."""
        trainer, cursor = self.trainer, self.cursor
        if start.random_states is not None:
            restore_random_states(start.random_states)
        trainer.control.should_evaluate, trainer.control.should_save = True, cursor.saves_after_evaluation
        cursor.is_within_evaluation = False
        self._end_step()
        self._stop_if_preempted(is_new_step=False)
        return replace(start, random_states=current_random_states())

    # ---- parts of a step ---------------------------------------------------------------------------------------------

    def evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float] | None:
        """Implement ``Trainer._evaluate``; return None if preemption interrupted it and a checkpoint was saved."""
        trainer, states = self.trainer, current_random_states()
        self._session.evaluation.is_repeatable = True
        try:
            metrics = trainer.evaluate(ignore_keys=ignore_keys_for_eval)
        except Preempted:
            restore_random_states(states)
            self.cursor.is_within_evaluation = True
            self.cursor.saves_after_evaluation = trainer.control.should_save
            self._save_and_end()
            return None
        except RuntimeError as error:
            size = trainer.args.per_device_eval_batch_size
            if trainer.args.auto_find_batch_size and (memory_error := evaluation_memory_error(error, batch_size=size)):
                raise memory_error from error
            raise
        finally:
            self._session.evaluation.is_repeatable = False
        trainer._report_to_hp_search(trial, trainer.state.global_step, metrics)
        if not skip_scheduler and not self._session.optimizer.steps_per_update:
            trainer.lr_scheduler.step(metric_for_best(trainer.args, metrics))
        return metrics

    def load_rng_state(self) -> None:
        """Implement ``Trainer._load_rng_state``."""
        if self.resume_point.random_states is not None:
            restore_random_states(self.resume_point.random_states)
        self.trainer.accelerator.session.engine.share_random_states()

    def _train_mode(self) -> None:
        self.trainer.model_wrapped.train()
        self.trainer.model.train()
        set_optimizer_mode(self.trainer.optimizer, "train")

    def _prepare_update(self, group: list[Any]) -> None:
        """Count an update's tokens and empty the memory cache if the arguments request it.

        Collective: call on every rank if tokens are counted.
        """
        every = self.trainer.args.torch_empty_cache_steps
        if every is not None and self.trainer.state.global_step % every == 0:
            clear_device_cache()
        if self.counts_tokens and not is_overridden(self.trainer, "_track_num_input_tokens"):
            count_tokens(self.trainer, group)

    def _stop_on_nan(self, group: list[Any]) -> None:
        """Raise before the optimizer changes the weights if a loss or gradient is nonfinite.

        Collective: call on every rank.
        """
        trainer = self.trainer
        is_bad = not all(bool(loss.isfinite().all()) for loss in self.losses.last(len(group)))
        if self.grad_norm is not None and not trainer.args.fp16:  # loss scaling handles overflow
            is_bad |= not bool(torch.as_tensor(self.grad_norm).isfinite())
        session = trainer.accelerator.session
        # Ranks with the same samples have the same losses and norms; accelerator.reduce counts ranks that share samples once.
        if not (is_bad if session.num_readers == 1 else session.on_any_rank(is_bad)):
            return
        step = trainer.state.global_step + 1
        is_sharded = trainer.accelerator.capabilities.shards_parameters  # then a forward pass would be collective
        what = first_bad(trainer.model, group, compute_loss=None if is_sharded else self._compute_loss)
        raise NonFiniteError(
            f"a loss or gradient in step {step} is not finite: {what or 'see the error on another rank'}",
            where=f"step {step}, epoch {trainer.state.epoch:.3g}",
        )

    def _compute_loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        takes_items = self._session.interface.compute_loss_takes_items
        options: Any = {"num_items_in_batch": self.num_items} if takes_items else {}
        loss: Any = self.trainer.compute_loss(model, self.trainer._prepare_inputs(inputs), **options)
        assert isinstance(loss, torch.Tensor)
        return loss

    def _throughput(self, num_steps: int) -> dict[str, float]:
        now = time.time()
        seconds, self.logged_at = max(now - self.logged_at, 1e-9), now
        samples = num_steps * self.plan.total_train_batch_size
        return {
            "samples_per_second": round(samples / seconds, 3),
            "steps_per_second": round(num_steps / seconds, 3),
        }
