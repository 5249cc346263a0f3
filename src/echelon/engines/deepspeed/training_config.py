"""Builds the config for the DeepSpeed library, with defaults and without the settings that the engine handles itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import ConfigError
from echelon.base.optional import require
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.engines.deepspeed.ds_config import DeepSpeedFacts, HfDeepSpeedConfig, resolve_deepspeed
from echelon.engines.deepspeed.options import DummyOptim, DummyScheduler

__all__ = [
    "evaluation_config",
    "host_optimizer",
    "is_on",
    "parameters_by_group",
    "stage_of",
    "replaces_optimizer_on_host",
    "resolve_run_config",
    "training_config",
]


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


def is_on(config: Mapping[str, Any], dtype: str) -> bool:
    """Return whether ``dtype`` (``fp16`` or ``bf16``) is enabled."""
    return bool((config.get(dtype) or {}).get("enabled", dtype in config))


def parameters_by_group(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters in each group of an optimizer or a ``DummyOptim``."""
    if isinstance(optimizer, Optimizer):
        return [list(group["params"]) for group in optimizer.param_groups]
    optimizer.params = list(optimizer.params)  # a generator can be consumed only once
    if optimizer.params and isinstance(optimizer.params[0], Mapping):
        return [list(group["params"]) for group in optimizer.params]
    return [optimizer.params]


def replaces_optimizer_on_host(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer state is offloaded and DeepSpeed's CPU optimizer replaces the user's optimizer."""
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    return offload.get("device", "none") != "none" and bool(config.get("zero_force_ds_cpu_optimizer", True))


def evaluation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for a model that has no optimizer."""
    plain = copy.deepcopy(dict(config))
    for key in ("optimizer", "scheduler", "gradient_clipping"):
        plain.pop(key, None)
    return _with_defaults(plain)


def training_config(
    config: Mapping[str, Any], optimizer: Any, *, scaler: torch.amp.GradScaler | None, on_cpu: bool
) -> dict[str, Any]:
    """Return the config for a model that ``optimizer`` (a torch optimizer or a ``DummyOptim``) trains.

    Raises:
        ConfigError: there is no optimizer or more than one, or DeepSpeed does not support the loss scale settings.
    """
    own = _with_defaults(copy.deepcopy(dict(config)))
    if stage_of(own) == 0:
        # In stage 0 the library keeps no float32 weights for bf16. Use autocast instead, like other engines.
        own.pop("fp16", None)
        own.pop("bf16", None)
    if stage_of(own) == 1:
        # Gradients are reduced after the backward passes. With this setting, the library then skips the reduction (0.19.8).
        own["zero_optimization"]["overlap_comm"] = False
    if is_on(own, "fp16") and scaler is not None:
        _copy_scaler_settings(scaler, own["fp16"])
    if not isinstance(optimizer, DummyOptim):
        if "optimizer" in own:
            raise ConfigError(
                f"DeepSpeed's config defines an optimizer ({own['optimizer'].get('type')}), but prepare() also got "
                f"{type(optimizer).__name__}",
                where="ds_config 'optimizer', and prepare()",
                do="pass a DummyOptim to prepare(), or remove 'optimizer' from the config",
            )
        own.setdefault("zero_allow_untested_optimizer", True)
    elif "optimizer" not in own:
        raise ConfigError(
            "prepare() got a DummyOptim, but DeepSpeed's config does not define an optimizer",
            where="ds_config 'optimizer'",
            do="add an 'optimizer' to the config, or pass a torch optimizer to prepare()",
        )
    if on_cpu:
        # All tensors are on the host, so torch's optimizers can step them without compiling a kernel.
        own.setdefault("zero_force_ds_cpu_optimizer", False)
        of_config = own.get("optimizer", {})
        if str(of_config.get("type", "")).lower() in ("adam", "adamw"):
            of_config.setdefault("params", {}).setdefault("torch_adam", True)
    return own


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    config.setdefault("steps_per_print", math.inf)
    return config


def _copy_scaler_settings(scaler: torch.amp.GradScaler, fp16: dict[str, Any]) -> None:
    """Copy the settings of ``scaler`` that the config does not define to DeepSpeed's loss scaler."""
    growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
    if (growth, backoff) != (2.0, 0.5):
        raise ConfigError(
            f"the loss scale grows by {growth} and shrinks by {backoff}, but DeepSpeed's factors are always 2 and 0.5",
            where="GradScalerKwargs(growth_factor=, backoff_factor=)",
            do="remove both arguments",
        )
    fp16.setdefault("initial_scale_power", round(math.log2(scaler.get_scale())))
    fp16.setdefault("loss_scale_window", scaler.get_growth_interval())


def host_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the DeepSpeed CPU optimizer that corresponds to ``optimizer``, with the same groups.

    Raises:
        ConfigError: DeepSpeed has no corresponding optimizer.

    Source: accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed (1.15), which uses Adam for unknown optimizers.
    """
    require("deepspeed", extra="deepspeed", purpose="an optimizer on the CPU")
    name = type(optimizer).__name__
    adams = {"AdamW": True, "Adam": False}
    kept = {key: value for key, value in optimizer.defaults.items() if key in ("lr", "weight_decay")}
    found: Any
    if name in adams:
        module = import_module("deepspeed.ops.adam")
        found = module.DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=adams[name], **kept)
    elif name in ("Adagrad", "Lion"):
        module = import_module(f"deepspeed.ops.{name.lower()}")
        found = getattr(module, f"DeepSpeedCPU{name}")(optimizer.param_groups, **kept)
    else:
        raise ConfigError(
            f"zero_optimization.offload_optimizer keeps the optimizer state on the CPU, but DeepSpeed has no CPU version of {name}",
            do=f"use AdamW, Adam or Adagrad, or set zero_force_ds_cpu_optimizer=false in DeepSpeed's config to use torch's slower "
            f"{name} on the CPU",
        )
    return found  # type: ignore[no-any-return]


def resolve_run_config(
    config: HfDeepSpeedConfig,
    *,
    world_size: int,
    settings: Mapping[str, Setting],
    batch_sizes: Sequence[int],
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    split_batches: bool,
) -> Mapping[str, Origin]:
    """Resolve every ``"auto"`` value in ``config`` in place from the loaders, model and optimizer; return the origins.

    Raises:
        ConfigError: see ``resolve_deepspeed``.
    """
    if not batch_sizes:
        # Without a loader, DeepSpeed uses these only in its reports.
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            if config.config.get(key) == "auto":
                del config.config[key]
    known = {
        **settings,
        **_optimizer_settings(optimizers),
        **_scheduler_settings(schedulers, world_size=1 if split_batches else world_size),
    }
    facts = DeepSpeedFacts(
        world_size=world_size,
        settings=known,
        batch_sizes=tuple(batch_sizes),
        hidden_size=_hidden_size(models),
        model=type(models[0]).__name__ if models else "the model",
    )
    resolved = resolve_deepspeed(config.config, facts, origin=config.origin)
    config.config.clear()
    config.config.update(resolved.config)
    return resolved.origins


def _hidden_size(models: Sequence[nn.Module]) -> int | None:
    """Return the hidden size from a transformers model's config, or the largest one if there are several."""
    for model in models:
        config = getattr(model, "config", None)
        for owner in (config, getattr(config, "text_config", None)):
            sizes = getattr(owner, "hidden_size", None) or getattr(owner, "hidden_sizes", None)
            if sizes:
                return max(sizes) if isinstance(sizes, (list, tuple)) else int(sizes)
    return None


def _optimizer_settings(optimizers: Sequence[Any]) -> dict[str, Setting]:
    for optimizer in optimizers:
        if isinstance(optimizer, DummyOptim):
            given = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
            return _settings_of("optimizer.params", given, "DummyOptim")
    return {}


def _scheduler_settings(schedulers: Sequence[Any], *, world_size: int) -> dict[str, Setting]:
    """Return a ``DummyScheduler``'s arguments, with the total number of steps divided by the number of processes."""
    for scheduler in schedulers:
        if not isinstance(scheduler, DummyScheduler) or scheduler.lr_scheduler_callable is not None:
            continue
        optimizer, steps = scheduler.optimizer, scheduler.total_num_steps
        given = {
            "warmup_min_lr": 0,
            "warmup_max_lr": optimizer.defaults["lr"]
            if isinstance(optimizer, Optimizer)
            else getattr(optimizer, "lr", None),
            "warmup_num_steps": max(1, scheduler.warmup_num_steps),  # DeepSpeed 0.19.6 and later reject 0
            "total_num_steps": None if steps is None else -(-steps // world_size),
        }
        known = {name: value for name, value in given.items() if value is not None}
        return _settings_of("scheduler.params", known, "DummyScheduler")
    return {}


def _settings_of(prefix: str, arguments: Mapping[str, Any], owner: str) -> dict[str, Setting]:
    return {
        f"{prefix}.{name}": Setting(value, Origin(SettingSource.CODE, f"{owner}({name}=)"))
        for name, value in arguments.items()
    }
