"""What one rank holds between two steps: parameters, gradients, optimizer state and buffers, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from echelon.plan.facts import ModelFacts, ParallelLayout, ParameterFacts, TensorFacts
from echelon.plan.sharding import (
    ShardingUnit,
    ddp_buckets,
    is_sharded,
    parameters_of_stage,
    shard_rows,
    sharding_units,
    zero1_owners,
)
from echelon.plan.sizes import (
    allocated,
    buffer_dtype,
    has_masters,
    item_bytes,
    numel,
    padded,
    stored_dtype,
)


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that hold tensors of the same sizes. ``index`` counts the ranks that share the parameters: 0 has the largest shards."""

    index: int = 0
    stage: int = 0  # of a pipeline


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor in the memory of a rank."""

    category: str
    """"parameters", "master weights", "gradients", "optimizer state", "buffers" or "buckets"."""
    name: str
    """Of the parameter, or of the unit whose gradients are one tensor."""
    num_bytes: int
    on_host: bool = False


def held_bytes(holdings: Iterable[Holding]) -> Mapping[str, int]:
    """Return the bytes by category, as they are."""
    found: Counter[str] = Counter()
    for holding in holdings:
        found[holding.category] += holding.num_bytes
    return found


def device_bytes(holdings: Iterable[Holding]) -> Mapping[str, int]:
    """Return the bytes by category in the memory of the device, rounded up for each tensor."""
    found: Counter[str] = Counter()
    for holding in holdings:
        if not holding.on_host:
            found[holding.category] += allocated(holding.num_bytes)
    return found


def holdings(model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> tuple[Holding, ...]:
    """Return what a rank of this class holds after an optimizer step, before gradients are cleared."""
    if layout.engine == "deepspeed":
        return tuple(_of_deepspeed(model, layout, rank))
    if layout.engine == "fsdp2":
        return tuple(_of_fsdp2(model, layout, rank))
    return tuple(_of_copies(model, layout, rank))


def fullest_rank(model: ModelFacts, layout: ParallelLayout, stage: int = 0) -> RankClass:
    """Return the class of the ranks of a stage that hold the most. Its cost does not depend on the number of ranks."""
    if layout.engine != "zero1":
        return RankClass(stage=stage)
    by_rank: Counter[int] = Counter()
    state = {p.name: sum(map(tensor_bytes, p.state)) for p in model.parameters}
    for name, owner in zero1_owners(model, layout.world).items():
        by_rank[owner] += state[name]
    return RankClass(index=max(by_rank, key=lambda rank: (by_rank[rank], -rank), default=0))


# ---- single, ddp and zero1 ---------------------------------------------------------------------------------------------


def _of_copies(model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> Iterator[Holding]:
    masters = has_masters(model, layout)
    owners = zero1_owners(model, layout.world) if layout.engine == "zero1" else {}
    gradients = []
    for p in model.parameters:
        dtype = stored_dtype(p, masters=masters)
        size = _whole_bytes(p, dtype)
        yield Holding(_category(p, dtype), p.name, size)
        if p.is_trainable:
            gradients.append((dtype, size))
            yield Holding("gradients", p.name, size)
        if owners.get(p.name, rank.index) == rank.index:
            yield from _whole_state(p, dtype)
    if layout.engine != "single":  # of DDP, which copies gradients into them (gradient_as_bucket_view=False)
        yield from (Holding("buckets", f"bucket {i}", size) for i, size in enumerate(ddp_buckets(gradients)))
    yield from _buffers(model, masters=masters)


def _whole_bytes(parameter: ParameterFacts, dtype: str) -> int:
    stored = parameter.tensor.storage_bytes
    return numel(parameter.tensor.shape) * item_bytes(dtype) if stored is None else stored


def _whole_state(parameter: ParameterFacts, dtype: str) -> Iterator[Holding]:
    for tensor in parameter.state:
        yield Holding("optimizer state", parameter.name, tensor_bytes(state_as_stored(tensor, parameter, dtype)))


def state_as_stored(state: TensorFacts, parameter: ParameterFacts, dtype: str) -> TensorFacts:
    """Return ``state`` in the dtype that it has for a parameter that was cast from its loaded dtype to ``dtype``."""
    follows = state.shape == parameter.tensor.shape and state.dtype == parameter.tensor.dtype
    return TensorFacts(state.shape, dtype) if follows and state.storage_bytes is None else state


def tensor_bytes(tensor: TensorFacts) -> int:
    """Return the bytes of the whole tensor."""
    return numel(tensor.shape) * item_bytes(tensor.dtype) if tensor.storage_bytes is None else tensor.storage_bytes


def _category(parameter: ParameterFacts, stored: str) -> str:
    return "parameters" if stored == parameter.tensor.dtype else "master weights"


def _buffers(model: ModelFacts, *, masters: bool) -> Iterator[Holding]:
    for i, buffer in enumerate(model.buffers):
        size = numel(buffer.shape) * item_bytes(buffer_dtype(buffer, masters=masters))
        yield Holding("buffers", f"buffer {i}", size if buffer.storage_bytes is None else buffer.storage_bytes)


# ---- fsdp2 ---------------------------------------------------------------------------------------------------------------


def _of_fsdp2(model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> Iterator[Holding]:
    masters, on_host = has_masters(model, layout), layout.cpu_offload
    for unit in sharding_units(model, layout, rank.stage):
        index = rank.index // layout.ep if unit.axes == "efsdp" else rank.index
        reduced = 0
        for p, shape in unit.sharded(layout):
            dtype = stored_dtype(p, masters=masters)
            # All shards of a parameter and of a gradient have the size of the first one.
            size = numel(padded(shape, unit.shards)) // unit.shards * item_bytes(dtype)
            yield Holding(_category(p, dtype), p.name, size + _beside(p), on_host)
            reduced += size if p.is_trainable else 0
            yield from _sharded_state(p, dtype, shape, unit, index, on_host=on_host)
        if reduced:  # the outputs of a reduce_scatter, of which the gradients are views
            yield Holding("gradients", unit.name, reduced, on_host)
    for p in parameters_of_stage(model, layout, rank.stage):
        if not is_sharded(p, layout):
            dtype = stored_dtype(p, masters=masters)
            size = _whole_bytes(p, dtype)
            yield Holding(_category(p, dtype), p.name, size)
            if p.is_trainable:
                yield Holding("gradients", p.name, size)
            yield from _whole_state(p, dtype)
    yield from _buffers(model, masters=masters)


def _beside(parameter: ParameterFacts) -> int:
    """Return the bytes that every rank keeps beside its shard: the scales of quantized weights."""
    tensor = parameter.tensor
    return 0 if tensor.storage_bytes is None else tensor.storage_bytes - numel(tensor.shape) * item_bytes(tensor.dtype)


def _sharded_state(
    parameter: ParameterFacts, dtype: str, shape: tuple[int, ...], unit: ShardingUnit, index: int, *, on_host: bool
) -> Iterator[Holding]:
    own = numel(shard_rows(shape, unit, index))
    for tensor in parameter.state:
        stored = state_as_stored(tensor, parameter, dtype)
        # State of another shape, such as a number of steps, is kept by every rank.
        size = tensor_bytes(stored)
        if tensor.shape == parameter.tensor.shape:
            size = -(-size * own // max(1, numel(tensor.shape)))  # also of 8-bit states, with their scales
        yield Holding("optimizer state", parameter.name, size, on_host)


# ---- deepspeed -----------------------------------------------------------------------------------------------------------


def _of_deepspeed(model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> Iterator[Holding]:
    """Yield the tensors of ZeRO by its formulas: 16-bit copies, float32 partitions of them, gradients and optimizer state.

    Source: Rajbhandari et al., "ZeRO", 2020, section 3; Ren et al., "ZeRO-Offload", 2021.
    """
    mixed, shards, on_host = layout.settings.mixed_precision != "no", layout.world, layout.cpu_offload
    computed = 2 if mixed and layout.stage > 0 else 4
    for p in model.parameters:
        count = numel(p.tensor.shape)
        own = -(-count // shards)
        yield Holding(
            "parameters", p.name, (own if layout.stage == 3 else count) * computed, on_host and layout.stage == 3
        )
        if not p.is_trainable:
            continue
        if computed == 2:
            yield Holding("master weights", p.name, own * 4, on_host)
        kept = own if layout.stage >= 2 else count
        yield Holding("gradients", p.name, kept * computed, on_host and layout.stage >= 2)
        for tensor in p.state:
            is_divided = tensor.shape == p.tensor.shape and layout.stage > 0
            elements = own if is_divided else numel(tensor.shape)
            yield Holding("optimizer state", p.name, elements * item_bytes("float32"), on_host)
    yield from _buffers(model, masters=False)


def owned_elements(model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> tuple[int, int]:
    """Return how many elements of trained parameters a rank steps, and how many there are in its stage."""
    trained = [p for p in parameters_of_stage(model, layout, rank.stage) if p.is_trainable]
    whole = sum(numel(p.tensor.shape) for p in trained)
    if layout.engine == "zero1":
        owners = zero1_owners(model, layout.world)
        return sum(numel(p.tensor.shape) for p in trained if owners.get(p.name, -1) == rank.index), whole
    if layout.engine == "deepspeed":
        return -(-whole // layout.world) if layout.stage > 0 else whole, whole
    if layout.engine != "fsdp2":
        return whole, whole
    own = sum(numel(p.tensor.shape) for p in trained if not is_sharded(p, layout))
    for unit in sharding_units(model, layout, rank.stage):
        for p, shape in unit.sharded(layout):
            own += numel(shard_rows(shape, unit, 0)) if p.is_trainable else 0
    return own, whole
