"""``TrainingArguments(deepspeed=)``: the DeepSpeed plugin, and placeholders for its optimizer and scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.accelerator import DeepSpeedPlugin, DummyOptim, DummyScheduler
from echelon.accelerator.prepare.build_deepspeed import build_plugin

__all__ = ["deepspeed_optimizer", "deepspeed_plugin", "deepspeed_schedule"]


def deepspeed_plugin(args: Any) -> DeepSpeedPlugin | None:
    """Return the plugin for ``TrainingArguments.deepspeed``, or None if DeepSpeed is not requested.

    Values that depend on the model or the number of steps remain "auto" until both are known.

    Raises:
        ConfigError: the config and the arguments conflict.
    """
    if not args.deepspeed:
        return None
    assert isinstance(args.deepspeed, dict), args.deepspeed
    plugin = build_plugin(args.deepspeed, _known(args), batch_size=args.train_batch_size, of="TrainingArguments")
    # The Trainer itself divides by the number of accumulated batches, so DeepSpeed sees each batch as an update.
    plugin.gradient_accumulation_steps = plugin.deepspeed_config["gradient_accumulation_steps"] = 1
    plugin.deepspeed_config.pop("train_batch_size", None)
    return plugin


def _known(args: Any) -> dict[str, tuple[str, Any]]:
    """Map each config key to the corresponding argument and its value."""
    return {
        "gradient_accumulation_steps": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "gradient_clipping": ("max_grad_norm", args.max_grad_norm),
        "fp16.enabled": ("fp16", args.mixed_precision == "fp16"),
        "bf16.enabled": ("bf16", args.mixed_precision == "bf16"),
        "optimizer.params.lr": ("learning_rate", args.learning_rate),
        "optimizer.params.betas": ("adam_beta1, adam_beta2", [args.adam_beta1, args.adam_beta2]),
        "optimizer.params.eps": ("adam_epsilon", args.adam_epsilon),
        "optimizer.params.weight_decay": ("weight_decay", args.weight_decay),
        "scheduler.params.warmup_min_lr": ("(always 0)", 0),
        "scheduler.params.warmup_max_lr": ("learning_rate", args.learning_rate),
    }


def deepspeed_optimizer(args: Any, groups: list[dict[str, Any]]) -> DummyOptim | None:
    """Return a placeholder for the optimizer in DeepSpeed's config, or None if the config defines none."""
    if not isinstance(args.deepspeed, dict) or "optimizer" not in args.deepspeed:
        return None
    return DummyOptim(groups, lr=args.learning_rate, weight_decay=args.weight_decay)


def deepspeed_schedule(
    args: Any, optimizer: Any, *, num_steps: int, num_shares: int, make: Callable[[Any], Any]
) -> DummyScheduler | None:
    """Return a placeholder for the scheduler that DeepSpeed's config or ``make`` defines, or None if neither does.

    ``num_shares`` divides the step count of a ``DummyScheduler``.
    """
    if not isinstance(args.deepspeed, dict):
        return None
    if "scheduler" in args.deepspeed:
        warmup = args.get_warmup_steps(num_steps)
        return DummyScheduler(optimizer, total_num_steps=num_steps * num_shares, warmup_num_steps=warmup)
    return DummyScheduler(optimizer, lr_scheduler_callable=make) if isinstance(optimizer, DummyOptim) else None
