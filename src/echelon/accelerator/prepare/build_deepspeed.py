"""Turns ``deepspeed_plugin`` into run settings and engine options.

``echelon.engines.deepspeed`` translates the DeepSpeed config; this module handles the plugins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin
from echelon.accelerator.plugins.kwargs_handlers import GradScalerKwargs
from echelon.accelerator.update.optimizer import Clipping
from echelon.base.errors import ConfigError, MissingExtraError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.optional import install_command, is_available
from echelon.base.warnings import warn
from echelon.config.derive import section_in_use
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.engines.base import Engine
from echelon.engines.deepspeed.config import (
    DeepSpeedFacts,
    facts_of,
    resolve_deepspeed,
    translate_to_fsdp2,
    unresolved,
)
from echelon.engines.deepspeed.options import DeepSpeedOptions, DummyOptim, DummyScheduler, parameters_by_group
from echelon.engines.registry import BY_DEEPSPEED, SHARDING
from echelon.world.environment import detect

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin

__all__ = [
    "DeepSpeedSettings",
    "choose_plugin",
    "resolve_plugin_config",
    "apply_plugin_settings",
    "parameters_by_group",
    "build_deepspeed",
    "build_plugin",
    "reject_placeholders",
    "translate_plugin_to_fsdp2",
]

_logger = get_logger(__name__)

# Accelerate's default if the config says "auto" and the loop does not clip.
_CLIPPING = Setting(1.0, Origin(SettingSource.DEFAULT, "of accelerate"))


def choose_plugin(
    plugin: Any, plugins: Any, config: Resolved[RunConfig], *, engine: Engine | str | None
) -> DeepSpeedPlugin | None:
    """Return the given plugin, or one built from the run's settings; None if DeepSpeed is not requested.

    Raises:
        ConfigError: the argument is not a plugin, or contains several.
    """
    if plugin is not None and plugins is not None:
        raise ConfigError(
            "deepspeed_plugin and deepspeed_plugins are both set",
            where="code Accelerator(deepspeed_plugin=, deepspeed_plugins=)",
            do="pass only one of them",
        )
    given = plugin if plugin is not None else plugins
    if isinstance(given, Mapping):
        if len(given) != 1:
            raise ConfigError(
                f"deepspeed_plugin contains {len(given)} plugins ({', '.join(map(str, given))}), but an Accelerator "
                "trains one model",
                where="code Accelerator(deepspeed_plugin=)",
                do="create a separate Accelerator for each model, with its own plugin",
            )
        (given,) = given.values()
    if given is None:
        if section_in_use(config) == "deepspeed_config":
            return DeepSpeedPlugin()
        # Selected by engine name: as with the other engines, only the loop clips.
        return DeepSpeedPlugin(gradient_clipping=0.0) if engine in BY_DEEPSPEED else None
    if not isinstance(given, DeepSpeedPlugin):
        raise ConfigError(
            f"deepspeed_plugin is a {type(given).__name__}",
            where="code Accelerator(deepspeed_plugin=)",
            do="pass a DeepSpeedPlugin, or omit it",
        )
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """The settings of a run that follow from its DeepSpeed plugin."""

    plugin: DeepSpeedPlugin | None = None
    engine: Engine | str | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine."""
    scaling: GradScalerKwargs | None = None
    """Default loss scaler settings. None: torch's defaults."""
    clipping: Clipping | None = None
    """Gradient clipping that an optimizer applies before its step if the engine does not clip."""

    def fill(self, **known: Any) -> None:
        """See ``resolve_plugin_config``."""
        if self.plugin is not None and self.options:
            resolve_plugin_config(self.plugin, **known)


def build_deepspeed(
    plugin: Any,
    plugins: Any,
    config: Resolved[RunConfig],
    *,
    engine: Engine | str | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
) -> tuple[DeepSpeedSettings, Resolved[RunConfig]]:
    """Return the run and engine settings for the plugin, with the deepspeed (default) or fsdp2 engine.

    Raises:
        ConfigError: the plugin is invalid, settings conflict, or the engine cannot implement them.
        MissingExtraError: DeepSpeed is not installed.
    """
    chosen = choose_plugin(plugin, plugins, config, engine=engine)
    if chosen is None:
        return DeepSpeedSettings(engine=engine, fsdp_plugin=fsdp_plugin), config
    config = apply_plugin_settings(config, chosen)
    if fsdp_plugin is not None and (engine is None or engine in SHARDING | BY_DEEPSPEED):
        raise ConfigError(
            "fsdp_plugin and deepspeed_plugin both define how the model is sharded",
            where="code Accelerator(fsdp_plugin=, deepspeed_plugin=)",
            do="pass only one of them",
        )
    if engine in SHARDING:
        translated, scaling = translate_plugin_to_fsdp2(chosen)
        chosen.select_for_torch()
        norm = _CLIPPING.value if chosen.clips_by_default else chosen.get_value("gradient_clipping", 0.0)
        clipping = Clipping(max_norm=float(str(norm)), gives_way=chosen.clips_by_default) if norm else None
        settings = DeepSpeedSettings(
            plugin=chosen, engine=engine, fsdp_plugin=translated, scaling=scaling, clipping=clipping
        )
        return settings, config
    if engine is not None and engine not in BY_DEEPSPEED:
        shown = f"{type(engine).__name__}()" if isinstance(engine, Engine) else repr(engine)
        raise ConfigError(
            f"engine={shown} and DeepSpeed settings (deepspeed_plugin or ACCELERATE_USE_DEEPSPEED) are both set",
            where="code Accelerator(engine=)",
            do="omit engine= to use DeepSpeed, pass engine='fsdp2' to train the same way with torch, or remove the "
            "DeepSpeed settings",
        )
    if not is_available("deepspeed"):  # transformers' own error explains neither cause nor remedy
        where = f"{config.origins['sharded_by']}"
        if config.origins["engine"].source is not SettingSource.DEFAULT:
            where = f"{config.origins['engine']}"
        elif plugin is not None or plugins is not None:
            where = "code Accelerator(deepspeed_plugin=)"
        raise MissingExtraError(
            "sharding with DeepSpeed requires the package 'deepspeed', which is not installed",
            where=where,
            do=f"{install_command('deepspeed')}, or pass engine='fsdp2' to train the same way with torch",
        )
    chosen.set_mixed_precision(config.value.mixed_precision)
    chosen.select(_from_accelerator_state=True)
    options = DeepSpeedOptions(
        config=chosen.deepspeed_config,  # prepare later resolves the "auto" values
        loop_clips=chosen.clips_by_default,
        makes_shards=chosen.zero3_init_flag,
        leaf_classes=chosen.leaf_classes,
    )
    return DeepSpeedSettings(plugin=chosen, engine=min(BY_DEEPSPEED), options={"deepspeed": options}), config


def reject_placeholders(objects: Sequence[Any]) -> None:
    """Raise ConfigError if ``objects`` contains a ``DummyOptim`` or ``DummyScheduler``, placeholders for DeepSpeed."""
    for one in objects:
        if isinstance(one, (DummyOptim, DummyScheduler)):
            raise ConfigError(
                f"prepare() got a {type(one).__name__}, which is a placeholder for an entry in the DeepSpeed config",
                where="prepare()",
                do="use Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=...)) with the deepspeed engine, "
                "or pass a torch object instead",
            )


def apply_plugin_settings(config: Resolved[RunConfig], plugin: DeepSpeedPlugin) -> Resolved[RunConfig]:
    """Replace the run's default settings with the plugin's.

    Raises:
        ConfigError: the run and the plugin set different values.
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
        if any(lost.name == name and lost.origin == setting.origin for lost in config.shadowed):
            # The plugin has the setting that the Accelerator's argument overrides.
            plugin.deepspeed_config[name] = present
            continue
        if origins[name].source not in (SettingSource.DEFAULT, SettingSource.ENV):
            raise ConfigError(
                _(
                    "{name}={present!r} (from {present_origin}) and {value!r} (from {origin}) contradict each other",
                    name=name,
                    present=present,
                    present_origin=origins[name],
                    value=setting.value,
                    origin=setting.origin,
                ),
                where=f"DeepSpeed config {name}",
                do='write "auto" in DeepSpeed\'s config, or remove the other setting',
            )
        values[name], origins[name] = setting.value, setting.origin
    if not values:
        return config
    return replace(config, value=replace(config.value, **values), origins=MappingProxyType(origins))


def resolve_plugin_config(
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
    """Resolve the ``"auto"`` values in the plugin's config, and log them.

    Raises:
        ConfigError: a value cannot be resolved, or two values conflict.
    """
    settings = {
        "gradient_accumulation_steps": accumulation,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": Setting(True, Origin(SettingSource.DEFAULT)),
    }
    if plugin.is_auto("gradient_clipping"):
        settings["gradient_clipping"] = _CLIPPING
    config = plugin.hf_ds_config.config
    if not batch_sizes:
        # Without a loader, DeepSpeed uses these only in its reports.
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            if config.get(key) == "auto":
                del config[key]
    facts = facts_of(
        world_size=world_size,
        settings=settings,
        batch_sizes=sorted(batch_sizes, reverse=not plugin.is_train_batch_min),
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        split_batches=split_batches,
    )
    values, plugin.origins = resolve_deepspeed(config, facts, origin=plugin.hf_ds_config.origin)
    config.clear()
    config.update(values)
    resolved = [
        f"{key}={plugin.get_value(key)} ({origin.detail or 'default'})"
        for key, origin in plugin.origins.items()
        if origin.source in (SettingSource.DERIVED, SettingSource.DEFAULT)
    ]
    if resolved:  # a warning is visible at the default log level
        _logger.warning(
            N_('DeepSpeed config values that were resolved from "auto" or defaults: %s'), ", ".join(resolved)
        )


def build_plugin(
    config: Mapping[str, Any], known: Mapping[str, tuple[str, Any]], *, batch_size: int, of: str
) -> DeepSpeedPlugin:
    """Return a plugin for ``config`` with the values known before the model exists; other values stay "auto".

    Args:
        config: DeepSpeed's config.
        known: argument name and value, by dotted config key.
        batch_size: batch size per process.
        of: class that these arguments belong to, for messages.

    Raises:
        ConfigError: an argument conflicts with the config.
    """
    settings = {key: Setting(value, Origin(SettingSource.CODE, f"{of}.{name}")) for key, (name, value) in known.items()}
    for key in unresolved(config):
        settings.setdefault(key, Setting("auto", Origin(SettingSource.DERIVED)))
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        settings.pop(key, None)
    facts = DeepSpeedFacts(world_size=detect().world_size, settings=settings, batch_sizes=(batch_size,))
    origin = Origin(SettingSource.CODE, f"{of}.deepspeed")
    resolved, _ = resolve_deepspeed(config, facts, origin=origin)
    return DeepSpeedPlugin(hf_ds_config=resolved)


def translate_plugin_to_fsdp2(
    plugin: DeepSpeedPlugin,
) -> tuple[FullyShardedDataParallelPlugin, GradScalerKwargs]:
    """Return the fsdp2 settings that implement the plugin's config; warn once about keys without a counterpart.

    Raises:
        ConfigError: fsdp2 cannot implement a setting.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: PLC0415 - slow to import

    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin  # noqa: PLC0415 - slow to import

    settings = translate_to_fsdp2(plugin.hf_ds_config)
    translated = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=settings.reshard_after_forward,
        cpu_offload=CPUOffloadPolicy(pin_memory=settings.pin_memory) if settings.cpu_offload else False,
    )
    if settings.without_counterpart:
        missing = "; ".join(settings.without_counterpart)
        warn(_("engine='fsdp2' has no counterpart for these DeepSpeed config keys: {missing}", missing=missing))
    return translated, GradScalerKwargs(**settings.scaler)
