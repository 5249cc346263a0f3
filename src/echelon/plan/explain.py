"""The formula behind each number of a plan, with the numbers put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.base.messages.translation import gettext as _
from echelon.plan.devices import Hardware
from echelon.plan.facts import CollectiveCost, ModelFacts, ParallelLayout, StepTrace
from echelon.plan.holdings import RankClass, holdings
from echelon.plan.sharding import sharding_units
from echelon.plan.sizes import numel
from echelon.plan.step_memory import MemoryMoment, activation_share
from echelon.plan.step_time import EFFICIENCY, StepTime


def formulas(
    model: ModelFacts,
    trace: StepTrace,
    layout: ParallelLayout,
    rank: RankClass,
    peak: MemoryMoment,
    costs: Sequence[CollectiveCost],
    time: StepTime,
    hardware: Hardware,
) -> Mapping[str, str]:
    """Return the formula of each category of memory, of each collective and of the time, by the names in ``LayoutPlan``."""
    found = {
        name: _of_category(name, size, model, layout, rank, peak, trace) for name, size in peak.by_category.items()
    }
    found["peak"] = " + ".join(f"{name} {size:,}" for name, size in peak.by_category.items()) + f" = {peak.total:,}"
    for cost in costs:
        found[f"{cost.kind} {cost.axis} {cost.when}"] = _(
            "{count} calls over {ranks} ranks, {size:,.0f} bytes each on average = {total:,}",
            count=cost.count,
            ranks=cost.group_size,
            size=cost.bytes / cost.count,
            total=cost.bytes,
        )
    found["flops"] = _(
        "{count} micro-steps x {flops:.4g} by the operators of the trace",
        count=layout.accumulation,
        flops=sum(trace.flops.values()),
    )
    found["seconds"] = _(
        "computing {compute:.3g} + optimizer {optimizer:.3g} + communication that nothing hides {exposed:.3g} + idle stages {idle:.3g} + "
        "offload {offload:.3g} = {total:.3g} s, at {efficiency:.0%} of the peaks of {device}",
        compute=time.compute,
        optimizer=time.optimizer,
        exposed=time.exposed,
        idle=time.idle,
        offload=time.offload,
        total=time.total,
        efficiency=EFFICIENCY,
        device=hardware.device.name,
    )
    return found


def _of_category(
    name: str,
    size: int,
    model: ModelFacts,
    layout: ParallelLayout,
    rank: RankClass,
    peak: MemoryMoment,
    trace: StepTrace,
) -> str:
    own = [h for h in holdings(model, layout, rank) if h.category == name and not h.on_host]
    if name in ("parameters", "master weights", "optimizer state", "buffers", "buckets") and own:
        return _(
            "{tensors} tensors of {elements:,} parameters on one of {shards}, {bytes:,} bytes; each rounded up to 512: {total:,}",
            tensors=len(own),
            elements=sum(numel(p.tensor.shape) for p in model.parameters),
            shards=_divided(layout),
            bytes=sum(h.num_bytes for h in own),
            total=size,
        )
    if name in ("activations", "temporaries"):
        return _(
            "of {line} in the trace x {share:.3g} of this rank = {total:,}",
            line=peak.moment.line,
            share=activation_share(layout, in_block=bool(peak.moment.unit)),
            total=size,
        )
    if name == "gathered parameters":
        units = sharding_units(model, layout, rank.stage)
        return _(
            "the unit {unit} of {number} units with its buffer, the model's own unit, and the unit gathered ahead: {total:,}",
            unit=peak.moment.unit or model.class_name,
            number=len(units),
            total=size,
        )
    if name == "unreduced gradients":
        return _(
            "whole gradients that are not reduced yet, after {count} micro-steps: {total:,}",
            count=layout.accumulation,
            total=size,
        )
    if name == "batch":
        return _(
            "{bytes:,} of one micro-batch / cp={cp}: {total:,}",
            bytes=trace.batch_bytes,
            cp=layout.cp,
            total=size,
        )
    return f"{size:,}"


def _divided(layout: ParallelLayout) -> str:
    axes = {"dp_shard": layout.dp_shard, "cp": layout.cp, "tp": layout.tp, "pp": layout.pp}
    if layout.engine != "fsdp2":
        return f"{layout.engine} {layout.world}"
    return " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "fsdp2 1"
