"""The choices of a run, frozen: what echelon can be told, each with its meaning and unit."""

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
    """Every choice that flags, environment, files or code can make; their other names are in ``config/key_table.py``."""

    num_processes: int | None = None
    """Processes of the run, on all machines together (``--nproc_per_node``: on each); None: one for each accelerator, one
    on a machine without."""
    num_machines: int = 1
    """Machines of the run; as a flag also MIN:MAX: it goes on while machines leave and join."""
    machine_rank: int = 0
    """Which of them this one is; not given: any, and where ``main_process_ip`` is this machine's address, the first."""
    main_process_ip: str | None = None
    """The address of rank zero's machine, as the others reach it; None: this one's loopback."""
    main_process_port: int | None = None
    """The port at which the machines meet (None: 29500); on one machine, of the store (None: a free one)."""
    rdzv_backend: str | None = None
    """How machines find each other, in torchrun's words."""
    same_network: bool = True
    """Can the machines reach each other directly?"""
    gpu_ids: str | None = None
    """The accelerators to use, such as ``0,2``; None: all."""
    enable_cpu_affinity: bool = False
    """Bind each process to the cores near its accelerator; on the CPU, to a share of the cores."""
    stall_timeout: float = 60.0
    """After so many seconds without a move of a rank that waits for others, say why. 0: never."""
    slow_timeout: float | None = None
    """A rank may compile, import, save, load, or be in what it has declared slow for so many seconds, or compute while others
    wait; then it is reported as a stall. 0: for ever. None: ten times ``stall_timeout``."""
    on_stall: Literal["report", "restart", "stop"] = "report"
    """What to do at a stall, besides the report: go on, restart (within ``max_restarts``), or stop with exit code 124."""
    engine: str | None = None
    """The engine by its name; None: by the number of processes, and whether the model is sharded."""
    sharded_by: Literal["fsdp", "deepspeed"] | None = None
    """Whose settings say how the model is sharded: ``fsdp_*``, or those of DeepSpeed. None: it is whole on every process."""
    cpu: bool = False
    """Use the CPU even where accelerators are present."""
    mixed_precision: Precision = "no"
    """The dtype of autocast in the forward pass."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in one update."""
    gradient_clipping: float | None = None
    """The largest norm of all gradients, for DeepSpeed, which clips by itself."""
    dynamo_backend: DynamoBackendName = "no"
    """The backend of ``torch.compile`` for prepared models; no: they are not compiled."""
    dynamo_mode: DynamoMode = "default"
    """The mode of ``torch.compile``."""
    dynamo_use_fullgraph: bool = False
    """A model that does not compile into one graph is an error."""
    dynamo_use_dynamic: bool | None = None
    """Compile for changing shapes; None: torch finds out."""
    dynamo_use_regional_compilation: bool = False
    """Compile the repeated blocks of a model one by one."""
    parity: Parity = "off"
    """What the update depends on: with ``off`` on the number of processes too, as in Accelerate; with ``exact`` it does not."""
    canonical_shards: int = 8
    """The shards of an update whose gradients are summed in a fixed order (bitwise): at least the number of processes."""
    max_micro_batch_size: int | None = None
    """Samples of one process in one forward pass, in the exact modes; None: as many as its share of the batch has."""
    seed: int | None = None
    """The seed of the run; None: the script's own."""
    allow_changed_data: bool = False
    """Go on from the middle of an epoch although the data are others now; from where is told."""
    debug: bool = False
    """Check structure, shapes and dtypes of every collective across the ranks before it runs, on every backend."""

    fsdp_version: Literal[1, 2] | None = None
    """Whose words the ``fsdp_*`` settings are; both run on torch's ``fully_shard``. None: those of 1."""
    fsdp_sharding_strategy: Strategy | None = None
    """What is sharded, in the words of version 1."""
    fsdp_reshard_after_forward: Resharding | bool | int | None = None
    """Free whole parameters after the forward pass; a number: keep them sharded over so many ranks."""
    fsdp_offload_params: bool | None = None
    """Keep parameters, gradients and optimizer states on the host."""
    fsdp_auto_wrap_policy: WrapPolicy | None = None
    """What is gathered at once."""
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    """Names of the layers that are gathered at once, by commas."""
    fsdp_min_num_params: int | None = None
    """For SIZE_BASED_WRAP: the least number of parameters."""
    fsdp_backward_prefetch: Prefetch | None = None
    """Without effect: the next unit is always gathered ahead."""
    fsdp_forward_prefetch: bool | None = None
    """Without effect: gathering overlaps by itself."""
    fsdp_state_dict_type: StateDict | None = None
    """How state is saved: whole or in shards."""
    fsdp_use_orig_params: bool | None = None
    """Without effect: parameters always keep their names."""
    fsdp_cpu_ram_efficient_loading: bool | None = None
    """Only rank zero reads the weights. None: so it is, as in Accelerate, where its launcher starts an FSDP run."""
    fsdp_sync_module_states: bool | None = None
    """Without effect: rank zero's weights always go to all."""
    fsdp_activation_checkpointing: bool | None = None
    """Compute activations again in the backward pass."""
    fsdp_activation_checkpointing_offload: bool | None = None
    """Keep their inputs on the host; not offered yet."""
    fsdp_ignored_modules: str | None = None
    """A regular expression: what stays whole."""

    deepspeed_config_file: str | None = None
    """A DeepSpeed json; values of "auto" in it are filled in at the start of the run."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What DeepSpeed shards: nothing, optimizer states, gradients too, parameters too. None: 2."""
    offload_optimizer_device: Offload | None = None
    """Where optimizer states are kept."""
    offload_param_device: Offload | None = None
    """Where parameters are kept."""
    offload_optimizer_nvme_path: str | None = None
    """A folder for them, with ``nvme``."""
    offload_param_nvme_path: str | None = None
    """A folder for them, with ``nvme``."""
    zero3_init_flag: bool | None = None
    """Make models in shards from the start."""
    zero3_save_16bit_model: bool | None = None
    """Let whole weights be gathered to save them."""
    deepspeed_moe_layer_cls_names: str | None = None
    """Names of mixture-of-experts layers, by commas."""
    deepspeed_hostfile: str | None = None
    """DeepSpeed's list of machines; for runs on many."""
    deepspeed_multinode_launcher: str | None = None
    """How DeepSpeed starts many machines."""
    deepspeed_inclusion_filter: str | None = None
    """The accelerators to use, as ``localhost:0,2``."""
    deepspeed_exclusion_filter: str | None = None
    """Those not to use."""

    use_parallelism_config: bool = False
    """Is the layout of the ranks given by ``parallelism_config_*``? True where one of them is."""
    parallelism_config_dp_replicate_size: int | None = None
    """Groups of ranks that each hold the model."""
    parallelism_config_dp_shard_size: int | None = None
    """Ranks over which it is sharded."""
    parallelism_config_tp_size: int | None = None
    """Ranks over which layers are split; not offered yet."""
    parallelism_config_cp_size: int | None = None
    """Ranks over which sequences are cut; not offered yet."""
    parallelism_config_cp_backend: str | None = None
    """Who cuts them."""
    parallelism_config_cp_comm_strategy: str | None = None
    """How they talk."""
    parallelism_config_sp_size: int | None = None
    """Ranks over which sequences are cut by heads; not offered yet."""
    parallelism_config_sp_backend: str | None = None
    """Who cuts them."""
    parallelism_config_sp_seq_length: int | None = None
    """The length of the sequences."""
    parallelism_config_sp_seq_length_is_variable: bool | None = None
    """Does it change?"""
    parallelism_config_sp_attn_implementation: str | None = None
    """The attention of the model."""

    fp8_backend: Literal["AO", "TE", "MSAMP", "NO"] | None = None
    """Who computes in fp8; only torchao (AO) is offered."""
    fp8_enable_fsdp_float8_all_gather: bool | None = None
    """Gather sharded parameters in fp8."""
    fp8_pad_inner_dim: bool | None = None
    """Pad matrices to sizes that fp8 can multiply."""


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
    """Return for each field of the dataclass ``schema`` the types that it may have, in the order in which they are tried."""
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
    do = f"give {name} as {_describe(kinds)}"
    if isinstance(value, str) and "$" in value:
        do += "; the variable in it was not expanded: single quotes and files leave it as it is"
    raise ConfigError(f"{name}={value!r} is not {_describe(kinds)}", where=where, do=do)


_MOST = {"main_process_port": 65535}


def _check_range(name: str, value: object, where: str) -> None:
    least = _LEAST.get(name)
    if least is not None and isinstance(value, (int, float)) and value < least:
        kind = "an integer" if isinstance(value, int) else "a number"
        raise ConfigError(f"{name}={value} is below {least}", where=where, do=f"give {kind} from {least} on")
    most = _MOST.get(name)
    if most is not None and isinstance(value, int) and value > most:
        raise ConfigError(f"{name}={value} is above {most}", where=where, do=f"give an integer up to {most}")


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


_TYPES = MappingProxyType(_types(RunConfig))  # 2 ms: once, not whenever settings are resolved
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "none"}
