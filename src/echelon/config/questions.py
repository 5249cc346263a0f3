"""The questions that ``echelon config`` asks. Each has a default and is repeated until the answer is valid."""

from __future__ import annotations

from typing import Any

from echelon.base.cores import usable_cores
from echelon.base.device import num_devices
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import is_available
from echelon.config.schema import RunConfig, coerce, field_types


def ask_settings() -> dict[str, Any]:
    """Ask the questions that concern this machine and return the non-default settings.

    Raises:
        EOFError: standard input ended.
    """
    values: dict[str, Any] = {}
    number = num_devices() if is_available("torch") else 0
    if number:
        question = _(
            "Train on the CPU, although this machine has {number} accelerator{s}? (yes, no)",
            number=number,
            s="" if number == 1 else "s",
        )
    else:
        question = _(
            "This machine has no accelerator. Train on its CPU? (yes; no: the settings are for another machine)"
        )
    _put(values, "cpu", question, "no" if number else "yes")
    if values["cpu"]:
        cores = usable_cores()
        _put(values, "num_processes", _("How many processes? (this machine has {cores} cores)", cores=cores), "1")
        _put(values, "mixed_precision", _("Which precision? (no, bf16)"), "no")
    else:
        _put(values, "num_processes", _("How many processes? (none: one per accelerator)"), "none")
        _put(values, "mixed_precision", _("Which precision? (no, fp16, bf16, fp8)"), "no")
    if not values["cpu"] or values["num_processes"] != 1:  # a single process may offload parts to the CPU
        _put(values, "sharded_by", _("Shard the model across the processes? (none, fsdp, deepspeed)"), "none")
        ask_more = {"fsdp": _ask_fsdp, "deepspeed": _ask_deepspeed}.get(values["sharded_by"])
        if ask_more is not None:
            ask_more(values)
    _put(
        values,
        "gradient_accumulation_steps",
        _("How many micro-batches per optimizer step (gradient accumulation)?"),
        "1",
    )
    if ask_yes_no(_("Compile models with torch.compile?"), default=False):
        _put(values, "dynamo_backend", _("Which backend? (inductor, aot_eager, cudagraphs, ...)"), "inductor")
    default = RunConfig()
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def ask_yes_no(question: str, *, default: bool) -> bool:
    """Ask a yes-no question."""
    return bool(_answer(question, "yes" if default else "no", (bool,), "the answer"))


def _ask_fsdp(values: dict[str, Any]) -> None:
    values["fsdp_version"] = 2
    _put(
        values, "fsdp_reshard_after_forward", _("Reshard parameters after the forward pass (ZeRO-3)? (yes, no)"), "yes"
    )
    if not values["cpu"]:
        _put(values, "fsdp_offload_params", _("Offload parameters and optimizer states to the CPU? (yes, no)"), "no")
    _put(
        values,
        "fsdp_transformer_layer_cls_to_wrap",
        _(
            "Which layer classes should be wrapped as FSDP units? (comma-separated class names; none: use the "
            "model's own list)"
        ),
        "none",
    )
    if values["fsdp_transformer_layer_cls_to_wrap"] is not None:
        values["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"


def _ask_deepspeed(values: dict[str, Any]) -> None:
    _put(values, "deepspeed_config_file", _("Path to the DeepSpeed JSON file? (or none)"), "none")
    if values["deepspeed_config_file"] is not None:
        return
    _put(values, "zero_stage", _("Which ZeRO stage? (0, 1, 2, 3)"), "2")
    _put(values, "offload_optimizer_device", _("Offload optimizer states? (none, cpu, nvme)"), "none")
    if values["zero_stage"] == 3:
        _put(values, "offload_param_device", _("Offload parameters? (none, cpu, nvme)"), "none")
        _put(values, "zero3_init_flag", _("Shard models during construction? (yes, no)"), "no")
        _put(values, "zero3_save_16bit_model", _("Gather the full weights when the model is saved? (yes, no)"), "yes")
    for kind in ("optimizer", "param"):
        if values.get(f"offload_{kind}_device") == "nvme":
            _put(values, f"offload_{kind}_nvme_path", _("Offload to which folder?"), "/nvme")
    _put(values, "gradient_clipping", _("What is the maximum gradient norm? (none: no clipping)"), "none")


def _put(values: dict[str, Any], field: str, question: str, default: str) -> None:
    values[field] = _answer(question, default, field_types(RunConfig)[field], field)


def _answer(question: str, default: str, kinds: tuple[object, ...], name: str) -> Any:
    while True:
        text = input(f"{question} [{default}]: ").strip() or default
        try:
            return coerce(kinds, name, text, where=_("the answer"))
        except ConfigError as error:
            print(f"{error.what}; {error.do or ''}")
