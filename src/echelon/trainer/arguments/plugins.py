"""Converts ``fsdp``, ``fsdp_config``, ``parallelism_config`` and ``deepspeed`` to the Accelerator's plugins and config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from echelon.accelerator import DeepSpeedPlugin, DummyOptim, DummyScheduler
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.prepare.build_deepspeed import build_plugin
from echelon.base.errors import ConfigError
from echelon.compat.variables import str_to_bool
from echelon.trainer.arguments.enums import suggest
from echelon.trainer.arguments.fields import TrainingFields

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_OPTIONS = (*_STRATEGIES, "offload", "auto_wrap")
# key of fsdp_config -> field of the plugin
_RENAMED = {"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap", "version": "fsdp_version"}
_XLA_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
_FLAGS = (
    "activation_checkpointing",
    "cpu_offload",
    "cpu_ram_efficient_loading",
    "forward_prefetch",
    "limit_all_gathers",
    "sync_module_states",
    "use_orig_params",
)


def read_fsdp(given: Any) -> list[str] | None:
    """Return the options in ``fsdp`` (True, ``"full_shard auto_wrap"`` or a list), or None if FSDP is off.

    Raises:
        ConfigError: an option is unknown, or ``fsdp`` names two strategies.
    """
    if given is None or given is False or given in ("", [], "false", "False"):
        return None
    if given is True or given in ("true", "True"):
        return []
    options = [str(getattr(option, "value", option)) for option in (given.split() if isinstance(given, str) else given)]
    for option in options:
        if option not in _OPTIONS:
            raise ConfigError(
                f"fsdp={given!r}: {option!r} is not one of {', '.join(_OPTIONS)}",
                where="TrainingArguments.fsdp",
                do=suggest(option, _OPTIONS, otherwise="set fsdp=True and configure the details in fsdp_config"),
            )
    if len([option for option in options if option in _STRATEGIES]) > 1:
        raise ConfigError(
            f"fsdp={given!r} names two strategies", where="TrainingArguments.fsdp", do="remove one of them"
        )
    return options


def fsdp_plugin(args: TrainingFields) -> FullyShardedDataParallelPlugin | None:
    """Return the plugin for ``fsdp`` and ``fsdp_config``, or None if FSDP is off.

    Raises:
        ConfigError: ``fsdp_config`` has an unknown key or an invalid value.
    """
    options = read_fsdp(args.fsdp)
    if options is None:
        return None
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin  # noqa: PLC0415 - slow to import

    given = args.fsdp_config or {}
    assert isinstance(given, Mapping), given
    settings: dict[str, Any] = {}
    known = {item.name for item in fields(FullyShardedDataParallelPlugin)}
    for key, value in given.items():
        plain = str(key).removeprefix("fsdp_")
        name = _RENAMED.get(plain, plain)
        if plain in _XLA_KEYS:
            if value not in (False, None, {}):
                raise ConfigError(
                    f"fsdp_config[{key!r}] is for TPUs, which echelon does not support",
                    where="TrainingArguments.fsdp_config",
                    do="remove it",
                )
            continue
        if name not in known:
            raise ConfigError(
                f"fsdp_config has no key {key!r}",
                where="TrainingArguments.fsdp_config",
                do=suggest(plain, [*known, *_RENAMED], otherwise=f"valid keys: {', '.join(sorted(known))}"),
            )
        settings[name] = _flag(value) if name in _FLAGS else value
    if not settings.get("min_num_params"):
        settings.pop("min_num_params", None)
    if isinstance(classes := settings.get("transformer_cls_names_to_wrap"), str):
        settings["transformer_cls_names_to_wrap"] = [name.strip() for name in classes.split(",")]
    settings.setdefault("fsdp_version", 2)
    settings["fsdp_version"] = int(settings["fsdp_version"])
    for option in options:
        if option == "offload":
            settings["cpu_offload"] = True
        elif option in _STRATEGIES:
            settings["sharding_strategy"] = option.upper()
    # "auto_wrap" needs no handling: a model that names its blocks is always wrapped by block.
    return FullyShardedDataParallelPlugin(**settings)


def parallelism(args: TrainingFields) -> ParallelismConfig | None:
    """Convert ``parallelism_config`` (accelerate's object, echelon's, or a dict) to the Accelerator's class."""
    given = args.parallelism_config
    if given is None or isinstance(given, ParallelismConfig):
        return given
    values = (
        dict(given) if isinstance(given, Mapping) else {k: v for k, v in vars(given).items() if not k.startswith("_")}
    )
    known = {item.name for item in fields(ParallelismConfig)}
    unknown = [name for name in values if name not in known and name != "device_mesh"]
    if isinstance(given, Mapping) and unknown:
        raise ConfigError(
            f"parallelism_config has no key {unknown[0]!r}",
            where="TrainingArguments.parallelism_config",
            do=f"valid keys: {', '.join(sorted(known))}",
        )
    return ParallelismConfig(**{name: value for name, value in values.items() if name in known})


def _flag(value: Any) -> Any:
    return bool(str_to_bool(value)) if isinstance(value, str) else value


# ---- DeepSpeed ---------------------------------------------------------------------------------------------------------


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
