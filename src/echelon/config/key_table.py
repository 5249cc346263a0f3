"""The names of each setting: field, accelerate's variable, section and names in accelerate's files, and flags.

This table defines the names in config files, environment variables, flags, the variables that the launcher exports, and
docs/configuration.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The names of one setting."""

    field: str
    """``RunConfig`` field, which the variable ``ECHELON_<FIELD>`` also sets."""
    variable: str | None = None
    """Environment variable that accelerate's launcher uses to pass the setting to the ranks."""
    section: str | None = None
    """Section in accelerate's config file; None for the top level."""
    names: tuple[str, ...] = ()
    """Other names that config files may use. If accelerate's name differs from the field's name, it comes first."""
    other_flags: tuple[str, ...] = ()
    """Command-line flags besides the one with the field's name."""
    shared: bool = False
    """Whether the setting also applies if the feature that its section configures is not used."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Command-line flags; empty if the setting has none."""
        return () if self.field in _WITHOUT_FLAG else (f"--{self.field.replace('_', '-')}", *self.other_flags)

    @property
    def written(self) -> str:
        """The setting's name in accelerate's config files."""
        return self.names[0] if self.field in _RENAMED else self.field


# Sections of a file: accelerate's name -> the prefix that names in the section may omit.
SECTIONS = MappingProxyType(
    {
        "fsdp_config": "fsdp_",
        "deepspeed_config": "",
        "dynamo_config": "dynamo_",
        "parallelism_config": "parallelism_config_",
        "fp8_config": "fp8_",
    }
)
_RENAMED = frozenset({"cpu"})
_WITHOUT_FLAG = frozenset({"sharded_by", "seed"})

# accelerate has no `sharded_by`, but a separate variable (and flag --use_...) for each of its values.
USE = MappingProxyType({"ACCELERATE_USE_FSDP": "fsdp", "ACCELERATE_USE_DEEPSPEED": "deepspeed"})


def own_variable(field: str) -> str:
    """Return the name of echelon's environment variable for a field."""
    return f"ECHELON_{field.upper()}"


def _keys(section: str, variables: str, *fields: str) -> tuple[Key, ...]:
    """Return one key per field, using the variable prefix ``variables`` and the field prefix of ``section``."""
    prefix = SECTIONS[section]
    return tuple(
        Key(
            field=prefix + name,
            variable=variables + name.removeprefix("deepspeed_").upper(),
            section=section,
        )
        for name in fields
    )


KEYS = (
    Key(field="num_processes", other_flags=("--nproc-per-node", "--num-gpus", "--num-accelerators")),
    Key(field="num_machines", other_flags=("--nnodes", "--num-nodes")),
    Key(field="machine_rank", other_flags=("--node-rank",)),
    Key(field="main_process_ip", other_flags=("--master-addr",)),
    Key(field="main_process_port", other_flags=("--master-port",)),
    *(Key(field=field) for field in ("rdzv_backend", "same_network", "gpu_ids")),
    Key(field="enable_cpu_affinity", variable="ACCELERATE_CPU_AFFINITY"),
    *(Key(field=field) for field in ("stall_timeout", "slow_timeout", "on_stall", "engine", "sharded_by")),
    Key(field="cpu", variable="ACCELERATE_USE_CPU", names=("use_cpu",), other_flags=("--use-cpu",)),
    Key(field="mixed_precision", variable="ACCELERATE_MIXED_PRECISION"),
    *(Key(field=field) for field in ("master_weights", "activation_checkpointing", "activation_checkpointing_blocks")),
    Key(
        field="gradient_accumulation_steps",
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        section="deepspeed_config",
        shared=True,
    ),
    Key(field="gradient_clipping", variable="ACCELERATE_GRADIENT_CLIPPING", section="deepspeed_config"),
    *_keys(
        "dynamo_config",
        "ACCELERATE_DYNAMO_",
        *("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation"),
    ),
    *(Key(field=field) for field in ("parity", "max_micro_batch_size", "canonical_shards", "verify_every")),
    *(
        Key(field=field)
        for field in (
            "verify_action",
            "spike_guard",
            "spike_factor",
            "speed",
            "seed",
            "plan",
            "gpu_memory",
            "allow_changed_data",
        )
    ),
    Key(field="debug", variable="ACCELERATE_DEBUG_MODE"),
    *_keys(
        "fsdp_config",
        "FSDP_",
        *("version", "sharding_strategy", "reshard_after_forward", "offload_params", "auto_wrap_policy"),
    ),
    Key(
        field="fsdp_transformer_layer_cls_to_wrap",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        section="fsdp_config",
        names=("fsdp_transformer_cls_names_to_wrap",),
    ),
    Key(
        field="fsdp_backward_prefetch",
        variable="FSDP_BACKWARD_PREFETCH",
        section="fsdp_config",
        names=("fsdp_backward_prefetch_policy",),
        other_flags=("--fsdp-backward-prefetch-policy",),
    ),
    *_keys(
        "fsdp_config",
        "FSDP_",
        *("min_num_params", "forward_prefetch", "state_dict_type", "use_orig_params", "cpu_ram_efficient_loading"),
        *("sync_module_states", "activation_checkpointing", "activation_checkpointing_offload", "ignored_modules"),
    ),
    Key(
        field="deepspeed_config_file",
        variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        section="deepspeed_config",
        other_flags=("--deepspeed",),
    ),
    *_keys(
        "deepspeed_config",
        "ACCELERATE_DEEPSPEED_",
        *("zero_stage", "offload_optimizer_device", "offload_param_device"),
        *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
    ),
    Key(field="zero3_init_flag", variable="ACCELERATE_DEEPSPEED_ZERO3_INIT", section="deepspeed_config"),
    *_keys("deepspeed_config", "ACCELERATE_DEEPSPEED_", "zero3_save_16bit_model", "deepspeed_moe_layer_cls_names"),
    *(
        Key(field=field, section="deepspeed_config", other_flags=tuple(others), shared=True)
        for field, *others in (
            ("deepspeed_hostfile", "--hostfile", "-H"),
            ("deepspeed_multinode_launcher", "--launcher"),
            ("deepspeed_inclusion_filter", "--include", "-i"),
            ("deepspeed_exclusion_filter", "--exclude", "-e"),
        )
    ),
    Key(field="use_parallelism_config", variable="ACCELERATE_USE_PARALLELISM_CONFIG"),
    *_keys(
        "parallelism_config",
        "PARALLELISM_CONFIG_",
        *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy", "sp_size"),
        *("sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation", "pp_size"),
        "ep_size",
    ),
    *_keys("fp8_config", "ACCELERATE_FP8_", *("backend", "enable_fsdp_float8_all_gather", "pad_inner_dim")),
)

BY_FIELD = MappingProxyType({key.field: key for key in KEYS})

# Known variables that are not in this table. Any other unknown variable is checked for misspellings.
OTHER_VARIABLES = frozenset(
    {
        "ACCELERATE_ALLOW_CP_STANDALONE",
        "ACCELERATE_BYPASS_DEVICE_MAP",
        "ACCELERATE_CONFIG_DS_FIELDS",
        "ACCELERATE_DEBUG_RDV_FILE",
        "ACCELERATE_DISABLE_RICH",
        "ACCELERATE_DOWNCAST_BF16",
        "ACCELERATE_ENABLE_RICH",
        "ACCELERATE_IN_TPU_POD",
        "ACCELERATE_LOG_LEVEL",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
        "ACCELERATE_TORCH_DEVICE",
        "ACCELERATE_USE_IPEX",
        "ACCELERATE_USE_MEGATRON_LM",
        "ACCELERATE_USE_MPS_DEVICE",
        "ACCELERATE_USE_SAGEMAKER",
        "ACCELERATE_USE_XPU",
        # Set by echelon for its own processes.
        "ECHELON_AS",
        "ECHELON_BOARD",
        "ECHELON_CHOSEN_THREADS",
        "ECHELON_CONFIG",
        "ECHELON_LAUNCHER",
        "ECHELON_STARTER",
        "ECHELON_WARM_SERVER",
        "ECHELON_RECORD",
        "ECHELON_SET_GLOO_SOCKET_IFNAME",
        "ECHELON_WROTE_FOR_TRANSFORMERS",
        # Read by other modules.
        "ECHELON_CHECKPOINT_FORMAT",
        "ECHELON_LOG_LEVEL",
        "ECHELON_NO_RECORD",
        "ECHELON_SSH_ARGS",
        "ECHELON_STRICT",
        "ECHELON_TOKEN",
        "ECHELON_TOKEN_FILE",
        *(f"ACCELERATE_FP8_{name}" for name in ("MARGIN", "INTERVAL", "FORMAT", "AMAX_HISTORY_LEN", "OPT_LEVEL")),
        *(f"ACCELERATE_FP8_{name}" for name in ("AMAX_COMPUTE_ALGO", "USE_AUTOCAST_DURING_EVAL")),
        *(f"ACCELERATE_FP8_OVERRIDE_{name}" for name in ("FPROP", "DGRAD", "WGRAD", "LINEAR_PRECISION")),
    }
)
