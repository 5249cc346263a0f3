"""The optimizer of a training: its class and arguments by name, and the two groups with and without weight decay."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import ConfigError
from echelon.trainer.enums import OptimizerNames

if TYPE_CHECKING:
    from echelon.trainer.arguments import TrainingArguments

__all__ = [
    "decay_parameter_names",
    "optimizer_class_and_arguments",
    "parameter_groups",
    "refuse_optimizers_of_other_packages",
]

_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

# How the names of transformers that torch itself has no optimizer for begin or end, and the package that has it.
_OF_OTHERS: Mapping[str, str] = {
    r".*(8bit|bnb).*|paged_.*|lion.*|ademamix.*": "bitsandbytes",
    r"adamw_torch_(4bit|8bit)": "torchao",
    r"galore_.*": "galore-torch",
    r"apollo_.*": "apollo-torch",
    r"(ada)?lomo": "lomo-optim",
    r"grokadamw": "grokadamw",
    r"schedule_free_.*": "schedulefree",
    r"stable_adamw": "torch-optimi",
    r"adamw_anyprecision": "torchdistx",
    r"adamw_torch_xla": "torch_xla",
    r"adamw_torch_npu_fused": "torch_npu",
    r"adamw_apex_fused": "apex",
}


def refuse_optimizers_of_other_packages(name: str) -> None:
    """Raise for a name of transformers whose optimizer is in a package that this version does not call.

    Raises:
        ConfigError: it names the package.
    """
    for pattern, package in sorted(_OF_OTHERS.items(), key=lambda item: item[1] != "torchao"):
        if re.fullmatch(pattern, name):
            raise ConfigError(
                f"optim={name!r} is an optimizer of the package {package!r}, and not offered yet by this version of echelon",
                where="TrainingArguments.optim",
                do=f"build it with {package} and pass Trainer(optimizers=(optimizer, None)), or choose one of: "
                + ", ".join(member.value for member in OptimizerNames),
            )


def optimizer_class_and_arguments(args: TrainingArguments) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class that ``args.optim`` names and its arguments, without the parameters and their decay."""
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    known: Mapping[OptimizerNames, tuple[type[Optimizer], dict[str, Any]]] = {
        OptimizerNames.ADAMW_TORCH: (torch.optim.AdamW, adam),
        OptimizerNames.ADAMW_TORCH_FUSED: (torch.optim.AdamW, {**adam, "fused": True}),
        OptimizerNames.ADAFACTOR: (torch.optim.Adafactor, {}),
        OptimizerNames.SGD: (torch.optim.SGD, {}),
        OptimizerNames.ADAGRAD: (torch.optim.Adagrad, {}),
        OptimizerNames.RMSPROP: (torch.optim.RMSprop, {}),
    }
    kind, arguments = known[OptimizerNames(args.optim)]
    return kind, {"lr": args.learning_rate, **arguments, **_parse(args.optim_args)}


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that decay: all but biases and those of normalisation layers."""
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


def parameter_groups(model: nn.Module, *, decaying: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters as two groups: with decay, then without; the order that checkpoints keep."""
    names = set(decaying)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in names], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in names], "weight_decay": 0.0},
    ]


def _parse(text: str | None) -> dict[str, Any]:
    """Read ``name=value,name=value``; commas inside brackets belong to the value."""
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
            result[name.strip()] = value.strip()  # a word
    return result
