"""Keyword arguments of TrainingArguments that older tutorials use, and what each one is called today."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from echelon.base.errors import ConfigError
from echelon.base.warnings import warn

__all__ = ["KEPT", "translate"]

_Value = Any
# old name -> (new name, new value from the old one; None: leave the new one alone)
_CONVERTED: Mapping[str, tuple[str, Callable[[_Value], _Value]]] = {
    "evaluation_strategy": ("eval_strategy", lambda value: value),
    "evaluate_during_training": ("eval_strategy", lambda value: "steps" if value else "no"),
    "warmup_ratio": ("warmup_steps", lambda value: float(value) or None),
    "group_by_length": ("train_sampling_strategy", lambda value: "group_by_length" if value else None),
    "no_cuda": ("use_cpu", lambda value: value),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", lambda value: value),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", lambda value: value),
    "include_inputs_for_metrics": ("include_for_metrics", lambda value: ["inputs"] if value else None),
    "include_tokens_per_second": ("include_num_input_tokens_seen", lambda value: value),
    "push_to_hub_token": ("hub_token", lambda value: value),
    "push_to_hub_model_id": ("hub_model_id", lambda value: value),
    "adafactor": ("optim", lambda value: "adafactor" if value else None),
}
# old name -> (new name, the key of that dict)
_MOVED: Mapping[str, tuple[str, str]] = {
    "dispatch_batches": ("accelerator_config", "dispatch_batches"),
    "split_batches": ("accelerator_config", "split_batches"),
    "fsdp_min_num_params": ("fsdp_config", "min_num_params"),
    "fsdp_transformer_layer_cls_to_wrap": ("fsdp_config", "transformer_layer_cls_to_wrap"),
}
# old name -> why leaving it out changes nothing
_WITHOUT_EFFECT: Mapping[str, str] = {
    "overwrite_output_dir": "an output folder is always used as it is",
    "save_safetensors": "weights are always written as safetensors",
    "past_index": "it has no successor",
    "jit_mode_eval": "it has no successor",
    "mp_parameters": "it has no successor",
    "ray_scope": "it has no successor",
    "use_legacy_prediction_loop": "there is one evaluation loop",
    "tpu_num_cores": "the launcher decides how many processes run",
    "use_ipex": "torch itself uses the processor's best kernels",
    "use_mps_device": "the machine's accelerator is used by itself",
    "xpu_backend": "the backend follows from the device",
    "sharded_ddp": "it has no successor of the same meaning",
    "torchdynamo": "it has no successor of the same meaning",
    "fp16_opt_level": "torch's own mixed precision has no levels",
    "fp16_backend": "torch's own mixed precision is used",
    "half_precision_backend": "torch's own mixed precision is used",
}
# Still understood; an attribute of the arguments, not one of the fields.
KEPT: Mapping[str, str] = {"logging_dir": "it is the folder that the trackers of report_to write to"}

_OLD_VALUES: Mapping[tuple[str, str], str] = {("optim", "adamw_hf"): "adamw_torch"}


def translate(given: Mapping[str, Any], *, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` under today's names, with one warning for each old one; those in ``KEPT`` stay.

    Args:
        given: keyword arguments as the user wrote them.
        fields: today's names and their defaults.

    Raises:
        ConfigError: a name that never was one (the nearest is named), or an old and its new name with different values.
    """
    result = {name: _today(name, value) for name, value in given.items() if name in fields}
    for name, value in given.items():
        if name in fields:
            continue
        if name in _CONVERTED:
            new, convert = _CONVERTED[name]
            _warn(f"{name}= is called {new}= now")
            if (converted := convert(value)) is not None:
                _put(result, new, converted, old=name, default=fields[new])
        elif name in _MOVED:
            new, key = _MOVED[name]
            _warn(f"{name}= is the key {key!r} of {new}= now")
            if value is not None:
                _put_key(result, new, key, value, old=name)
        elif name in _WITHOUT_EFFECT:
            _warn(f"{name}= has no effect: {_WITHOUT_EFFECT[name]}")
        elif name in KEPT:
            _warn(f"{name}= is no setting of today: {KEPT[name]}")
            result[name] = value
        else:
            raise _unknown(name, [*fields, *_CONVERTED, *_MOVED, *_WITHOUT_EFFECT, *KEPT])
    return result


def _today(name: str, value: Any) -> Any:
    new = _OLD_VALUES.get((name, str(value)))
    if new is None:
        return value
    _warn(f"{name}={str(value)!r} is called {new!r} now")
    return new


def _warn(message: str) -> None:
    warn(f"TrainingArguments: {message}")


def _put(result: dict[str, Any], new: str, value: Any, *, old: str, default: Any) -> None:
    if new in result and result[new] != value:
        if old == "warmup_ratio" and not result[new]:
            result[new] = value  # tutorials write warmup_steps=0 beside it
            return
        if old == "warmup_ratio":
            return  # a number of steps always won over the ratio
        raise ConfigError(
            f"{old}={value!r} and {new}={result[new]!r} are the same setting with two values",
            where="TrainingArguments",
            do=f"keep {new}= only",
        )
    result[new] = value


def _put_key(result: dict[str, Any], new: str, key: str, value: Any, *, old: str) -> None:
    there = result.get(new) or {}
    if not isinstance(there, Mapping):
        raise ConfigError(
            f"{old}= cannot be put into {new}={there!r}, which names a file",
            where="TrainingArguments",
            do=f"write {key!r} into that file",
        )
    result[new] = {**there, key: value}


def _unknown(name: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1)
    return ConfigError(
        f"TrainingArguments has no setting {name!r}",
        where="TrainingArguments",
        do=f"did you mean {near[0]!r}?" if near else "see help(TrainingArguments) for the settings",
    )
