"""The options of ``echelon launch`` by group: those of ``--help``, and all of them for ``--help-all``."""

from __future__ import annotations

from types import MappingProxyType

__all__ = ["ALL", "COMMON", "EXAMPLES", "LAUNCHER_FIELDS", "METAVARS", "group_of", "position_of"]

COMMON = MappingProxyType(
    {
        "This machine": {
            "num_processes": "Total number of processes (default: one per accelerator).",
            "gpu_ids": "Accelerators to use, such as 0,2 (default: all).",
            "cpu": "Use the CPU even if accelerators are available.",
        },
        "Several machines": {
            "num_machines": "Number of machines, or MIN:MAX for an elastic run (default: 1).",
            "machine_rank": "Rank of this machine (default: any free rank).",
            "main_process_ip": "Address at which the other machines reach the machine with rank 0.",
        },
        "Training": {
            "mixed_precision": "Autocast dtype for the forward pass (default: no).",
            "parity": "Make the updates independent of the number of processes (default: off, as in Accelerate).",
            "engine": "How to parallelize: ddp, zero1, fsdp2 or deepspeed (default: follows from the other settings).",
        },
        "Run": {
            "config_file": "File with settings: echelon's, accelerate's or DeepSpeed's (default: ./echelon.toml, else the "
            "file written by echelon config).",
            "log_dir": "Write each rank's output to a new folder below DIR.",
            "max_restarts": "Restart all processes after a failure, at most N times (default: 0).",
        },
        "Help": {"help": "", "help_all": ""},
    }
)
"""Heading -> the parameters that ``--help`` shows, each with a line of text (empty: the option's own)."""

EXAMPLES = (
    ("echelon launch --num_processes 4 train.py --lr 0.1", "Four processes on this machine; --lr goes to the script:"),
    ("echelon launch --cpu --num_processes 2 train.py", "Try the same on a machine without a GPU:"),
    (
        "echelon launch --num_machines 2 --main_process_ip HOST train.py",
        "Two machines, the same command on each, with the token from echelon token in ECHELON_TOKEN:",
    ),
)
"""Command line and what it does."""

ALL = MappingProxyType(
    {
        "Processes of this machine": "num_processes gpu_ids cpu enable_cpu_affinity num_cpu_threads_per_process "
        "oversubscribe",
        "Several machines": "num_machines machine_rank main_process_ip main_process_port rdzv_endpoint rdzv_id rdzv_conf "
        "local_addr listen_on insecure_network",
        "Machines of a hostfile, started through ssh": "deepspeed_hostfile deepspeed_inclusion_filter "
        "deepspeed_exclusion_filter deepspeed_multinode_launcher",
        "Training": "engine mixed_precision gradient_accumulation_steps parity max_micro_batch_size canonical_shards "
        "speed verify_every verify_action allow_changed_data",
        "Sharding with FSDP's settings": "use_fsdp fsdp_version fsdp_sharding_strategy fsdp_reshard_after_forward "
        "fsdp_offload_params fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
        "fsdp_ignored_modules fsdp_state_dict_type fsdp_cpu_ram_efficient_loading fsdp_activation_checkpointing",
        "Axes of the device mesh": "use_parallelism_config parallelism_config_dp_replicate_size "
        "parallelism_config_dp_shard_size parallelism_config_tp_size parallelism_config_cp_size parallelism_config_sp_size "
        "parallelism_config_pp_size parallelism_config_ep_size parallelism_config_cp_comm_strategy",
        "DeepSpeed": "use_deepspeed deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
        "offload_optimizer_nvme_path offload_param_nvme_path gradient_clipping zero3_init_flag zero3_save_16bit_model "
        "deepspeed_moe_layer_cls_names",
        "torch.compile": "dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic "
        "dynamo_use_regional_compilation",
        "fp8": "fp8_backend fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim",
        "Failures, stalls and preemption": "max_restarts no_warm stall_timeout slow_timeout on_stall preemption_grace "
        "monitor_interval",
        "Output and diagnosis": "log_dir no_record tee redirects quiet summary debug debugger",
        "Configuration and script": "config_file strict libraries module no_python local_rank_arg",
        "Compatibility: accepted, but without effect in echelon or not supported yet": "multi_gpu standalone no_local_rank "
        "rdzv_backend same_network fsdp_backward_prefetch fsdp_forward_prefetch fsdp_use_orig_params "
        "fsdp_sync_module_states fsdp_activation_checkpointing_offload parallelism_config_cp_backend "
        "parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
        "Help": "help help_all",
    }
)
"""Heading -> parameters that ``--help-all`` shows."""

_OTHER = "Other options"

METAVARS = MappingProxyType(
    {
        "gpu_ids": "IDS",
        "main_process_ip": "ADDRESS",
        "stall_timeout": "SECONDS",
        "slow_timeout": "SECONDS",
        "deepspeed_config_file": "PATH",
        "deepspeed_hostfile": "PATH",
        "deepspeed_multinode_launcher": "NAME",
        "deepspeed_inclusion_filter": "MACHINES",
        "deepspeed_exclusion_filter": "MACHINES",
        "deepspeed_moe_layer_cls_names": "CLASSES",
        "fsdp_transformer_layer_cls_to_wrap": "CLASSES",
        "fsdp_ignored_modules": "REGEX",
        "fsdp_reshard_after_forward": "[true|false|N]",
        "offload_optimizer_nvme_path": "DIR",
        "offload_param_nvme_path": "DIR",
        "engine": "NAME",
        "rdzv_backend": "NAME",
        "parallelism_config_cp_backend": "NAME",
        "parallelism_config_cp_comm_strategy": "NAME",
        "parallelism_config_sp_backend": "NAME",
        "parallelism_config_sp_attn_implementation": "NAME",
    }
)
"""Parameter -> how its value is called, where the type does not tell."""

LAUNCHER_FIELDS = frozenset(
    " ".join(
        ALL[heading]
        for heading in (
            "Processes of this machine",
            "Several machines",
            "Machines of a hostfile, started through ssh",
            "Failures, stalls and preemption",
        )
    ).split()
) | {"multi_gpu", "standalone", "rdzv_backend", "same_network"}
"""Parameters that are specific to the launcher."""


def group_of(name: str) -> str:
    """Return the heading in ``--help-all`` of the parameter ``name``."""
    return next((heading for heading, names in ALL.items() if name in names.split()), _OTHER)


def position_of(name: str) -> int:
    """Return the position in ``--help-all`` of the parameter ``name``."""
    names = " ".join(ALL.values()).split()
    return names.index(name) if name in names else len(names)
