"""Optimizers by name, and the parameter groups with and without weight decay."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.accelerator import AcceleratedOptimizer, DummyOptim, DummyScheduler
from echelon.accelerator.setup.choose_precision import rounds_stochastically
from echelon.base.errors import ConfigError, UsageError
from echelon.base.optional import require
from echelon.trainer.arguments.enums import OptimizerNames
from echelon.trainer.arguments.plugins import deepspeed_optimizer, deepspeed_schedule
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.optim.adafactor import Adafactor
from echelon.trainer.optim.lr_schedules import get_scheduler

_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def optimizer_class_and_arguments(
    args: TrainingArguments, model: nn.Module | None = None
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the optimizer class for ``args.optim`` and its arguments, without parameters and weight decay.

    For optimizers that define their own parameter groups, the arguments include them as ``params``.

    Args:
        model: required by optimizers that define their own parameter groups.

    Raises:
        MissingExtraError: the optimizer's package is not installed.
    """
    kind = OptimizerNames(args.optim)
    more = _parse_arguments(args.optim_args)
    common = {"lr": args.learning_rate}
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    of_torch: Mapping[OptimizerNames, tuple[type[Optimizer], dict[str, Any]]] = {
        OptimizerNames.ADAMW_TORCH: (torch.optim.AdamW, adam),
        OptimizerNames.ADAMW_TORCH_FUSED: (torch.optim.AdamW, {**adam, "fused": True}),
        OptimizerNames.ADAFACTOR: (Adafactor, {"scale_parameter": False, "relative_step": False}),
        OptimizerNames.SGD: (torch.optim.SGD, {}),
        OptimizerNames.ADAGRAD: (torch.optim.Adagrad, {}),
        OptimizerNames.RMSPROP: (torch.optim.RMSprop, {}),
    }
    if kind in of_torch:
        chosen, arguments = of_torch[kind]
        return chosen, {**common, **arguments, **more}
    for begins, find in _FROM_PACKAGES.items():
        if re.match(begins, kind.value):
            chosen, arguments = find(kind.value, args, adam, more, model)
            return chosen, {**common, **arguments}
    raise AssertionError(kind)


# Optimizers with their own parameter groups name them in one of these ways, as in transformers.
_PARAMETERS = ("params", "model", "optimizer_dict")


def build_optimizer(
    args: TrainingArguments, model: nn.Module, kind: Any, options: Mapping[str, Any], *, decaying: list[str]
) -> Optimizer | DummyOptim:
    """Return a new optimizer of class ``kind``; ``decaying`` names the parameters that weight decay applies to."""
    given = dict(options)
    groups: Any = parameter_groups(model, decaying=decaying, weight_decay=args.weight_decay)
    if isinstance(kind, type) and any("__call__" in vars(owner) for owner in kind.__mro__[:-1]):
        factory: Any = kind()  # as in transformers
        return factory(model, **given)  # type: ignore[no-any-return]
    for name in _PARAMETERS:
        groups = given.pop(name, groups)
    return deepspeed_optimizer(args, groups) or kind(groups, **given)


def build_scheduler(
    args: TrainingArguments, optimizer: Optimizer, num_steps: int, *, num_shares: int
) -> LRScheduler | DummyScheduler:
    """Return a new scheduler; ``num_shares`` divides the step count of DeepSpeed's scheduler."""
    options = args.lr_scheduler_kwargs
    assert options is None or isinstance(options, dict), options
    make = partial(
        get_scheduler,
        args.lr_scheduler_type,
        num_warmup_steps=args.get_warmup_steps(num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=options,
    )
    return deepspeed_schedule(
        args, optimizer, num_steps=num_steps, num_shares=num_shares, make=lambda own: make(optimizer=own)
    ) or make(optimizer=optimizer)


def set_optimizer_mode(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Switch a schedule-free optimizer, which has separate weights for evaluation, to ``mode``."""
    switch = getattr(unwrapped(optimizer), mode, None)
    if callable(switch):
        switch()


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that the Accelerator has prepared."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


_Found = tuple[type[Optimizer], dict[str, Any]]


def _bitsandbytes(name: str, args: TrainingArguments, adam: dict[str, Any], more: dict[str, Any], model: Any) -> _Found:
    package = require("bitsandbytes.optim", extra="bitsandbytes", purpose=f"optim={name!r}")
    bits = {"optim_bits": 8 if "8bit" in name else 32}
    paged = {**bits, "is_paged": "paged" in name}
    if "ademamix" in name:
        betas = (more.pop("beta1", args.adam_beta1), more.pop("beta2", args.adam_beta2), more.pop("beta3", 0.9999))
        return package.AdEMAMix, {"betas": betas, "alpha": 5.0, "eps": args.adam_epsilon, **paged, **more}
    if "lion" in name:
        return package.Lion, {"betas": adam["betas"], **paged, **more}
    if "rmsprop" in name:
        return package.RMSprop, {**bits, **more}
    return package.AdamW, {**adam, **paged, **more}


def _torchao(name: str, args: TrainingArguments, adam: dict[str, Any], more: dict[str, Any], model: Any) -> _Found:
    package = require("torchao.optim", extra="fp8", purpose=f"optim={name!r}")
    kind = package.AdamW4bit if name.endswith("4bit") else package.AdamW8bit
    rounding = {"bf16_stochastic_round": True} if rounds_stochastically(args.master_weights) else {}
    return kind, {**adam, "block_size": 256, **rounding, **more}


def _schedule_free(
    name: str, args: TrainingArguments, adam: dict[str, Any], more: dict[str, Any], model: Any
) -> _Found:
    package = require("schedulefree", extra="schedulefree", purpose=f"optim={name!r}")
    arguments = {"weight_decay": args.weight_decay, "weight_lr_power": 2.0, "r": 0.0}
    if name == "schedule_free_radam":
        return package.RAdamScheduleFree, {**adam, **arguments, **more}
    arguments["warmup_steps"] = args.get_warmup_steps(max(args.max_steps, 0))
    if name == "schedule_free_sgd":
        return package.SGDScheduleFree, {**arguments, **more}
    return package.AdamWScheduleFree, {**adam, **arguments, **more}


def _low_rank(name: str, args: TrainingArguments, adam: dict[str, Any], more: dict[str, Any], model: Any) -> _Found:
    if name.startswith("galore"):
        package = require("galore_torch", extra="galore", purpose=f"optim={name!r}")
        projection = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
        kinds = {
            "galore_adamw": "GaLoreAdamW",
            "galore_adamw_8bit": "GaLoreAdamW8bit",
            "galore_adafactor": "GaLoreAdafactor",
        }
        arguments = {} if name != "galore_adafactor" else {"scale_parameter": False, "relative_step": False}
        kind = getattr(package, kinds[name])
    else:
        package = require("apollo_torch", extra="apollo", purpose=f"optim={name!r}")
        projection = {"rank": 128, "proj": "random", "scale_type": "channel"}
        projection |= {"update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}
        kind, arguments = package.APOLLOAdamW, dict(adam)
    projection |= {key: more.pop(key) for key in list(more) if key in projection}
    targets = _target_weights(args.optim_target_modules, model, optimizer=name)
    others = [p for p in model.parameters() if p.requires_grad and all(p is not target for target in targets)]
    return kind, {**arguments, **more, "params": [{"params": others}, {"params": targets, **projection}]}


def _target_weights(wanted: Any, model: nn.Module | None, *, optimizer: str) -> list[torch.Tensor]:
    """Return the weights of the linear layers selected by ``optim_target_modules``.

    Args:
        wanted: ``all-linear``, a regular expression that matches the full name, or a list of substrings or expressions.
    """
    if wanted is None or model is None:
        raise ConfigError(
            f"optim={optimizer!r} requires optim_target_modules, the layers to apply it to",
            where="TrainingArguments.optim_target_modules",
            do=(
                "set optim_target_modules to 'all-linear', a regular expression, or a list of name parts such as "
                "['attn', 'mlp']"
            ),
        )

    def _is_wanted(name: str) -> bool:
        if isinstance(wanted, str):
            return wanted.replace("_", "-") == "all-linear" or re.fullmatch(wanted, name) is not None
        return any(part in name or re.fullmatch(part, name) for part in wanted)

    found = [m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and _is_wanted(name)]
    if not found:
        layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ConfigError(
            f"optim_target_modules={wanted!r} does not match any linear layer; the model has "
            f"{', '.join(layers[:8]) or 'none'}",
            where="TrainingArguments.optim_target_modules",
            do="set optim_target_modules to one or more of these layers, or to 'all-linear'",
        )
    return found


def _grokadamw(name: str, args: TrainingArguments, adam: dict[str, Any], more: dict[str, Any], model: Any) -> _Found:
    package = require("grokadamw", extra="grokadamw", purpose=f"optim={name!r}")
    arguments = {"alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1}
    return package.GrokAdamW, {**arguments, "gradient_clipping": 1.0, **more}


def _stable(name: str, args: TrainingArguments, adam: dict[str, Any], more: dict[str, Any], model: Any) -> _Found:
    package = require("optimi", extra="optimi", purpose=f"optim={name!r}")
    arguments = {"weight_decay": args.weight_decay, "decouple_lr": False, "max_lr": None, "kahan_sum": None}
    return package.StableAdamW, {**adam, **arguments, **more}


# Pattern of the name -> factory; the first match counts.
_FROM_PACKAGES: Mapping[str, Callable[..., _Found]] = {
    "adamw_torch_[48]bit": _torchao,
    "paged_|lion_|ademamix|adamw_|rmsprop_": _bitsandbytes,
    "schedule_free_": _schedule_free,
    "galore_|apollo_": _low_rank,
    "grokadamw": _grokadamw,
    "stable_adamw": _stable,
}


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay applies to: all except biases and normalization layers."""
    in_layer_norm = {
        f"{module_name}.{name}" if module_name else name
        for module_name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters(recurse=False)
    }
    return [
        name
        for name, _ in model.named_parameters()
        if name not in in_layer_norm and not _WITHOUT_DECAY.search(name.lower())
    ]


def param_groups_of(optimizer: Any, method: str) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, for ``Trainer.<method>``.

    Raises:
        UsageError: ``optimizer`` is None.
    """
    if optimizer is None:
        raise UsageError(
            "there is no optimizer yet", where=f"Trainer.{method}", do="call train() or create_optimizer() first"
        )
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def find_param_group(optimizer: Any, model: nn.Module, param: str | nn.Parameter | None) -> Any:
    """Implement ``Trainer.get_optimizer_group``."""
    groups = param_groups_of(optimizer, "get_optimizer_group")
    if param is None:
        return [group["params"] for group in groups]
    wanted = model.get_parameter(param) if isinstance(param, str) else param
    return next((group for group in groups if any(p is wanted for p in group["params"])), None)


def parameter_groups(model: nn.Module, *, decaying: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups, with decay first; checkpoints depend on this order."""
    names = set(decaying)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in names], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in names], "weight_decay": 0.0},
    ]


def _parse_arguments(text: str | None) -> dict[str, Any]:
    """Parse ``name=value,name=value``; commas inside brackets belong to the value."""
    result = {}
    for part in re.split(r",(?![^(\[]*[)\]])", text or ""):
        name, separator, value = part.strip().partition("=")
        if not name:
            continue
        if not separator:
            raise ConfigError(
                f"optim_args={text!r}: {part.strip()!r} has no value",
                where="TrainingArguments.optim_args",
                do="write name=value,name=value",
            )
        try:
            result[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            result[name.strip()] = value.strip()  # a string
    return result
