"""What a plan is computed from (a model and one traced step), and what it says about a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor's global shape and dtype (``"bfloat16"``); ``storage_bytes`` where storage is not elements times size."""

    shape: tuple[int, ...]
    dtype: str
    storage_bytes: int | None = None  # quantized weights, with the scales beside them
    follows_masters: bool = False
    """Whether master_weights="float32" casts this frozen parameter or buffer from low precision because it is in a norm or beside a weight
    that is cast (see ``MasterWeights.cast``)."""


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """A parameter as loaded; tied parameters appear once, under their first name."""

    name: str
    tensor: TensorFacts
    is_trainable: bool
    unit: str  # name of the innermost repeated block that holds it ("" outside the blocks): the unit of sharding
    state: tuple[TensorFacts, ...] = ()  # what the optimizer keeps for it after its first step, from a traced step
    other_names: tuple[str, ...] = ()  # of tied parameters
    group: int | None = 0  # the optimizer's parameter group that holds it; None: the optimizer does not hold it
    tp_style: str = (
        ""  # style of its module in the model's plan for tensor parallelism ("colwise"), if that splits this parameter
    )
    is_expert: bool = False  # stacked experts, along dimension 0
    is_shardable: bool = True  # False: quantized weights that fully_shard cannot divide


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Parameters and buffers of a model, and its blocks in the order of the forward pass."""

    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[TensorFacts, ...]
    units: tuple[str, ...]
    class_name: str
    head_counts: tuple[int, ...] = ()  # numbers of attention heads and key-value heads, which tp must divide
    stage_pieces: tuple[
        tuple[str, ...], ...
    ] = ()  # modules that a pipeline keeps together, in their order; (): it cannot be cut
    piece_sizes: tuple[int, ...] = ()  # of each of these pieces, by which stages are balanced


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings that change what a traced step allocates on one device."""

    micro_batch: int
    mixed_precision: str = "no"  # "no", "bf16", "fp16"
    master_weights: str = "float32"
    activation_checkpointing: str = "none"  # "none", "selective", "full", "offload"
    loss_chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """Live bytes while one operator runs, rounded up to 512 bytes for each tensor as CUDA's allocator does.

    Parameters, buffers, optimizer state, their gathered copies and the batch are not in it: they depend on the layout.
    """

    phase: Phase
    unit: str  # the block that runs ("" outside the blocks)
    line: str  # file:line of the model's code and the operator
    activations: int  # outputs that the backward pass will read
    temporaries: int  # everything else but gradients of parameters
    gradients: int  # gradients of parameters, whole, in the dtype of the parameters
    offloaded: int = 0  # activations in host memory
    weight_copies: int = (
        0  # low-precision copies of parameters that autocast made; fully_shard gathers such copies in their place
    )


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of the user's model on one device, traced under fake tensors."""

    settings: StepSettings
    moments: tuple[Moment, ...]
    flops: Mapping[str, int]  # by unit, forward and backward, recomputation included
    bytes_moved: Mapping[str, int]  # by unit, read and written by operators; the optimizer's are in ""
    batch_bytes: int  # of one micro-batch on the device; not in the moments
    tokens: int = 0  # of the micro-batch (samples, if there are no tokens)
    outputs: Mapping[str, int] = field(default_factory=dict)  # by unit, bytes of its output: what a pipeline sends
    attention: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # by unit, bytes of queries, and of keys and values
    routed: Mapping[str, int] = field(default_factory=dict)  # by unit, bytes of the rows that experts get
    operators: Mapping[str, int] = field(default_factory=dict)  # by unit, without views and the optimizer's
    notes: tuple[str, ...] = ()  # what the trace could not see


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines a plan is for. Bandwidths in bytes per second and direction, memory in bytes."""

    gpus_per_node: int
    nodes: int
    gpu_memory: int
    device: str = ""  # a name in the table of devices
    link: str = ""  # within a machine, a name in the table of links
    network: str = ""  # between machines
    host_memory: int | None = None


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """One way to run the step: an engine, its mesh, and the settings of the step. ``world`` is the product of the axes."""

    engine: str  # "single", "ddp", "zero1", "fsdp2", "deepspeed"
    settings: StepSettings
    accumulation: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    stage: int = 3  # of fsdp2 and deepspeed: 2 keeps parameters gathered between forward and backward
    cpu_offload: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Collectives of one kind in one optimizer step.

    ``bytes`` is the larger of one rank's input and output (the whole tensor of an all_gather), summed over the calls. In a ring of n ranks,
    each rank sends (n - 1) / n of it (all_reduce: twice that).
    """

    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"
    axis: str  # the mesh axes whose ranks take part: "dp_shard", "dp_shard cp", "tp", ...; "dp" for all ranks of ddp and zero1
    count: int
    bytes: int
    group_size: int = 1
    when: str = "backward"  # "forward", "backward", "optimizer": what it can overlap with


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """What one layout costs: memory of the fullest rank, traffic, time."""

    layout: ParallelLayout
    memory: Mapping[
        str, int
    ]  # at the peak, by category: parameters, master weights, gradients, optimizer state, activations, ...
    peak: int
    peak_phase: str
    peak_line: str
    timeline: tuple[int, ...]  # total bytes at each moment of the trace
    host_memory: Mapping[
        str, int
    ]  # peaks: "rank 0 at load", "a machine at load", "rank 0 at save", "a machine at save", "offload"
    collectives: tuple[CollectiveCost, ...]
    flops: int
    checkpoint_bytes: int
    seconds: float  # of one optimizer step, by a roofline: for ranking
    formulas: Callable[[], Mapping[str, str]] = dict  # the formula behind each number, for --explain
    refused: str = ""  # why this layout cannot run the model; the numbers are then zero
    worst_peak: int = 0  # the peak if all tokens choose the experts of one rank; without experts, ``peak``
    notes: tuple[str, ...] = ()  # what is estimated by a rule, or not counted


def refused_plan(layout: ParallelLayout, reason: str) -> LayoutPlan:
    """Return the plan of a layout that cannot run."""
    return LayoutPlan(layout, {}, 0, "", "", (), {}, (), 0, 0, 0.0, refused=reason)
