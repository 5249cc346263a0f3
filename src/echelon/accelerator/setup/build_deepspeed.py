"""From ``deepspeed_plugin`` and the environment to settings of the run, and to the options of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin
from echelon.accelerator.plugins.kwargs_handlers import GradScalerKwargs
from echelon.accelerator.update.optimizer import Clipping
from echelon.base.errors import ConfigError, MissingExtraError
from echelon.base.logging import get_logger
from echelon.base.optional import is_available
from echelon.base.warnings import warn
from echelon.compat.variables import parse_flag_from_env
from echelon.config.deepspeed_json import DeepSpeedFacts, resolve_deepspeed
from echelon.config.deepspeed_keys import without_counterpart
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.engines.base import Engine
from echelon.engines.deepspeed.config import parameter_groups, unresolved
from echelon.engines.deepspeed.options import DeepSpeedOptions, DummyOptim, DummyScheduler
from echelon.engines.registry import BY_DEEPSPEED, SHARDING
from echelon.world.environment import detect

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin

__all__ = [
    "DeepSpeedUse",
    "choose_deepspeed",
    "fill_deepspeed",
    "follow_deepspeed",
    "groups_of",
    "build_deepspeed",
    "plugin_knowing",
    "refuse_stand_ins",
    "sharding_of_deepspeed",
]

_logger = get_logger(__name__)

# What accelerate takes where the config says "auto" and the loop does not clip.
_CLIPPING = Setting(1.0, Origin(SettingSource.DEFAULT, "of accelerate"))


def choose_deepspeed(plugin: Any, plugins: Any, *, engine: Engine | str | None) -> DeepSpeedPlugin | None:
    """Return the plugin of the run: what was given, else that of the environment; None: nothing asks for DeepSpeed.

    Raises:
        ConfigError: no plugin, or several.
    """
    if plugin is not None and plugins is not None:
        raise ConfigError(
            "deepspeed_plugin and deepspeed_plugins are both given",
            where="code Accelerator(deepspeed_plugin=, deepspeed_plugins=)",
            do="give one of the two",
        )
    given = plugin if plugin is not None else plugins
    if isinstance(given, Mapping):
        if len(given) != 1:
            raise ConfigError(
                f"deepspeed_plugin has {len(given)} plugins ({', '.join(map(str, given))}), and an Accelerator trains one model",
                where="code Accelerator(deepspeed_plugin=)",
                do="make one Accelerator for each model, with its plugin; they do not touch each other",
            )
        (given,) = given.values()
    if given is None:
        if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            return DeepSpeedPlugin()
        # By name, as the other engines: nothing is clipped that the loop does not clip.
        return DeepSpeedPlugin(gradient_clipping=0.0) if engine in BY_DEEPSPEED else None
    if not isinstance(given, DeepSpeedPlugin):
        raise ConfigError(
            f"deepspeed_plugin is a {type(given).__name__}",
            where="code Accelerator(deepspeed_plugin=)",
            do="give a DeepSpeedPlugin, or leave it out",
        )
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedUse:
    """What a plugin means for the rest of a run."""

    plugin: DeepSpeedPlugin | None = None
    engine: Engine | str | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine."""
    scaling: GradScalerKwargs | None = None
    """Of the loss scale, where the user says nothing; None: torch's defaults."""
    clipping: Clipping | None = None
    """What an optimizer does before its step, where the engine does not by itself."""

    def fill(self, **known: Any) -> None:
        """See ``fill_deepspeed``."""
        if self.plugin is not None and self.options:
            fill_deepspeed(self.plugin, **known)


def build_deepspeed(
    plugin: Any,
    plugins: Any,
    config: Resolved[RunConfig],
    *,
    engine: Engine | str | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
) -> tuple[DeepSpeedUse, Resolved[RunConfig]]:
    """Return what a plugin means for the engine deepspeed (the default with one), or for fsdp2; and the settings of the run.

    Raises:
        ConfigError: no plugin, or several; another engine; something that fsdp2 cannot do; settings in conflict.
        MissingExtraError: DeepSpeed is not installed.
    """
    chosen = choose_deepspeed(plugin, plugins, engine=engine)
    if chosen is None:
        return DeepSpeedUse(engine=engine, fsdp_plugin=fsdp_plugin), config
    config = follow_deepspeed(config, chosen)
    where = f"{config.origins['sharded_by']}"
    if config.origins["engine"].source is not SettingSource.DEFAULT:
        where = f"{config.origins['engine']}"
    elif plugin is not None or plugins is not None:
        where = "code Accelerator(deepspeed_plugin=)"
    precision = config.value.mixed_precision
    return _use(chosen, engine=engine, fsdp_plugin=fsdp_plugin, mixed_precision=precision, where=where), config


def _use(
    plugin: DeepSpeedPlugin,
    *,
    engine: Engine | str | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    mixed_precision: str,
    where: str,
) -> DeepSpeedUse:
    if engine in SHARDING:
        translated, scaling = sharding_of_deepspeed(plugin, fsdp_plugin)
        plugin.select_for_torch()
        norm = _CLIPPING.value if plugin.clips_by_default else plugin.get_value("gradient_clipping", 0.0)
        clipping = Clipping(max_norm=float(str(norm)), gives_way=plugin.clips_by_default) if norm else None
        return DeepSpeedUse(plugin=plugin, engine=engine, fsdp_plugin=translated, scaling=scaling, clipping=clipping)
    if engine is not None and engine not in BY_DEEPSPEED:
        shown = f"{type(engine).__name__}()" if isinstance(engine, Engine) else repr(engine)
        raise ConfigError(
            f"engine={shown} and settings of DeepSpeed (deepspeed_plugin, or ACCELERATE_USE_DEEPSPEED) are both given",
            where="code Accelerator(engine=)",
            do="leave engine out to use DeepSpeed, give engine='fsdp2' to do the same by torch, or take the settings away",
        )
    if fsdp_plugin is not None:
        raise ConfigError(
            "fsdp_plugin and deepspeed_plugin both say how the model is sharded",
            where="code Accelerator(fsdp_plugin=, deepspeed_plugin=)",
            do="leave one of them out",
        )
    _require_library(where)
    options = deepspeed_options(plugin, mixed_precision=mixed_precision)
    return DeepSpeedUse(plugin=plugin, engine=min(BY_DEEPSPEED), options={"deepspeed": options})


def _require_library(where: str) -> None:
    """Refuse where DeepSpeed is missing, before transformers looks for it: its error says neither who asked nor what to do.

    Raises:
        MissingExtraError: it is not installed.
    """
    if not is_available("deepspeed"):
        raise MissingExtraError(
            "sharding by DeepSpeed needs the package 'deepspeed', which is not installed",
            where=where,
            do="pip install 'echelon[deepspeed]', or give engine='fsdp2' to do the same by torch",
        )


def refuse_stand_ins(objects: Sequence[Any]) -> None:
    """Raise where ``prepare`` was given what only DeepSpeed's config can replace."""
    for one in objects:
        if isinstance(one, (DummyOptim, DummyScheduler)):
            raise ConfigError(
                f"prepare() was given a {type(one).__name__}, which stands for an entry of DeepSpeed's config",
                where="prepare()",
                do="use Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=...)) on the engine deepspeed, or give torch's",
            )


def follow_deepspeed(config: Resolved[RunConfig], plugin: DeepSpeedPlugin) -> Resolved[RunConfig]:
    """Let the settings of the run be those of the plugin where the run has only defaults.

    Raises:
        ConfigError: both say something, and not the same.
    """
    values: dict[str, Any] = {}
    origins = dict(config.origins)
    for name, setting in (
        ("mixed_precision", plugin.precision()),
        ("gradient_accumulation_steps", plugin.accumulation()),
    ):
        present = getattr(config.value, name)
        if setting is None or setting.value == present:
            continue
        if origins[name].source is SettingSource.CODE and setting.origin.source is SettingSource.ENV:
            plugin.deepspeed_config[name] = present
            continue
        if origins[name].source not in (SettingSource.DEFAULT, SettingSource.ENV):
            raise ConfigError(
                f"{name}={present!r} (from {origins[name]}) and {setting.value!r} (from {setting.origin}) cannot both hold",
                where=f"DeepSpeed config {name}",
                do='write "auto" in DeepSpeed\'s config, or leave the other one out',
            )
        values[name], origins[name] = setting.value, setting.origin
    if not values:
        return config
    return replace(config, value=replace(config.value, **values), origins=MappingProxyType(origins))


def deepspeed_options(plugin: DeepSpeedPlugin, *, mixed_precision: str) -> DeepSpeedOptions:
    """Return the options of the engine deepspeed; its config is filled in until a model is prepared."""
    plugin.set_mixed_precision(mixed_precision)
    plugin.select(_from_accelerator_state=True)
    return DeepSpeedOptions(
        config=plugin.deepspeed_config,
        loop_clips=plugin.clips_by_default,
        makes_shards=plugin.zero3_init_flag,
        leaf_classes=plugin.leaf_classes,
    )


def fill_deepspeed(
    plugin: DeepSpeedPlugin,
    *,
    world_size: int,
    accumulation: Setting,
    batch_sizes: Sequence[int],
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    split_batches: bool,
) -> None:
    """Find out what is "auto" in the plugin's config, now that loaders, model and optimizer are known, and show it.

    Raises:
        ConfigError: a value that nobody knows, or two that cannot both hold.
    """
    config = plugin.hf_ds_config
    known = {
        "gradient_accumulation_steps": accumulation,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": Setting(True, Origin(SettingSource.DEFAULT)),
        **_of_optimizer(optimizers),
        **_of_schedulers(schedulers, world_size=1 if split_batches else world_size),
    }
    if plugin.is_auto("gradient_clipping"):
        known["gradient_clipping"] = _CLIPPING
    if not batch_sizes:
        # Without a loader DeepSpeed only reports by these numbers.
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            if config.config.get(key) == "auto":
                del config.config[key]
    sizes = sorted(batch_sizes, reverse=not plugin.is_train_batch_min)
    resolved = resolve_deepspeed(
        config.config,
        DeepSpeedFacts(
            world_size=world_size,
            settings=known,
            batch_sizes=tuple(sizes),
            hidden_size=_hidden_size(models),
            model=type(models[0]).__name__ if models else "the model",
        ),
        origin=config.origin,
    )
    config.config.clear()
    config.config.update(resolved.config)
    plugin.origins = resolved.origins
    found = {
        key: origin
        for key, origin in resolved.origins.items()
        if origin.source in (SettingSource.DERIVED, SettingSource.DEFAULT)
    }
    if found:
        shown = ", ".join(
            f"{key}={config.get_value(key)} ({origin.detail or 'default'})" for key, origin in found.items()
        )
        _logger.warning("DeepSpeed's config, found out: %s", shown)  # at the level that is seen by default


def _hidden_size(models: Sequence[nn.Module]) -> int | None:
    """Return the hidden size that the config of a model (of transformers) names, the largest of several."""
    for model in models:
        config = getattr(model, "config", None)
        for owner in (config, getattr(config, "text_config", None)):
            sizes = getattr(owner, "hidden_size", None) or getattr(owner, "hidden_sizes", None)
            if sizes:
                return max(sizes) if isinstance(sizes, (list, tuple)) else int(sizes)
    return None


def _of_optimizer(optimizers: Sequence[Any]) -> dict[str, Setting]:
    for optimizer in optimizers:
        if isinstance(optimizer, DummyOptim):
            given = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
            return {
                f"optimizer.params.{name}": Setting(value, Origin(SettingSource.CODE, f"DummyOptim({name}=)"))
                for name, value in given.items()
            }
    return {}


def _of_schedulers(schedulers: Sequence[Any], *, world_size: int) -> dict[str, Setting]:
    """Return what a ``DummyScheduler`` knows; its steps are those of one process, and DeepSpeed counts updates."""
    for scheduler in schedulers:
        if not isinstance(scheduler, DummyScheduler) or scheduler.lr_scheduler_callable is not None:
            continue
        optimizer = scheduler.optimizer
        largest = optimizer.defaults["lr"] if isinstance(optimizer, Optimizer) else getattr(optimizer, "lr", None)
        given = {
            "warmup_min_lr": 0,
            "warmup_max_lr": largest,
            # DeepSpeed refuses 0 (from 0.19.6 on).
            "warmup_num_steps": max(1, scheduler.warmup_num_steps),
            "total_num_steps": None
            if scheduler.total_num_steps is None
            else -(-scheduler.total_num_steps // world_size),
        }
        return {
            f"scheduler.params.{name}": Setting(value, Origin(SettingSource.CODE, f"DummyScheduler({name}=)"))
            for name, value in given.items()
            if value is not None
        }
    return {}


def plugin_knowing(
    config: Mapping[str, Any], known: Mapping[str, tuple[str, Any]], *, batch_size: int, of: str
) -> DeepSpeedPlugin:
    """Return a plugin for ``config``, with what is known before there is a model; the rest stays "auto".

    Args:
        config: of DeepSpeed.
        known: by dotted key, the name of an argument and its value.
        batch_size: of one process.
        of: whose arguments these are.

    Raises:
        ConfigError: an argument and the config contradict each other.
    """
    settings = {key: Setting(value, Origin(SettingSource.CODE, f"{of}.{name}")) for key, (name, value) in known.items()}
    for key in unresolved(config):
        settings.setdefault(key, Setting("auto", Origin(SettingSource.DERIVED)))
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        settings.pop(key, None)
    facts = DeepSpeedFacts(world_size=detect().world_size, settings=settings, batch_sizes=(batch_size,))
    origin = Origin(SettingSource.CODE, f"{of}.deepspeed")
    return DeepSpeedPlugin(hf_ds_config=resolve_deepspeed(config, facts, origin=origin).config)


def groups_of(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each group of an optimizer, or of what stands for one."""
    return parameter_groups(optimizer)


# ---- on the engine fsdp2 ---------------------------------------------------------------------------------------------


def sharding_of_deepspeed(
    plugin: DeepSpeedPlugin, given: FullyShardedDataParallelPlugin | None
) -> tuple[FullyShardedDataParallelPlugin, GradScalerKwargs]:
    """Return what the engine fsdp2 does for the plugin's config, and say once what it has no counterpart for.

    Raises:
        ConfigError: something that it cannot do, or two plugins.
    """
    config = plugin.hf_ds_config
    where = f"engine='fsdp2', {config.origin}"
    if given is not None:
        raise ConfigError(
            "fsdp_plugin and deepspeed_plugin both say how the model is sharded",
            where=where,
            do="leave one of them out",
        )
    stage = int(config.get_value("zero_optimization.stage", 0))
    if stage < 2:
        raise ConfigError(
            f"ZeRO stage {stage} has no counterpart in fsdp2",
            where=f"{where} zero_optimization.stage",
            do=f"use engine={'zero1' if stage else 'ddp'!r} without deepspeed_plugin, or stage 2 or 3",
        )
    for key in ("optimizer", "scheduler"):
        if key in config.config:
            raise ConfigError(
                f"DeepSpeed's config has {'an' if key == 'optimizer' else 'a'} {key!r}, which fsdp2 does not make",
                where=f"{where} {key}",
                do=f"take it out, and give prepare() {'an optimizer' if key == 'optimizer' else 'a schedule'} of torch",
            )
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin  # noqa: PLC0415 - slow to import

    translated = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=_resharding(config, stage), cpu_offload=_offloading(config, where)
    )
    told = without_counterpart(_flat(config.config))
    if told:
        warn(f"engine='fsdp2' has no counterpart for these keys of DeepSpeed's config: {'; '.join(told)}")
    return translated, _scaling(config.config.get("fp16") or {})


def _resharding(config: Any, stage: int) -> bool | int:
    secondary = int(config.get_value("zero_optimization.zero_hpz_partition_size", 1))
    return secondary if stage == 3 and secondary > 1 else stage == 3


def _offloading(config: Any, where: str) -> Any:
    pinned: list[bool] = []
    for what in ("optimizer", "param"):
        node = config.get_value(f"zero_optimization.offload_{what}") or {}
        device = node.get("device", "none")
        if device == "nvme":
            raise ConfigError(
                f"zero_optimization.offload_{what}.device='nvme' has no counterpart in fsdp2",
                where=where,
                do="use 'cpu', or engine='deepspeed'",
            )
        if device == "cpu":
            pinned.append(bool(node.get("pin_memory", True)))
    if not pinned:
        return False
    from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: PLC0415 - slow to import

    return CPUOffloadPolicy(pin_memory=all(pinned))


def _scaling(fp16: Mapping[str, Any]) -> GradScalerKwargs:
    """Return the settings of torch's loss scale that do what those of DeepSpeed say."""
    options: dict[str, Any] = {}
    if fp16.get("loss_scale", 0):
        return GradScalerKwargs(init_scale=float(fp16["loss_scale"]), growth_interval=2**31 - 1)  # it never grows
    if "initial_scale_power" in fp16:
        options["init_scale"] = 2.0 ** int(fp16["initial_scale_power"])
    if "loss_scale_window" in fp16:
        options["growth_interval"] = int(fp16["loss_scale_window"])
    return GradScalerKwargs(**options)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
