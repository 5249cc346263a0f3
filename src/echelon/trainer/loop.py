"""The training loop: passes, updates, and what happens after each of them."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from echelon.accelerator.checkpoint.rng_states import current_random_states, restore_random_states
from echelon.accelerator.memory import clear_device_cache
from echelon.accelerator.preemption import Preempted
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsSetEpoch
from echelon.trainer.arguments.enums import SaveStrategy
from echelon.trainer.batch_loss import call_compute_loss
from echelon.trainer.build_accelerator import accumulation_options
from echelon.trainer.checkpoint.best_model import load_best, metric_for_best, remove_last_checkpoint, update_best_metric
from echelon.trainer.checkpoint.resume_point import ResumePoint
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data.epoch_batches import EpochBatches, warn_of_wrong_length
from echelon.trainer.data.num_tokens import num_tokens
from echelon.trainer.features.auto_find_batch_size import evaluation_memory_error
from echelon.trainer.features.nonfinite import NonFiniteError, first_bad
from echelon.trainer.hooks import BoundMethods, TrainerHooks, bind_log, bind_training_step, notify
from echelon.trainer.loss_window import LossWindow, mean_loss, no_losses
from echelon.trainer.optim.prepared_optimizer import set_optimizer_mode
from echelon.trainer.results import TrainOutput, speed_metrics
from echelon.trainer.session import TrainerSession
from echelon.trainer.training_plan import TrainingPlan

__all__ = ["TrainingLoop"]

logger = get_logger(__name__)


class TrainingLoop:
    """One call of ``Trainer.train``: its epochs, updates, and what follows each of them.

    It owns what belongs to this call only: the losses, the last norm of the gradients, the learning rate that was used.

    Args:
        hooks: the Trainer's public attributes and overridable methods.
        session: the Trainer's parts.
        methods: the Trainer's bound methods.
        plan: the length of the training.
        loader: of the training data.
        start: where the training begins.
        ignore_keys: outputs of the model that evaluations leave out.
    """

    def __init__(
        self,
        hooks: TrainerHooks,
        session: TrainerSession,
        methods: BoundMethods,
        plan: TrainingPlan,
        loader: Any,
        *,
        start: ResumePoint,
        ignore_keys: list[str] | None,
    ) -> None:
        self.hooks = hooks
        self._session = session
        self._training_step = bind_training_step(hooks)
        self._log = bind_log(hooks)
        self._methods = methods
        self._accumulation_steps = session.update_size(hooks.args).accumulation_steps
        self._syncs_each_batch = bool(accumulation_options(hooks.args).get("sync_each_batch"))
        self.plan = plan
        self.loader = loader
        self.begins = start
        self.cursor = session.cursor
        self.ignore_keys = ignore_keys
        self.is_exact = hooks.accelerator.parity != "off"
        self.is_left = False
        """The last update was left in its middle."""
        self.is_stepping = False
        """Between the step of the optimizer and the end of what belongs to it."""
        self.batches = EpochBatches(())
        """Of the epoch."""
        self._is_length_warned = False
        self.last_saved_step: int | None = None
        self._is_ending = False  # to end, and saved
        self._boundary: dict[str, Any] | None = None  # of the last whole step, for an error after it
        self.losses = LossWindow()
        self.total = no_losses()  # those of this call that were logged, or taken at its end
        self.num_items: Any = None  # what the losses of the update are divided by
        self.grad_norm: torch.Tensor | None = None
        self.learning_rate = 0.0
        self.last_logged_step = 0
        self.floating_point_ops = 0.0
        args = hooks.args
        self.counts_tokens = args.include_num_input_tokens_seen != "no"
        self.prepares_update = self.counts_tokens or args.torch_empty_cache_steps is not None
        self.start = self.logged_at = time.time()
        self.first_step = hooks.state.global_step
        if hooks.state.global_step:
            self._restore(self.cursor)
        cursor, accelerator = self.cursor, hooks.accelerator
        cursor.batch_size, cursor.world_size, cursor.parity = (
            plan.batch_size,
            accelerator.num_processes,
            accelerator.parity,
        )
        cursor.canonical_shards = accelerator.config.value.canonical_shards
        cursor.is_within_update = False

    def run(self) -> TrainOutput:
        """Train, and return what came of it.

        Collective: every rank.
        """
        hooks, args, plan, start = self.hooks, self.hooks.args, self.plan, self.begins
        self.start = self.logged_at = time.time()
        if hooks.state.epoch is None:
            hooks.state.epoch = 0.0
        notify(hooks, "on_train_begin")
        if args.eval_on_start:
            self._evaluate(steps_schedule=False)
        elif self.cursor.is_within_evaluation:
            start = self._evaluate_again(start)
        self._train_mode()
        is_done = self._is_ending or (self._has_all_steps and not start.num_batches)
        # With other batches than those of the plan, max_steps may lie beyond its epochs.
        num_epochs = sys.maxsize if args.max_steps > 0 else plan.num_epochs
        for epoch in () if is_done else range(start.epoch, num_epochs):
            self._run_epoch(epoch, start if epoch == start.epoch else ResumePoint(epoch=epoch))
            if hooks.control.should_training_stop or self._has_all_steps:
                break
        self._count_losses()  # those since the last log
        self._store_flops()
        num_steps = hooks.state.global_step - self.first_step
        mean = self._mean_loss(self.total, num_steps=num_steps)
        part = num_steps / max(plan.max_steps, 1)  # a training that was ended early, or that went on
        num_samples = int(plan.num_train_samples * part)
        metrics = speed_metrics("train", self.start, num_samples=num_samples, num_steps=num_steps)
        metrics |= {"total_flos": hooks.state.total_flos, "train_loss": mean, **self._session.memory.end("train")}
        load_best(hooks, self._session.output_dir(args))
        hooks.is_in_train = False
        self._log(metrics, None)
        remove_last_checkpoint(hooks, self._session.output_dir(args))
        notify(hooks, "on_train_end")
        self._session.hub.wait()
        return TrainOutput(hooks.state.global_step, mean, metrics)

    def _run_epoch(self, epoch: int, start: ResumePoint) -> None:
        hooks, plan, cursor = self.hooks, self.plan, self.cursor
        if isinstance(self.loader, SupportsSetEpoch):
            self.loader.set_epoch(epoch)
        loader = self.loader
        if start.num_to_skip:
            loader = hooks.accelerator.skip_first_batches(loader, start.num_to_skip)
        cursor.is_read &= start.num_batches > 0  # in the saved training, to the end of its data
        cursor.epoch, cursor.num_batches, cursor.is_over = epoch, start.num_batches, False
        notify(hooks, "on_epoch_begin")
        if start.random_states is not None and not start.restores_rng_after_reading:
            restore_random_states(start.random_states)
        after_reading = start.random_states if start.restores_rng_after_reading else None
        self._note_boundary()
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
                restore_random_states(start.random_states)  # there was nothing to read, and looking may have drawn some
            has_more = not (cursor.is_read or hooks.control.should_epoch_stop)
            if has_more and (plan.is_sized or not self._has_all_steps):
                has_more = self._has_more()
            if not has_more:
                batches.close()
            if not cursor.num_batches and not self.is_left:
                logger.warning(
                    "the training data gave no batch in pass %d: the training ends at step %d of %d",
                    epoch + 1,
                    hooks.state.global_step,
                    plan.max_steps,
                )
                hooks.control.should_training_stop = True
            elif not start.num_batches:
                self._warn_of_wrong_length(has_more=has_more)
            notify(hooks, "on_epoch_end")
            # Batches that are left are trained on by whoever goes on from here.
            cursor.is_over, cursor.is_within_update = not has_more, has_more and self.is_left
            self._log_evaluate_save()
            self._stop_if_preempted(is_new_step=False)
        finally:
            batches.close()

    # ---- where an epoch ends -----------------------------------------------------------------------------------------

    @property
    def _has_all_steps(self) -> bool:
        """Whether the steps that were asked for are made: those of ``max_steps``, or of the last, partial epoch."""
        return not self.plan.ends_with_data and self.hooks.state.global_step >= self._num_steps

    @property
    def _num_steps(self) -> int:
        """The steps of the training, where it does not end with the data of its last epoch."""
        num_beyond = 0 if self.hooks.args.max_steps > 0 else self.cursor.num_steps_beyond
        return self.plan.max_steps + num_beyond

    def _has_more(self, num_batches: int | None = None) -> bool:
        """Whether the epoch has more batches than ``num_batches`` (those that were trained on).

        The data decide, whatever number was planned with, unless the user has set a limit, or they have no end.

        Collective: where ``EpochBatches.has_more`` is.
        """
        plan, cursor = self.plan, self.cursor
        num_batches = cursor.num_batches if num_batches is None else num_batches
        if num_batches < plan.batches_per_epoch:
            return True  # as planned; if not, reading finds out
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
        """Whether no step follows the one in hand, after which ``num_batches`` of the epoch are trained on."""
        plan, cursor = self.plan, self.cursor
        if not plan.ends_with_data:
            return self.hooks.state.global_step + 1 >= self._num_steps
        return cursor.epoch + 1 >= plan.num_epochs and (
            self.batches.is_known_to_be_over or not self._has_more(num_batches)
        )

    def _warn_of_wrong_length(self, *, has_more: bool) -> None:
        """Warn, once, of an epoch that had another number of batches than was planned, and may have more."""
        hooks, plan, cursor = self.hooks, self.plan, self.cursor
        if self._is_length_warned or not plan.is_sized or cursor.num_batches == plan.batches_per_epoch:
            return
        is_short = cursor.num_batches < plan.batches_per_epoch
        if is_short and (not cursor.is_read or plan.is_limited or hooks.control.should_epoch_stop):
            return  # it was left before its end
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

    def _update(self, batches: EpochBatches, random_states: Any) -> bool:
        """Make one optimizer step of the next batches; False: there are none.

        Args:
            batches: of the epoch.
            random_states: what random numbers are drawn from when they are read; None: as they come.
        """
        hooks, model, losses = self.hooks, self.hooks.model_wrapped, self.losses
        group, num_items = self._next_group(batches)
        self.num_items = num_items
        if not group:
            return False
        if random_states is not None:
            restore_random_states(random_states)
        notify(hooks, "on_step_begin")
        hooks.current_gradient_accumulation_steps = len(group)
        last = len(group) - 1
        if self.prepares_update:
            self._prepare_update(group)
        for i, inputs in enumerate(group):
            if i < last and not self._syncs_each_batch:  # gradients need not travel before the last pass
                with hooks.accelerator.no_sync(model):
                    losses.add(self._training_step(model, inputs, num_items))
            else:
                losses.add(self._training_step(model, inputs, num_items))
            if i < last:
                control = notify(hooks, "on_substep_end")
                if control.should_epoch_stop or control.should_training_stop:
                    self._leave_update()
                    return True
        self._step(group, num_batches=len(group))
        return True

    def _next_group(self, batches: EpochBatches) -> tuple[list[Any], Any]:
        """Return the batches of an update, and the number of their items: as many as are planned, and more where there are."""
        get, device = self.hooks.get_batch_samples, self.hooks.accelerator.device
        wanted, num_left = self._accumulation_steps, self.plan.batches_per_epoch - self.cursor.num_batches
        planned = min(wanted, num_left) if num_left > 0 else wanted
        group, num_items = get(batches, planned, device)
        if planned == wanted or len(group) < planned or self.plan.is_limited or not batches.has_more():
            return group, num_items
        more, num_more = get(batches, wanted - planned, device)
        return [*group, *more], None if num_items is None or num_more is None else num_items + num_more

    def _leave_update(self) -> None:
        """Forget an update that a callback ended before its last batch: nothing of it is stepped with later on."""
        self.losses.drop_open_step()
        self._session.optimizer.zero_grad(self.hooks)
        self.is_left = True

    def _exact_update(self, batches: Any, random_states: Any) -> bool:
        """Make one optimizer step in the micro-steps that the loader cuts it into; False: there is none.

        Args:
            batches: of the epoch.
            random_states: as in ``_update``.
        """
        hooks, model, accelerator = self.hooks, self.hooks.model_wrapped, self.hooks.accelerator
        hooks.current_gradient_accumulation_steps = 1  # the weight of each sample or label makes the mean
        group: list[Any] = []
        while not group or not accelerator.sync_gradients:
            if group:
                notify(hooks, "on_substep_end")
            group, num_items = hooks.get_batch_samples(batches, 1, accelerator.device)
            if not group:
                return False
            if random_states is not None:
                restore_random_states(random_states)
                random_states = None
            if accelerator.progress.micro_step <= 1:
                notify(hooks, "on_step_begin")
            if self.prepares_update:
                self._prepare_update([accelerator.trim_for_metrics(inputs) for inputs in group])
            with accelerator.accumulate(model):
                self._training_step(model, group[0], num_items)
        self.losses.add(torch.tensor(accelerator.update_loss(), dtype=torch.float64))
        self._step(group, num_batches=1)
        return True

    def _step(self, group: list[Any], *, num_batches: int) -> None:
        """Let the optimizer step with the gradients that are there, and do what comes after."""
        hooks, cursor = self.hooks, self.cursor
        args, state, model, losses = hooks.args, hooks.state, hooks.model_wrapped, self.losses
        if self._session.interface.counts_flops:
            self.floating_point_ops += sum(float(hooks.floating_point_ops(inputs)) for inputs in group)
        optimizer = hooks.optimizer
        if args.max_grad_norm:
            self.grad_norm = hooks.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        if args.stop_on_nan:
            self._stop_on_nan(group)
        losses.end_step()
        notify(hooks, "on_pre_optimizer_step")
        self.is_stepping = True
        optimizer.step()
        notify(hooks, "on_optimizer_step")
        self.learning_rate = optimizer.param_groups[0]["lr"]
        if cursor.num_batches >= self.plan.batches_per_epoch:
            cursor.num_steps_beyond += 1
        # Beyond the steps that it was made for, a schedule keeps its rate: a cosine would rise again.
        is_beyond = state.global_step + 1 >= self.plan.max_steps and not self._is_last_step(
            cursor.num_batches + num_batches
        )
        if self._session.optimizer.steps_per_update and not is_beyond and not self._was_skipped():
            hooks.lr_scheduler.step()
        self._session.optimizer.zero_grad(hooks)
        state.global_step += 1
        if is_beyond and state.global_step >= state.max_steps:
            state.max_steps = state.global_step + 1  # callbacks end the training there
        cursor.num_batches += num_batches
        cursor.is_read = self.batches.is_known_to_be_over
        state.epoch = cursor.epoch + min(cursor.num_batches / self.plan.batches_per_epoch, 1.0)
        self._note_boundary()
        self.is_stepping = False
        control = notify(hooks, "on_step_end")
        if control.should_log or control.should_evaluate or control.should_save:
            self._log_evaluate_save()
        self._stop_if_preempted(is_new_step=True)

    def _was_skipped(self) -> bool:
        return self.hooks.args.fp16 and self.hooks.accelerator.optimizer_step_was_skipped

    def _log_evaluate_save(self) -> None:
        hooks, state = self.hooks, self.hooks.state
        if hooks.control.should_log and state.global_step > self.last_logged_step:
            logs: dict[str, Any] = {"loss": self._count_losses()}
            if self.grad_norm is not None:
                logs["grad_norm"] = self.grad_norm.item()
            logs["learning_rate"] = self.learning_rate
            if hooks.args.log_throughput:
                logs |= self._throughput(state.global_step - self.last_logged_step)
            self.last_logged_step = state.global_step
            self._log(logs, self.start if self.counts_tokens else None)
        if hooks.control.should_evaluate:
            metrics = self._evaluate()
            if metrics is None:
                return
            is_best = update_best_metric(hooks, metrics)
            if hooks.args.save_strategy == SaveStrategy.BEST:
                hooks.control.should_save = is_best
        if hooks.control.should_save:
            self._save()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint of now. Collective: every rank."""
        hooks, cursor = self.hooks, self.cursor
        self._store_flops()
        num_processes = hooks.accelerator.num_processes
        sums, num_steps = self.losses.state()
        if self._num_shares > 1:
            # Each rank gets the mean of all, whatever their number will be.
            sums = hooks.accelerator.reduce(sums.to(hooks.accelerator.device), "sum").cpu() / num_processes
        cursor.window = {"sums": sums, "num_steps": num_steps}
        cursor.last_logged_step, cursor.learning_rate = self.last_logged_step, self.learning_rate
        cursor.grad_norm = None if self.grad_norm is None else float(self.grad_norm)
        cursor.schedule = hooks.lr_scheduler.state_dict() if self._session.optimizer.is_foreign_scheduler else None
        trial = self._session.search.trial
        self._methods.save_checkpoint(hooks.model, None if trial is None else trial.trial)
        self.last_saved_step = hooks.state.global_step
        notify(hooks, "on_save")

    def _restore(self, cursor: TrainCursor) -> None:
        """Restore what was not logged yet, if ``cursor`` is that of the checkpoint."""
        self.last_logged_step = self.hooks.state.global_step
        if cursor.window:
            self.losses.restore(cursor.window["sums"], cursor.window["num_steps"])
            self.last_logged_step, self.learning_rate = cursor.last_logged_step, cursor.learning_rate
            self.grad_norm = None if cursor.grad_norm is None else torch.tensor(cursor.grad_norm, dtype=torch.float64)

    def _note_boundary(self) -> None:
        """Note what an error in the next update must not change."""
        if self.hooks.args.save_on_exception:
            self._boundary = {
                "random_states": current_random_states(),
                "progress": self.hooks.accelerator.progress.to_json(),
                "loader": self.loader.state_dict() if self.is_exact and hasattr(self.loader, "last_step") else None,
            }

    def save_last_step(self) -> None:
        """Write a checkpoint of the training after the last whole step. Collective: every rank."""
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
        """If all ranks are to save here: save, and end the process or (``enable_jit_checkpoint``) the training.

        Collective: where they are.

        Raises:
            Preempted: the training is saved.
        """
        preemption, step = self.hooks.accelerator.preemption, self.hooks.state.global_step
        if self._is_ending or not preemption.at_boundary(is_new_step=is_new_step, is_whole=True):
            return
        self._save_and_end(is_needed=self.last_saved_step != step or self.cursor.is_over)

    def _save_and_end(self, *, is_needed: bool = True) -> None:
        hooks, step = self.hooks, self.hooks.state.global_step
        if is_needed:
            self._save()
        how = "is saved" if hooks.accelerator.checkpoints.store.is_saved else "could not be saved"
        logger.warning("asked to end by a signal: the training %s after step %d of %d", how, step, self.plan.max_steps)
        if not hooks.args.enable_jit_checkpoint or hooks.args.save_on_signal:
            raise Preempted
        self._is_ending = hooks.control.should_training_stop = True

    def _on_any_rank(self, flag: bool) -> bool:
        """Collective: on several ranks."""
        accelerator = self.hooks.accelerator
        if accelerator.num_processes == 1:
            return flag
        return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum") > 0)

    def _evaluate_again(self, start: ResumePoint) -> ResumePoint:
        """Make the evaluation that the saved training was left in; return where the data goes on."""
        hooks, cursor = self.hooks, self.cursor
        if start.random_states is not None:
            restore_random_states(start.random_states)
        hooks.control.should_evaluate, hooks.control.should_save = True, cursor.saves_after_evaluation
        cursor.is_within_evaluation = False
        self._log_evaluate_save()
        self._stop_if_preempted(is_new_step=False)
        return replace(start, random_states=current_random_states())

    # ---- parts of a step ---------------------------------------------------------------------------------------------

    def _evaluate(self, *, steps_schedule: bool = True) -> dict[str, float] | None:
        """Return the metrics of now; None: in the middle, the training was asked to end, and is saved.

        Args:
            steps_schedule: tell a schedule that follows evaluations of it.
        """
        hooks, states = self.hooks, current_random_states()
        self._session.evaluation.is_repeatable = True
        try:
            metrics = hooks.evaluate(ignore_keys=self.ignore_keys)
        except Preempted:
            restore_random_states(states)
            self.cursor.is_within_evaluation = True
            self.cursor.saves_after_evaluation = hooks.control.should_save
            self._save_and_end()
            return None
        except RuntimeError as error:
            size = hooks.args.per_device_eval_batch_size
            if hooks.args.auto_find_batch_size and (ours := evaluation_memory_error(error, batch_size=size)):
                raise ours from error
            raise
        finally:
            self._session.evaluation.is_repeatable = False
        self._train_mode()
        if (trial := self._session.search.trial) is not None:
            trial.report_evaluation(metrics, step=hooks.state.global_step)
        if steps_schedule and not self._session.optimizer.steps_per_update:
            hooks.lr_scheduler.step(metric_for_best(hooks, metrics))
        return metrics

    def _train_mode(self) -> None:
        self.hooks.model_wrapped.train()
        set_optimizer_mode(self.hooks.optimizer, "train")

    def _prepare_update(self, group: list[Any]) -> None:
        """Count the tokens of an update, and set memory free, where asked for.

        Collective: where tokens are counted.
        """
        hooks, args = self.hooks, self.hooks.args
        every = args.torch_empty_cache_steps
        if every is not None and hooks.state.global_step % every == 0:
            clear_device_cache()
        if self.counts_tokens:
            options = {
                "with_padding": args.include_num_input_tokens_seen == "all",
                "tokenizer": hooks.processing_class,
            }
            count = sum(num_tokens(inputs, model=hooks.model, **options) for inputs in group)
            total = torch.tensor(count, dtype=torch.int64, device=hooks.accelerator.device)
            if hooks.accelerator.num_processes > 1:
                total = hooks.accelerator.reduce(total, "sum")
            hooks.state.num_input_tokens_seen += int(total)

    def _stop_on_nan(self, group: list[Any]) -> None:
        """Raise before the optimizer steps with numbers that are not finite; the weights are those of the last good step.

        Collective: every rank.
        """
        hooks = self.hooks
        is_bad = not all(bool(loss.isfinite().all()) for loss in self.losses.last(len(group)))
        if self.grad_norm is not None and not hooks.args.fp16:  # loss scaling tries sizes that overflow
            is_bad |= not bool(torch.as_tensor(self.grad_norm).isfinite())
        if not self._on_any_rank(is_bad):
            return
        step = hooks.state.global_step + 1
        is_sharded = hooks.accelerator.capabilities.shards_parameters  # there a forward pass is collective
        what = first_bad(hooks.model, group, compute_loss=None if is_sharded else self._compute_loss)
        raise NonFiniteError(
            f"step {step} is not finite: {what or 'on another rank, whose error names the tensor'}",
            where=f"step {step}, epoch {hooks.state.epoch:.3g}",
        )

    def _compute_loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        inputs = self._methods.prepare_inputs(inputs)
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

    def _count_losses(self) -> float:
        """Return the mean loss of the steps since the last call.

        Collective: every rank.
        """
        num_steps, window = self.losses.num_steps, self.losses.take()
        if self._num_shares > 1:
            accelerator = self.hooks.accelerator
            window = accelerator.reduce(window.to(accelerator.device), "sum").cpu()
        self.total += window[1]
        return self._mean_loss(window[0], num_steps=num_steps)

    def _mean_loss(self, sums: torch.Tensor, *, num_steps: int) -> float:
        filtered = self.hooks.args.logging_nan_inf_filter
        return mean_loss(sums, num_steps=num_steps * self._num_shares, filtered=filtered)

    @property
    def _num_shares(self) -> int:
        """Ranks with losses of their own; in the exact modes every rank has the mean of all."""
        return 1 if self.is_exact else self.hooks.accelerator.num_processes

    def _store_flops(self) -> None:
        """Add the operations since the last call to the state. Collective: where the model can tell them."""
        self.hooks.state.total_flos += self._all_ranks(self.floating_point_ops)
        self.floating_point_ops = 0.0

    def _all_ranks(self, number: float) -> float:
        accelerator = self.hooks.accelerator
        if accelerator.num_processes == 1 or not self._session.interface.counts_flops:
            return number
        total = accelerator.reduce(torch.tensor(number, dtype=torch.float64, device=accelerator.device), "sum")
        return float(total.item())
