"""The collectives of one optimizer step of each engine: how many, over which axis, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.plan.facts import CollectiveCost, ModelFacts, ParallelLayout, ParameterFacts, StepTrace
from echelon.plan.holdings import RankClass, held_bytes, holdings
from echelon.plan.sharding import (
    ShardingUnit,
    ddp_buckets,
    gathered_bytes,
    is_sharded,
    local_shape,
    parameters_of_stage,
    sharding_units,
    split_dim,
)
from echelon.plan.sizes import computed_dtype, has_masters, item_bytes, numel, reduced_dtype, stored_dtype

_BUFFER_BUCKET_BYTES = 250 * 2**20  # in which DDP broadcasts buffers
_NORM_BYTES = 4


def collectives(
    model: ModelFacts, trace: StepTrace, layout: ParallelLayout, rank: RankClass
) -> tuple[CollectiveCost, ...]:
    """Return the collectives that a rank starts in one optimizer step after the first one, with clipping by the norm.

    Not counted: what is sent once (weights in ``prepare``, the order of DDP's buckets), messages through the store, sums of losses that the
    training loop asks for, and checkpoints.
    """
    if layout.world == 1:
        return ()
    if layout.engine == "fsdp2":
        found = [*_of_fsdp2(model, layout, rank), *_of_activations(model, trace, layout, rank)]
    elif layout.engine == "deepspeed":
        found = list(_of_deepspeed(model, layout))
    else:
        found = list(_of_copies(model, layout))
    return tuple(cost for cost in found if cost.count)


# ---- ddp and zero1 -----------------------------------------------------------------------------------------------------


def _of_copies(model: ModelFacts, layout: ParallelLayout) -> Iterator[CollectiveCost]:
    masters = has_masters(model, layout)
    sizes = [
        (dtype := stored_dtype(p, masters=masters), numel(p.tensor.shape) * item_bytes(dtype))
        for p in model.parameters
        if p.is_trainable
    ]
    buckets = ddp_buckets(sizes)
    yield CollectiveCost("all_reduce", "dp", len(buckets), sum(buckets), layout.world)
    # DDP sends rank zero's buffers before a forward pass that follows a reduction: once in each step.
    buffers = [h.num_bytes for h in holdings(model, layout, RankClass()) if h.category == "buffers"]
    if buffers:
        yield CollectiveCost(
            "broadcast", "dp", -(-sum(buffers) // _BUFFER_BUCKET_BYTES), sum(buffers), layout.world, "forward"
        )
    if layout.engine == "zero1":
        stepped = [p for p in model.parameters if p.group is not None]
        size = sum(numel(p.tensor.shape) * item_bytes(stored_dtype(p, masters=masters)) for p in stepped)
        yield CollectiveCost("broadcast", "dp", len(stepped), size, layout.world, "optimizer")


# ---- fsdp2 ---------------------------------------------------------------------------------------------------------------


def _of_fsdp2(model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> Iterator[CollectiveCost]:
    masters = has_masters(model, layout)
    units = sharding_units(model, layout, rank.stage)
    passes = num_gathers(model, layout, units)
    for unit in units:
        whole = reduced = 0
        for p, shape in unit.sharded(layout):
            computed = computed_dtype(stored_dtype(p, masters=masters), layout)
            whole += gathered_bytes(unit, p, shape, computed)
            reduced += gathered_bytes(unit, p, shape, reduced_dtype(computed, layout)) if p.is_trainable else 0
        forward, backward = passes[unit.name]
        if unit.shards > 1:
            yield CollectiveCost("all_gather", unit.axes, forward, forward * whole, unit.shards, "forward")
            yield CollectiveCost("all_gather", unit.axes, backward, backward * whole, unit.shards, "backward")
            yield CollectiveCost("reduce_scatter", unit.axes, int(reduced > 0), reduced, unit.shards)
        if layout.dp_replicate > 1:
            yield CollectiveCost(
                "all_reduce", "dp_replicate", int(reduced > 0), reduced // unit.shards, layout.dp_replicate
            )
    yield from _of_whole_parameters(model, layout, rank)
    yield from _of_norm(model, layout, units, rank)


def num_gathers(
    model: ModelFacts, layout: ParallelLayout, units: tuple[ShardingUnit, ...]
) -> dict[str, tuple[int, int]]:
    """Return how often each unit is gathered in forward and in backward passes of one step."""
    micro_steps = layout.accumulation
    if layout.pp > 1:  # once for all micro-batches
        return {unit.name: (1, 0) for unit in units}
    if layout.stage == 2:
        return {unit.name: (micro_steps, 0) for unit in units}
    # Gradients do not reach the units before the first one with trained parameters; of these, torch gathers only the last one, ahead.
    first = _first_trained(model, units)
    return {unit.name: (micro_steps, micro_steps if i >= first - 1 else 0) for i, unit in enumerate(units)}


def _first_trained(model: ModelFacts, units: tuple[ShardingUnit, ...]) -> int:
    """Return the first unit whose output needs gradients."""
    blocks = set(model.units)
    for p in model.parameters:
        if not p.is_trainable:
            continue
        if p.unit not in blocks:  # outside of the blocks: before the first one, or after the last one
            return 0 if _is_before_blocks(model, p) else len(units) - 1
        return next((i for i, unit in enumerate(units) if p in unit.parameters), 0)
    return len(units)


def _is_before_blocks(model: ModelFacts, parameter: ParameterFacts) -> bool:
    order = [p.unit for p in model.parameters]
    first = next((i for i, unit in enumerate(order) if unit), len(order))
    return model.parameters.index(parameter) < first


def _of_whole_parameters(model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> Iterator[CollectiveCost]:
    """Yield the averages of the gradients of scalars, which fully_shard does not shard: before clipping, and before the step."""
    whole = [p for p in parameters_of_stage(model, layout, rank.stage) if p.is_trainable and not is_sharded(p, layout)]
    if whole:
        masters = has_masters(model, layout)
        sizes = sum(numel(p.tensor.shape) * item_bytes(stored_dtype(p, masters=masters)) for p in whole)
        of_flags = 2 * len(whole) * 4
        yield CollectiveCost(
            "all_reduce", "dp", 2 * (1 + len(whole)), 2 * (of_flags + sizes), layout.world, "optimizer"
        )


def _of_norm(
    model: ModelFacts, layout: ParallelLayout, units: tuple[ShardingUnit, ...], rank: RankClass
) -> Iterator[CollectiveCost]:
    """Yield the sums of the norm: one for each set of axes over which gradients are sharded."""
    sets = {
        (unit.axes, layout.tp > 1 and bool(p.tp_style), layout.ep > 1 and p.is_expert): unit.shards
        for unit in units
        for p in unit.parameters
        if p.is_trainable
    }
    for (axes, splits, is_expert), shards in sets.items():
        if shards > 1:
            yield CollectiveCost("all_reduce", axes, 1, _NORM_BYTES, shards, "optimizer")
        if splits:
            yield CollectiveCost("all_reduce", "tp", 1, _NORM_BYTES, layout.tp, "optimizer")
        if is_expert:
            yield CollectiveCost("all_reduce", "ep", 1, _NORM_BYTES, layout.ep, "optimizer")
    if layout.pp > 1:
        yield CollectiveCost("all_reduce", "pp", 1, 8, layout.pp, "optimizer")


# ---- tensor, context, expert and pipeline axes ---------------------------------------------------------------------------


def _of_activations(
    model: ModelFacts, trace: StepTrace, layout: ParallelLayout, rank: RankClass
) -> Iterator[CollectiveCost]:
    own = parameters_of_stage(model, layout, rank.stage)
    passes, piece = layout.accumulation, trace.tokens // layout.cp
    if layout.tp > 1:
        yield from _of_split_layers(own, layout, piece, passes)
    units = {p.unit for p in own}
    if layout.cp > 1:
        sizes = [kv for unit, (_, kv) in trace.attention.items() if unit in units]
        # Keys and values go to the n - 1 other ranks in each pass, and their gradients once more around.
        calls, sent = (3 * layout.cp - 2) * passes, sum(sizes) // layout.cp
        for kind in ("send", "recv"):
            yield CollectiveCost(kind, "cp", calls * len(sizes), calls * sent, layout.cp, "forward")
    if layout.ep > 1:
        rows = [size // layout.cp for unit, size in trace.routed.items() if unit in units]
        yield CollectiveCost("all_to_all", "ep", 5 * len(rows) * passes, 4 * sum(rows) * passes, layout.ep, "forward")
    if layout.pp > 1:
        size = max(trace.outputs.values(), default=0) // layout.cp
        inner = (rank.stage > 0) + (rank.stage < layout.pp - 1)
        for kind in ("send", "recv"):
            yield CollectiveCost(kind, "pp", inner * passes, inner * passes * size, 2, "forward")


def _of_split_layers(
    parameters: tuple[ParameterFacts, ...], layout: ParallelLayout, tokens: int, passes: int
) -> Iterator[CollectiveCost]:
    """Yield the sums and gathers of split matrices: of outputs in the forward pass, of gradients of inputs in the backward pass."""
    item = item_bytes(computed_dtype("float32", layout))
    reduced = {"forward": [0, 0], "backward": [0, 0]}
    gathered = [0, 0]
    for p in parameters:
        if len(p.tensor.shape) != 2 or split_dim(p.tp_style) is None:
            continue
        rows, columns = p.tensor.shape
        is_embedding = p.tp_style.startswith("embedding")
        if p.tp_style == "embedding_rowwise":
            _add(reduced["forward"], tokens * columns * item)
        elif split_dim(p.tp_style) == 1 and not is_embedding:
            _add(reduced["forward"], tokens * rows * item)
        elif not is_embedding:
            _add(reduced["backward"], tokens * columns * item)
        if p.tp_style in ("colwise_gather_output", "colwise_rep", "embedding_colwise"):
            _add(gathered, tokens * (columns if is_embedding else rows) * item)
    for when, (count, size) in reduced.items():
        yield CollectiveCost("all_reduce", "tp", count * passes, size * passes, layout.tp, when)
    yield CollectiveCost("all_gather", "tp", gathered[0] * passes, gathered[1] * passes, layout.tp, "forward")


def _add(total: list[int], size: int) -> None:
    total[0] += 1
    total[1] += size


# ---- deepspeed -----------------------------------------------------------------------------------------------------------


def _of_deepspeed(model: ModelFacts, layout: ParallelLayout) -> Iterator[CollectiveCost]:
    """Yield ZeRO's traffic by its formulas, without the library's buckets.

    Source: Rajbhandari et al., "ZeRO", 2020, section 7.
    """
    held = held_bytes(holdings(model, layout, RankClass()))
    item = 2 if layout.settings.mixed_precision != "no" and layout.stage > 0 else 4
    trained = sum(numel(p.tensor.shape) for p in model.parameters if p.is_trainable) * item
    whole = sum(numel(local_shape(p, layout)) for p in model.parameters) * item
    if layout.stage == 0:
        yield CollectiveCost("all_reduce", "dp", 1, held["gradients"], layout.world)
        return
    yield CollectiveCost("reduce_scatter", "dp", 1, trained, layout.world)
    if layout.stage == 3:
        for when in ("forward", "backward"):
            yield CollectiveCost(
                "all_gather", "dp", layout.accumulation, layout.accumulation * whole, layout.world, when
            )
    else:
        yield CollectiveCost("all_gather", "dp", 1, trained, layout.world, "optimizer")
