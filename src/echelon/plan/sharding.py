"""How an engine divides a model: the part of a parameter that a rank has, the units of fully_shard, and the owners of zero1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

from echelon.plan.facts import ModelFacts, ParallelLayout, ParameterFacts
from echelon.plan.sizes import item_bytes, numel, padded, rows_of_shard

_ROW_STYLES = ("rowwise", "rowwise_split_input", "rowwise_rep", "embedding_colwise")


def split_dim(style: str) -> int | None:
    """Return the dimension of a parameter that a style of tensor parallelism splits; None: it stays whole.

    Source: ``engines.tensor_parallel.styles.split_dim``.
    """
    if style.startswith("colwise") or style == "embedding_rowwise":
        return 0
    return 1 if style in _ROW_STYLES else None


def local_shape(parameter: ParameterFacts, layout: ParallelLayout) -> tuple[int, ...]:
    """Return the shape of a rank's part of ``parameter`` before fully_shard divides it: its columns, rows or experts."""
    shape = list(parameter.tensor.shape)
    dim = split_dim(parameter.tp_style) if layout.tp > 1 else None
    if dim is not None and dim < len(shape):
        shape[dim] //= layout.tp
    if layout.ep > 1 and parameter.is_expert:
        shape[0] //= layout.ep
    return tuple(shape)


# ---- units of fully_shard ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardingUnit:
    """Parameters that fully_shard gathers, frees and reduces together."""

    name: str
    """Of the module; "" is the model itself, which has the rest."""
    parameters: tuple[ParameterFacts, ...]
    shards: int
    axes: str
    """Mesh axes over which the parameters are sharded."""

    def sharded(self, layout: ParallelLayout) -> Iterator[tuple[ParameterFacts, tuple[int, ...]]]:
        """Yield each parameter with its shape on a rank, whose first dimension is then divided into ``shards``."""
        for parameter in self.parameters:
            yield parameter, local_shape(parameter, layout)


def is_sharded(parameter: ParameterFacts, layout: ParallelLayout) -> bool:
    """Return whether fully_shard shards ``parameter``; scalars and some quantized weights stay whole."""
    return layout.engine == "fsdp2" and bool(parameter.tensor.shape) and parameter.is_shardable


def sharding_units(model: ModelFacts, layout: ParallelLayout, stage: int = 0) -> tuple[ShardingUnit, ...]:
    """Return the units that fully_shard makes of pipeline stage ``stage``, in the order in which their forward passes end."""
    of_stage = parameters_of_stage(model, layout, stage)
    names = (
        model.units if layout.pp == 1 else tuple(name for piece in stage_pieces(model, layout, stage) for name in piece)
    )
    by_unit: dict[str, list[ParameterFacts]] = {name: [] for name in (*names, "")}
    for parameter in of_stage:
        if is_sharded(parameter, layout):
            by_unit[parameter.unit if layout.pp == 1 else _holder(parameter.name, names)].append(parameter)
    axes = "dp_shard cp" if layout.cp > 1 else "dp_shard"
    shards = layout.dp_shard * layout.cp
    found = []
    for name, parameters in by_unit.items():
        experts = tuple(p for p in parameters if layout.ep > 1 and p.is_expert)
        others = tuple(p for p in parameters if p not in experts) if experts else tuple(parameters)
        if experts:  # a unit inside the unit
            found.append(ShardingUnit(f"{name}.experts", experts, shards // layout.ep, "efsdp"))
        if others:
            found.append(ShardingUnit(name, others, shards, axes))
    return tuple(found)


def _holder(name: str, modules: Sequence[str]) -> str:
    return next((module for module in modules if name.startswith(f"{module}.")), "")


def gathered_bytes(unit: ShardingUnit, parameter: ParameterFacts, shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of ``parameter`` gathered in ``dtype``, with padding."""
    return numel(padded(shape, unit.shards)) * item_bytes(dtype)


# ---- stages of a pipeline ----------------------------------------------------------------------------------------------


def parameters_of_stage(model: ModelFacts, layout: ParallelLayout, stage: int) -> tuple[ParameterFacts, ...]:
    """Return the parameters that the ranks of a pipeline stage hold, also those of a tied weight of another stage."""
    if layout.pp == 1:
        return model.parameters
    prefixes = tuple(f"{name}." for piece in stage_pieces(model, layout, stage) for name in piece)
    return tuple(p for p in model.parameters if any(n.startswith(prefixes) for n in (p.name, *p.other_names)))


def stage_pieces(model: ModelFacts, layout: ParallelLayout, stage: int) -> tuple[tuple[str, ...], ...]:
    """Return the pieces of the model that stage ``stage`` computes: consecutive ones, as ``prepare_pipeline`` balances them."""
    begin, end = _stage_ranges(model.piece_sizes, layout.pp)[stage]
    return model.stage_pieces[begin:end]


@lru_cache(maxsize=64)
def _stage_ranges(sizes: tuple[int, ...], num_stages: int) -> list[tuple[int, int]]:
    from echelon.engines.pipeline_parallel.stages import balanced_ranges  # noqa: PLC0415 - slow to import, and only pipelines need it

    return balanced_ranges(sizes, num_stages)


# ---- owners of zero1 ---------------------------------------------------------------------------------------------------


def zero1_owners(model: ModelFacts, world_size: int) -> dict[str, int]:
    """Return the rank that steps each parameter of the optimizer.

    The cost does not depend on ``world_size``, because a rank gets its first parameter before any gets a second one.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer, ``_partition_parameters``.
    """
    held = [p for p in model.parameters if p.group is not None]
    loads = [(0, rank) for rank in range(min(world_size, max(1, len(held))))]
    heapify(loads)
    owners = {}
    for group in sorted({p.group for p in held if p.group is not None}):
        for p in sorted((p for p in held if p.group == group), key=lambda p: -numel(p.tensor.shape)):
            load, rank = loads[0]
            owners[p.name] = rank
            heapreplace(loads, (load + numel(p.tensor.shape), rank))
    return owners


# ---- buckets of DistributedDataParallel --------------------------------------------------------------------------------

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


def ddp_buckets(gradients: Sequence[tuple[str, int]]) -> list[int]:
    """Return the bytes of each bucket, after the first step, of gradients (dtype, bytes) in the order of the parameters.

    Source: torch.nn.parallel.DistributedDataParallel (``bucket_cap_mb=25``): the buckets follow the order in which gradients arrive, which
    is taken to be the reverse order of the parameters; each dtype has its own.
    """
    found: list[int] = []
    by_dtype: dict[str, list[int]] = {}
    for dtype, size in reversed(gradients):
        by_dtype.setdefault(dtype, []).append(size)
    for sizes in by_dtype.values():
        limit, total = FIRST_BUCKET_BYTES, 0
        for size in sizes:
            total += size
            if total >= limit:
                found.append(total)
                limit, total = BUCKET_BYTES, 0
        if total:
            found.append(total)
    return found


def shard_rows(shape: tuple[int, ...], unit: ShardingUnit, index: int) -> tuple[int, ...]:
    """Return the shape of shard ``index``, without padding."""
    return (rows_of_shard(shape[0], unit.shards, index), *shape[1:])
