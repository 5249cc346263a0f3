"""Derives dependent TrainingArguments values, and checks for invalid, conflicting and unsupported ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _
from echelon.checkpoint.object_store import is_url
from echelon.trainer.arguments.enums import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from echelon.trainer.arguments.fields import TrainingFields
from echelon.trainer.arguments.plugins import read_fsdp

logger = get_logger(__name__)


def set_derived_values(args: TrainingFields) -> None:
    """Set the values that are derived from other values."""
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        if not args.logging_steps > 0:
            raise ConfigError(
                "eval_strategy='steps' needs a positive eval_steps or logging_steps",
                where="TrainingArguments.eval_steps",
                do="set eval_steps",
            )
        args.eval_steps = args.logging_steps
    by_metric = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    wants_best = args.load_best_model_at_end or args.save_best is not None or args.lr_scheduler_type in by_metric
    if wants_best and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.use_cpu:
        args.dataloader_pin_memory = False
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.fast_dev_run:
        _apply_fast_dev_run(args)
    if args.disable_tqdm is None:
        args.disable_tqdm = logger.getEffectiveLevel() > logging.WARNING
    for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
        setattr(args, name, _whole_steps(name, getattr(args, name)))


def _apply_fast_dev_run(args: TrainingFields) -> None:
    steps = int(args.fast_dev_run)
    args.max_steps = args.limit_train_batches = args.limit_eval_batches = steps
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1
    args.save_strategy, args.report_to = SaveStrategy.NO, []
    args.load_best_model_at_end = args.push_to_hub = False
    if args.eval_strategy == IntervalStrategy.STEPS:
        args.eval_steps = steps


def check_values(args: TrainingFields) -> None:
    """Check the values.

    Raises:
        ConfigError: a value is invalid, or values conflict.
    """
    if is_url(args.output_dir):
        local = {
            "push_to_hub": args.push_to_hub,
            "save_on_each_node": args.save_on_each_node,
            "checkpoint_format='transformers'": args.checkpoint_format == "transformers",
        }
        if named := [name for name, is_set in local.items() if is_set]:
            raise ConfigError(
                _(
                    "{settings} does not work with output_dir={output_dir}",
                    settings=named[0],
                    output_dir=args.output_dir,
                ),
                where=f"TrainingArguments.{named[0].partition('=')[0]}",
                do=_("remove it, or set output_dir to a local folder"),
            )
    if args.trackio_static_space_id:
        raise ConfigError(
            f"trackio_static_space_id={args.trackio_static_space_id!r} is not supported by echelon",
            where="TrainingArguments.trackio_static_space_id",
            do="remove this setting and create the static view with the trackio command line",
        )
    if args.fp16 and args.bf16:
        raise ConfigError("fp16 and bf16 are mutually exclusive", where="TrainingArguments", do="remove one of them")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ConfigError(
                f"{name}={getattr(args, name)} must be at least 1",
                where=f"TrainingArguments.{name}",
                do="set it to 1",
            )
    follows_metric = args.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    if follows_metric and args.eval_strategy == IntervalStrategy.NO:
        raise ConfigError(
            f"lr_scheduler_type={str(args.lr_scheduler_type)!r} depends on an evaluation metric, but eval_strategy is "
            "'no'",
            where="TrainingArguments.lr_scheduler_type",
            do="set eval_strategy='epoch', or 'steps' with eval_steps",
        )
    every = args.torch_empty_cache_steps
    if every is not None and (not isinstance(every, int) or every <= 0):
        raise ConfigError(
            f"torch_empty_cache_steps={every!r} is not a positive whole number",
            where="TrainingArguments.torch_empty_cache_steps",
            do="set torch_empty_cache_steps to 1 or more, or to None",
        )
    if args.warmup_steps < 0:
        raise ConfigError(
            f"warmup_steps={args.warmup_steps} must not be negative", where="TrainingArguments.warmup_steps"
        )
    for name in ("limit_train_batches", "limit_eval_batches", "fast_dev_run"):
        limit = getattr(args, name)
        if limit is not None and (
            limit < 0 or (limit > 1 and limit != int(limit)) or (limit == 0 and name != "fast_dev_run")
        ):
            raise ConfigError(
                f"{name}={limit} is neither a number of batches nor a fraction of all batches",
                where=f"TrainingArguments.{name}",
                do="pass a positive integer, or a fraction such as 0.1",
            )
    if not 0 <= args.label_smoothing_factor < 1:
        raise ConfigError(
            f"label_smoothing_factor={args.label_smoothing_factor} is not in [0, 1)",
            where="TrainingArguments.label_smoothing_factor",
            do="a common value is 0.1",
        )
    if args.fp16_full_eval and args.bf16_full_eval:
        raise ConfigError(
            "fp16_full_eval and bf16_full_eval are mutually exclusive",
            where="TrainingArguments",
            do="remove one of them",
        )
    if read_fsdp(args.fsdp) is not None and args.deepspeed:
        raise ConfigError(
            "fsdp and deepspeed are mutually exclusive", where="TrainingArguments", do="remove one of them"
        )
    if args.dataloader_prefetch_factor is not None and not args.dataloader_num_workers:
        raise ConfigError(
            f"dataloader_prefetch_factor={args.dataloader_prefetch_factor} needs data loader workers",
            where="TrainingArguments.dataloader_prefetch_factor",
            do="set dataloader_num_workers to 1 or more",
        )
    if args.logging_strategy == IntervalStrategy.STEPS and not args.logging_steps > 0:
        raise ConfigError(
            f"logging_strategy='steps' needs a positive logging_steps, not {args.logging_steps}",
            where="TrainingArguments.logging_steps",
            do="set logging_steps, or logging_strategy='no'",
        )
    if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
        raise ConfigError(
            "save_strategy='best' needs metric_for_best_model",
            where="TrainingArguments.metric_for_best_model",
            do="set metric_for_best_model to the name of an evaluation metric, such as 'loss'",
        )
    if args.save_best is not None and args.save_best < 1:
        raise ConfigError(
            _("save_best={number} is below 1", number=args.save_best),
            where="TrainingArguments.save_best",
            do=_("set it to the number of best checkpoints to keep, or to None"),
        )
    if args.save_strategy != SaveStrategy.BEST:
        if args.load_best_model_at_end:
            _check_saved_when_evaluated(args, "load_best_model_at_end")
        elif args.save_best is not None:
            _check_saved_when_evaluated(args, "save_best")
    _check_average(args)
    if not args.save_blocking and args.push_to_hub and args.hub_strategy != HubStrategy.END:
        raise ConfigError(
            _(
                "save_blocking=False cannot upload checkpoints (hub_strategy={strategy!r}), which are not yet on disk when "
                "training continues",
                strategy=str(args.hub_strategy),
            ),
            where="TrainingArguments.save_blocking",
            do=_("set hub_strategy='end', or remove save_blocking=False"),
        )
    if args.loss_chunk is not None and args.loss_chunk < 1:
        raise ConfigError(
            _("loss_chunk={size} is below 1", size=args.loss_chunk),
            where="TrainingArguments.loss_chunk",
            do=_("set it to a number of tokens, such as 1024"),
        )
    if args.pack_to_length is not None and args.pack_to_length < 2:
        raise ConfigError(
            _("pack_to_length={length} is below 2", length=args.pack_to_length),
            where="TrainingArguments.pack_to_length",
            do=_("set it to the number of tokens in a row, such as 2048"),
        )


def _check_average(args: TrainingFields) -> None:
    if args.ema_decay is not None and args.swa_start is not None:
        raise ConfigError(
            _("ema_decay and swa_start both define the average of the weights"),
            where="TrainingArguments",
            do=_("remove one of them"),
        )
    if args.ema_decay is None and args.swa_start is None:
        if args.average_every != 1:
            raise ConfigError(
                _("average_every={every} has no effect without an average", every=args.average_every),
                where="TrainingArguments.average_every",
                do=_("set ema_decay or swa_start"),
            )
        return
    if args.checkpoint_format == "transformers":
        raise ConfigError(
            _("a checkpoint in transformers' format cannot hold the average of the weights"),
            where="TrainingArguments.checkpoint_format",
            do=_("remove checkpoint_format='transformers', or ema_decay and swa_start"),
        )


def _check_saved_when_evaluated(args: TrainingFields, setting: str) -> None:
    if str(args.eval_strategy) != str(args.save_strategy):
        raise ConfigError(
            f"{setting} needs a checkpoint for each evaluation, but "
            f"eval_strategy={str(args.eval_strategy)!r} and save_strategy={str(args.save_strategy)!r}",
            where=f"TrainingArguments.{setting}",
            do="set both to the same value, or set save_strategy='best'",
        )
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_steps is not None:
        ratio = args.save_steps / args.eval_steps
        if abs(ratio - round(ratio)) > 1e-9 or round(ratio) < 1:
            raise ConfigError(
                f"{setting} needs an evaluation at each checkpoint, but save_steps={args.save_steps} is not a"
                f" multiple of eval_steps={args.eval_steps}",
                where="TrainingArguments.save_steps",
                do="set save_steps to a multiple of eval_steps, or set save_strategy='best'",
            )


def _whole_steps(name: str, value: float | None) -> float | None:
    if value is None or value < 1:
        return value
    if value != int(value):
        raise ConfigError(
            f"{name}={value} is neither a whole number of steps nor a fraction of all steps (below 1)",
            where=f"TrainingArguments.{name}",
            do=f"set it to {round(value)}",
        )
    return int(value)


# ---- what echelon does not support -------------------------------------------------------------------------------------

# name -> (reason, optimizer to use instead)
_EARLY = "it steps during the backward pass, before gradients are accumulated over batches and reduced across ranks"
_OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("lomo", "adalomo"), (_EARLY, "adafactor")),
    **{
        f"{name}_layerwise": (_EARLY, name)
        for name in ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
    },
    "adamw_torch_xla": ("echelon does not run on TPUs", "adamw_torch"),
    "adamw_torch_npu_fused": ("torch's fused AdamW also runs on NPUs", "adamw_torch_fused"),
    "adamw_apex_fused": ("it needs apex, which transformers has dropped", "adamw_torch_fused"),
    "adamw_anyprecision": ("its package, torchdistx, is no longer maintained", "adamw_torch with bf16=True"),
}


def refuse_optimizer(name: str) -> None:
    """Check that the optimizer is supported.

    Raises:
        ConfigError: echelon does not support the optimizer; the message gives the reason.
    """
    if name in _OPTIMIZERS:
        why, instead = _OPTIMIZERS[name]
        raise ConfigError(
            f"optim={name!r} is not supported: {why}", where="TrainingArguments.optim", do=f"use {instead}"
        )
