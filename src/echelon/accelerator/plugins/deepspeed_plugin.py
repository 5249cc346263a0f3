"""``DeepSpeedPlugin``: DeepSpeed settings under Accelerate's names, from code, the run's settings or a ``ds_config.json``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import ConfigError, UsageError
from echelon.base.keywords import suggest_keywords
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.plugin_arguments import plugin_arguments
from echelon.engines.deepspeed.config import HfDeepSpeedConfig
from echelon.engines.deepspeed.library import host_optimizer
from echelon.engines.deepspeed.options import DrivenScheduler

_logger = get_logger(__name__)

_ZERO = "zero_optimization"
# Field -> its key in DeepSpeed's config and its default.
_KEYS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "gradient_accumulation_steps": ("gradient_accumulation_steps", "auto"),
        "gradient_clipping": ("gradient_clipping", "auto"),
        "zero_stage": (f"{_ZERO}.stage", 2),
        "offload_optimizer_device": (f"{_ZERO}.offload_optimizer.device", "none"),
        "offload_param_device": (f"{_ZERO}.offload_param.device", "none"),
        "offload_param_nvme_path": (f"{_ZERO}.offload_param.nvme_path", "none"),
        "offload_optimizer_nvme_path": (f"{_ZERO}.offload_optimizer.nvme_path", "none"),
        "zero3_save_16bit_model": (f"{_ZERO}.stage3_gather_16bit_weights_on_model_save", False),
    }
)
# Argument -> the setting that fills it.
_SETTINGS = MappingProxyType(
    {
        **{name: name for name in (*_KEYS, "zero3_init_flag")},
        "transformer_moe_cls_names": "deepspeed_moe_layer_cls_names",
        "hf_ds_config": "deepspeed_config_file",
    }
)


@suggest_keywords
@dataclass
class DeepSpeedPlugin:
    """DeepSpeed settings. None: use the setting (flag, ``ACCELERATE_DEEPSPEED_*``, file), else the default.

    If ``hf_ds_config`` is given, the other arguments only resolve its ``"auto"`` values.

    Raises:
        ConfigError: a value is invalid, or an argument conflicts with the config.
    """

    hf_ds_config: Any = None
    """DeepSpeed config: a path, a dict, a JSON string, or an ``HfDeepSpeedConfig``."""
    gradient_accumulation_steps: int = None  # type: ignore[assignment]
    """Number of micro-steps per update. ``"auto"`` (the default): the Accelerator's value."""
    gradient_clipping: float = None  # type: ignore[assignment]
    """Maximum gradient norm; 0: no clipping. ``"auto"`` (the default): the norm that the loop passes to
    ``clip_grad_norm_``, else 1.0, as in Accelerate."""
    zero_stage: int = None  # type: ignore[assignment]
    """ZeRO stage, from 0 to 3; default 2."""
    is_train_batch_min: bool = True
    """Whether the loader with the smallest batch is the training loader; otherwise, it is the one with the largest
    batch."""
    offload_optimizer_device: str = None  # type: ignore[assignment]
    """Where stages 1 to 3 offload optimizer state: ``none``, ``cpu`` or ``nvme``."""
    offload_param_device: str = None  # type: ignore[assignment]
    """Where stage 3 offloads parameters: ``none``, ``cpu`` or ``nvme``."""
    offload_optimizer_nvme_path: str = None  # type: ignore[assignment]
    """Folder for ``nvme``."""
    offload_param_nvme_path: str = None  # type: ignore[assignment]
    """Folder for ``nvme``."""
    zero3_init_flag: bool = None  # type: ignore[assignment]
    """Whether transformers' ``from_pretrained`` and ``from_config`` create sharded models with stage 3; False with other
    engines."""
    zero3_save_16bit_model: bool = None  # type: ignore[assignment]
    """Has no effect: full weights can always be gathered, in float32. (Accelerate gathers them in 16 bits, and only if
    this is True.)"""
    transformer_moe_cls_names: str = None  # type: ignore[assignment]
    """Comma-separated class names of expert layers that stage 3 gathers as a whole."""
    enable_msamp: bool = None  # type: ignore[assignment]
    """Not supported."""
    msamp_opt_level: Any = None
    """Not supported."""

    def __post_init__(self) -> None:
        self._selected = False
        settings = plugin_arguments(self, _SETTINGS)
        settings.fill(self, _SETTINGS)
        self._given = {name: settings.origin(name) for name in _SETTINGS if getattr(self, name) is not None}
        if self.enable_msamp or settings.resolved.value.fp8_backend == "MSAMP":
            raise ConfigError(
                "MS-AMP is not supported",
                where="code DeepSpeedPlugin(enable_msamp=)"
                if self.enable_msamp
                else str(settings.resolved.origins["fp8_backend"]),
                do="use mixed_precision='bf16' or 'fp8'",
            )
        for name, (_, default) in _KEYS.items():
            value = getattr(self, name)
            setattr(self, name, default if value in (None, default) else settings.typed(name, value))
        if self.zero3_init_flag is not None:
            self.zero3_init_flag = bool(settings.typed("zero3_init_flag", self.zero3_init_flag))
        if self.hf_ds_config in (None, "none"):
            self.hf_ds_config = HfDeepSpeedConfig(self._own_config())
        else:
            self._load_config(self.hf_ds_config)
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        """The config passed to DeepSpeed; ``prepare`` resolves its ``"auto"`` values."""
        self.origins: Mapping[str, Origin] = {}
        """Origin of each value in ``deepspeed_config``, by dotted key; empty until a model is prepared."""
        self.deepspeed_config.setdefault("steps_per_print", float("inf"))  # DeepSpeed prints every ten steps by default
        is_zero3 = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag is None:
            self.zero3_init_flag = is_zero3
        if self.zero3_init_flag and not is_zero3:
            _logger.warning(N_("zero3_init_flag has no effect with ZeRO stage %s, only with stage 3"), self.zero_stage)
            self.zero3_init_flag = False

    def _own_config(self) -> dict[str, Any]:
        """Return a config built only from the arguments."""
        zero: dict[str, Any] = {
            "stage": self.zero_stage,
            "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
        }
        for what in ("optimizer", "param"):
            device, path = (getattr(self, f"offload_{what}_{name}") for name in ("device", "nvme_path"))
            zero[f"offload_{what}"] = {"device": device, "nvme_path": path if device == "nvme" else None}
        config: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            _ZERO: zero,
        }
        if self.gradient_clipping:
            config["gradient_clipping"] = self.gradient_clipping
        return config

    def _load_config(self, given: Any) -> None:
        """Use the config ``given`` and set the fields to its values."""
        config = given if isinstance(given, HfDeepSpeedConfig) else HfDeepSpeedConfig(given)
        self.hf_ds_config = config
        if _ZERO not in config.config:
            raise ConfigError(
                f"DeepSpeed's config ({config.origin}) has no {_ZERO!r}",
                where="DeepSpeedPlugin(hf_ds_config=)",
                do='add "zero_optimization": {"stage": 0}, or another stage',
            )
        for name, (key, _) in _KEYS.items():
            value, own = config.get_value(key), getattr(self, name)
            origin = self._given.get(name)
            if value is None:
                continue
            if value == "auto":
                if own != "auto":
                    node, last = config.find_config_node(key)
                    assert node is not None
                    node[last] = own
            elif origin is not None and origin.source is SettingSource.CODE and own not in ("auto", value):
                raise ConfigError(
                    f"{name}={own!r} (from {origin}) and {key}={value!r} (from {config.origin}) contradict each other",
                    where="DeepSpeedPlugin",
                    do=f'omit {name}, or write "auto" in DeepSpeed\'s config',
                )
            else:
                setattr(self, name, value)
        config.config.setdefault("gradient_accumulation_steps", self.gradient_accumulation_steps)
        config.set_stage_and_offload()

    # ---- Accelerate's methods -----------------------------------------------------------------------------------------

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace an "auto" value with the one in ``kwargs``; append other differences to ``mismatches``.

        Raises:
            ConfigError: the value is "auto" and ``kwargs`` has no value.
        """
        node, last = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        if node.get(last) == "auto":
            if ds_key_long not in kwargs:
                raise ConfigError(
                    f'{ds_key_long} is "auto", but no value was passed for it',
                    do=("pass a value, or set it in the config"),
                )
            node[last] = kwargs[ds_key_long]
        elif (
            must_match
            and mismatches is not None
            and node.get(last) not in (None, kwargs.get(ds_key_long, node.get(last)))
        ):
            mismatches.append(f"- ds {ds_key_long}={node[last]} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the value of the key is ``"auto"``."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == "auto")

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of the key in DeepSpeed's config, or ``default``."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Resolve every "auto" in the config (or below the key ``prefix``) from ``kwargs``, which has dotted keys.

        Raises:
            ConfigError: a value is missing, or (``must_match``) conflicts with the config.
        """
        found = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, found, must_match=must_match, **kwargs)
        if found and not prefix:
            raise ConfigError(
                "DeepSpeed's config and the arguments differ:\n" + "\n".join(found), do='write "auto" for these keys'
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable ``mixed_precision`` in the config.

        Raises:
            ConfigError: the config enables a different 16-bit dtype.
        """
        config = self.deepspeed_config
        dtype = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(mixed_precision)
        for name in ("fp16", "bf16"):
            if dtype == name and name not in config:
                config[name] = {"enabled": True}
            config.setdefault(name, {"enabled": False})
            enabled = config[name].get("enabled")
            if enabled == "auto":
                config[name]["enabled"] = dtype == name
            elif dtype is not None and dtype != name and str(enabled).lower() == "true":
                raise ConfigError(
                    f"mixed_precision={mixed_precision!r} and {name}.enabled=true (from {self.hf_ds_config.origin}) "
                    "contradict each other",
                    where=f"DeepSpeed config {name}.enabled",
                    do=f'write "auto" there, or use mixed_precision={name!r}',
                )

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Make stage 3 gather each expert layer of ``model`` as a whole; ``prepare`` calls this automatically."""
        classes = self.leaf_classes
        if classes:
            import_module("deepspeed.utils").set_z3_leaf_modules(model, list(classes))

    @property
    def leaf_classes(self) -> tuple[str, ...]:
        """The classes of expert layers."""
        return tuple(name.strip() for name in (self.transformer_moe_cls_names or "").split(",") if name.strip())

    def is_zero3_init_enabled(self) -> bool:
        """Return whether transformers creates sharded models."""
        return self.zero3_init_flag

    def set_deepspeed_weakref(self) -> None:
        """Register this config with transformers, if imported, so that it creates sharded models."""
        self.dschf = None
        if "transformers" not in sys.modules:
            return
        integration: Any = import_module("transformers.integrations.deepspeed")
        integration.unset_hf_deepspeed_config()
        if not self.zero3_init_flag:
            return
        # transformers reads stage, dtypes and offloading; batch sizes only have to be numbers.
        config = {
            name: value
            for name, value in self.deepspeed_config.items()
            if not (name == "train_batch_size" and value == "auto")
        }
        for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(name, "auto") == "auto":
                config[name] = 1
        self.dschf = integration.HfDeepSpeedConfig(config)  # transformers holds a weak reference

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Create sharded models inside the block, or unsharded ones if ``enable`` is False."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Select this plugin; called by ``AcceleratorState().select_deepspeed_plugin(name)``.

        Raises:
            UsageError: called directly.
        """
        if not _from_accelerator_state:
            raise UsageError(
                "DeepSpeedPlugin.select() was called directly",
                do="call AcceleratorState().select_deepspeed_plugin(name)",
            )
        self.set_deepspeed_weakref()
        self._selected = True

    def select_for_torch(self) -> None:
        """Select this plugin for an engine that shards in ``prepare``, so that transformers creates unsharded models."""
        self.zero3_init_flag = False
        self.set_deepspeed_weakref()
        self._selected = True

    def unselect(self) -> None:
        """Deselect this plugin."""
        self._selected = False

    @property
    def selected(self) -> bool:
        """Whether this plugin is selected."""
        return self._selected

    # ---- for the Accelerator ------------------------------------------------------------------------------------------

    @property
    def clips_by_default(self) -> bool:
        """Whether ``gradient_clipping`` is a default that the training loop's value replaces."""
        return self.is_auto("gradient_clipping")

    def precision(self) -> Setting | None:
        """Return the 16-bit dtype that the config enables, or None."""
        for name in ("fp16", "bf16"):
            if str(self.get_value(f"{name}.enabled")).lower() == "true":
                return Setting(
                    name, Origin(self.hf_ds_config.origin.source, f"{self.hf_ds_config.origin.detail} {name}.enabled")
                )
        return None

    def accumulation(self) -> Setting | None:
        """Return the number of accumulation steps set in the config or by an argument, or None."""
        value = self.get_value("gradient_accumulation_steps", "auto")
        if value == "auto":
            return None
        origin = self._given.get("gradient_accumulation_steps", self.hf_ds_config.origin)
        return Setting(int(value), origin)


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the selected plugin.

    Raises:
        UsageError: DeepSpeed is not used.
    """
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if plugin is None:
        raise UsageError(
            "no DeepSpeedPlugin is selected",
            do="pass Accelerator(deepspeed_plugin=...), or launch with --use_deepspeed",
        )
    return plugin


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's CPU counterpart of ``optimizer``; ``prepare`` calls this automatically."""
    return host_optimizer(optimizer)


class DeepSpeedSchedulerWrapper(DrivenScheduler):
    """A scheduler that DeepSpeed steps, under Accelerate's name."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler)
        self.optimizers = optimizers


class DeepSpeedOptimizerWrapper:
    """An optimizer stepped by a DeepSpeed engine that the script created; ``step`` and ``zero_grad`` do nothing."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: Any = None) -> None:
        """Do nothing, because DeepSpeed's ``step`` clears the gradients."""

    def step(self) -> None:
        """Do nothing, because ``DeepSpeedEngineWrapper.backward`` steps the optimizer."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)  # not set yet while unpickling
        return getattr(self.optimizer, name)


class DeepSpeedEngineWrapper:
    """Runs a DeepSpeed engine that the script created itself, as in Accelerate; ``prepare`` does not use this class."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward pass of ``loss``; with ``sync_gradients``, also step the optimizer (collective)."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """Return the last update's gradient norm."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm
