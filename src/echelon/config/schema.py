"""The settings of a run, frozen, each with its meaning and unit."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from types import MappingProxyType, NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from echelon.base.errors import ConfigError

__all__ = [
    "DynamoBackendName",
    "DynamoMode",
    "Parity",
    "Precision",
    "RunConfig",
    "coerce",
    "field_docs",
    "field_names",
    "field_types",
]

Precision = Literal["no", "fp16", "bf16", "fp8"]
DynamoBackendName = Literal[
    "no",
    "eager",
    "aot_eager",
    "inductor",
    "aot_ts_nvfuser",
    "nvprims_nvfuser",
    "cudagraphs",
    "ofi",
    "fx2trt",
    "onnxrt",
    "tensorrt",
    "aot_torchxla_trace_once",
    "torchxla_trace_once",
    "tvm",
    "hpu_backend",
    "neuron",
]
Parity = Literal["off", "exact", "bitwise"]
DynamoMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite"]
Offload = Literal["none", "cpu", "nvme"]
# Also by their numbers from 1 on, as Accelerate's older files have them.
Strategy = Literal[
    "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5"
]
Resharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
Prefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2", "3"]
StateDict = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "1", "2", "3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Every setting that a flag, the environment, a file or code can give; their other names are in ``config/key_table.py``."""

    num_processes: int | None = None
    """Processes of the whole run, on all machines (``--nproc_per_node``: per machine). None: one per accelerator, or
    one process on a machine without accelerators."""
    num_machines: int = 1
    """Machines of the run. As a flag also MIN:MAX: the run continues while machines leave and join."""
    machine_rank: int = 0
    """The rank of this machine. Not set: any free rank, and rank 0 where ``main_process_ip`` is an address of this
    machine."""
    main_process_ip: str | None = None
    """The address at which the other machines reach the machine of rank 0. None: the loopback address of this
    machine."""
    main_process_port: int | None = None
    """The port of the rendezvous host (None: 29500); on one machine, the port of the store (None: a free one)."""
    rdzv_backend: str | None = None
    """How machines find each other, with the values of torchrun."""
    same_network: bool = True
    """Assert that the machines can reach each other directly."""
    gpu_ids: str | None = None
    """The accelerators to use, such as ``0,2``. None: all."""
    enable_cpu_affinity: bool = False
    """Bind each process to the cores near its accelerator; on the CPU, to an equal share of the cores."""
    stall_timeout: float = 60.0
    """Seconds without progress, while other ranks wait, after which a rank is reported as stalled. 0: never."""
    slow_timeout: float | None = None
    """Seconds that a rank may spend compiling, importing, saving, loading or in a phase declared slow, or computing
    while others wait, before it is reported as stalled. 0: no limit. None: ten times ``stall_timeout``."""
    on_stall: Literal["report", "restart", "stop"] = "report"
    """What to do after reporting a stall: nothing (report), restart (within ``max_restarts``), or stop with exit code
    124."""
    engine: str | None = None
    """The name of the engine. None: chosen by the number of processes and by whether the model is sharded."""
    sharded_by: Literal["fsdp", "deepspeed"] | None = None
    """Which settings control sharding: ``fsdp_*``, or those of DeepSpeed. None: every process holds the whole model."""
    cpu: bool = False
    """Use the CPU even where accelerators are present."""
    mixed_precision: Precision = "no"
    """The dtype of autocast in the forward pass."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    gradient_clipping: float | None = None
    """The maximum norm of the gradients for DeepSpeed, which clips them itself."""
    dynamo_backend: DynamoBackendName = "no"
    """The backend of ``torch.compile`` for prepared models. no: models are not compiled."""
    dynamo_mode: DynamoMode = "default"
    """The mode of ``torch.compile``."""
    dynamo_use_fullgraph: bool = False
    """Raise an error if a model does not compile into one graph."""
    dynamo_use_dynamic: bool | None = None
    """Compile for dynamic shapes. None: torch detects them."""
    dynamo_use_regional_compilation: bool = False
    """Compile the repeated blocks of a model separately."""
    parity: Parity = "off"
    """Whether the update depends on the number of processes: with ``off`` it does, as in Accelerate; with ``exact`` and
    ``bitwise`` it does not."""
    canonical_shards: int = 8
    """Number of shards of an update whose gradients are summed in a fixed order (bitwise); at least the number of
    processes."""
    max_micro_batch_size: int | None = None
    """Largest micro-batch per process when parity is exact or bitwise. None: the process's share of the batch."""
    seed: int | None = None
    """The seed of the run. None: the script sets it."""
    allow_changed_data: bool = False
    """Resume in the middle of an epoch although the data have changed; the position is logged."""
    debug: bool = False
    """Check structure, shapes and dtypes of every collective across the ranks before it runs, on every backend."""

    fsdp_version: Literal[1, 2] | None = None
    """Which version's names the ``fsdp_*`` settings use; both run on torch's ``fully_shard``. None: version 1."""
    fsdp_sharding_strategy: Strategy | None = None
    """What is sharded, with the names of FSDP version 1."""
    fsdp_reshard_after_forward: Resharding | bool | int | None = None
    """Free unsharded parameters after the forward pass. A number: reshard them over that many ranks."""
    fsdp_offload_params: bool | None = None
    """Keep parameters, gradients and optimizer states in host memory."""
    fsdp_auto_wrap_policy: WrapPolicy | None = None
    """How the model is divided into units that are gathered at once."""
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    """Class names of the layers that form one unit each, separated by commas."""
    fsdp_min_num_params: int | None = None
    """With SIZE_BASED_WRAP: the minimum number of parameters of a unit."""
    fsdp_backward_prefetch: Prefetch | None = None
    """No effect: the next unit is always prefetched."""
    fsdp_forward_prefetch: bool | None = None
    """No effect: all-gathers always overlap with computation."""
    fsdp_state_dict_type: StateDict | None = None
    """How state is saved: whole or in shards."""
    fsdp_use_orig_params: bool | None = None
    """No effect: parameters always keep their names."""
    fsdp_cpu_ram_efficient_loading: bool | None = None
    """Only rank 0 reads the weights. None: true where the launcher starts an FSDP run, as in Accelerate."""
    fsdp_sync_module_states: bool | None = None
    """No effect: the weights of rank 0 are always sent to all ranks."""
    fsdp_activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass."""
    fsdp_activation_checkpointing_offload: bool | None = None
    """Keep the inputs of checkpointed layers in host memory; not supported yet."""
    fsdp_ignored_modules: str | None = None
    """A regular expression for the names of modules that are not sharded."""

    deepspeed_config_file: str | None = None
    """A DeepSpeed JSON file; its "auto" values are filled in at the start of the run."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """The ZeRO stage of DeepSpeed: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too. None: 2."""
    offload_optimizer_device: Offload | None = None
    """Where optimizer states are kept."""
    offload_param_device: Offload | None = None
    """Where parameters are kept."""
    offload_optimizer_nvme_path: str | None = None
    """The folder for optimizer states, with ``nvme``."""
    offload_param_nvme_path: str | None = None
    """The folder for parameters, with ``nvme``."""
    zero3_init_flag: bool | None = None
    """Construct models sharded from the start."""
    zero3_save_16bit_model: bool | None = None
    """Allow gathering the whole weights to save them."""
    deepspeed_moe_layer_cls_names: str | None = None
    """Class names of mixture-of-experts layers, separated by commas."""
    deepspeed_hostfile: str | None = None
    """DeepSpeed's list of machines, for runs on several."""
    deepspeed_multinode_launcher: str | None = None
    """How DeepSpeed starts processes on several machines."""
    deepspeed_inclusion_filter: str | None = None
    """The accelerators to use, such as ``localhost:0,2``."""
    deepspeed_exclusion_filter: str | None = None
    """The accelerators not to use."""

    use_parallelism_config: bool = False
    """Take the layout of the ranks from ``parallelism_config_*``. True where one of these is set."""
    parallelism_config_dp_replicate_size: int | None = None
    """Number of groups of ranks that each hold the whole model."""
    parallelism_config_dp_shard_size: int | None = None
    """Number of ranks over which the model is sharded."""
    parallelism_config_tp_size: int | None = None
    """Tensor parallel size; not supported yet."""
    parallelism_config_cp_size: int | None = None
    """Context parallel size; not supported yet."""
    parallelism_config_cp_backend: str | None = None
    """The context parallel implementation."""
    parallelism_config_cp_comm_strategy: str | None = None
    """The context parallel communication: all-gather or all-to-all."""
    parallelism_config_sp_size: int | None = None
    """Sequence parallel size; not supported yet."""
    parallelism_config_sp_backend: str | None = None
    """The sequence parallel implementation."""
    parallelism_config_sp_seq_length: int | None = None
    """The sequence length."""
    parallelism_config_sp_seq_length_is_variable: bool | None = None
    """Whether the sequence length varies."""
    parallelism_config_sp_attn_implementation: str | None = None
    """The attention implementation of the model."""

    fp8_backend: Literal["AO", "TE", "MSAMP", "NO"] | None = None
    """The library that computes in fp8; only torchao (AO) is supported."""
    fp8_enable_fsdp_float8_all_gather: bool | None = None
    """Gather sharded parameters in fp8."""
    fp8_pad_inner_dim: bool | None = None
    """Pad matrices to sizes that fp8 kernels support."""


_LEAST = {
    "num_processes": 1,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,
    "stall_timeout": 0,
    "slow_timeout": 0,
    "max_micro_batch_size": 1,
    "canonical_shards": 1,
    "gradient_accumulation_steps": 1,
    "seed": 0,
    "fsdp_min_num_params": 0,
    **dict.fromkeys((f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")), 1),
}


def field_names(schema: type) -> tuple[str, ...]:
    """Return the names of the fields of the dataclass ``schema``, in order."""
    return tuple(f.name for f in fields(schema))


def field_docs(schema: type) -> dict[str, str]:
    """Return the text under each field of the dataclass ``schema``, read from its source."""
    (tree,) = ast.parse(inspect.getsource(schema)).body
    assert isinstance(tree, ast.ClassDef), schema
    found = {}
    for field, doc in zip(tree.body, tree.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found


def field_types(schema: type) -> Mapping[str, tuple[object, ...]]:
    """Return the types of each field of the dataclass ``schema``, in the order in which they are tried."""
    return _TYPES if schema is RunConfig else _types(schema)


def coerce(kinds: tuple[object, ...], name: str, value: object, *, where: str) -> object:
    """Return ``value`` as the first of ``kinds`` that it fits: ``"8"`` and ``8`` are the same.

    Args:
        kinds: of ``field_types``.
        name: the field.
        value: as it was given; text from the environment or a flag, or already typed.
        where: the origin, for the message.

    Raises:
        ConfigError: ``value`` is of none of them or not among their choices.
    """
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
        if NoneType in kinds:
            return None
    else:
        for kind in kinds:
            found, typed = _as_kind(kind, value)
            if found:
                _check_range(name, typed, where)
                return typed
    do = f"set {name} to {_describe(kinds)}"
    if isinstance(value, str) and "$" in value:
        do += "; the variable in it was not expanded: single quotes and files do not expand variables"
    raise ConfigError(f"{name}={value!r} is not {_describe(kinds)}", where=where, do=do)


_MOST = {"main_process_port": 65535}


def _check_range(name: str, value: object, where: str) -> None:
    least = _LEAST.get(name)
    if least is not None and isinstance(value, (int, float)) and value < least:
        kind = "an integer" if isinstance(value, int) else "a number"
        raise ConfigError(f"{name}={value} is below {least}", where=where, do=f"set {kind} of at least {least}")
    most = _MOST.get(name)
    if most is not None and isinstance(value, int) and value > most:
        raise ConfigError(f"{name}={value} is above {most}", where=where, do=f"set an integer of at most {most}")


_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", ""})


def _as_kind(kind: object, value: object) -> tuple[bool, object]:
    if get_origin(kind) is Literal:
        # YAML reads a bare `no` as False, and `mixed_precision: no` is what every accelerate file says.
        text = "no" if value is False else str(value).lower()
        choices = {str(choice).lower(): choice for choice in get_args(kind)}
        return text in choices, choices.get(text)
    if kind is bool:
        text = str(value).lower()
        return (text in _TRUE | _FALSE, text in _TRUE)
    if kind in (int, float):
        return _as_number(kind, value)
    if kind is str:
        # YAML reads `gpu_ids: 0` as a number.
        is_text = isinstance(value, (str, int)) and not isinstance(value, bool)
        return is_text, str(value)
    return False, None


def _as_number(kind: object, value: object) -> tuple[bool, object]:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return False, None
    try:
        if kind is int and isinstance(value, (int, str)):
            return True, int(value)
    except ValueError:
        pass  # perhaps 1e8
    try:
        number = float(value)  # YAML 1.1 reads `1e8` as text, and accelerate exports FSDP_MIN_NUM_PARAMS=100000000.0
    except ValueError:
        return False, None
    if not isfinite(number):
        return False, None
    if kind is float:
        return True, number
    return number.is_integer(), int(number)


def _describe(kinds: tuple[object, ...]) -> str:
    words = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words.append("one of " + ", ".join(str(choice) for choice in get_args(kind)))
        else:
            words.append(_WORDS[kind])  # type: ignore[index]
    return " or ".join(words)


def _types(schema: type) -> Mapping[str, tuple[object, ...]]:
    hints = get_type_hints(schema).items()
    return {name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,) for name, hint in hints}


_TYPES = MappingProxyType(_types(RunConfig))  # takes 2 ms: computed once
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "none"}
