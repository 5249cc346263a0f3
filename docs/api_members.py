"""The members of large classes, by task, in the order in which the API reference shows them.

A class that is not listed here is shown whole. Members that are left out are internals, properties derived from a member that is shown,
and names that only scripts for Accelerate or transformers read; the compatibility tables list those.
"""

from __future__ import annotations

import re
from pathlib import Path

FIELDS = Path(__file__).resolve().parent.parent / "src" / "echelon" / "trainer" / "arguments" / "fields.py"

_ON_ONE_PROCESS = [
    "print", "main_process_first", "local_main_process_first", "on_main_process", "on_local_main_process", "on_last_process",
    "on_process", "on_local_process", "split_between_processes",
]  # fmt: skip
_RANK = [
    "device", "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process", "is_last_process",
]  # fmt: skip
_SERVICE = ["tracker", "start", "store_init_configuration", "log", "finish"]


def _training_fields() -> dict[str, list[str]]:
    """Return the fields of TrainingArguments, by the comments above them."""
    groups: dict[str, list[str]] = {}
    title = ""
    for line in FIELDS.read_text(encoding="utf-8").splitlines():
        if comment := re.match(r"    # (.+)\.$", line):
            title = comment[1]
        elif (field := re.match(r"    ([a-z]\w*): ", line)) and title:
            groups.setdefault(title, []).append(field[1])
    return groups


_ARGUMENTS = {
    **_training_fields(),
    "Read from the environment": ["device", "world_size", "process_index", "local_process_index", "n_gpu"],
    "Methods": [
        "main_process_first", "set_training", "set_evaluate", "set_testing", "set_save", "set_logging", "set_push_to_hub", "set_optimizer",
        "set_lr_scheduler", "set_dataloader", "to_dict", "to_json_string", "to_sanitized_dict",
    ],
}  # fmt: skip

# Public name -> heading -> members. An empty heading: right below the class.
MEMBERS: dict[str, dict[str, list[str]]] = {
    "echelon.Accelerator": {
        "Preparing": [
            "prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader", "prepare_pipeline",
            "skip_first_batches", "allow_unsharded", "plan",
        ],
        "A training step": [
            "accumulate", "backward", "clip_grad_norm_", "clip_grad_value_", "autocast", "no_sync", "trigger_sync_in_backward",
            "unscale_gradients", "update_loss", "join_uneven_inputs", "context_parallel", "maybe_context_parallel",
        ],
        "Evaluation and communication": [
            "gather_for_metrics", "gather", "reduce", "pad_across_processes", "wait_for_everyone", "set_trigger", "check_trigger",
        ],
        "Saving and loading": [
            "epochs", "save_state", "load_state", "resume", "best_checkpoint", "register_for_checkpointing",
            "register_save_state_pre_hook", "register_load_state_pre_hook", "save_model", "save", "get_state_dict", "unwrap_model",
        ],
        "Logging and profiling": ["log", "log_hyperparameters", "init_trackers", "get_tracker", "trackers", "profile", "slow"],
        "Running code on some processes": _ON_ONE_PROCESS,
        "Ending": ["end_training", "free_memory"],
        "Processes and devices": [*_RANK, "distributed_type", "torch_device_mesh"],
        "State of the training": [
            "sync_gradients", "step", "progress", "optimizer_step_was_skipped", "preemption", "gradient_state", "state",
        ],
        "Settings": [
            "config", "parity", "mixed_precision", "gradient_accumulation_steps", "device_placement", "step_scheduler_with_optimizer",
            "dataloader_config", "project_configuration", "parallelism_config", "fsdp_plugin", "deepspeed_plugin", "dynamo_plugin",
            "rng_types", "scaler",
        ],
    },
    "echelon.PartialState": {
        "": [*_RANK, "backend", "distributed_type", "wait_for_everyone", *_ON_ONE_PROCESS, "set_device", "destroy_process_group"],
    },
    "echelon.accelerator.AcceleratorState": {
        "": ["mixed_precision", "distributed_type", "parallelism_config", "device_mesh", "fsdp_plugin", "deepspeed_plugin",
             "dynamo_plugin", "get_deepspeed_plugin", "select_deepspeed_plugin"],
    },
    "echelon.accelerator.GradientState": {
        "": ["sync_gradients", "num_steps", "end_of_dataloader", "remainder", "active_dataloader", "in_dataloader", "dataloader_references",
             "adjust_scheduler", "sync_with_dataloader", "plugin_kwargs"],
    },
    "echelon.accelerator.AcceleratedOptimizer": {
        "": ["step", "zero_grad", "step_was_skipped", "add_param_group", "param_groups", "state", "state_dict", "load_state_dict",
             "full_state_dict", "load_full_state_dict", "train", "eval", "optimizer"],
    },
    "echelon.accelerator.AcceleratedScheduler": {
        "": ["step", "get_last_lr", "state_dict", "load_state_dict", "scheduler"],
    },
    "echelon.FullyShardedDataParallelPlugin": {
        "": ["fsdp_version", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy", "transformer_cls_names_to_wrap",
             "min_num_params", "ignored_modules", "mixed_precision_policy", "cpu_offload", "activation_checkpointing",
             "activation_checkpointing_offload", "cpu_ram_efficient_loading", "sync_module_states", "param_init_fn", "state_dict_type",
             "state_dict_config", "optim_state_dict_config", "forward_prefetch", "backward_prefetch", "limit_all_gathers",
             "use_orig_params", "set_state_dict_type", "set_mixed_precision"],
    },
    "echelon.TrainerState": {
        "": ["epoch", "global_step", "max_steps", "num_train_epochs", "log_history", "best_metric", "best_global_step",
             "best_model_checkpoint", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_input_tokens_seen",
             "total_flos", "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
             "stateful_callbacks", "save_to_json", "load_from_json"],
    },
    "echelon.DeepSpeedPlugin": {
        "": ["hf_ds_config", "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device",
             "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model",
             "transformer_moe_cls_names", "is_auto", "get_value", "set_moe_leaf_modules", "zero3_init_context_manager", "select"],
    },
    "echelon.ParallelismConfig": {
        "": ["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_handler", "pp_size", "ep_size",
             "build_device_mesh", "get_device_mesh", "total_size", "data_parallel_size", "non_data_parallel_size", "active_mesh_dims",
             "to_json"],
    },
    "echelon.Trainer": {
        "Running": ["train", "evaluate", "predict", "hyperparameter_search", "end"],
        "Saving": ["save_model", "save_state", "push_to_hub", "create_model_card"],
        "Logging": ["log", "log_metrics", "save_metrics", "metrics_format"],
        "Callbacks": ["add_callback", "pop_callback", "remove_callback"],
        "To override: loss and steps": ["compute_loss", "training_step", "prediction_step", "evaluation_loop", "get_batch_samples"],
        "To override: data": ["get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "num_examples"],
        "To override: optimizer": [
            "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs",
            "get_decay_parameter_names", "get_optimizer_group", "get_learning_rates", "get_num_trainable_parameters",
        ],
        "To override: setup": ["call_model_init", "create_accelerator_and_postprocess", "init_hf_repo", "floating_point_ops"],
        "Where it runs": ["is_world_process_zero", "is_local_process_zero", "get_total_train_batch_size"],
        "Attributes": [
            "args", "model", "model_wrapped", "optimizer", "lr_scheduler", "train_dataset", "eval_dataset", "data_collator",
            "processing_class", "accelerator", "state", "control", "callback_handler", "compute_metrics", "label_names", "is_in_train",
        ],
    },
    "echelon.Seq2SeqTrainer": {"": ["evaluate", "predict", "prediction_step", "load_generation_config"]},
    "echelon.TrainingArguments": _ARGUMENTS,
    "echelon.Seq2SeqTrainingArguments": {
        "": ["predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config", "sortish_sampler"],
    },
    "echelon.TrainerControl": {
        "": ["should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"],
    },
    "echelon.EarlyStoppingCallback": {"": ["early_stopping_patience", "early_stopping_threshold", "check_metric_value"]},
    "echelon.ProgressCallback": {"": []},
    "echelon.PrinterCallback": {"": []},
    "echelon.trainer.NotebookProgressCallback": {"": []},
    "echelon.DefaultFlowCallback": {"": []},
    "echelon.CallbackHandler": {"": ["add_callback", "pop_callback", "remove_callback", "callbacks", "callback_list", "call_event"]},
    "echelon.NonFiniteError": {"": []},
    "echelon.EchelonError": {"": ["what", "where", "do", "exit_code"]},
    "echelon.trackers.JSONLTracker": {"": ["path", *_SERVICE]},
    "echelon.trackers.AimTracker": {"": [*_SERVICE, "log_images"]},
    "echelon.trackers.ClearMLTracker": {"": [*_SERVICE, "log_images", "log_table"]},
    "echelon.trackers.CometMLTracker": {"": _SERVICE},
    "echelon.trackers.DVCLiveTracker": {"": _SERVICE},
    "echelon.trackers.MLflowTracker": {"": [*_SERVICE, "log_figure", "log_artifact", "log_artifacts"]},
    "echelon.trackers.SwanLabTracker": {"": [*_SERVICE, "log_images"]},
    "echelon.trackers.TensorBoardTracker": {"": [*_SERVICE, "log_images"]},
    "echelon.trackers.TrackioTracker": {"": _SERVICE},
    "echelon.trackers.WandBTracker": {"": [*_SERVICE, "log_images", "log_table"]},
}  # fmt: skip
