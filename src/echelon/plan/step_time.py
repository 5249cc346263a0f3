"""The time of one optimizer step by a roofline: for ranking layouts, not a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.plan.devices import Hardware, Link
from echelon.plan.facts import Cluster, CollectiveCost, ModelFacts, ParallelLayout, StepTrace
from echelon.plan.holdings import Holding, RankClass, owned_elements
from echelon.plan.sharding import stage_pieces
from echelon.plan.sizes import computed_dtype

EFFICIENCY = 0.6  # of the peak FLOP/s that matrix products of usual sizes reach, and of bandwidths
_SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "broadcast": 1.0}
# Ranks of these axes are neighbours, from the innermost axis outwards.
_INNER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by what takes them. ``exposed`` is the communication that nothing hides."""

    compute: float
    optimizer: float
    exposed: float
    idle: float
    """Of the pipeline, while it fills and drains."""
    offload: float

    @property
    def total(self) -> float:
        return self.compute + self.optimizer + self.exposed + self.idle + self.offload


def step_time(
    model: ModelFacts,
    trace: StepTrace,
    layout: ParallelLayout,
    cluster: Cluster,
    hardware: Hardware,
    costs: Sequence[CollectiveCost],
    rank: RankClass,
    held: Sequence[Holding],
) -> StepTime:
    """Return the time of a step of the slowest stage.

    The forward and the backward pass of a unit take the longest of FLOPs / peak, bytes / bandwidth, and the time in which the host starts
    its operators (on a CPU, which does both, their sum); the optimizer reads and writes what the rank owns. Collectives take the time of a
    ring. Those of DDP and fully_shard run beside computation; those of activations (tp, ep, and
    stages) and zero1's broadcasts do not.
    """
    compute = layout.accumulation * _micro_step(model, trace, layout, hardware, rank)
    owned = [h.num_bytes for h in held if h.category != "buffers"]
    _, trained = owned_elements(model, layout, rank)
    bandwidth = hardware.host.bandwidth if layout.cpu_offload else hardware.device.bandwidth * EFFICIENCY
    optimizer = 2 * sum(owned) / bandwidth if trained else 0.0
    offload = 0.0
    if layout.cpu_offload:  # shards go to the device for each gather, and their gradients come back
        shards = sum(h.num_bytes for h in held if h.on_host and h.category != "optimizer state")
        offload = (2 * layout.accumulation + 1) * shards / hardware.host.bandwidth
    compute += sum(map(_copied_bytes, costs)) / (hardware.device.bandwidth * EFFICIENCY)
    hidden, shown = 0.0, 0.0
    for cost in costs:
        seconds = collective_seconds(cost, layout, cluster, hardware)
        if hardware.overlaps and cost.axis.startswith(("dp", "efsdp", "cp")) and cost.when != "optimizer":
            hidden += seconds
        else:
            shown += seconds
    exposed = shown + max(0.0, hidden - compute)
    # The last bucket, or the first unit, has nothing to hide behind.
    exposed += min(hidden, compute) / max(2, len(model.units) + 1)
    idle = compute * (layout.pp - 1) / layout.accumulation if layout.pp > 1 else 0.0
    return StepTime(compute=compute, optimizer=optimizer, exposed=exposed, idle=idle, offload=offload)


def _copied_bytes(cost: CollectiveCost) -> int:
    """Return the bytes that are read and written beside a collective: to and from the buckets of DDP, and the buffers of fully_shard."""
    if cost.kind == "all_reduce" and cost.axis == "dp" and cost.when == "backward":
        return 4 * cost.bytes
    return 2 * cost.bytes if cost.kind in ("all_gather", "reduce_scatter") and cost.axis != "tp" else 0


def _micro_step(
    model: ModelFacts, trace: StepTrace, layout: ParallelLayout, hardware: Hardware, rank: RankClass
) -> float:
    dtype = computed_dtype(max((p.tensor.dtype for p in model.parameters), default="float32"), layout)
    peak, bandwidth = hardware.device.peak(dtype) * EFFICIENCY, hardware.device.bandwidth * EFFICIENCY
    units = set(trace.flops) | set(trace.bytes_moved)
    if layout.pp > 1:
        own = {name for piece in stage_pieces(model, layout, rank.stage) for name in piece}
        ends = {""} if rank.stage in (0, layout.pp - 1) else set()
        units &= own | ends
    divisor = layout.tp * layout.cp
    total = 0.0
    for unit in sorted(units):
        device = max(trace.flops.get(unit, 0) / peak, trace.bytes_moved.get(unit, 0) / bandwidth) / divisor
        host = trace.operators.get(unit, 0) * hardware.dispatch
        if layout.engine == "fsdp2":
            host += 2 * hardware.hooks  # the forward and the backward pass
        total += max(device, host) if hardware.overlaps else device + host
    return total


def collective_seconds(cost: CollectiveCost, layout: ParallelLayout, cluster: Cluster, hardware: Hardware) -> float:
    """Return the time of ``cost.count`` collectives in a ring: each rank sends (n - 1) / n of the bytes, all_reduce twice that.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    n = cost.group_size
    if n < 2 or not cost.count:
        return 0.0
    link = hardware.links.get(cost.kind) or _slowest_link(cost, layout, cluster, hardware)
    if cost.kind in ("send", "recv"):  # both at the same time
        return (cost.bytes / link.bandwidth + cost.count * link.latency) / 2
    factor = _SENT[cost.kind] if cost.kind != "broadcast" else n / (n - 1)
    steps = (2 if cost.kind == "all_reduce" else 1) * math.ceil(math.log2(n))
    return factor * (n - 1) / n * cost.bytes / link.bandwidth + cost.count * steps * link.latency


def _slowest_link(cost: CollectiveCost, layout: ParallelLayout, cluster: Cluster, hardware: Hardware) -> Link:
    """Return the link that the ring of a group passes: the machine's own, or a share of the network if the group spans machines."""
    first = next((axis for axis in _INNER if axis in cost.axis.split()), "")
    stride = 1
    if cost.axis == "efsdp":
        stride = layout.tp * layout.ep
    elif first:
        for axis in _INNER[: _INNER.index(first)]:
            stride *= getattr(layout, axis)
    span = stride * cost.group_size
    machine = min(cluster.gpus_per_node, layout.world)
    if span <= machine:
        return hardware.link
    # All ranks of a machine that are in different groups use its network at the same time.
    inside = max(1, machine // stride)
    groups = max(1, machine // inside)
    return Link(min(hardware.link.bandwidth, hardware.network.bandwidth / groups), hardware.network.latency)
