"""TrainingArguments' old keyword arguments and their current names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.trainer.arguments.enums import suggest
from echelon.trainer.arguments.fields import TrainingFields

_Value = Any
# old name -> (new name, conversion of the value; a result of None leaves the new setting unset)
_CONVERTED: Mapping[str, tuple[str, Callable[[_Value], _Value]]] = {
    "evaluation_strategy": ("eval_strategy", lambda value: value),
    "evaluate_during_training": ("eval_strategy", lambda value: "steps" if value else "no"),
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
# old name -> (dict setting, key in it)
_MOVED: Mapping[str, tuple[str, str]] = {
    "dispatch_batches": ("accelerator_config", "dispatch_batches"),
    "split_batches": ("accelerator_config", "split_batches"),
    "fsdp_min_num_params": ("fsdp_config", "min_num_params"),
    "fsdp_transformer_layer_cls_to_wrap": ("fsdp_config", "transformer_layer_cls_to_wrap"),
}
# old name -> why it has no effect
_WITHOUT_EFFECT: Mapping[str, str] = {
    "overwrite_output_dir": N_("existing files in output_dir are never deleted"),
    "save_safetensors": N_("weights are always written in safetensors format"),
    "past_index": N_("it was removed without replacement"),
    "jit_mode_eval": N_("it was removed without replacement"),
    "mp_parameters": N_("it was removed without replacement"),
    "ray_scope": N_("it was removed without replacement"),
    "use_legacy_prediction_loop": N_("there is only one evaluation loop"),
    "tpu_num_cores": N_("the launcher sets the number of processes"),
    "use_ipex": N_("torch selects the CPU kernels itself"),
    "use_mps_device": N_("the accelerator is detected automatically"),
    "xpu_backend": N_("the device determines the backend"),
    "sharded_ddp": N_("it was removed; use fsdp="),
    "torchdynamo": N_("it was removed; use torch_compile_backend="),
    "fp16_opt_level": N_("torch's mixed precision has no optimization levels"),
    "fp16_backend": N_("torch's own mixed precision is used"),
    "half_precision_backend": N_("torch's own mixed precision is used"),
}
_OLD_VALUES: Mapping[tuple[str, str], str] = {("optim", "adamw_hf"): "adamw_torch"}


def translate(given: Mapping[str, Any], *, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rename old keyword arguments to their current names, with a warning for each.

    Raises:
        ConfigError: a name is unknown, or an old name and its new name have different values.
    """
    result = {name: _rename_value(name, value) for name, value in given.items() if name in fields}
    for name, value in given.items():
        if name in fields:
            continue
        if name in _CONVERTED:
            new, convert = _CONVERTED[name]
            _warn(_("{name}= was renamed to {new}=", name=name, new=new))
            if (converted := convert(value)) is not None:
                _put(result, new, converted, old=name, default=fields[new])
        elif name in _MOVED:
            new, key = _MOVED[name]
            _warn(_("{name}= is now the key {key!r} of {new}=", name=name, key=key, new=new))
            if value is not None:
                _put_key(result, new, key, value, old=name)
        elif name in _WITHOUT_EFFECT:
            _warn(_("{name}= has no effect: {why}", name=name, why=_(_WITHOUT_EFFECT[name])))
        else:
            known = [*fields, *_CONVERTED, *_MOVED, *_WITHOUT_EFFECT]
            raise ConfigError(
                f"TrainingArguments has no setting {name!r}",
                where="TrainingArguments",
                do=suggest(name, known, otherwise="see help(TrainingArguments)"),
            )
    return result


def translate_fields(args: TrainingFields) -> None:
    """Translate the old names that are fields, so that argument parsers find them, with a warning for each."""
    if args.logging_dir is not None:
        _warn(_("{name}= is deprecated: {why}", name="logging_dir", why=_("trackers still write to it")))
    if args.warmup_ratio:
        _warn(_("{name}= was renamed to {new}=", name="warmup_ratio", new="warmup_steps"))
        args.warmup_steps = args.warmup_steps or args.warmup_ratio  # tutorials also pass warmup_steps=0
    args.warmup_ratio = None


def _rename_value(name: str, value: Any) -> Any:
    new = _OLD_VALUES.get((name, str(value)))
    if new is None:
        return value
    _warn(_("{name}={value!r} was renamed to {new!r}", name=name, value=str(value), new=new))
    return new


def _warn(message: str) -> None:
    warn(_("TrainingArguments: {message}", message=message))


def _put(result: dict[str, Any], new: str, value: Any, *, old: str, default: Any) -> None:
    if new in result and result[new] != value:
        raise ConfigError(
            f"{old}={value!r} and {new}={result[new]!r} conflict: {old} is the old name of {new}",
            where="TrainingArguments",
            do=f"pass only {new}=",
        )
    result[new] = value


def _put_key(result: dict[str, Any], new: str, key: str, value: Any, *, old: str) -> None:
    existing = result.get(new) or {}
    if not isinstance(existing, Mapping):
        raise ConfigError(
            f"{old}= conflicts with {new}={existing!r}, which names a file",
            where="TrainingArguments",
            do=f"set {key!r} in that file",
        )
    result[new] = {**existing, key: value}
