"""The optimizer and the schedule of a training: created by the arguments, and prepared by the Accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.accelerator import AcceleratedOptimizer, AcceleratedScheduler, DummyOptim, DummyScheduler
from echelon.accelerator.setup.build_deepspeed import parameters_by_group
from echelon.trainer.arguments.deepspeed import deepspeed_optimizer, deepspeed_schedule
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.optim.lr_schedules import follows_a_metric, get_scheduler
from echelon.trainer.optim.optimizers import parameter_groups, without_compiler

__all__ = ["PreparedOptimizer", "create_optimizer", "create_scheduler", "set_optimizer_mode"]


def create_optimizer(hooks: TrainerHooks, model: nn.Module) -> Optimizer | DummyOptim:
    """Return a new optimizer for ``model``, as ``Trainer.create_optimizer`` says."""
    args = hooks.args
    kind, given = hooks.optimizer_cls_and_kwargs or hooks.get_optimizer_cls_and_kwargs(args, model)
    options = dict(given)
    decaying = hooks.get_decay_parameter_names(model)
    groups = parameter_groups(model, decaying=decaying, weight_decay=args.weight_decay)
    groups = options.pop("params", groups)  # of an optimizer that treats some weights in its own way
    if args.world_size == 1 and not args.torch_compile:  # elsewhere torch loads its compiler anyway
        kind = without_compiler(kind)
    return deepspeed_optimizer(args, groups) or kind(groups, **options)


def create_scheduler(hooks: TrainerHooks, optimizer: Optimizer, num_steps: int) -> LRScheduler | DummyScheduler:
    """Return a new schedule of ``optimizer``, as ``Trainer.create_scheduler`` says."""
    args, accelerator = hooks.args, hooks.accelerator
    options = args.lr_scheduler_kwargs
    assert options is None or isinstance(options, dict), options
    make = partial(
        get_scheduler,
        args.lr_scheduler_type,
        num_warmup_steps=args.get_warmup_steps(num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=options,
    )
    shares = 1 if accelerator.split_batches else accelerator.num_processes
    return deepspeed_schedule(
        args, optimizer, num_steps=num_steps, num_shares=shares, make=lambda own: make(optimizer=own)
    ) or make(optimizer=optimizer)


@dataclass
class PreparedOptimizer:
    """What the loop and checkpoints know of the optimizer and its schedule, beside the Trainer's attributes."""

    is_prepared: bool = False
    """A training has begun: model, optimizer and schedule are the Accelerator's."""
    scheduler: Any = None
    """The schedule as ``prepare`` returned it."""
    is_foreign_scheduler: bool = False
    """Of a class that torch does not know: the Accelerator does not save it."""
    steps_per_update: bool = True
    """The schedule is stepped after each update; else with the metric of each evaluation."""
    _has_other_gradients: bool = False  # of weights that the optimizer does not hold
    _created_scheduler: bool = False

    def prepare(self, hooks: TrainerHooks, max_steps: int) -> None:
        """Create what was not given, and let the Accelerator prepare the model, the optimizer and the schedule.

        Collective: every rank.
        """
        hooks.optimizer = _unwrapped(hooks.optimizer)
        if self._created_scheduler:
            hooks.lr_scheduler = None  # of an earlier training, and at its end
        is_given = hooks.lr_scheduler is not None
        hooks.create_optimizer_and_scheduler(max_steps)
        self._created_scheduler = not is_given
        optimizer, scheduler = hooks.optimizer, hooks.lr_scheduler
        held = {id(p) for group in parameters_by_group(optimizer) for p in group}
        self._has_other_gradients = any(p.requires_grad and id(p) not in held for p in hooks.model.parameters())
        hooks.model_wrapped, hooks.optimizer, prepared = hooks.accelerator.prepare(hooks.model, optimizer, scheduler)
        # Schedules count optimizer steps here, so that the user's own object can be stepped, and asked what it is.
        hooks.lr_scheduler = prepared.scheduler if isinstance(prepared, AcceleratedScheduler) else prepared
        self.scheduler = prepared
        self.is_foreign_scheduler = not isinstance(scheduler, (LRScheduler, DummyScheduler))
        if self.is_foreign_scheduler and getattr(scheduler, "optimizer", None) is optimizer:
            scheduler.optimizer = hooks.optimizer.optimizer  # as engines do for a schedule that they know
        self.steps_per_update = not follows_a_metric(hooks.lr_scheduler)
        hooks.model = hooks.accelerator.unwrap_model(hooks.model_wrapped, keep_torch_compile=False)
        self.is_prepared = True
        handler = hooks.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = hooks.model, hooks.optimizer, hooks.lr_scheduler

    def zero_grad(self, hooks: TrainerHooks) -> None:
        """Clear the gradients of the model, also of weights that the optimizer does not hold."""
        (hooks.model_wrapped if self._has_other_gradients else hooks.optimizer).zero_grad()


def set_optimizer_mode(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Switch an optimizer that keeps other weights for evaluations (schedule-free)."""
    switch = getattr(_unwrapped(optimizer), mode, None)
    if callable(switch):
        switch()


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
