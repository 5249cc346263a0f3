"""TrainingArguments: the fields of transformers in their order, its rules, old names, and clear refusals."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.trainer import ParallelMode, TrainingArguments
from echelon.trainer.not_offered import NOT_OFFERED
from echelon.trainer.optimizers import optimizer_class_and_arguments

# transformers 5.23: the order in which positional arguments are read, and what they default to.
FIELDS: dict[str, Any] = {
    "output_dir": None,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 5e-05,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "optim_args": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "optim_target_modules": None,
    "gradient_accumulation_steps": 1,
    "average_tokens_across_devices": True,
    "max_grad_norm": 1.0,
    "label_smoothing_factor": 0.0,
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "tf32": None,
    "activation_checkpointing": None,
    "activation_checkpointing_kwargs": None,
    "gradient_checkpointing": None,
    "gradient_checkpointing_kwargs": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "use_liger_kernel": False,
    "liger_kernel_config": None,
    "use_cache": False,
    "neftune_noise_alpha": None,
    "torch_empty_cache_steps": None,
    "auto_find_batch_size": False,
    "logging_strategy": "steps",
    "logging_steps": 500,
    "logging_first_step": False,
    "log_on_each_node": True,
    "logging_nan_inf_filter": True,
    "include_num_input_tokens_seen": "no",
    "log_level": "passive",
    "log_level_replica": "warning",
    "disable_tqdm": None,
    "report_to": "none",
    "run_name": None,
    "project": "huggingface",
    "trackio_space_id": None,
    "trackio_bucket_id": None,
    "trackio_static_space_id": None,
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_delay": 0,
    "per_device_eval_batch_size": 8,
    "prediction_loss_only": False,
    "eval_on_start": False,
    "eval_do_concat_batches": True,
    "eval_use_gather_object": False,
    "eval_accumulation_steps": None,
    "include_for_metrics": [],
    "batch_eval_metrics": False,
    "save_only_model": False,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_on_each_node": False,
    "save_total_limit": None,
    "enable_jit_checkpoint": False,
    "push_to_hub": False,
    "hub_token": None,
    "hub_private_repo": None,
    "hub_model_id": None,
    "hub_strategy": "every_save",
    "hub_always_push": False,
    "hub_revision": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False,
    "full_determinism": False,
    "seed": 42,
    "data_seed": None,
    "use_cpu": False,
    "accelerator_config": None,
    "parallelism_config": None,
    "dataloader_drop_last": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None,
    "dataloader_in_order": True,
    "remove_unused_columns": True,
    "label_names": None,
    "train_sampling_strategy": "random",
    "length_column_name": "length",
    "ddp_find_unused_parameters": None,
    "ddp_bucket_cap_mb": None,
    "ddp_broadcast_buffers": None,
    "ddp_static_graph": None,
    "ddp_backend": None,
    "ddp_timeout": 1800,
    "fsdp": None,
    "fsdp_config": None,
    "deepspeed": None,
    "debug": "",
    "skip_memory_metrics": True,
    "do_train": False,
    "do_eval": False,
    "do_predict": False,
    "resume_from_checkpoint": None,
    "local_rank": -1,
}


def test_fields_and_defaults_are_those_of_transformers_in_their_order() -> None:
    found = {
        item.name: item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        for item in dataclasses.fields(TrainingArguments)
    }
    assert list(found.items()) == list(FIELDS.items())
    assert len(found) == 114


def test_every_field_has_a_help_text_for_argument_parsers() -> None:
    assert [item.name for item in dataclasses.fields(TrainingArguments) if not item.metadata.get("help")] == []


def test_the_signature_is_that_of_the_fields() -> None:
    assert list(inspect.signature(TrainingArguments).parameters) == list(FIELDS)
    assert TrainingArguments("out", 4, 2.0).num_train_epochs == 2.0


@pytest.mark.parametrize(
    ("old", "field", "value"),
    [
        ({"evaluation_strategy": "epoch"}, "eval_strategy", "epoch"),
        ({"evaluate_during_training": True}, "eval_strategy", "steps"),
        ({"warmup_ratio": 0.1}, "warmup_steps", 0.1),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, "warmup_steps", 0.1),
        ({"warmup_ratio": 0.1, "warmup_steps": 20}, "warmup_steps", 20),
        ({"warmup_ratio": 0.0, "warmup_steps": 20}, "warmup_steps", 20),
        ({"group_by_length": False}, "train_sampling_strategy", "random"),
        ({"no_cuda": True}, "use_cpu", True),
        ({"per_gpu_train_batch_size": 3}, "per_device_train_batch_size", 3),
        ({"per_gpu_eval_batch_size": 3}, "per_device_eval_batch_size", 3),
        ({"include_inputs_for_metrics": False}, "include_for_metrics", []),
        ({"include_tokens_per_second": False}, "include_num_input_tokens_seen", "no"),
        ({"push_to_hub_token": "t"}, "hub_token", "t"),
        ({"push_to_hub_model_id": "m"}, "hub_model_id", "m"),
        ({"adafactor": True}, "optim", "adafactor"),
        ({"optim": "adamw_hf"}, "optim", "adamw_torch"),
        ({"split_batches": True}, "accelerator_config", {"split_batches": True}),
        ({"dispatch_batches": False}, "accelerator_config", {"dispatch_batches": False}),
        ({"fsdp_min_num_params": 5}, "fsdp_config", {"min_num_params": 5}),
        ({"logging_dir": "logs"}, "logging_dir", "logs"),
    ],
)
def test_an_old_name_means_its_new_one_and_is_told_once(old: dict[str, Any], field: str, value: Any) -> None:
    with pytest.warns(EchelonWarning) as told:
        args = TrainingArguments(**old)
    assert getattr(args, field) == value
    assert len(told) == 1
    assert told[0].filename == __file__  # the user's line, not ours
    name, text = next(iter(old)), str(told[0].message)
    assert name in text
    assert field in text or field == "logging_dir"


@pytest.mark.parametrize(
    "name", ["overwrite_output_dir", "save_safetensors", "use_mps_device", "half_precision_backend"]
)
def test_an_old_name_without_effect_is_told(name: str) -> None:
    with pytest.warns(EchelonWarning, match=rf"{name}= has no effect: "):
        TrainingArguments(**{name: True})


def test_old_names_work_for_classes_of_the_user_s(tmp_path: Path) -> None:
    @dataclass
    class Mine(TrainingArguments):
        extra: int = 1

    with pytest.warns(EchelonWarning, match="eval_strategy"):
        args = Mine(output_dir=str(tmp_path), evaluation_strategy="steps", extra=2)
    assert (args.eval_strategy, args.extra) == ("steps", 2)
    assert list(inspect.signature(Mine).parameters) == [*FIELDS, "extra"]


def test_an_old_and_its_new_name_must_agree() -> None:
    with pytest.warns(EchelonWarning), pytest.raises(ConfigError, match="the same setting with two values"):
        TrainingArguments(evaluation_strategy="epoch", eval_strategy="steps")


def test_new_names_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainingArguments(eval_strategy="epoch", warmup_steps=0.1, report_to=[])


def test_an_unknown_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="has no setting 'learning_rat'") as error:
        TrainingArguments(learning_rat=1e-3)  # type: ignore[call-arg]
    assert "did you mean 'learning_rate'?" in str(error.value)


ASKING: dict[str, Any] = {
    **dict.fromkeys(NOT_OFFERED, True),
    "skip_memory_metrics": False,
    "report_to": ["wandb"],
    "include_for_metrics": ["inputs"],
    "label_smoothing_factor": 0.1,
    "debug": "underflow_overflow",
    "deepspeed": {"stage": 2},
    "fsdp": "full_shard",
    "neftune_noise_alpha": 5.0,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "liger_kernel_config": {"rope": True},
    "optim_target_modules": ["all-linear"],
    "activation_checkpointing_kwargs": {"a": 1},
    "include_num_input_tokens_seen": "all",
    "parallelism_config": object(),
    "torch_empty_cache_steps": 5,
    "bf16_full_eval": True,
}


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_what_is_not_offered_is_refused_not_ignored(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* is not offered yet by this version") as error:
        TrainingArguments(**{name: ASKING[name]})
    assert "do: " in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_strategy": "epochs"}, "eval_strategy='epochs' is none of the choices: no, steps, epoch"),
        ({"save_strategy": "sometimes"}, "save_strategy='sometimes' is none of the choices: no, steps, epoch, best"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type='cosin' is none of the choices: linear, cosine"),
        ({"optim": "adam"}, "optim='adam' is none of the choices: adamw_torch"),
        ({"optim": "adamw_8bit"}, "optim='adamw_8bit' is an optimizer of the package 'bitsandbytes'"),
        ({"optim": "adamw_torch_8bit"}, "optim='adamw_torch_8bit' is an optimizer of the package 'torchao'"),
        ({"optim": "galore_adamw"}, "of the package 'galore-torch'"),
        ({"optim": "schedule_free_adamw"}, "of the package 'schedulefree'"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type='greedy' is not offered yet"),
        ({"train_sampling_strategy": "group_by_length"}, "'group_by_length' is not offered yet"),
        ({"train_sampling_strategy": "length"}, "none of the choices: random, sequential"),
        ({"log_level": "loud"}, "log_level='loud' is none of the choices: debug, info"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 exclude each other"),
        ({"logging_steps": 2.5}, "logging_steps=2.5 is no whole number of steps"),
        ({"logging_steps": 0}, "not logging_steps=0"),
        ({"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0}, "neither eval_steps nor logging"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
        ({"dataloader_prefetch_factor": 2}, "needs processes that read data"),
        ({"save_strategy": "best"}, "does not know what is best"),
        ({"load_best_model_at_end": True}, "eval_strategy='no' and save_strategy='steps'"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 200, "save_steps": 300},
            "save_steps=300 is no multiple of eval_steps=200",
        ),
        ({"accelerator_config": "missing.json"}, "neither JSON nor a file with JSON"),
        ({"optim_args": "lr"}, "has no value"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        optimizer_class_and_arguments(TrainingArguments(**options))
    assert message in str(error.value)
    assert "where: " in str(error.value)


def test_what_follows_from_the_values(tmp_path: Path) -> None:
    args = TrainingArguments(eval_strategy="steps", logging_steps=7, use_cpu=True)
    assert (args.eval_steps, args.do_eval, args.dataloader_pin_memory) == (7, True, False)
    assert args.output_dir == "trainer_output"
    assert TrainingArguments(output_dir="~/x").output_dir == str(Path.home() / "x")
    assert not (tmp_path / "trainer_output").exists()
    best = TrainingArguments(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert (best.metric_for_best_model, best.greater_is_better) == ("loss", False)
    assert TrainingArguments(metric_for_best_model="accuracy").greater_is_better is True
    assert TrainingArguments(eval_strategy=False).eval_strategy == "no"  # type: ignore[arg-type]
    assert TrainingArguments(lr_scheduler_kwargs='{"num_cycles": 2}').lr_scheduler_kwargs == {"num_cycles": 2}
    assert TrainingArguments(gradient_checkpointing=False).activation_checkpointing is False
    assert [TrainingArguments(warmup_steps=w).get_warmup_steps(25) for w in (0, 7, 0.1)] == [0, 7, 3]


def test_who_this_process_is() -> None:
    args = TrainingArguments(use_cpu=True, per_device_train_batch_size=4)
    assert (args.device, args.n_gpu, args.world_size) == (torch.device("cpu"), 0, 1)
    assert (args.process_index, args.local_process_index) == (0, 0)
    assert (args.train_batch_size, args.eval_batch_size) == (4, 8)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert args.should_log
    assert args.should_save
    assert TrainingArguments(log_level="info").get_process_log_level() == logging.INFO
    with args.main_process_first(desc="nothing"):
        pass


def test_as_a_dict_names_are_words_and_secrets_are_hidden() -> None:
    args = TrainingArguments(hub_token="secret", eval_strategy="epoch")
    values = args.to_dict()
    assert (values["eval_strategy"], values["optim"], values["hub_token"]) == (
        "epoch",
        "adamw_torch_fused",
        "<HUB_TOKEN>",
    )
    assert "secret" not in args.to_json_string() + str(args)
    assert json.loads(args.to_json_string())["seed"] == 42
    assert args.to_sanitized_dict()["label_names"] == "None"


def test_arguments_can_be_copied_and_pickled() -> None:
    args = TrainingArguments(learning_rate=0.1)
    assert dataclasses.replace(args, seed=1).learning_rate == 0.1
    assert pickle.loads(pickle.dumps(args)) == args
