"""Settings of TrainingArguments that this version knows by name and cannot do yet: asking for one is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.base.errors import ConfigError

__all__ = ["NOT_OFFERED", "refuse_what_is_not_offered"]

# setting -> what to do instead. One line goes when its feature comes.
NOT_OFFERED: Mapping[str, str] = {
    "activation_checkpointing": "wrap the layers with torch.utils.checkpoint in the model",
    "activation_checkpointing_kwargs": "wrap the layers with torch.utils.checkpoint in the model",
    "auto_find_batch_size": "choose per_device_train_batch_size by hand",
    "batch_eval_metrics": "leave it out: compute_metrics then gets all predictions at once",
    "bf16_full_eval": "leave it out: bf16=True also evaluates under autocast",
    "debug": "use torch.autograd.set_detect_anomaly(True)",
    "deepspeed": "leave it out",
    "enable_jit_checkpoint": "save often enough with save_steps",
    "eval_use_gather_object": "return tensors from the model",
    "fp16_full_eval": "leave it out: fp16=True also evaluates under autocast",
    "fsdp": "leave it out",
    "include_for_metrics": "take what you need from the evaluation set itself: the order is the same",
    "include_num_input_tokens_seen": "count tokens in a callback",
    "label_smoothing_factor": "pass compute_loss_func= with torch's cross_entropy(label_smoothing=)",
    "liger_kernel_config": "leave it out",
    "neftune_noise_alpha": "leave it out",
    "optim_target_modules": "freeze the other parameters (requires_grad=False)",
    "parallelism_config": "leave it out",
    "push_to_hub": "upload output_dir after the training",
    "report_to": "log from a callback's on_log",
    "restore_callback_states_from_checkpoint": "leave it out",
    "save_on_each_node": "share output_dir between the machines",
    "skip_memory_metrics": "leave it out",
    "tf32": "call torch.set_float32_matmul_precision('high')",
    "torch_compile": "pass torch.compile(model) to the Trainer",
    "torch_compile_backend": "pass torch.compile(model, backend=...) to the Trainer",
    "torch_compile_mode": "pass torch.compile(model, mode=...) to the Trainer",
    "torch_empty_cache_steps": "leave it out",
    "use_liger_kernel": "leave it out",
}


def refuse_what_is_not_offered(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for the first setting that differs from its default and cannot be given.

    Raises:
        ConfigError: it would otherwise be ignored in silence.
    """
    for name, instead in NOT_OFFERED.items():
        # None, 0, "" and [] in place of one another ask for nothing.
        if values[name] != defaults[name] and (values[name] or defaults[name]):
            raise ConfigError(
                f"{name}={values[name]!r} is not offered yet by this version of echelon",
                where=f"TrainingArguments.{name}",
                do=instead,
            )
