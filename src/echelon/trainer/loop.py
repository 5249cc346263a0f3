"""The training loop: passes, updates, and what happens after each of them."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from echelon.accelerator.checkpoint.folders import is_saved
from echelon.accelerator.checkpoint.rng_states import current_random_states, restore_random_states
from echelon.accelerator.memory import clear_device_cache
from echelon.accelerator.preemption import Preempted
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsSetEpoch
from echelon.trainer.arguments.enums import SaveStrategy
from echelon.trainer.checkpoint.best_model import load_best, metric_for_best, note_best, remove_last_checkpoint
from echelon.trainer.checkpoint.train_cursor import ResumePoint, TrainCursor
from echelon.trainer.data.epoch_batches import EpochBatches, tell_length
from echelon.trainer.data.num_tokens import num_tokens
from echelon.trainer.features.auto_find_batch_size import evaluation_ran_out
from echelon.trainer.features.nonfinite import NonFiniteError, first_bad
from echelon.trainer.loss_window import LossWindow, mean_loss, no_losses
from echelon.trainer.results import TrainOutput, speed_metrics
from echelon.trainer.training_plan import TrainingPlan

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = ["TrainingLoop"]

logger = get_logger(__name__)


class TrainingLoop:
    """One call of ``Trainer.train``.

    It calls the Trainer's public methods, so that a subclass can override them, and keeps what belongs to this call
    only: the losses, the last norm of the gradients, the learning rate that was used.

    Args:
        trainer: whose training it is.
        plan: its length.
        loader: of the training data.
        start: where it begins.
        ignore_keys: outputs of the model that evaluations leave out.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: TrainingPlan,
        loader: Any,
        *,
        start: ResumePoint,
        ignore_keys: list[str] | None,
    ) -> None:
        self.trainer = trainer
        self.plan = plan
        self.loader = loader
        self.begins = start
        self.place = trainer._place
        self.ignore_keys = ignore_keys
        self.is_exact = trainer.accelerator.parity != "off"
        self.is_left = False
        """The last update was left in its middle."""
        self.is_stepping = False
        """Between the step of the optimizer and the end of what belongs to it."""
        self.batches = EpochBatches(())
        """Of the epoch."""
        self._is_length_told = False
        self.last_saved_step: int | None = None
        self._is_told = False  # to end, and saved
        self._boundary: dict[str, Any] | None = None  # of the last whole step, for an error after it
        self.losses = LossWindow()
        self.total = no_losses()  # those of this call that were logged, or taken at its end
        self.num_items: Any = None  # what the losses of the update are divided by
        self.grad_norm: torch.Tensor | None = None
        self.learning_rate = 0.0
        self.last_logged_step = 0
        self.floating_point_ops = 0.0
        args = trainer.args
        self.counts_tokens = args.include_num_input_tokens_seen != "no"
        self.prepares_update = self.counts_tokens or args.torch_empty_cache_steps is not None
        self.start = self.logged_at = time.time()
        self.first_step = trainer.state.global_step
        if trainer.state.global_step:
            self._restore(self.place)
        place, accelerator = self.place, trainer.accelerator
        place.batch_size, place.world_size, place.parity = (
            plan.batch_size,
            accelerator.num_processes,
            accelerator.parity,
        )
        place.canonical_shards = accelerator.config.value.canonical_shards
        place.is_within_update = False

    def run(self) -> TrainOutput:
        """Train, and return what came of it.

        Collective: every rank.
        """
        trainer, args, plan, start = self.trainer, self.trainer.args, self.plan, self.begins
        self.start = self.logged_at = time.time()
        if trainer.state.epoch is None:
            trainer.state.epoch = 0.0
        trainer._tell("on_train_begin")
        if args.eval_on_start:
            self._evaluate(steps_schedule=False)
        elif self.place.is_within_evaluation:
            start = self._evaluate_again(start)
        self._train_mode()
        is_done = self._is_told or (self._has_all_steps and not start.num_batches)
        # With other batches than those of the plan, max_steps may lie beyond its epochs.
        num_epochs = sys.maxsize if args.max_steps > 0 else plan.num_epochs
        for epoch in () if is_done else range(start.epoch, num_epochs):
            self._run_epoch(epoch, start if epoch == start.epoch else ResumePoint(epoch=epoch))
            if trainer.control.should_training_stop or self._has_all_steps:
                break
        self._count_losses()  # those since the last log
        self._store_flops()
        num_steps = trainer.state.global_step - self.first_step
        mean = self._mean_loss(self.total, num_steps=num_steps)
        part = num_steps / max(plan.max_steps, 1)  # a training that was ended early, or that went on
        num_samples = int(plan.num_train_samples * part)
        metrics = speed_metrics("train", self.start, num_samples=num_samples, num_steps=num_steps)
        metrics |= {"total_flos": trainer.state.total_flos, "train_loss": mean, **trainer._memory.end("train")}
        load_best(trainer)
        trainer.is_in_train = False
        trainer._log(metrics)
        remove_last_checkpoint(trainer)
        trainer._tell("on_train_end")
        trainer._hub.wait()
        return TrainOutput(trainer.state.global_step, mean, metrics)

    def _run_epoch(self, epoch: int, start: ResumePoint) -> None:
        trainer, plan, place = self.trainer, self.plan, self.place
        if isinstance(self.loader, SupportsSetEpoch):
            self.loader.set_epoch(epoch)
        loader = self.loader
        if start.num_to_skip:
            loader = trainer.accelerator.skip_first_batches(loader, start.num_to_skip)
        place.is_read &= start.num_batches > 0  # in the saved training, to the end of its data
        place.epoch, place.num_batches, place.is_over = epoch, start.num_batches, False
        trainer._tell("on_epoch_begin")
        if start.random_states is not None and not start.is_read_first:
            restore_random_states(start.random_states)
        after_reading = start.random_states if start.is_read_first else None
        self._note_boundary()
        num_planned = sys.maxsize if self.is_exact else plan.batches_per_epoch - place.num_batches
        batches = self.batches = EpochBatches(loader, trainer.accelerator, num_planned=num_planned)
        num_made = 0
        try:
            while not self._has_all_steps and not place.is_read and self._has_more():
                made = (
                    self._exact_update(batches, after_reading)
                    if self.is_exact
                    else self._update(batches, after_reading)
                )
                if not made:
                    place.is_read = True
                    break
                num_made += 1
                after_reading = None
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    break
            if not num_made and start.random_states is not None:
                restore_random_states(start.random_states)  # there was nothing to read, and looking may have drawn some
            has_more = not (place.is_read or trainer.control.should_epoch_stop)
            if has_more and (plan.is_sized or not self._has_all_steps):
                has_more = self._has_more()
            if not has_more:
                batches.close()
            if not place.num_batches and not self.is_left:
                logger.warning(
                    "the training data gave no batch in pass %d: the training ends at step %d of %d",
                    epoch + 1,
                    trainer.state.global_step,
                    plan.max_steps,
                )
                trainer.control.should_training_stop = True
            elif not start.num_batches:
                self._tell_length(has_more=has_more)
            trainer._tell("on_epoch_end")
            # Batches that are left are trained on by whoever goes on from here.
            place.is_over, place.is_within_update = not has_more, has_more and self.is_left
            self._log_evaluate_save()
            self._stop_if_told(is_new_step=False)
        finally:
            batches.close()

    # ---- where an epoch ends -----------------------------------------------------------------------------------------

    @property
    def _has_all_steps(self) -> bool:
        """Whether the steps that were asked for are made: those of ``max_steps``, or of the last, partial epoch."""
        return not self.plan.ends_with_data and self.trainer.state.global_step >= self._num_steps

    @property
    def _num_steps(self) -> int:
        """The steps of the training, where it does not end with the data of its last epoch."""
        num_beyond = 0 if self.trainer.args.max_steps > 0 else self.place.num_steps_beyond
        return self.plan.max_steps + num_beyond

    def _has_more(self, num_batches: int | None = None) -> bool:
        """Whether the epoch has more batches than ``num_batches`` (those that were trained on).

        The data decide, whatever number was planned with, unless the user has set a limit, or they have no end.

        Collective: where ``EpochBatches.has_more`` is.
        """
        plan, place = self.plan, self.place
        num_batches = place.num_batches if num_batches is None else num_batches
        if num_batches < plan.batches_per_epoch:
            return True  # as planned; if not, reading finds out
        if plan.is_limited or place.has_no_end:
            return False
        if num_batches == place.num_batches and place.is_read:
            return False
        if not self.batches.has_more():
            return False
        num_workers = getattr(self.loader, "num_workers", 0)
        place.has_no_end = plan.is_sized and num_batches >= 2 * plan.batches_per_epoch + num_workers
        return not place.has_no_end

    def _is_last_step(self, num_batches: int) -> bool:
        """Whether no step follows the one in hand, after which ``num_batches`` of the epoch are trained on."""
        plan, place = self.plan, self.place
        if not plan.ends_with_data:
            return self.trainer.state.global_step + 1 >= self._num_steps
        return place.epoch + 1 >= plan.num_epochs and (
            self.batches.is_known_to_be_over or not self._has_more(num_batches)
        )

    def _tell_length(self, *, has_more: bool) -> None:
        """Warn, once, of an epoch that had another number of batches than was planned, and may have more."""
        trainer, plan, place = self.trainer, self.plan, self.place
        if self._is_length_told or not plan.is_sized or place.num_batches == plan.batches_per_epoch:
            return
        is_short = place.num_batches < plan.batches_per_epoch
        if is_short and (not place.is_read or plan.is_limited or trainer.control.should_epoch_stop):
            return  # it was left before its end
        self._is_length_told = True
        tell_length(
            plan,
            self.loader,
            epoch=place.epoch,
            num_batches=place.num_batches,
            has_more=has_more or place.has_no_end,
            ends=place.has_no_end,
            max_steps=trainer.args.max_steps,
        )

    def _update(self, batches: EpochBatches, random_states: Any) -> bool:
        """Make one optimizer step of the next batches; False: there are none.

        Args:
            batches: of the epoch.
            random_states: what random numbers are drawn from when they are read; None: as they come.
        """
        trainer, model, losses = self.trainer, self.trainer.model_wrapped, self.losses
        group, num_items = self._next_group(batches)
        self.num_items = num_items
        if not group:
            return False
        if random_states is not None:
            restore_random_states(random_states)
        trainer._tell("on_step_begin")
        trainer.current_gradient_accumulation_steps = len(group)
        last = len(group) - 1
        if self.prepares_update:
            self._prepare_update(group)
        for i, inputs in enumerate(group):
            if i < last and not trainer._syncs_each_batch:  # gradients need not travel before the last pass
                with trainer.accelerator.no_sync(model):
                    losses.add(trainer._training_step(model, inputs, num_items))
            else:
                losses.add(trainer._training_step(model, inputs, num_items))
            if i < last:
                control = trainer._tell("on_substep_end")
                if control.should_epoch_stop or control.should_training_stop:
                    self._leave_update()
                    return True
        self._step(group, num_batches=len(group))
        return True

    def _next_group(self, batches: EpochBatches) -> tuple[list[Any], Any]:
        """Return the batches of an update, and the number of their items: as many as are planned, and more where there are."""
        get, device = self.trainer.get_batch_samples, self.trainer.accelerator.device
        wanted, num_left = self.trainer._accumulation_steps, self.plan.batches_per_epoch - self.place.num_batches
        planned = min(wanted, num_left) if num_left > 0 else wanted
        group, num_items = get(batches, planned, device)
        if planned == wanted or len(group) < planned or self.plan.is_limited or not batches.has_more():
            return group, num_items
        more, num_more = get(batches, wanted - planned, device)
        return [*group, *more], None if num_items is None or num_more is None else num_items + num_more

    def _leave_update(self) -> None:
        """Forget an update that a callback ended before its last batch: nothing of it is stepped with later on."""
        self.losses.drop_open_step()
        self._zero_grad()
        self.is_left = True

    def _zero_grad(self) -> None:
        if self.trainer._has_gradients_elsewhere:
            self.trainer.model_wrapped.zero_grad()
        else:
            self.trainer.optimizer.zero_grad()

    def _exact_update(self, batches: Any, random_states: Any) -> bool:
        """Make one optimizer step in the micro-steps that the loader cuts it into; False: there is none.

        Args:
            batches: of the epoch.
            random_states: as in ``_update``.
        """
        trainer, model, accelerator = self.trainer, self.trainer.model_wrapped, self.trainer.accelerator
        trainer.current_gradient_accumulation_steps = 1  # the weight of each sample or label makes the mean
        group: list[Any] = []
        while not group or not accelerator.sync_gradients:
            if group:
                trainer._tell("on_substep_end")
            group, num_items = trainer.get_batch_samples(batches, 1, accelerator.device)
            if not group:
                return False
            if random_states is not None:
                restore_random_states(random_states)
                random_states = None
            if accelerator.progress.micro_step <= 1:
                trainer._tell("on_step_begin")
            if self.prepares_update:
                self._prepare_update([accelerator.trim_for_metrics(inputs) for inputs in group])
            with accelerator.accumulate(model):
                trainer._training_step(model, group[0], num_items)
        self.losses.add(torch.tensor(accelerator.update_loss(), dtype=torch.float64))
        self._step(group, num_batches=1)
        return True

    def _step(self, group: list[Any], *, num_batches: int) -> None:
        """Let the optimizer step with the gradients that are there, and do what comes after."""
        trainer, place = self.trainer, self.place
        args, state, model, losses = trainer.args, trainer.state, trainer.model_wrapped, self.losses
        if trainer._counts_flops:
            self.floating_point_ops += sum(float(trainer.floating_point_ops(inputs)) for inputs in group)
        optimizer = trainer.optimizer
        if args.max_grad_norm:
            self.grad_norm = trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        if args.stop_on_nan:
            self._stop_on_nan(group)
        losses.end_step()
        trainer._tell("on_pre_optimizer_step")
        self.is_stepping = True
        optimizer.step()
        trainer._tell("on_optimizer_step")
        self.learning_rate = optimizer.param_groups[0]["lr"]
        if place.num_batches >= self.plan.batches_per_epoch:
            place.num_steps_beyond += 1
        # Beyond the steps that it was made for, a schedule keeps its rate: a cosine would rise again.
        is_beyond = state.global_step + 1 >= self.plan.max_steps and not self._is_last_step(
            place.num_batches + num_batches
        )
        if trainer._steps_schedule and not is_beyond and not self._was_skipped():
            trainer.lr_scheduler.step()
        self._zero_grad()
        state.global_step += 1
        if is_beyond and state.global_step >= state.max_steps:
            state.max_steps = state.global_step + 1  # callbacks end the training there
        place.num_batches += num_batches
        place.is_read = self.batches.is_known_to_be_over
        state.epoch = place.epoch + min(place.num_batches / self.plan.batches_per_epoch, 1.0)
        self._note_boundary()
        self.is_stepping = False
        control = trainer._tell("on_step_end")
        if control.should_log or control.should_evaluate or control.should_save:
            self._log_evaluate_save()
        self._stop_if_told(is_new_step=True)

    def _was_skipped(self) -> bool:
        return self.trainer.args.fp16 and self.trainer.accelerator.optimizer_step_was_skipped

    def _log_evaluate_save(self) -> None:
        trainer, state = self.trainer, self.trainer.state
        if trainer.control.should_log and state.global_step > self.last_logged_step:
            logs: dict[str, Any] = {"loss": self._count_losses()}
            if self.grad_norm is not None:
                logs["grad_norm"] = self.grad_norm.item()
            logs["learning_rate"] = self.learning_rate
            if trainer.args.log_throughput:
                logs |= self._throughput(state.global_step - self.last_logged_step)
            self.last_logged_step = state.global_step
            trainer._log(logs, self.start if self.counts_tokens else None)
        if trainer.control.should_evaluate:
            metrics = self._evaluate()
            if metrics is None:
                return
            is_best = note_best(trainer, metrics)
            if trainer.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            self._save()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint of now. Collective: every rank."""
        trainer, place = self.trainer, self.place
        self._store_flops()
        num_processes = trainer.accelerator.num_processes
        sums, num_steps = self.losses.state()
        if self._num_shares > 1:
            # Each rank gets the mean of all, whatever their number will be.
            sums = trainer.accelerator.reduce(sums.to(trainer.accelerator.device), "sum").cpu() / num_processes
        place.window = {"sums": sums, "num_steps": num_steps}
        place.last_logged_step, place.learning_rate = self.last_logged_step, self.learning_rate
        place.grad_norm = None if self.grad_norm is None else float(self.grad_norm)
        place.schedule = trainer.lr_scheduler.state_dict() if trainer._is_foreign_schedule else None
        trial = None if trainer._trial is None else trainer._trial.trial
        trainer._save_checkpoint(trainer.model, trial)
        self.last_saved_step = trainer.state.global_step
        trainer._tell("on_save")

    def _restore(self, place: TrainCursor) -> None:
        """Take over what was not logged yet, if ``place`` is that of the checkpoint."""
        self.last_logged_step = self.trainer.state.global_step
        if place.window:
            self.losses.restore(place.window["sums"], place.window["num_steps"])
            self.last_logged_step, self.learning_rate = place.last_logged_step, place.learning_rate
            self.grad_norm = None if place.grad_norm is None else torch.tensor(place.grad_norm, dtype=torch.float64)

    def _note_boundary(self) -> None:
        """Note what an error in the next update must not change."""
        if self.trainer.args.save_on_exception:
            self._boundary = {
                "random_states": current_random_states(),
                "progress": self.trainer.accelerator.progress.to_json(),
                "loader": self.loader.state_dict() if self.is_exact and hasattr(self.loader, "last_step") else None,
            }

    def save_last_step(self) -> None:
        """Write a checkpoint of the place after the last whole step. Collective: every rank."""
        trainer, boundary = self.trainer, self._boundary
        assert boundary is not None
        self.losses.drop_open_step()
        restore_random_states(boundary["random_states"])
        if boundary["loader"] is not None:
            self.loader.load_state_dict(boundary["loader"])
        trainer.accelerator.gradient_state.sync_gradients = True
        trainer.accelerator.progress.load_json(boundary["progress"])
        self.place.is_within_update = True
        self._save()

    def _stop_if_told(self, *, is_new_step: bool) -> None:
        """If all ranks are to save here: save, and end the process or (``enable_jit_checkpoint``) the training.

        Collective: where they are.

        Raises:
            Preempted: the training is saved.
        """
        preemption, step = self.trainer.accelerator.preemption, self.trainer.state.global_step
        if self._is_told or not preemption.at_boundary(is_new_step=is_new_step, is_whole=True):
            return
        self._save_and_end(is_needed=self.last_saved_step != step or self.place.is_over)

    def _save_and_end(self, *, is_needed: bool = True) -> None:
        trainer, step = self.trainer, self.trainer.state.global_step
        if is_needed:
            self._save()
        how = "is saved" if is_saved(trainer.accelerator) else "could not be saved"
        logger.warning("asked to end by a signal: the training %s after step %d of %d", how, step, self.plan.max_steps)
        if not trainer.args.enable_jit_checkpoint or trainer.args.save_on_signal:
            raise Preempted
        self._is_told = trainer.control.should_training_stop = True

    def _on_any_rank(self, flag: bool) -> bool:
        """Collective: on several ranks."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return flag
        return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum") > 0)

    def _evaluate_again(self, start: ResumePoint) -> ResumePoint:
        """Make the evaluation that the saved training was left in; return where the data goes on."""
        trainer, place = self.trainer, self.place
        if start.random_states is not None:
            restore_random_states(start.random_states)
        trainer.control.should_evaluate, trainer.control.should_save = True, place.saves_after_evaluation
        place.is_within_evaluation = False
        self._log_evaluate_save()
        self._stop_if_told(is_new_step=False)
        return replace(start, random_states=current_random_states())

    # ---- parts of a step ---------------------------------------------------------------------------------------------

    def _evaluate(self, *, steps_schedule: bool = True) -> dict[str, float] | None:
        """Return the metrics of now; None: in the middle, the training was asked to end, and is saved.

        Args:
            steps_schedule: tell a schedule that follows evaluations of it.
        """
        trainer, states = self.trainer, current_random_states()
        trainer._evaluates_again = True
        try:
            metrics = trainer.evaluate(ignore_keys=self.ignore_keys)
        except Preempted:
            restore_random_states(states)
            self.place.is_within_evaluation = True
            self.place.saves_after_evaluation = trainer.control.should_save
            self._save_and_end()
            return None
        except RuntimeError as error:
            size = trainer.args.per_device_eval_batch_size
            if trainer.args.auto_find_batch_size and (ours := evaluation_ran_out(error, batch_size=size)):
                raise ours from error
            raise
        finally:
            trainer._evaluates_again = False
        self._train_mode()
        if trainer._trial is not None:
            trainer._trial.evaluated(metrics, step=trainer.state.global_step)
        if steps_schedule and not trainer._steps_schedule:
            trainer.lr_scheduler.step(metric_for_best(trainer, metrics))
        return metrics

    def _train_mode(self) -> None:
        self.trainer.model_wrapped.train()
        self.trainer._tell_optimizer("train")

    def _prepare_update(self, group: list[Any]) -> None:
        """Count the tokens of an update, and set memory free, where asked for.

        Collective: where tokens are counted.
        """
        trainer, args = self.trainer, self.trainer.args
        every = args.torch_empty_cache_steps
        if every is not None and trainer.state.global_step % every == 0:
            clear_device_cache()
        if self.counts_tokens:
            options = {
                "with_padding": args.include_num_input_tokens_seen == "all",
                "tokenizer": trainer.processing_class,
            }
            count = sum(num_tokens(inputs, model=trainer.model, **options) for inputs in group)
            total = torch.tensor(count, dtype=torch.int64, device=trainer.accelerator.device)
            if trainer.accelerator.num_processes > 1:
                total = trainer.accelerator.reduce(total, "sum")
            trainer.state.num_input_tokens_seen += int(total)

    def _stop_on_nan(self, group: list[Any]) -> None:
        """Raise before the optimizer steps with numbers that are not finite; the weights are those of the last good step.

        Collective: every rank.
        """
        trainer = self.trainer
        is_bad = not all(bool(loss.isfinite().all()) for loss in self.losses.last(len(group)))
        if self.grad_norm is not None and not trainer.args.fp16:  # loss scaling tries sizes that overflow
            is_bad |= not bool(torch.as_tensor(self.grad_norm).isfinite())
        if not self._on_any_rank(is_bad):
            return
        step = trainer.state.global_step + 1
        what = first_bad(trainer, group, num_items=self.num_items)
        raise NonFiniteError(
            f"step {step} is not finite: {what or 'on another rank, whose error names the tensor'}",
            where=f"step {step}, epoch {trainer.state.epoch:.3g}",
        )

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
            accelerator = self.trainer.accelerator
            window = accelerator.reduce(window.to(accelerator.device), "sum").cpu()
        self.total += window[1]
        return self._mean_loss(window[0], num_steps=num_steps)

    def _mean_loss(self, sums: torch.Tensor, *, num_steps: int) -> float:
        filtered = self.trainer.args.logging_nan_inf_filter
        return mean_loss(sums, num_steps=num_steps * self._num_shares, filtered=filtered)

    @property
    def _num_shares(self) -> int:
        """Ranks with losses of their own; in the exact modes every rank has the mean of all."""
        return 1 if self.is_exact else self.trainer.accelerator.num_processes

    def _store_flops(self) -> None:
        """Add the operations since the last call to the state. Collective: where the model can tell them."""
        self.trainer.state.total_flos += self._all_ranks(self.floating_point_ops)
        self.floating_point_ops = 0.0

    def _all_ranks(self, number: float) -> float:
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1 or not self.trainer._counts_flops:
            return number
        total = accelerator.reduce(torch.tensor(number, dtype=torch.float64, device=accelerator.device), "sum")
        return float(total.item())
