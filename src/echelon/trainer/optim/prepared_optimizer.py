"""Creates and prepares a run's optimizer and scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.accelerator import AcceleratedOptimizer, AcceleratedScheduler, DummyOptim, DummyScheduler
from echelon.accelerator.pipeline import Pipeline
from echelon.accelerator.prepare.build_deepspeed import parameters_by_group
from echelon.accelerator.update.scheduler import steps_with_metric
from echelon.trainer.arguments.deepspeed import deepspeed_optimizer, deepspeed_schedule
from echelon.trainer.features.pipeline_steps import refuse_own_losses, splits_layers
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.optim.lr_schedules import get_scheduler
from echelon.trainer.optim.optimizers import parameter_groups, without_compiler

__all__ = ["PreparedOptimizer", "create_optimizer", "create_scheduler", "set_optimizer_mode"]


# Optimizers with their own parameter groups name them in one of these ways, as in transformers.
_PARAMETERS = ("params", "model", "optimizer_dict")


def create_optimizer(hooks: TrainerHooks, model: nn.Module) -> Optimizer | DummyOptim:
    """Return a new optimizer for ``model``, for ``Trainer.create_optimizer``."""
    args = hooks.args
    kind, given = hooks.optimizer_cls_and_kwargs or hooks.get_optimizer_cls_and_kwargs(args, model)
    options = dict(given)
    decaying = hooks.get_decay_parameter_names(model)
    groups: Any = parameter_groups(model, decaying=decaying, weight_decay=args.weight_decay)
    if isinstance(kind, type) and any("__call__" in vars(owner) for owner in kind.__mro__[:-1]):
        return kind()(model, **options)  # type: ignore[no-any-return,call-arg,operator] # a factory, as in transformers
    for name in _PARAMETERS:
        groups = options.pop(name, groups)
    if args.world_size == 1 and not args.torch_compile:  # otherwise torch imports its compiler anyway
        kind = without_compiler(kind)
    return deepspeed_optimizer(args, groups) or kind(groups, **options)


def create_scheduler(hooks: TrainerHooks, optimizer: Optimizer, num_steps: int) -> LRScheduler | DummyScheduler:
    """Return a new scheduler for ``optimizer``, for ``Trainer.create_scheduler``."""
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
    shares = 1 if accelerator.split_batches else accelerator.session.num_readers
    return deepspeed_schedule(
        args, optimizer, num_steps=num_steps, num_shares=shares, make=lambda own: make(optimizer=own)
    ) or make(optimizer=optimizer)


@dataclass
class PreparedOptimizer:
    """Optimizer and scheduler state that is not in the Trainer's attributes."""

    is_prepared: bool = False
    """Whether the model, optimizer and scheduler are prepared."""
    scheduler: Any = None
    """The scheduler that ``prepare`` returned."""
    is_foreign_scheduler: bool = False
    """Whether the scheduler is not a torch ``LRScheduler``, so that the Accelerator does not save it."""
    pipeline: Pipeline | None = None
    """The model's stages on this rank (``pp_size``)."""
    steps_per_update: bool = True
    """Whether the scheduler steps after each update; otherwise, it steps with each evaluation's metric."""
    created_scheduler: bool = False
    """Whether the Trainer has created the scheduler."""
    saved_state: dict[str, Any] | None = None
    """The optimizer's whole state on the saving rank, while a checkpoint in transformers' format is written."""
    _has_other_gradients: bool = False  # trainable weights that the optimizer does not contain

    def prepare(self, hooks: TrainerHooks, max_steps: int) -> None:
        """Create the optimizer and the scheduler if they were not given, and prepare them with the model.

        Collective: call on every rank.
        """
        hooks.optimizer = _unwrapped(hooks.optimizer)
        if self.created_scheduler:
            hooks.lr_scheduler = None  # for another number of steps, or finished in an earlier run
        is_given = hooks.lr_scheduler is not None
        hooks.create_optimizer_and_scheduler(max_steps)
        self.created_scheduler = not is_given
        optimizer, scheduler = hooks.optimizer, hooks.lr_scheduler
        held = {id(p) for group in parameters_by_group(optimizer) for p in group}
        self._has_other_gradients = any(p.requires_grad and id(p) not in held for p in hooks.model.parameters())
        if splits_layers(hooks):
            self.prepare_pipeline(hooks)
            hooks.optimizer, prepared = hooks.accelerator.prepare(optimizer, scheduler)
            self._finish(hooks, scheduler, optimizer, prepared)
            return
        wrapped = hooks._wrap_model(hooks.model_wrapped)
        if wrapped is hooks.model_wrapped or wrapped is hooks.model:
            hooks.model_wrapped, hooks.optimizer, prepared = hooks.accelerator.prepare(
                hooks.model, optimizer, scheduler
            )
            hooks.model = hooks.accelerator.unwrap_model(hooks.model_wrapped, keep_torch_compile=False)
        else:  # the user's own wrapper
            hooks.model_wrapped = wrapped
            hooks.optimizer, prepared = hooks.accelerator.prepare(optimizer, scheduler)
        self._finish(hooks, scheduler, optimizer, prepared)

    def _finish(self, hooks: TrainerHooks, scheduler: Any, optimizer: Any, prepared: Any) -> None:
        # Schedulers count optimizer steps here, so the loop can step the unwrapped object.
        hooks.lr_scheduler = prepared.scheduler if isinstance(prepared, AcceleratedScheduler) else prepared
        self.scheduler = prepared
        self.is_foreign_scheduler = not isinstance(scheduler, (LRScheduler, DummyScheduler))
        if self.is_foreign_scheduler and getattr(scheduler, "optimizer", None) is optimizer:
            scheduler.optimizer = hooks.optimizer.optimizer  # as engines do for torch schedulers
        self.steps_per_update = not steps_with_metric(hooks.lr_scheduler)
        self.is_prepared = True
        if hooks.is_deepspeed_enabled:
            hooks.deepspeed = hooks.model_wrapped
        handler = hooks.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = hooks.model, hooks.optimizer, hooks.lr_scheduler

    def prepare_pipeline(self, hooks: TrainerHooks) -> None:
        """Divide the model into stages, unless it is already (``parallelism_config`` with ``pp_size``).

        Collective: call on every rank.
        """
        if self.pipeline is None or self.pipeline.model is not hooks.model:
            refuse_own_losses(hooks)
            self.pipeline = hooks.accelerator.prepare_pipeline(
                hooks.model,
                schedule=hooks.args.pipeline_schedule,
                num_micro_batches=hooks.args.pipeline_num_micro_batches,
            )
        hooks.model_wrapped = hooks.model

    def zero_grad(self, hooks: TrainerHooks) -> None:
        """Zero the model's gradients, including those of weights that the optimizer does not contain."""
        (hooks.model_wrapped if self._has_other_gradients else hooks.optimizer).zero_grad()


def set_optimizer_mode(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Switch a schedule-free optimizer, which has separate weights for evaluation, to ``mode``."""
    switch = getattr(_unwrapped(optimizer), mode, None)
    if callable(switch):
        switch()


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
