"""The configuration that DeepSpeed gets: that of the run, with what the engine itself answers for left out or filled in."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import ConfigError
from echelon.base.optional import require
from echelon.engines.deepspeed.options import DummyOptim

__all__ = [
    "evaluation_config",
    "host_optimizer",
    "is_on",
    "parameter_groups",
    "stage_of",
    "steps_on_host",
    "training_config",
    "unresolved",
]


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


def is_on(config: Mapping[str, Any], dtype: str) -> bool:
    """Tell whether ``dtype`` (``fp16`` or ``bf16``) is enabled."""
    return bool((config.get(dtype) or {}).get("enabled", dtype in config))


def unresolved(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the keys whose value is still ``"auto"``."""
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += unresolved(value, f"{prefix}{key}.")
        elif value == "auto":
            found.append(f"{prefix}{key}")
    return found


def parameter_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each group of an optimizer, or of a ``DummyOptim``."""
    if isinstance(optimizer, Optimizer):
        return [list(group["params"]) for group in optimizer.param_groups]
    optimizer.params = list(optimizer.params)  # a generator would be used up by the first look
    if optimizer.params and isinstance(optimizer.params[0], Mapping):
        return [list(group["params"]) for group in optimizer.params]
    return [optimizer.params]


def steps_on_host(config: Mapping[str, Any]) -> bool:
    """Is a client's optimizer to be replaced by DeepSpeed's for the host, because its state is offloaded?"""
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    return offload.get("device", "none") != "none" and bool(config.get("zero_force_ds_cpu_optimizer", True))


def evaluation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for a model without an optimizer."""
    plain = copy.deepcopy(dict(config))
    for key in ("optimizer", "scheduler", "gradient_clipping"):
        plain.pop(key, None)
    return _with_defaults(plain)


def training_config(
    config: Mapping[str, Any], optimizer: Any, *, scaler: torch.amp.GradScaler | None, on_cpu: bool
) -> dict[str, Any]:
    """Return the config for a model that ``optimizer`` (torch's, or a ``DummyOptim``) trains.

    Raises:
        ConfigError: an optimizer twice or not at all, or a loss scale that DeepSpeed cannot follow.
    """
    own = _with_defaults(copy.deepcopy(dict(config)))
    if stage_of(own) == 0:
        # In stage 0 the library would keep no float32 weights for bf16: autocast does, as in the other engines.
        own.pop("fp16", None)
        own.pop("bf16", None)
    if is_on(own, "fp16") and scaler is not None:
        _scale_as(scaler, own["fp16"])
    if not isinstance(optimizer, DummyOptim):
        if "optimizer" in own:
            raise ConfigError(
                f"DeepSpeed's config has an optimizer ({own['optimizer'].get('type')}), and prepare() was given "
                f"{type(optimizer).__name__}",
                where="ds_config 'optimizer', and prepare()",
                do="give prepare() a DummyOptim, or take 'optimizer' out of the config",
            )
        own.setdefault("zero_allow_untested_optimizer", True)
    elif "optimizer" not in own:
        raise ConfigError(
            "prepare() was given a DummyOptim, and DeepSpeed's config has no optimizer that it could stand for",
            where="ds_config 'optimizer'",
            do="put an 'optimizer' into the config, or give prepare() an optimizer of torch",
        )
    if on_cpu:
        # Everything is on the host: torch's optimizers step there, and no kernel need be compiled for a minute.
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


def _scale_as(scaler: torch.amp.GradScaler, fp16: dict[str, Any]) -> None:
    """Give DeepSpeed's loss scale the settings of ``scaler``, where its config says nothing."""
    growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
    if (growth, backoff) != (2.0, 0.5):
        raise ConfigError(
            f"the loss scale is to grow by {growth} and shrink by {backoff}, and DeepSpeed's does by 2 and 0.5",
            where="GradScalerKwargs(growth_factor=, backoff_factor=)",
            do="leave them out",
        )
    fp16.setdefault("initial_scale_power", round(math.log2(scaler.get_scale())))
    fp16.setdefault("loss_scale_window", scaler.get_growth_interval())


def host_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's optimizer for the host that does what ``optimizer`` does, with the same groups.

    Raises:
        ConfigError: there is none.

    Source: the choice of accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed (1.15), which takes Adam for whatever it
    does not know.
    """
    require("deepspeed", extra="deepspeed", purpose="an optimizer for the host")
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
            f"the optimizer's state is to be on the host (zero_optimization.offload_optimizer), and DeepSpeed has no {name} "
            "for it",
            do="use AdamW, Adam or Adagrad, or set zero_force_ds_cpu_optimizer=false in its config to step yours there, slowly",
        )
    return found  # type: ignore[no-any-return]
