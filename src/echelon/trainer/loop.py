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
from echelon.trainer.batch_loss import call_compute_loss
from echelon.trainer.build_accelerator import accumulation_options
from echelon.trainer.checkpoint.best_model import (
    metric_for_best,
    point_to_best,
    remove_last_checkpoint,
    warn_of_unsaved_best,
)
from echelon.trainer.checkpoint.resume_point import ResumePoint
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data.epoch_batches import EpochBatches, warn_of_wrong_length
from echelon.trainer.data.num_tokens import count_tokens
from echelon.trainer.features.auto_find_batch_size import evaluation_memory_error
from echelon.trainer.features.nonfinite import NonFiniteError, first_bad
from echelon.trainer.hooks import TrainerHooks, log, notify
from echelon.trainer.loss_window import MeanLoss
from echelon.trainer.optim.prepared_optimizer import set_optimizer_mode
from echelon.trainer.results import TrainOutput, speed_metrics
from echelon.trainer.session import TrainerSession
from echelon.trainer.signatures import takes
from echelon.trainer.training_plan import TrainingPlan

__all__ = ["TrainingLoop"]

logger = get_logger(__name__)


class TrainingLoop:
    """The training loop of one ``Trainer.train`` call; owns this call's state, such as the losses to log.

    Args:
        hooks: the Trainer's hooks.
        session: the Trainer's session.
        plan: the run's length in steps, epochs and batches.
        loader: the training data loader.
        resume_point: the position in the data at which training starts.
        trial: the search trial, or None.
        ignore_keys: model outputs that evaluations ignore.
    """

    def __init__(
        self,
        hooks: TrainerHooks,
        session: TrainerSession,
        plan: TrainingPlan,
        loader: Any,
        *,
        resume_point: ResumePoint,
        trial: Any,
        ignore_keys: list[str] | None,
    ) -> None:
        self.hooks = hooks
        self._session = session
        self._trial = trial
        self._accumulation_steps = session.update_size(hooks.args).accumulation_steps
        self._syncs_each_batch = bool(accumulation_options(hooks.args).get("sync_each_batch"))
        self.plan = plan
        self.loader = loader
        self.resume_point = resume_point
        self.cursor = session.cursor
        self.ignore_keys = ignore_keys
        self.is_exact = hooks.accelerator.parity != "off"
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
        self._mean_loss = session.losses = MeanLoss(hooks.accelerator, filtered=hooks.args.logging_nan_inf_filter)
        self.losses = self._mean_loss.window
        self.num_items: Any = None  # divisor of the losses of the update
        self.grad_norm: torch.Tensor | None = None
        self.learning_rate = 0.0
        args = hooks.args
        self._step_takes_items = takes(hooks.training_step, "num_items_in_batch")
        self.counts_tokens = args.include_num_input_tokens_seen != "no"
        self._prepares_update = self.counts_tokens or args.torch_empty_cache_steps is not None
        self.start_time = self.logged_at = time.time()
        self.first_step = session.initial_step = hooks.state.global_step
        session.initial_num_tokens = hooks.state.num_input_tokens_seen
        if hooks.state.global_step:
            self._restore(self.cursor)
        cursor, accelerator = self.cursor, hooks.accelerator
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
        hooks, args, plan, start = self.hooks, self.hooks.args, self.plan, self.resume_point
        self.start_time = self.logged_at = time.time()
        if hooks.state.epoch is None:
            hooks.state.epoch = 0.0
        record_planned_steps(plan.max_steps)
        notify(hooks, "on_train_begin")
        if args.eval_on_start:
            hooks._evaluate(self._trial, self.ignore_keys, skip_scheduler=True)
        elif self.cursor.is_within_evaluation:
            start = self.resume_point = self._repeat_evaluation(start)
        is_done = self._is_ending or (self._has_all_steps and not start.num_batches)
        # max_steps may need more epochs than planned if an epoch has fewer batches than its length.
        num_epochs = sys.maxsize if args.max_steps > 0 else plan.num_epochs
        for epoch in () if is_done else range(start.epoch, num_epochs):
            notify(hooks, "on_epoch_begin")
            hooks._run_epoch(
                model=hooks.model_wrapped,
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
            if hooks.control.should_training_stop or self._has_all_steps:
                break
        return hooks._finalize_training(self._trial, plan.num_train_samples, self.start_time)

    def finalize(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Implement ``Trainer._finalize_training``."""
        hooks, args = self.hooks, self.hooks.args
        self._mean_loss.end()
        hooks.store_flos()
        num_steps = hooks.state.global_step - self.first_step
        mean = self._mean_loss.total(num_steps=num_steps)
        part = num_steps / max(self.plan.max_steps, 1)  # below 1 if training stopped early or was resumed
        num_samples = int(num_train_samples * part)
        metrics = speed_metrics("train", start_time, num_samples=num_samples, num_steps=num_steps)
        metrics |= {"total_flos": hooks.state.total_flos, "train_loss": mean, **self._session.memory.end("train")}
        log(hooks, metrics)
        run_dir = Path(hooks._get_output_dir(trial))
        point_to_best(
            hooks, run_dir, saved=self._session.saved_steps
        )  # which may have been saved before it was evaluated
        if args.load_best_model_at_end:
            warn_of_unsaved_best(hooks)
            if hooks.state.best_model_checkpoint is not None:
                hooks._load_best_model()
        remove_last_checkpoint(hooks, resolve_path(args, run_dir))
        notify(hooks, "on_train_end")
        hooks._finish_current_push()
        hooks.is_in_train = False
        return TrainOutput(hooks.state.global_step, mean, metrics)

    def run_epoch(self, epoch: int, loader: Any) -> None:
        """Implement ``Trainer._run_epoch``."""
        hooks, plan, cursor = self.hooks, self.plan, self.cursor
        is_first = epoch == self.resume_point.epoch
        start = self.resume_point if is_first else ResumePoint(epoch=epoch)
        self._train_mode()  # a pass that begins in eval mode counts as an evaluation
        if isinstance(loader, SupportsSetEpoch):
            loader.set_epoch(epoch)
        if start.num_to_skip:
            loader = hooks.accelerator.skip_first_batches(loader, start.num_to_skip)
        cursor.is_read &= start.num_batches > 0  # as saved
        cursor.epoch, cursor.num_batches, cursor.is_over = epoch, start.num_batches, False
        if start.checkpoint is not None and not start.restores_rng_after_reading:
            hooks._load_rng_state(start.checkpoint)
        after_reading = start.checkpoint if start.restores_rng_after_reading else None
        self._record_boundary()
        num_planned = sys.maxsize if self.is_exact else plan.batches_per_epoch - cursor.num_batches
        batches = self.batches = EpochBatches(loader, hooks.accelerator, num_planned=num_planned)
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
                if hooks.control.should_epoch_stop or hooks.control.should_training_stop:
                    break
            if not num_made and start.random_states is not None:
                restore_random_states(start.random_states)  # reading an empty rest may have drawn random numbers
            has_more = not (cursor.is_read or hooks.control.should_epoch_stop)
            if has_more and (plan.is_sized or not self._has_all_steps):
                has_more = self._has_more()
            if not has_more:
                batches.close()
            if not cursor.num_batches and not self.is_update_abandoned:
                logger.warning(
                    "the training data yielded no batch in epoch %d, so training stops at step %d of %d",
                    epoch + 1,
                    hooks.state.global_step,
                    plan.max_steps,
                )
                hooks.control.should_training_stop = True
            elif not start.num_batches:
                self._warn_of_wrong_length(has_more=has_more)
            notify(hooks, "on_epoch_end")
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
        return not self.plan.ends_with_data and self.hooks.state.global_step >= self._num_steps

    @property
    def _num_steps(self) -> int:
        """Number of steps after which the run ends, unless its last epoch's data ends it."""
        num_beyond = 0 if self.hooks.args.max_steps > 0 else self.cursor.num_steps_beyond
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
            return self.hooks.state.global_step + 1 >= self._num_steps
        return cursor.epoch + 1 >= plan.num_epochs and (
            self.batches.is_known_to_be_over or not self._has_more(num_batches)
        )

    def _warn_of_wrong_length(self, *, has_more: bool) -> None:
        """Warn once if an epoch has more or fewer batches than planned."""
        hooks, plan, cursor = self.hooks, self.plan, self.cursor
        if self._is_length_warned or not plan.is_sized or cursor.num_batches == plan.batches_per_epoch:
            return
        is_short = cursor.num_batches < plan.batches_per_epoch
        if is_short and (not cursor.is_read or plan.is_limited or hooks.control.should_epoch_stop):
            return  # the epoch was ended early
        self._is_length_warned = True
        warn_of_wrong_length(
            plan,
            self.loader,
            epoch=cursor.epoch,
            num_batches=cursor.num_batches,
            has_more=has_more or cursor.has_no_end,
            ends=cursor.has_no_end,
            max_steps=hooks.args.max_steps,
        )

    def _update(self, batches: EpochBatches, checkpoint: str | None) -> bool:
        """Take one optimizer step with the next batches; return False if there are none.

        Args:
            batches: the epoch's batches.
            checkpoint: restore this checkpoint's RNG states after the batches are read.
        """
        hooks, model, losses = self.hooks, self.hooks.model_wrapped, self.losses
        group, num_items = self._next_group(batches)
        self.num_items = num_items
        if not group:
            return False
        if checkpoint is not None:
            hooks._load_rng_state(checkpoint)
        notify(hooks, "on_step_begin")
        hooks.current_gradient_accumulation_steps = len(group)
        last = len(group) - 1
        if self._prepares_update:
            self._prepare_update(group)
        for i, inputs in enumerate(group):
            if i < last and not self._syncs_each_batch:  # gradients are synchronized in the last pass only
                with hooks.accelerator.no_sync(model):
                    losses.add(self._train_on(inputs, num_items))
            else:
                losses.add(self._train_on(inputs, num_items))
            if i < last:
                control = notify(hooks, "on_substep_end")
                if control.should_epoch_stop or control.should_training_stop:
                    self._abandon_update()
                    return True
        self._step(group, num_batches=len(group))
        return True

    def _train_on(self, inputs: Any, num_items: Any) -> torch.Tensor:
        """Run one batch's forward and backward pass, and return its loss."""
        hooks, model = self.hooks, self.hooks.model_wrapped
        if not (model.training and hooks.model.training):  # for example after an evaluation
            self._train_mode()
        if self._step_takes_items:
            loss = hooks.training_step(model, inputs, num_items)
        else:
            loss = hooks.training_step(model, inputs)
        # An override gets every batch; otherwise ``_prepare_update`` has counted those of the update with one reduction.
        if self._session.is_overridden(hooks, "_track_num_input_tokens"):
            hooks._track_num_input_tokens(inputs)
        return loss

    def _next_group(self, batches: EpochBatches) -> tuple[list[Any], Any]:
        """Return an update's batches, including batches beyond the planned ones, and their number of items."""
        get, device = self.hooks.get_batch_samples, self.hooks.accelerator.device
        wanted, num_left = self._accumulation_steps, self.plan.batches_per_epoch - self.cursor.num_batches
        planned = min(wanted, num_left) if num_left > 0 else wanted
        group, num_items = get(batches, planned, device)
        if planned == wanted or len(group) < planned or self.plan.is_limited or not batches.has_more():
            return group, num_items
        more, num_more = get(batches, wanted - planned, device)
        return [*group, *more], None if num_items is None or num_more is None else num_items + num_more

    def _abandon_update(self) -> None:
        """Discard an update's losses and gradients after a callback ended it before its last batch."""
        self.losses.drop_open_step()
        self._session.optimizer.zero_grad(self.hooks)
        self.is_update_abandoned = True

    def _exact_update(self, batches: Any, checkpoint: str | None) -> bool:
        """Take one optimizer step with the loader's micro-batches; return False if there are none.

        The arguments are the same as for ``_update``.
        """
        hooks, model, accelerator = self.hooks, self.hooks.model_wrapped, self.hooks.accelerator
        hooks.current_gradient_accumulation_steps = 1  # losses are weighted by samples or labels instead
        group: list[Any] = []
        while not group or not accelerator.sync_gradients:
            if group:
                notify(hooks, "on_substep_end")
            group, num_items = hooks.get_batch_samples(batches, 1, accelerator.device)
            if not group:
                return False
            if checkpoint is not None:
                hooks._load_rng_state(checkpoint)
                checkpoint = None
            if accelerator.progress.micro_step <= 1:
                notify(hooks, "on_step_begin")
            if self._prepares_update:
                self._prepare_update([accelerator.trim_for_metrics(inputs) for inputs in group])
            with accelerator.accumulate(model):
                self._train_on(group[0], num_items)
        self.losses.add(torch.tensor(accelerator.update_loss(), dtype=torch.float64))
        self._step(group, num_batches=1)
        return True

    def _step(self, group: list[Any], *, num_batches: int) -> None:
        """Step the optimizer and the scheduler, then log, evaluate, save and stop as requested."""
        hooks, cursor = self.hooks, self.cursor
        args, state, model, losses = hooks.args, hooks.state, hooks.model_wrapped, self.losses
        if self._session.interface.counts_flops:
            hooks.current_flos += sum(float(hooks.floating_point_ops(inputs)) for inputs in group)
        optimizer = hooks.optimizer
        if args.max_grad_norm:
            self.grad_norm = hooks._clip_grad_norm(model)
        # Without clipping, the default would compute a norm, which is logged only if an override asks for it.
        if self._session.is_overridden(hooks, "_get_grad_norm"):
            self.grad_norm = hooks._get_grad_norm(model, grad_norm=self.grad_norm if args.max_grad_norm else None)
        if args.stop_on_nan:
            self._stop_on_nan(group)
        losses.end_step()
        notify(hooks, "on_pre_optimizer_step")
        self.is_stepping = True
        optimizer.step()
        notify(hooks, "on_optimizer_step")
        self.learning_rate = hooks._get_learning_rate()
        if cursor.num_batches >= self.plan.batches_per_epoch:
            cursor.num_steps_beyond += 1
        # Beyond its planned steps the scheduler keeps its last rate: a cosine would rise again.
        is_beyond = state.global_step + 1 >= self.plan.max_steps and not self._is_last_step(
            cursor.num_batches + num_batches
        )
        if (
            self._session.optimizer.steps_per_update
            and not is_beyond
            and not (args.fp16 and hooks.accelerator.optimizer_step_was_skipped)
        ):
            hooks.lr_scheduler.step()
        self._session.optimizer.zero_grad(hooks)
        state.global_step += 1
        if is_beyond and state.global_step >= state.max_steps:
            state.max_steps = state.global_step + 1  # so that callbacks do not stop training yet
        cursor.num_batches += num_batches
        cursor.is_read = self.batches.is_known_to_be_over
        state.epoch = cursor.epoch + min(cursor.num_batches / self.plan.batches_per_epoch, 1.0)
        if args.save_on_exception:
            self._record_boundary()
        self.is_stepping = False
        notify(hooks, "on_step_end")
        self._end_step()
        self._stop_if_preempted(is_new_step=True)

    def _end_step(self) -> None:
        """Log, evaluate and save as requested, through the override of ``_maybe_log_save_evaluate`` if there is one."""
        hooks, state = self.hooks, self.hooks.state
        if not self._session.is_overridden(hooks, "_maybe_log_save_evaluate"):
            self.log_evaluate_save()  # without the sum of the losses, which waits for the device
            return
        hooks._maybe_log_save_evaluate(
            torch.tensor(self.losses.total(), device=hooks.accelerator.device),
            self.grad_norm,
            hooks.model_wrapped,
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
        hooks, state = self.hooks, self.hooks.state
        losses = self._mean_loss
        if hooks.control.should_log and state.global_step > losses.last_logged_step:
            logs: dict[str, Any] = {"loss": losses.take()}
            norm = self.grad_norm if grad_norm is None else grad_norm
            if norm is not None:
                logs["grad_norm"] = norm.item() if isinstance(norm, torch.Tensor) else norm
            logs["learning_rate"] = self.learning_rate if learning_rate is None else learning_rate
            if hooks.args.log_throughput:
                logs |= self._throughput(state.global_step - losses.last_logged_step)
            losses.last_logged_step = state.global_step
            hooks.store_flos()
            log(hooks, logs, self.start_time if self.counts_tokens else None)
        if hooks.control.should_evaluate:
            metrics = hooks._evaluate(self._trial, self.ignore_keys)
            if metrics is None:
                return
            is_best = hooks._determine_best_metric(metrics=metrics, trial=self._trial)
            if hooks.args.save_strategy == SaveStrategy.BEST:
                hooks.control.should_save = is_best
        if hooks.control.should_save:
            self._save()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save a checkpoint. Collective: call on every rank."""
        hooks, cursor = self.hooks, self.cursor
        cursor.window = self._mean_loss.state()
        cursor.last_logged_step, cursor.learning_rate = self._mean_loss.last_logged_step, self.learning_rate
        cursor.grad_norm = None if self.grad_norm is None else float(self.grad_norm)
        cursor.schedule = hooks.lr_scheduler.state_dict() if self._session.optimizer.is_foreign_scheduler else None
        hooks._save_checkpoint(hooks.model, self._trial)
        self.last_saved_step = hooks.state.global_step
        notify(hooks, "on_save")

    def _restore(self, cursor: TrainCursor) -> None:
        """Restore the values to log from ``cursor``, if it comes from a checkpoint."""
        self._mean_loss.last_logged_step = self.hooks.state.global_step
        if cursor.window:
            self.losses.restore(cursor.window["sums"], cursor.window["num_steps"])
            self._mean_loss.last_logged_step, self.learning_rate = cursor.last_logged_step, cursor.learning_rate
            self.grad_norm = None if cursor.grad_norm is None else torch.tensor(cursor.grad_norm, dtype=torch.float64)

    def _record_boundary(self) -> None:
        """Record the state that ``save_last_step`` restores after an error in the next update."""
        if self.hooks.args.save_on_exception:
            self._boundary = {
                "random_states": current_random_states(),
                "progress": self.hooks.accelerator.progress.to_json(),
                "loader": self.loader.state_dict() if self.is_exact and hasattr(self.loader, "last_step") else None,
            }

    def save_last_step(self) -> None:
        """Save a checkpoint of the state after the last completed step. Collective: call on every rank."""
        hooks, boundary = self.hooks, self._boundary
        assert boundary is not None
        self.losses.drop_open_step()
        restore_random_states(boundary["random_states"])
        if boundary["loader"] is not None:
            self.loader.load_state_dict(boundary["loader"])
        hooks.accelerator.gradient_state.sync_gradients = True
        hooks.accelerator.progress.load_json(boundary["progress"])
        self.cursor.is_within_update = True
        self._save()

    def _stop_if_preempted(self, *, is_new_step: bool) -> None:
        """If the ranks have agreed to stop here, save and end the process (or, with
        ``enable_jit_checkpoint``, only the run).

        Collective: call on every rank, once the ranks have agreed to stop.

        Raises:
            Preempted: the checkpoint has been saved, and the process must end.
        """
        preemption, step = self.hooks.accelerator.preemption, self.hooks.state.global_step
        if self._is_ending or not preemption.at_boundary(is_new_step=is_new_step, is_whole=True):
            return
        self._save_and_end(is_needed=self.last_saved_step != step or self.cursor.is_over)

    def _save_and_end(self, *, is_needed: bool = True) -> None:
        hooks, step = self.hooks, self.hooks.state.global_step
        if is_needed:
            self._save()
        how = "saved a checkpoint" if hooks.accelerator.checkpoints.store.is_saved else "could not save a checkpoint"
        logger.warning("stopping after a signal: %s of step %d of %d", how, step, self.plan.max_steps)
        if not hooks.args.enable_jit_checkpoint or hooks.args.save_on_signal:
            raise Preempted
        self._is_ending = hooks.control.should_training_stop = True

    def _on_any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank. Collective: call on every rank."""
        accelerator = self.hooks.accelerator
        if accelerator.session.num_readers == 1:  # ranks with the same samples have the same losses and norms
            return flag
        # Over all ranks: accelerator.reduce counts ranks that share samples once.
        return accelerator.session.on_any_rank(flag)

    def _repeat_evaluation(self, start: ResumePoint) -> ResumePoint:
        """Repeat the evaluation that preemption interrupted, and return the new resume point."""
        hooks, cursor = self.hooks, self.cursor
        if start.random_states is not None:
            restore_random_states(start.random_states)
        hooks.control.should_evaluate, hooks.control.should_save = True, cursor.saves_after_evaluation
        cursor.is_within_evaluation = False
        self._end_step()
        self._stop_if_preempted(is_new_step=False)
        return replace(start, random_states=current_random_states())

    # ---- parts of a step ---------------------------------------------------------------------------------------------

    def evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float] | None:
        """Implement ``Trainer._evaluate``; return None if preemption interrupted it and a checkpoint was saved."""
        hooks, states = self.hooks, current_random_states()
        self._session.evaluation.is_repeatable = True
        try:
            metrics = hooks.evaluate(ignore_keys=ignore_keys_for_eval)
        except Preempted:
            restore_random_states(states)
            self.cursor.is_within_evaluation = True
            self.cursor.saves_after_evaluation = hooks.control.should_save
            self._save_and_end()
            return None
        except RuntimeError as error:
            size = hooks.args.per_device_eval_batch_size
            if hooks.args.auto_find_batch_size and (memory_error := evaluation_memory_error(error, batch_size=size)):
                raise memory_error from error
            raise
        finally:
            self._session.evaluation.is_repeatable = False
        hooks._report_to_hp_search(trial, hooks.state.global_step, metrics)
        if not skip_scheduler and not self._session.optimizer.steps_per_update:
            hooks.lr_scheduler.step(metric_for_best(hooks, metrics))
        return metrics

    def load_rng_state(self) -> None:
        """Implement ``Trainer._load_rng_state``."""
        if self.resume_point.random_states is not None:
            restore_random_states(self.resume_point.random_states)
        self.hooks.accelerator.session.engine.share_random_states()

    def _train_mode(self) -> None:
        self.hooks.model_wrapped.train()
        self.hooks.model.train()
        set_optimizer_mode(self.hooks.optimizer, "train")

    def _prepare_update(self, group: list[Any]) -> None:
        """Count an update's tokens and empty the memory cache if the arguments request it.

        Collective: call on every rank if tokens are counted.
        """
        every = self.hooks.args.torch_empty_cache_steps
        if every is not None and self.hooks.state.global_step % every == 0:
            clear_device_cache()
        if self.counts_tokens and not self._session.is_overridden(self.hooks, "_track_num_input_tokens"):
            count_tokens(self.hooks, group)

    def _stop_on_nan(self, group: list[Any]) -> None:
        """Raise before the optimizer changes the weights if a loss or gradient is nonfinite.

        Collective: call on every rank.
        """
        hooks = self.hooks
        is_bad = not all(bool(loss.isfinite().all()) for loss in self.losses.last(len(group)))
        if self.grad_norm is not None and not hooks.args.fp16:  # loss scaling handles overflow
            is_bad |= not bool(torch.as_tensor(self.grad_norm).isfinite())
        if not self._on_any_rank(is_bad):
            return
        step = hooks.state.global_step + 1
        is_sharded = hooks.accelerator.capabilities.shards_parameters  # then a forward pass would be collective
        what = first_bad(hooks.model, group, compute_loss=None if is_sharded else self._compute_loss)
        raise NonFiniteError(
            f"a loss or gradient in step {step} is not finite: {what or 'see the error on another rank'}",
            where=f"step {step}, epoch {hooks.state.epoch:.3g}",
        )

    def _compute_loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        inputs = self.hooks._prepare_inputs(inputs)
        loss: torch.Tensor = call_compute_loss(self.hooks, self._session, model, inputs, self.num_items)
        return loss

    def _throughput(self, num_steps: int) -> dict[str, float]:
        now = time.time()
        seconds, self.logged_at = max(now - self.logged_at, 1e-9), now
        samples = num_steps * self.plan.total_train_batch_size
        return {
            "samples_per_second": round(samples / seconds, 3),
            "steps_per_second": round(num_steps / seconds, 3),
        }
