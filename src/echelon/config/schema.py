"""``RunConfig``: a run's settings, with their meanings and units."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from math import isfinite
from types import MappingProxyType, NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_

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
ActivationMode = Literal["none", "full", "selective", "offload"]
MasterWeightsMode = Literal["float32", "keep", "stochastic"]
DynamoMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite"]
Offload = Literal["none", "cpu", "nvme"]
# Files of older Accelerate versions contain the numbers instead of the names.
Strategy = Literal[
    "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5"
]
Resharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
Prefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2", "3"]
StateDict = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "1", "2", "3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All settings that flags, environment variables, files or code can set. ``config/key_table.py`` lists their other names."""

    num_processes: int | None = None
    """Total number of processes across all machines; with ``--nproc_per_node``, the number per machine. Default: one per
    accelerator, or one process on a machine without accelerators."""
    num_machines: int = 1
    """Number of machines. The flag also accepts MIN:MAX, for an elastic run."""
    machine_rank: int = 0
    """Rank of this machine. Default: any free rank, or rank 0 if ``main_process_ip`` is an address of this machine."""
    main_process_ip: str | None = None
    """Address at which other machines reach the machine with rank 0. Default: this machine's loopback address."""
    main_process_port: int | None = None
    """Port of the rendezvous host (default: 29500). For a single-machine run, port of the store (default: any free port)."""
    rdzv_backend: str | None = None
    """Accepted for compatibility with torchrun: ``c10d`` or ``static``. The launchers connect to each other in the same way."""
    same_network: bool = True
    """Accepted for compatibility with Accelerate: the machines must always be able to reach each other directly."""
    gpu_ids: str | None = None
    """Accelerators to use, such as ``0,2``. Default: all."""
    enable_cpu_affinity: bool = False
    """Bind each process to the CPU cores near its accelerator or, without accelerators, to an equal share of the cores."""
    stall_timeout: float = 60.0
    """Report a rank as stalled after this many seconds without progress while other ranks wait for it. 0 disables the check."""
    slow_timeout: float | None = None
    """Report a rank as stalled after this many seconds of compiling, importing, saving, loading, being in a phase declared as
    slow, or computing while other ranks wait. 0 disables the limit. Default: ten times ``stall_timeout``."""
    on_stall: Literal["auto", "report", "restart", "stop"] = "auto"
    """What to do after reporting a stall: nothing else (``report``), restart the processes, at most ``max_restarts`` times
    (``restart``), or stop with exit code 124 (``stop``). ``auto`` does so only if the run certainly cannot continue: it then
    restarts the processes or, after ``max_restarts``, stops; other stalls are only reported."""
    engine: str | None = None
    """How to parallelize: ``single``, ``dp``, ``ddp``, ``zero1``, ``fsdp2`` or ``deepspeed``. Default: follows from the number of
    processes and the sharding settings."""
    sharded_by: Literal["fsdp", "deepspeed"] | None = None
    """Which settings control sharding: ``fsdp_*`` or DeepSpeed's. Default: neither; every process holds the whole model."""
    cpu: bool = False
    """Use the CPU even if accelerators are available."""
    mixed_precision: Precision = "no"
    """Autocast dtype for the forward pass."""
    master_weights: MasterWeightsMode = "float32"
    """How trained weights that were loaded in bf16 or fp16 are stepped with mixed precision: as float32 copies (``float32``), as they
    are, so that small updates are lost (``keep``), or rounded stochastically by an optimizer of torchao (``stochastic``)."""
    activation_checkpointing: ActivationMode = "none"
    """What each block of a model keeps for the backward pass, in which it is recomputed: its inputs (``full``), also the outputs of
    matrix products and attention (``selective``), or its inputs on the CPU (``offload``). ``none`` keeps everything."""
    activation_checkpointing_blocks: str | None = None
    """Comma-separated class names of the blocks that ``activation_checkpointing`` recomputes. Default: those that the model names
    (``_no_split_modules``)."""
    gradient_accumulation_steps: int = 1
    """Number of micro-batches per optimizer step."""
    gradient_clipping: float | None = None
    """Maximum gradient norm. Applies only to DeepSpeed, which clips the gradients itself."""
    dynamo_backend: DynamoBackendName = "no"
    """``torch.compile`` backend for prepared models; ``no`` disables compilation."""
    dynamo_mode: DynamoMode = "default"
    """``torch.compile`` mode."""
    dynamo_use_fullgraph: bool = False
    """Raise an error if a model cannot be compiled into a single graph."""
    dynamo_use_dynamic: bool | None = None
    """Compile for dynamic shapes. Default: torch detects whether shapes are dynamic."""
    dynamo_use_regional_compilation: bool = False
    """Compile each repeated block of a model separately."""
    parity: Parity = "off"
    """Make the updates independent of the number of processes: with ``exact`` up to rounding, with ``bitwise`` to the last
    bit. With ``off``, they depend on it, as in Accelerate."""
    canonical_shards: int = 8
    """Number of shards into which the samples of each update are split if parity is bitwise. The shards' gradients are
    summed in a fixed order. Must be at least the number of processes."""
    max_micro_batch_size: int | None = None
    """Maximum micro-batch size per process if parity is exact or bitwise. Default: the process's share of the batch."""
    verify_every: int | None = None
    """Check every N-th update of a live run against the update that one process makes with the same batch. Default: never."""
    verify_action: Literal["stop", "warn"] | None = None
    """What to do if an update that ``verify_every`` checks differs: raise an error on every process, or warn. Default: ``stop``."""
    spike_guard: Literal["warn", "skip", "rollback"] | None = None
    """What to do with an update whose loss is a spike, NaN or infinite: warn, drop the update (``skip``), or drop the update that
    caused it, also if that is the one before (``rollback``, only with the Trainer). Default: losses are not watched."""
    spike_factor: float = 10.0
    """A loss is a spike if it exceeds the median of the last 64 losses by this many standard deviations, which are estimated as
    1.4826 times the median absolute deviation."""
    speed: Literal["safe", "max", "off"] = "safe"
    """Faster ways of computing the same updates: ``safe`` uses only those that are bit-equal to the plain loop, ``max`` also those
    that round differently (bf16 autocast, fused kernels), ``off`` none (docs/speed.md)."""
    seed: int | None = None
    """Random seed for the run. Default: no seed is set; the script may set one."""
    plan: bool = False
    """Before the run, predict its memory as ``echelon plan`` does, and refuse a run that does not fit. Needs an accelerator or
    ``gpu_memory``."""
    gpu_memory: str | None = None
    """Memory of an accelerator for ``plan``, such as ``80GB``. Default: that of the first accelerator of this machine."""
    allow_changed_data: bool = False
    """Resume in the middle of an epoch even if the data has changed, and log the position."""
    debug: bool = False
    """Before each collective of echelon, check that structure, shapes and dtypes match across ranks, on every backend. With
    ``echelon launch``, also compare the collectives of plain torch, once a second (docs/diagnosis.md)."""

    fsdp_version: Literal[1, 2] | None = None
    """Version of FSDP from which the ``fsdp_*`` settings take their names; both use torch's ``fully_shard``. Default: 1."""
    fsdp_sharding_strategy: Strategy | None = None
    """Sharding strategy, as named in FSDP version 1."""
    fsdp_reshard_after_forward: Resharding | bool | int | None = None
    """Free unsharded parameters after the forward pass. If this is an integer, reshard them across that many ranks instead."""
    fsdp_offload_params: bool | None = None
    """Offload parameters, gradients and optimizer states to the CPU."""
    fsdp_auto_wrap_policy: WrapPolicy | None = None
    """Policy for dividing the model into units whose parameters are gathered together."""
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    """Comma-separated class names of the layers to wrap as separate units."""
    fsdp_min_num_params: int | None = None
    """Minimum number of parameters per unit for SIZE_BASED_WRAP."""
    fsdp_backward_prefetch: Prefetch | None = None
    """No effect: the next unit is always prefetched."""
    fsdp_forward_prefetch: bool | None = None
    """No effect: all-gathers always overlap with computation."""
    fsdp_state_dict_type: StateDict | None = None
    """Format of saved state dicts: full or sharded."""
    fsdp_use_orig_params: bool | None = None
    """No effect: parameters always keep their original names."""
    fsdp_cpu_ram_efficient_loading: bool | None = None
    """Read the weights only on rank 0. Default: true if the launcher starts an FSDP run, as in Accelerate."""
    fsdp_sync_module_states: bool | None = None
    """No effect: rank 0 always broadcasts its weights."""
    fsdp_activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass."""
    fsdp_activation_checkpointing_offload: bool | None = None
    """Keep the inputs of recomputed layers on the CPU; requires ``fsdp_activation_checkpointing``."""
    fsdp_ignored_modules: str | None = None
    """Regular expression matching the names of modules that should not be sharded."""

    deepspeed_config_file: str | None = None
    """DeepSpeed JSON file; its "auto" values are filled in when the run starts."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage: 0 shards nothing, 1 shards optimizer states, 2 also shards gradients, and 3 also shards parameters.
    Default: 2."""
    offload_optimizer_device: Offload | None = None
    """Device to which optimizer states are offloaded."""
    offload_param_device: Offload | None = None
    """Device to which parameters are offloaded."""
    offload_optimizer_nvme_path: str | None = None
    """Folder for optimizer states offloaded to ``nvme``."""
    offload_param_nvme_path: str | None = None
    """Folder for parameters offloaded to ``nvme``."""
    zero3_init_flag: bool | None = None
    """Shard models during construction."""
    zero3_save_16bit_model: bool | None = None
    """Gather the full 16-bit weights when the model is saved."""
    deepspeed_moe_layer_cls_names: str | None = None
    """Comma-separated class names of mixture-of-experts layers."""
    deepspeed_hostfile: str | None = None
    """DeepSpeed hostfile that lists the machines to use."""
    deepspeed_multinode_launcher: str | None = None
    """DeepSpeed launcher for several machines: pdsh, ssh or standard."""
    deepspeed_inclusion_filter: str | None = None
    """Machines and accelerators to use, such as ``localhost:0,2``."""
    deepspeed_exclusion_filter: str | None = None
    """Machines and accelerators to exclude, such as ``node1:0``."""

    use_parallelism_config: bool = False
    """Use the rank layout given by ``parallelism_config_*``. Default: true if any of these settings is set."""
    parallelism_config_dp_replicate_size: int | None = None
    """Number of replicas of the model. Each replica is sharded across ``parallelism_config_dp_shard_size`` ranks."""
    parallelism_config_dp_shard_size: int | None = None
    """Number of ranks across which each replica of the model is sharded."""
    parallelism_config_tp_size: int | None = None
    """Number of ranks that split each layer (tensor parallel)."""
    parallelism_config_cp_size: int | None = None
    """Number of ranks that split each sequence, with ring attention (context parallel)."""
    parallelism_config_cp_backend: str | None = None
    """Context parallel implementation."""
    parallelism_config_cp_comm_strategy: str | None = None
    """Context parallel communication strategy: all-gather or all-to-all."""
    parallelism_config_sp_size: int | None = None
    """Number of ranks that split each sequence, with attention divided by heads (Ulysses)."""
    parallelism_config_sp_backend: str | None = None
    """Sequence parallel implementation."""
    parallelism_config_sp_seq_length: int | None = None
    """Sequence length for sequence parallelism."""
    parallelism_config_sp_seq_length_is_variable: bool | None = None
    """Whether the sequence length varies between batches."""
    parallelism_config_sp_attn_implementation: str | None = None
    """Attention implementation that the model uses for sequence parallelism."""
    parallelism_config_pp_size: int | None = None
    """Number of stages that the layers are divided into (pipeline parallel)."""
    parallelism_config_ep_size: int | None = None
    """Number of ranks among which the experts of mixture-of-experts layers are divided (expert parallelism)."""

    fp8_backend: Literal["AO", "TE", "MSAMP", "NO"] | None = None
    """fp8 library; only torchao (AO) is supported."""
    fp8_enable_fsdp_float8_all_gather: bool | None = None
    """All-gather sharded parameters in fp8."""
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
    "verify_every": 1,
    "gradient_accumulation_steps": 1,
    "seed": 0,
    "fsdp_min_num_params": 0,
    **dict.fromkeys(
        (f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep")), 1
    ),
}


def field_names(schema: type) -> tuple[str, ...]:
    """Return the field names of the dataclass ``schema``, in order."""
    return tuple(f.name for f in fields(schema))


def field_docs(schema: type) -> dict[str, str]:
    """Return the docstring of each field of the dataclass ``schema``."""
    (tree,) = ast.parse(inspect.getsource(schema)).body
    assert isinstance(tree, ast.ClassDef), schema
    found = {}
    for field, doc in zip(tree.body, tree.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found


def field_types(schema: type) -> Mapping[str, tuple[object, ...]]:
    """Return the accepted types of each field of the dataclass ``schema``, in the order in which ``coerce`` tries them."""
    return _TYPES if schema is RunConfig else _types(schema)


def coerce(kinds: tuple[object, ...], name: str, value: object, *, where: str) -> object:
    """Convert ``value`` to the first type in ``kinds`` that accepts it; ``"8"`` and ``8`` are equivalent.

    Args:
        kinds: the field's types, from ``field_types``.

    Raises:
        ConfigError: no type accepts ``value``, or it is out of range.
    """
    if NoneType in kinds and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    for kind in kinds:
        found, typed = _as_kind(kind, value)
        if found:
            _check_range(name, typed, where)
            return typed
    do = _("set {name} to {kinds}", name=name, kinds=_describe(kinds))
    if isinstance(value, str) and "$" in value:
        do += "; its shell variable was not expanded, because the value was in single quotes or in a config file"
    raise ConfigError(
        _("{name}={value!r} is not {kinds}", name=name, value=value, kinds=_describe(kinds)), where=where, do=do
    )


_MOST = {"main_process_port": 65535}


def _check_range(name: str, value: object, where: str) -> None:
    least = _LEAST.get(name)
    if least is not None and isinstance(value, (int, float)) and value < least:
        kind = _("an integer") if isinstance(value, int) else _("a number")
        raise ConfigError(
            _("{name}={value} is below {least}", name=name, value=value, least=least),
            where=where,
            do=_("set it to {kind} of at least {least}", kind=kind, least=least),
        )
    most = _MOST.get(name)
    if most is not None and isinstance(value, int) and value > most:
        raise ConfigError(
            _("{name}={value} is above {most}", name=name, value=value, most=most),
            where=where,
            do=_("set it to an integer of at most {most}", most=most),
        )


_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", ""})


def _as_kind(kind: object, value: object) -> tuple[bool, object]:
    if get_origin(kind) is Literal:
        # YAML parses an unquoted `no` as False, and accelerate writes `mixed_precision: no`.
        text = "no" if value is False else str(value).lower()
        choices = {str(choice).lower(): choice for choice in get_args(kind)}
        return text in choices, choices.get(text)
    if kind is bool:
        text = str(value).lower()
        return (text in _TRUE | _FALSE, text in _TRUE)
    if kind in (int, float):
        return _as_number(kind, value)
    if kind is str:
        # YAML parses `gpu_ids: 0` as an integer.
        is_text = isinstance(value, (str, int)) and not isinstance(value, bool)
        return is_text, str(value)
    return False, None


def _as_number(kind: object, value: object) -> tuple[bool, object]:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return False, None
    if kind is int and isinstance(value, (int, str)):
        with suppress(ValueError):  # text such as 1e8 is not an int literal, but an integral float
            return True, int(value)
    try:
        number = float(value)  # YAML 1.1 parses `1e8` as text, and accelerate exports FSDP_MIN_NUM_PARAMS=100000000.0
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
            words.append(_("one of {names}", names=", ".join(str(choice) for choice in get_args(kind))))
        else:
            words.append(_(_WORDS[kind]))  # type: ignore[index]
    return _(" or ").join(words)


def _types(schema: type) -> Mapping[str, tuple[object, ...]]:
    hints = get_type_hints(schema).items()
    return {name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,) for name, hint in hints}


_TYPES = MappingProxyType(_types(RunConfig))  # computed once, because it takes 2 ms
_WORDS = {
    int: N_("an integer"),
    float: N_("a number"),
    bool: N_("true or false"),
    str: N_("text"),
    NoneType: N_("none"),
}
