"""The training loop: passes, updates, and what happens after each of them."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsSetEpoch
from echelon.trainer.enums import SaveStrategy
from echelon.trainer.losses import LossWindow, mean_loss
from echelon.trainer.plan import Plan
from echelon.trainer.results import TrainOutput, speed_metrics

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

    def run(self) -> TrainOutput:
        """Train, and return what came of it.

        Collective: every rank.
        """
        trainer, args, plan = self.trainer, self.trainer.args, self.plan
        start = time.time()
        trainer.state.epoch = 0.0
        trainer._tell("on_train_begin")
        if args.eval_on_start:
            self._evaluate()
        trainer.model_wrapped.train()
        for epoch in range(plan.num_epochs):
            self._run_epoch(epoch)
            if trainer.control.should_training_stop:
                break
        self._count_losses()  # those since the last log
        trainer.state.total_flos += self._all_ranks(self.floating_point_ops)
        mean = self.total_loss / max(trainer.state.global_step, 1)
        metrics = speed_metrics("train", start, num_samples=plan.num_train_samples, num_steps=plan.max_steps)
        metrics |= {"total_flos": trainer.state.total_flos, "train_loss": mean}
        trainer._load_best()
        trainer.is_in_train = False
        trainer._log(metrics)
        trainer._remove_last_checkpoint()
        trainer._tell("on_train_end")
        return TrainOutput(trainer.state.global_step, mean, metrics)

    def _run_epoch(self, epoch: int) -> None:
        trainer, plan, accumulation = self.trainer, self.plan, self.trainer.args.gradient_accumulation_steps
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
        for i, inputs in enumerate(group):
            if i < last:  # gradients need not travel before the last pass
                with trainer.accelerator.no_sync(model):
                    losses.add(trainer._training_step(model, inputs, num_items))
                if trainer._counts_flops:
                    self.floating_point_ops += float(trainer.floating_point_ops(inputs))
                trainer._tell("on_substep_end")
            else:
                losses.add(trainer._training_step(model, inputs, num_items))
                if trainer._counts_flops:
                    self.floating_point_ops += float(trainer.floating_point_ops(inputs))
        losses.num_steps += 1
        optimizer = trainer.optimizer
        if args.max_grad_norm:
            self.grad_norm = trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
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
            self.last_logged_step = state.global_step
            trainer._log(logs)
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
        metrics = trainer.evaluate(ignore_keys=self.ignore_keys)
        trainer.model_wrapped.train()
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        if isinstance(scheduler, ReduceLROnPlateau) and trainer.state.global_step:
            scheduler.step(trainer._metric_for_best(metrics))
        return metrics

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
