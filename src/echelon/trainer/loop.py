"""The training loop: passes, updates, and what happens after each of them."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from echelon.accelerator.memory import clear_device_cache
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsSetEpoch
from echelon.trainer.enums import SaveStrategy
from echelon.trainer.fitting_batch import evaluation_ran_out
from echelon.trainer.losses import LossWindow, mean_loss
from echelon.trainer.nonfinite import NonFiniteError, first_bad
from echelon.trainer.plan import Plan
from echelon.trainer.results import TrainOutput, speed_metrics
from echelon.trainer.tokens import num_tokens

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = ["TrainingLoop"]

logger = get_logger(__name__)


class TrainingLoop:
    """One call of ``Trainer.train``.

    It calls the Trainer's public methods, so that a subclass can override them, and keeps what belongs to this call
    only: the losses, the last norm of the gradients, the learning rate that was used.
    """

    def __init__(self, trainer: Trainer, plan: Plan, loader: Any, *, ignore_keys: list[str] | None) -> None:
        self.trainer = trainer
        self.plan = plan
        self.loader = loader
        self.ignore_keys = ignore_keys
        self.losses = LossWindow()
        self.total_loss = 0.0
        self.grad_norm: torch.Tensor | None = None
        self.learning_rate = 0.0
        self.last_logged_step = 0
        self.floating_point_ops = 0.0
        args = trainer.args
        self.counts_tokens = args.include_num_input_tokens_seen != "no"
        self.prepares_update = self.counts_tokens or args.torch_empty_cache_steps is not None
        self.start = self.logged_at = time.time()

    def run(self) -> TrainOutput:
        """Train, and return what came of it.

        Collective: every rank.
        """
        trainer, args, plan = self.trainer, self.trainer.args, self.plan
        self.start = self.logged_at = time.time()
        trainer.state.epoch = 0.0
        trainer._tell("on_train_begin")
        if args.eval_on_start:
            self._evaluate()
        self._train_mode()
        for epoch in range(plan.num_epochs):
            self._run_epoch(epoch)
            if trainer.control.should_training_stop:
                break
        self._count_losses()  # those since the last log
        trainer.state.total_flos += self._all_ranks(self.floating_point_ops)
        mean = self.total_loss / max(trainer.state.global_step, 1)
        part = trainer.state.global_step / max(plan.max_steps, 1)  # a training that was ended early
        metrics = speed_metrics(
            "train", self.start, num_samples=int(plan.num_train_samples * part), num_steps=trainer.state.global_step
        )
        metrics |= {"total_flos": trainer.state.total_flos, "train_loss": mean, **trainer._memory.end("train")}
        trainer._load_best()
        trainer.is_in_train = False
        trainer._log(metrics)
        trainer._remove_last_checkpoint()
        trainer._tell("on_train_end")
        trainer._hub.wait()
        return TrainOutput(trainer.state.global_step, mean, metrics)

    def _run_epoch(self, epoch: int) -> None:
        trainer, plan, accumulation = self.trainer, self.plan, self.trainer._accumulation_steps
        if isinstance(self.loader, SupportsSetEpoch):
            self.loader.set_epoch(epoch)
        trainer._tell("on_epoch_begin")
        batches, done = iter(self.loader), 0
        try:
            while done < plan.batches_per_epoch:
                wanted = min(accumulation, plan.batches_per_epoch - done)
                group, num_items = trainer.get_batch_samples(batches, wanted, trainer.accelerator.device)
                if not group:
                    break
                done += len(group)
                self._update(group, num_items, epoch + done / plan.batches_per_epoch)
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    break
        finally:
            if isinstance(batches, Generator):
                batches.close()  # a prepared loader counts as being read until then
        if not done:
            logger.warning(
                "the training data gave no batch in pass %d: the training ends at step %d of %d",
                epoch + 1,
                trainer.state.global_step,
                plan.max_steps,
            )
            trainer.control.should_training_stop = True
        trainer._tell("on_epoch_end")
        self._log_evaluate_save()

    def _update(self, group: list[Any], num_items: Any, epoch: float) -> None:
        """Make one optimizer step of the batches in ``group``; ``epoch`` is how far the training is after it."""
        trainer = self.trainer
        args, state, model, losses = trainer.args, trainer.state, trainer.model_wrapped, self.losses
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
                trainer._tell("on_substep_end")
        if trainer._counts_flops:
            self.floating_point_ops += sum(float(trainer.floating_point_ops(inputs)) for inputs in group)
        optimizer = trainer.optimizer
        if args.max_grad_norm:
            self.grad_norm = trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        if args.stop_on_nan:
            self._stop_on_nan(group)
        losses.end_step()
        trainer._tell("on_pre_optimizer_step")
        optimizer.step()
        trainer._tell("on_optimizer_step")
        self.learning_rate = optimizer.param_groups[0]["lr"]
        if trainer._steps_schedule and not (args.fp16 and trainer.accelerator.optimizer_step_was_skipped):
            trainer.lr_scheduler.step()
        if trainer._has_gradients_elsewhere:
            model.zero_grad()
        else:
            optimizer.zero_grad()
        state.global_step += 1
        state.epoch = epoch
        control = trainer._tell("on_step_end")
        if control.should_log or control.should_evaluate or control.should_save:
            self._log_evaluate_save()

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
            is_best = trainer._note_best(metrics)
            if trainer.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            trainer._save_checkpoint()
            trainer._tell("on_save")

    def _evaluate(self) -> dict[str, float]:
        trainer = self.trainer
        try:
            metrics = trainer.evaluate(ignore_keys=self.ignore_keys)
        except RuntimeError as error:
            size = trainer.args.per_device_eval_batch_size
            if trainer.args.auto_find_batch_size and (ours := evaluation_ran_out(error, batch_size=size)):
                raise ours from error
            raise
        self._train_mode()
        if trainer._trial is not None:
            trainer._trial.evaluated(metrics, step=trainer.state.global_step)
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        if isinstance(scheduler, ReduceLROnPlateau) and trainer.state.global_step:
            scheduler.step(trainer._metric_for_best(metrics))
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
        accelerator = trainer.accelerator
        is_bad = not all(bool(loss.isfinite().all()) for loss in self.losses.last(len(group)))
        if self.grad_norm is not None and not trainer.args.fp16:  # loss scaling tries sizes that overflow
            is_bad |= not bool(torch.as_tensor(self.grad_norm).isfinite())
        if accelerator.num_processes > 1:
            flag = torch.tensor(float(is_bad), device=accelerator.device)
            is_bad = bool(accelerator.reduce(flag, "sum") > 0)
        if not is_bad:
            return
        step = trainer.state.global_step + 1
        what = first_bad(trainer, group)
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
        accelerator, num_steps = self.trainer.accelerator, self.losses.num_steps
        sums = self.losses.take()
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums.to(accelerator.device), "sum")
        mean = mean_loss(
            sums,
            num_steps=num_steps * accelerator.num_processes,
            filtered=self.trainer.args.logging_nan_inf_filter,
        )
        self.total_loss += mean * num_steps
        return mean

    def _all_ranks(self, number: float) -> float:
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1 or not self.trainer._counts_flops:
            return number
        total = accelerator.reduce(torch.tensor(number, dtype=torch.float64, device=accelerator.device), "sum")
        return float(total.item())
