"""The parts of a training's set-up that need only the Trainer: arguments, the exact modes' loader, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from echelon.accelerator import EMA, SWA, AcceleratedScheduler, DummyScheduler
from echelon.accelerator.prepare.build_deepspeed import parameters_by_group
from echelon.accelerator.update.scheduler import steps_with_metric
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.trainer.arguments.training_arguments import TrainingArguments, building_loader
from echelon.trainer.checkpoint.adapters import has_adapters
from echelon.trainer.features.memory_plan import plan_training
from echelon.trainer.features.model_changes import prepare_pipeline, splits_layers
from echelon.trainer.optim.optimizers import unwrapped
from echelon.trainer.session import TrainerSession
from echelon.trainer.trainer_methods import TrainerMethods


def checkpoint_argument(given: Any, options: Mapping[str, Any]) -> Any:
    """Return the checkpoint passed to ``train``, possibly under its old name ``model_path``."""
    unknown = [name for name in options if name != "model_path"]
    if unknown:
        raise UsageError(
            f"train() has no argument {', '.join(unknown)}", where="Trainer.train", do="see help(Trainer.train)"
        )
    if options.get("model_path") is None:
        return given
    warn(_("train(model_path=) was renamed to resume_from_checkpoint="))
    return options["model_path"] if given is None else given


def check_quantized(model: nn.Module) -> None:
    """Raise UsageError if the weights of a transformers model are quantized and nothing was added that can be trained."""
    quantizer = getattr(model, "hf_quantizer", None)
    if not getattr(model, "is_quantized", False) or getattr(quantizer, "is_qat_trainable", False):
        return
    name = type(model).__name__
    if not has_adapters(model):
        raise UsageError(
            _("{name} has quantized weights, which cannot be trained, and no adapters", name=name),
            where="Trainer.train",
            do=_(
                "add adapters with peft.get_peft_model(model, LoraConfig(...)), or load the model without quantization"
            ),
        )
    if quantizer is not None and not quantizer.is_trainable:
        raise UsageError(
            _(
                "{name} is quantized with {method}, through which no gradients flow to adapters",
                name=name,
                method=quantizer.quantization_config.quant_method,
            ),
            where="Trainer.train",
            do=_("load the model with another quantization method (BitsAndBytesConfig), or without quantization"),
        )


# ---- exact modes -----------------------------------------------------------------------------------------------------


def check_exact(trainer: TrainerMethods) -> None:
    """Check for settings that an exact mode does not support.

    Raises:
        ConfigError: ``auto_find_batch_size`` is set.
        UsageError: ``compute_loss`` divides by the whole update's item count, which is not known for a micro-batch.
    """
    parity = trainer.accelerator.parity
    if trainer.args.auto_find_batch_size:
        raise ConfigError(
            f"auto_find_batch_size does not work with parity={parity!r}",
            where="TrainingArguments.auto_find_batch_size",
            do="set max_micro_batch_size instead, which does not change the updates",
        )
    if trainer.loss_is_scaled_for_ga:
        raise UsageError(
            f"loss_is_scaled_for_ga=True does not work with parity={parity!r}, which weights the loss of each micro-batch by "
            "its labels",
            where=f"{type(trainer).__name__}.loss_is_scaled_for_ga",
            do="remove loss_is_scaled_for_ga and return the mean over the batch from compute_loss",
        )


def exact_train_loader(trainer: TrainerMethods, batch_size: int) -> Any:
    """Return the loader from ``get_train_dataloader``; each of its batches is one update across all processes.

    An override reads ``batch_size`` from ``args.train_batch_size``. Warns if the loader's batch size differs.
    """
    with building_loader(trainer.args, batch_size):
        loader = trainer.get_train_dataloader()
    whole = getattr(loader, "original", loader)
    size = getattr(whole, "batch_size", None) or getattr(getattr(whole, "batch_sampler", None), "batch_size", None)
    if isinstance(size, int) and size != batch_size:
        parity = trainer.accelerator.parity
        warn(
            _(
                "{name}.get_train_dataloader returned a loader with batches of {size} samples, but global_batch_size "
                "is {batch_size}. With parity={parity!r}, each batch from the loader is one update across all "
                "processes, so updates have {size} samples. Build the loader with args.train_batch_size, which is "
                "global_batch_size inside get_train_dataloader, or set global_batch_size={size}",
                name=type(trainer).__name__,
                size=size,
                batch_size=batch_size,
                parity=parity,
            )
        )
    return loader


# ---- averages of the weights -----------------------------------------------------------------------------------------


def new_average(args: TrainingArguments) -> EMA | SWA | None:
    """Return the average of the weights that ``args`` requests."""
    if args.ema_decay is not None:
        return EMA(args.ema_decay, every=args.average_every)
    return None if args.swa_start is None else SWA(args.swa_start, every=args.average_every)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def prepare_optimizer(trainer: TrainerMethods, session: TrainerSession, loader: Any, max_steps: int) -> None:
    """Create the optimizer and the scheduler if they were not given, and prepare them with the model.

    Collective: call on every rank.
    """
    prepared = session.optimizer
    trainer.optimizer = unwrapped(trainer.optimizer)
    if prepared.created_scheduler:
        trainer.lr_scheduler = None  # for another number of steps, or finished in an earlier run
    is_given = trainer.lr_scheduler is not None
    trainer.create_optimizer_and_scheduler(max_steps)
    prepared.created_scheduler = not is_given
    accelerator, optimizer, scheduler = trainer.accelerator, trainer.optimizer, trainer.lr_scheduler
    if trainer.args.plan and not prepared.is_prepared:
        plan_training(trainer, session, loader)
    held = {id(p) for group in parameters_by_group(optimizer) for p in group}
    prepared.has_other_gradients = any(p.requires_grad and id(p) not in held for p in trainer.model.parameters())
    if splits_layers(trainer):
        prepare_pipeline(trainer, prepared)
        trainer.optimizer, prepared.scheduler = accelerator.prepare(optimizer, scheduler)
    elif any(
        (wrapped := trainer._wrap_model(trainer.model_wrapped)) is own for own in (trainer.model_wrapped, trainer.model)
    ):
        trainer.model_wrapped, trainer.optimizer, prepared.scheduler = accelerator.prepare(
            trainer.model, optimizer, scheduler
        )
        trainer.model = accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    else:  # the user's own wrapper
        trainer.model_wrapped = wrapped
        trainer.optimizer, prepared.scheduler = accelerator.prepare(optimizer, scheduler)
    # Schedulers count optimizer steps here, so the loop can step the unwrapped object.
    own = prepared.scheduler
    trainer.lr_scheduler = own.scheduler if isinstance(own, AcceleratedScheduler) else own
    prepared.is_foreign_scheduler = not isinstance(scheduler, (LRScheduler, DummyScheduler))
    if prepared.is_foreign_scheduler and getattr(scheduler, "optimizer", None) is optimizer:
        scheduler.optimizer = trainer.optimizer.optimizer  # as engines do for torch schedulers
    prepared.steps_per_update = not steps_with_metric(trainer.lr_scheduler)
    prepared.is_prepared = True
    if trainer.is_deepspeed_enabled:
        trainer.deepspeed = trainer.model_wrapped
    handler = trainer.callback_handler
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
