"""What one layout of the ranks costs: memory of the fullest rank, traffic, host memory and time, computed from facts alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from echelon.base.messages.translation import gettext as _
from echelon.plan.devices import Hardware, hardware_of
from echelon.plan.explain import formulas
from echelon.plan.facts import (
    Cluster,
    CollectiveCost,
    LayoutPlan,
    ModelFacts,
    ParallelLayout,
    StepTrace,
    refused_plan,
)
from echelon.plan.holdings import RankClass, fullest_rank, holdings
from echelon.plan.host_memory import checkpoint_bytes, host_memory
from echelon.plan.sharding import sharding_units, split_dim
from echelon.plan.sizes import has_masters, stored_dtype
from echelon.plan.step_memory import MemoryMoment, memory_over_step
from echelon.plan.step_time import step_time
from echelon.plan.traffic import collectives


def plan_layout(
    model: ModelFacts,
    trace: StepTrace,
    layout: ParallelLayout,
    cluster: Cluster,
    *,
    hardware: Hardware | None = None,
) -> LayoutPlan:
    """Return what ``layout`` costs. The time this takes does not depend on the number of ranks.

    Args:
        model: the model and the optimizer's state.
        trace: a micro-step with the settings of ``layout``.
        layout: one way to run it.
        cluster: the machines.
        hardware: of a cluster whose device is in no table. None: from the names in ``cluster``.

    Raises:
        ConfigError: ``cluster`` names unknown hardware.
    """
    assert trace.settings == layout.settings, (trace.settings, layout.settings)
    hardware = hardware or hardware_of(cluster)
    reason = refusal(model, layout, cluster)
    if not reason and layout.cp > 1 and not trace.attention:
        reason = _("{name} calls no scaled_dot_product_attention, which cp divides", name=model.class_name)
    if reason:
        return refused_plan(layout, reason)
    moments, rank = _fullest(model, trace, layout)
    peak = max(moments, key=lambda one: one.total)
    costs = _merged(collectives(model, trace, layout, rank))
    held = holdings(model, layout, rank)
    time = step_time(model, trace, layout, cluster, hardware, costs, rank, held)
    return LayoutPlan(
        layout=layout,
        memory=peak.by_category,
        peak=peak.total,
        peak_phase=peak.moment.phase,
        peak_line=peak.moment.line,
        timeline=tuple(one.total for one in moments),
        host_memory=host_memory(model, trace, layout, cluster, held),
        collectives=costs,
        flops=sum(trace.flops.values()) * layout.accumulation,
        checkpoint_bytes=checkpoint_bytes(model, layout),
        seconds=time.total,
        formulas=partial(formulas, model, trace, layout, rank, peak, costs, time, hardware),
        worst_peak=_worst_peak(model, trace, layout, rank, peak),
        notes=tuple(_notes(layout, hardware)),
    )


def _fullest(model: ModelFacts, trace: StepTrace, layout: ParallelLayout) -> tuple[tuple[MemoryMoment, ...], RankClass]:
    """Return the memory of the fullest rank over the step, and its class."""
    classes = [fullest_rank(model, layout, stage) for stage in range(layout.pp)]
    found = [(memory_over_step(model, trace, layout, rank), rank) for rank in classes]
    return max(found, key=lambda pair: max(one.total for one in pair[0]))


def _worst_peak(
    model: ModelFacts, trace: StepTrace, layout: ParallelLayout, rank: RankClass, peak: MemoryMoment
) -> int:
    """Return the peak if the experts of one rank get the rows of all ranks that share experts."""
    if layout.ep == 1:
        return peak.total
    moments = memory_over_step(model, trace, layout, rank, expert_load=float(layout.ep))
    return max(one.total for one in moments)


def _merged(costs: tuple[CollectiveCost, ...]) -> tuple[CollectiveCost, ...]:
    """Return one cost for each kind, axis and phase."""
    found: dict[tuple[str, str, int, str], tuple[int, int]] = {}
    for cost in costs:
        key = (cost.kind, cost.axis, cost.group_size, cost.when)
        count, size = found.get(key, (0, 0))
        found[key] = count + cost.count, size + cost.bytes
    return tuple(
        CollectiveCost(kind, axis, count, size, group_size, when)
        for (kind, axis, group_size, when), (count, size) in found.items()
    )


# ---- layouts that cannot run -------------------------------------------------------------------------------------------


def refusal(model: ModelFacts, layout: ParallelLayout, cluster: Cluster) -> str:
    """Return why ``layout`` cannot run the model on ``cluster``; "" if it can."""
    return next(_refusals(model, layout, cluster), "")


def _refusals(model: ModelFacts, layout: ParallelLayout, cluster: Cluster) -> Iterator[str]:
    if layout.world > cluster.gpus_per_node * cluster.nodes:
        yield _(
            "it needs {world} GPUs, but there are {number}",
            world=layout.world,
            number=cluster.gpus_per_node * cluster.nodes,
        )
    if layout.engine == "single" and layout.world > 1:
        yield _("the single engine runs on one GPU")
    others = [axis for axis in ("tp", "cp", "pp", "ep") if getattr(layout, axis) > 1]
    if others and layout.engine != "fsdp2":
        yield _("the axis {axis} needs the fsdp2 engine", axis=others[0])
    if layout.cpu_offload and layout.engine not in ("fsdp2", "deepspeed"):
        yield _("CPU offload needs the fsdp2 or the deepspeed engine")
    if layout.engine == "zero1":
        masters = has_masters(model, layout)
        dtypes = {stored_dtype(p, masters=masters) for p in model.parameters if p.group is not None}
        if len(dtypes) > 1:
            yield _("zero1 needs one dtype, but the optimizer holds {dtypes}", dtypes=" and ".join(sorted(dtypes)))
    if layout.engine == "fsdp2":
        yield from _refusals_of_axes(model, layout)
        yield from _refusals_of_units(model, layout)


def _refusals_of_axes(model: ModelFacts, layout: ParallelLayout) -> Iterator[str]:
    if layout.tp > 1:
        split = [(p, split_dim(p.tp_style)) for p in model.parameters]
        if not any(dim is not None for _p, dim in split):
            yield _("{name} has no plan for tensor parallelism", name=model.class_name)
        heads = next((count for count in model.head_counts if count % layout.tp), None)
        if heads is not None:
            yield _("{count} heads cannot be split over tp={tp}", count=heads, tp=layout.tp)
        uneven = next((p for p, dim in split if dim is not None and p.tensor.shape[dim] % layout.tp), None)
        if uneven is not None:
            yield _("{name} cannot be split over tp={tp}", name=uneven.name, tp=layout.tp)
    if layout.ep > 1:
        experts = [p for p in model.parameters if p.is_expert]
        if not experts:
            yield _("{name} has no experts that can be divided", name=model.class_name)
        elif any(p.tensor.shape[0] % layout.ep for p in experts) or (layout.dp_shard * layout.cp) % layout.ep:
            yield _(
                "{count} experts on {shards} ranks cannot be divided by ep={ep}",
                count=experts[0].tensor.shape[0],
                shards=layout.dp_shard * layout.cp,
                ep=layout.ep,
            )
    if layout.pp > 1:
        if not model.stage_pieces:
            yield _("{name} cannot be cut into stages by rule", name=model.class_name)
        elif len(model.stage_pieces) < layout.pp:
            yield _("{count} layers cannot be cut into pp={pp} stages", count=len(model.stage_pieces), pp=layout.pp)
        if layout.accumulation < layout.pp:
            yield _(
                "{pp} stages need at least as many micro-batches, not {count}", pp=layout.pp, count=layout.accumulation
            )


def _refusals_of_units(model: ModelFacts, layout: ParallelLayout) -> Iterator[str]:
    masters = has_masters(model, layout)
    for stage in range(layout.pp):
        for unit in sharding_units(model, layout, stage):
            dtypes = {stored_dtype(p, masters=masters) for p in unit.parameters if p.is_trainable}
            if len(dtypes) > 1:
                yield _(
                    "fully_shard needs one dtype in {unit}, but its trained parameters are {dtypes}",
                    unit=unit.name or model.class_name,
                    dtypes=" and ".join(sorted(dtypes)),
                )


def _notes(layout: ParallelLayout, hardware: Hardware) -> Iterator[str]:
    if layout.engine == "deepspeed":
        yield _("deepspeed: by ZeRO's formulas, without the library's buckets")
    if layout.tp > 1:
        yield _("tp: activations of a block by the formula of a decoder")
    if layout.ep > 1:
        yield _("ep: with tokens divided evenly among the experts")
    if not hardware.is_known:
        yield _("no device was named: times are those of {device}", device=hardware.device.name)
