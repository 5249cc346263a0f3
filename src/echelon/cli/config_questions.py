"""The questions of ``echelon config``, each with a default and repeated until the answer is valid."""

from __future__ import annotations

from typing import Any

from echelon.base.errors import ConfigError
from echelon.config.schema import RunConfig, coerce, field_types

__all__ = ["ask", "yes"]


def ask() -> dict[str, Any]:
    """Ask the questions, and return the chosen settings.

    Raises:
        EOFError: standard input has no more answers.
    """
    values: dict[str, Any] = {}
    _put(values, "cpu", "Train on the CPU only, even where there are accelerators? (yes, no)", "no")
    _put(values, "num_processes", "How many processes? (none: one per accelerator)", "none")
    _put(values, "mixed_precision", "Which precision? (no, fp16, bf16, fp8)", "no")
    _put(values, "sharded_by", "Shard the model over the processes? (none, fsdp, deepspeed)", "none")
    {"fsdp": _ask_fsdp, "deepspeed": _ask_deepspeed}.get(values["sharded_by"], _ask_nothing)(values)
    _put(values, "gradient_accumulation_steps", "How many micro-batches per optimizer step?", "1")
    if yes("Compile models with torch.compile?", default=False):
        _put(values, "dynamo_backend", "Which backend? (inductor, aot_eager, cudagraphs, ...)", "inductor")
    default = RunConfig()
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def yes(question: str, *, default: bool) -> bool:
    """Ask for yes or no."""
    return bool(_answer(question, "yes" if default else "no", (bool,), "the answer"))


def _ask_nothing(values: dict[str, Any]) -> None:
    pass


def _ask_fsdp(values: dict[str, Any]) -> None:
    values["fsdp_version"] = 2
    _put(values, "fsdp_reshard_after_forward", "Free whole parameters after the forward pass, ZeRO-3? (yes, no)", "yes")
    _put(values, "fsdp_offload_params", "Keep parameters and optimizer states in host memory? (yes, no)", "no")
    _put(
        values,
        "fsdp_transformer_layer_cls_to_wrap",
        "Which layers are gathered at once? (class names, separated by commas; none: the model defines it)",
        "none",
    )
    if values["fsdp_transformer_layer_cls_to_wrap"] is not None:
        values["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"


def _ask_deepspeed(values: dict[str, Any]) -> None:
    _put(values, "deepspeed_config_file", "A DeepSpeed JSON file? (its path, or none)", "none")
    if values["deepspeed_config_file"] is not None:
        return
    _put(values, "zero_stage", "Which stage of ZeRO? (0, 1, 2, 3)", "2")
    _put(values, "offload_optimizer_device", "Where are optimizer states kept? (none: the device, cpu, nvme)", "none")
    if values["zero_stage"] == 3:
        _put(values, "offload_param_device", "Where are parameters kept? (none: the device, cpu, nvme)", "none")
        _put(values, "zero3_init_flag", "Construct models sharded from the start? (yes, no)", "no")
        _put(values, "zero3_save_16bit_model", "Gather whole weights to save them? (yes, no)", "yes")
    for kind in ("optimizer", "param"):
        if values.get(f"offload_{kind}_device") == "nvme":
            _put(values, f"offload_{kind}_nvme_path", "In which folder?", "/nvme")
    _put(values, "gradient_clipping", "The maximum norm of the gradients? (none: not clipped)", "none")


def _put(values: dict[str, Any], field: str, question: str, default: str) -> None:
    values[field] = _answer(question, default, field_types(RunConfig)[field], field)


def _answer(question: str, default: str, kinds: tuple[object, ...], name: str) -> Any:
    while True:
        text = input(f"{question} [{default}]: ").strip() or default
        try:
            return coerce(kinds, name, text, where="the answer")
        except ConfigError as error:
            print(f"{error.what}; {error.do}")
