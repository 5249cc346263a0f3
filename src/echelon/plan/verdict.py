"""Whether a layout fits, the fastest layout that does, and the single changes that make one fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import ge
from types import MappingProxyType
from typing import Any, Protocol

from echelon.base.errors import EchelonError
from echelon.base.messages.translation import gettext as _
from echelon.plan.facts import (
    Cluster,
    LayoutPlan,
    ModelFacts,
    Moment,
    ParallelLayout,
    StepSettings,
    StepTrace,
    refused_plan,
)

Planner = Callable[[ModelFacts, StepTrace, ParallelLayout, Cluster], LayoutPlan]
"""Predicts a layout: ``echelon.plan.layouts.plan_layout``."""

_MODES = ("none", "selective", "full", "offload")  # of activation checkpointing, the fastest first
_MOST_DEVICES = 1024
_AS_FAST = 1.05  # times of a roofline do not rank layouts that differ by less


class StepSource(Protocol):
    """A model and its step, which can be traced with several settings."""

    @property
    def model(self) -> ModelFacts:
        """The model's parameters, buffers and blocks."""

    @property
    def can_chunk_loss(self) -> bool:
        """Whether ``settings.loss_chunk`` works for this model."""

    def trace(self, settings: StepSettings) -> StepTrace:
        """Trace one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another way to build the model, such as with LoRA, which may need less memory."""

    text: str
    """What changes, for the user."""
    arguments: str
    """What to add to the command ``echelon plan``, or to change in the script."""
    build: Callable[[], StepSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Memory kept free for what a plan does not count."""

    context: int = 600 * 2**20
    """Bytes of the CUDA context, and of the workspaces of matrix products."""
    communicator: int = 512 * 2**20
    """Bytes of NCCL's buffers, for each mesh axis with several ranks."""
    share: float = 0.08
    """Fragmentation of the allocator and the error of the trace, as a share of the counted peak."""

    def of(self, plan: LayoutPlan) -> int:
        """Return the bytes to keep free beside ``plan.peak``."""
        layout = plan.layout
        axes = (layout.dp_replicate, layout.dp_shard, layout.tp, layout.cp, layout.pp, layout.ep)
        return self.context + self.communicator * sum(size > 1 for size in axes) + round(self.share * plan.peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLayout:
    """A layout with its plan, and whether it fits."""

    plan: LayoutPlan
    reserve: int
    """Bytes kept free for what is not counted."""
    margin: int
    """Bytes of a device that remain; negative if the layout does not fit."""

    @property
    def fits(self) -> bool:
        """Whether the layout runs, and its peak and the reserve fit into a device."""
        return not self.plan.refused and self.margin >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A single change with which the step fits."""

    text: str
    flags: tuple[str, ...]
    """Flags of ``echelon launch``; empty for a change in the script or of the machine."""
    arguments: str
    """What to change elsewhere; empty if flags do it."""
    candidate: JudgedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    """What ``echelon plan`` answers."""

    cluster: Cluster
    reserve: Reserve
    asked: JudgedLayout
    best: JudgedLayout | None
    """The fastest layout that fits with the same global batch, of those within 5 % the nearest to ``asked``; None if none fits."""
    candidates: tuple[JudgedLayout, ...]
    """All layouts that were computed, the fastest first, those that do not fit last."""
    changes: tuple[Change, ...]
    """If the asked layout does not fit: single changes with which it does, the cheapest first."""
    over_ranks: tuple[JudgedLayout, ...]
    """The best layout, or else the asked one, on 1, 2, 4, ... devices, with the same micro-batch on each."""
    notes: tuple[str, ...] = ()
    """What the trace could not see."""
    text: str = ""
    """What ``print`` shows: the lines of ``verdict_text.to_lines``, from who has asked."""

    @property
    def fits(self) -> bool:
        """Whether the asked layout runs, and fits into a device."""
        return self.asked.fits

    def __str__(self) -> str:
        return self.text


class Traces:
    """The traces of a source, each computed once. A micro-batch between two traced ones is interpolated moment by moment."""

    def __init__(self, source: StepSource) -> None:
        self.source = source
        self._exact: dict[StepSettings, StepTrace] = {}
        self._near: dict[StepSettings, StepTrace] = {}
        self._failed: dict[StepSettings, EchelonError] = {}

    def exact(self, settings: StepSettings) -> StepTrace:
        """Return the trace of the step with ``settings``.

        Raises:
            EchelonError: the step cannot run with them, such as with recomputation in a model without blocks.
        """
        if settings in self._failed:
            raise self._failed[settings]
        if settings not in self._exact:
            try:
                self._exact[settings] = self.source.trace(settings)
            except EchelonError as error:
                self._failed[settings] = error
                raise
        return self._exact[settings]

    def near(self, settings: StepSettings, largest: int) -> StepTrace:
        """Return the moments of the trace that can be peaks; those between micro-batches 1 or 2 and ``largest`` are interpolated."""
        if settings not in self._near:
            self._near[settings] = _possible_peaks(self._traced_or_between(settings, largest))
        return self._near[settings]

    def _traced_or_between(self, settings: StepSettings, largest: int) -> StepTrace:
        for smallest in (1, 2):  # operators such as expand() and copies differ for a single sample
            if settings in self._exact or settings.micro_batch in (smallest, largest):
                break
            try:
                low = self.exact(replace(settings, micro_batch=smallest))
                high = self.exact(replace(settings, micro_batch=largest))
            except EchelonError:  # such as batch normalization of a single sample
                continue
            if len(low.moments) == len(high.moments):
                return _interpolate(low, high, settings)
        return self.exact(settings)


def search(
    traces: Traces,
    asked: ParallelLayout,
    cluster: Cluster,
    planner: Planner,
    *,
    reserve: Reserve | None = None,
    variants: Sequence[Variant] = (),
) -> PlanVerdict:
    """Return whether ``asked`` fits, the fastest layout of the same global batch that does, and otherwise what to change.

    A layout with an interpolated trace is traced before it is said to fit.

    Args:
        traces: of the model and its step.
        asked: the layout that the user would run.
        cluster: the machines.
        planner: predicts a layout.
        reserve: what to keep free; by default, what CUDA and NCCL need.
        variants: other ways to build the model, tried if nothing fits, or nothing without CPU offload.

    Raises:
        EchelonError: the step cannot be traced with the settings of ``asked``.
    """
    traces.exact(asked.settings)
    reserve = Reserve() if reserve is None else reserve
    judging = _Judge(traces, cluster, planner, reserve)
    first = judging.exactly(asked)
    found = {asked: first}
    best = _fastest(judging, asked, found, with_offload=False) or _fastest(judging, asked, found, with_offload=True)
    changes: list[Change] = []
    if not first.fits:
        changes = _changes_of_layout(judging, asked)
        # Offload needs much host memory and is slow: who must use it may rather train less, or rent more.
        if best is None or best.plan.layout.cpu_offload:
            changes += _changes_of_model(judging, asked, variants)
        if best is None:
            changes += _changes_of_cluster(judging, asked)
    ordered = sorted(found.values(), key=lambda one: (not one.fits, bool(one.plan.refused), one.plan.seconds))
    return PlanVerdict(
        cluster=cluster,
        reserve=reserve,
        asked=first,
        best=best,
        candidates=tuple(ordered),
        changes=tuple(changes),
        over_ranks=tuple(_over_ranks(judging, (best or first).plan.layout)),
        notes=traces.exact(asked.settings).notes,
    )


def _over_ranks(judging: _Judge, layout: ParallelLayout) -> Iterator[JudgedLayout]:
    """Yield ``layout`` on 1, 2, 4, ... devices, which differ in the axis of data parallelism that the layout uses."""
    fixed = layout.world // (layout.dp_replicate * layout.dp_shard)
    world = max(8 * judging.cluster.gpus_per_node * judging.cluster.nodes, 64)
    for total in (2**power for power in range(world.bit_length())):
        data, rest = divmod(total, fixed)
        if rest or data == 0:
            continue
        per_node = min(total, judging.cluster.gpus_per_node if judging.cluster.nodes > 1 else 8)
        cluster = replace(judging.cluster, gpus_per_node=per_node, nodes=total // per_node)
        is_sharded = layout.dp_shard > 1 or layout.engine in ("fsdp2", "deepspeed")
        other = replace(layout, dp_replicate=1 if is_sharded else data, dp_shard=data if is_sharded else 1)
        if other.engine == "single" and total > 1:
            other = replace(other, engine="ddp")
        candidate = replace(judging, cluster=cluster).at_peaks(other)
        if not candidate.plan.refused:
            yield candidate


def judge(
    traces: Traces, layout: ParallelLayout, cluster: Cluster, planner: Planner, reserve: Reserve | None = None
) -> JudgedLayout:
    """Return whether one layout fits, without looking for others. Arguments as for ``search``."""
    return _Judge(traces, cluster, planner, reserve or Reserve()).exactly(layout)


def default_layout(
    settings: StepSettings,
    world: int,
    *,
    engine: str | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
    accumulation: int = 1,
    stage: int = 3,
    cpu_offload: bool = False,
) -> ParallelLayout:
    """Return the layout that ``echelon launch`` runs with these choices.

    Args:
        world: number of ranks. The axis of data parallelism takes those that ``sizes`` leaves; with other sizes, the product differs.
        engine: by default ``fsdp2`` for a mesh or offload, else ``ddp``, or ``single`` on one rank.
        sizes: sizes of mesh axes by their names.
    """
    engine = engine or ("fsdp2" if sizes or cpu_offload else "ddp" if world > 1 else "single")
    data, other = ("dp_shard", "dp_replicate") if engine in ("fsdp2", "deepspeed") else ("dp_replicate", "dp_shard")
    fixed = math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "pp", other))
    return ParallelLayout(
        engine=engine,
        settings=settings,
        accumulation=accumulation,
        stage=stage,
        cpu_offload=cpu_offload,
        **{data: max(1, world // fixed), **sizes},
    )


def flags_of(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the flags of ``echelon launch`` that run ``layout``, without the micro-batch, which the script sets."""
    found = [] if layout.engine == "single" else [f"--engine {layout.engine}"]
    if layout.engine == "fsdp2":
        if layout.stage == 2:
            found.append("--fsdp_reshard_after_forward false")
        if layout.cpu_offload:
            found.append("--fsdp_offload_params true")
    if layout.engine == "deepspeed":
        found.append(f"--zero_stage {layout.stage}")
        if layout.cpu_offload:
            found.append("--offload_optimizer_device cpu")
            if layout.stage == 3:
                found.append("--offload_param_device cpu")
    is_mesh = max(layout.tp, layout.cp, layout.pp, layout.ep) > 1 or (layout.dp_shard > 1 and layout.dp_replicate > 1)
    if is_mesh:
        found += [f"--parallelism_config_{axis}_size {size}" for axis, size in axis_sizes(layout).items() if size > 1]
    settings = layout.settings
    if settings.mixed_precision != "no":
        found.append(f"--mixed_precision {settings.mixed_precision}")
    if settings.activation_checkpointing != "none":
        found.append(f"--activation_checkpointing {settings.activation_checkpointing}")
    if layout.accumulation > 1:
        found.append(f"--gradient_accumulation_steps {layout.accumulation}")
    return tuple(found)


def axis_sizes(layout: ParallelLayout) -> dict[str, int]:
    """Return the sizes of the mesh axes by their names."""
    return {axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")}


def global_batch(layout: ParallelLayout) -> int:
    """Return the samples of one optimizer step."""
    return layout.settings.micro_batch * layout.accumulation * layout.dp_replicate * layout.dp_shard


@dataclass(frozen=True, slots=True)
class _Judge:
    traces: Traces
    cluster: Cluster
    planner: Planner
    reserve: Reserve

    def exactly(self, layout: ParallelLayout) -> JudgedLayout:
        return self._candidate(layout, lambda: self.traces.exact(layout.settings))

    def at_peaks(self, layout: ParallelLayout) -> JudgedLayout:
        """Judge by the moments that can be peaks, of a trace that is not interpolated: faster, and never below ``exactly``."""
        return self.nearly(layout, layout.settings.micro_batch)

    def nearly(self, layout: ParallelLayout, largest: int) -> JudgedLayout:
        return self._candidate(layout, lambda: self.traces.near(layout.settings, largest))

    def _candidate(self, layout: ParallelLayout, trace: Callable[[], StepTrace]) -> JudgedLayout:
        try:
            step = trace()
            plan = self.planner(self.traces.source.model, step, layout, self.cluster)
        except EchelonError as error:
            plan = refused_plan(layout, error.what)
        if not plan.refused and self.cluster.host_memory is not None:
            host = max((size for name, size in plan.host_memory.items()), default=0)
            if host > self.cluster.host_memory:
                plan = replace(plan, refused=_("a machine needs {size} of host memory", size=format_bytes(host)))
        kept = self.reserve.of(plan)
        # With experts on several ranks, all tokens may choose those of one rank.
        margin = self.cluster.gpu_memory - max(plan.peak, plan.worst_peak) - kept
        return JudgedLayout(plan=plan, reserve=kept, margin=margin)


def _fastest(
    judging: _Judge, asked: ParallelLayout, found: dict[ParallelLayout, JudgedLayout], *, with_offload: bool
) -> JudgedLayout | None:
    """Return the fastest layout that fits, of equally fast ones that nearest to ``asked``; add all that were computed to ``found``."""
    batch, cluster = global_batch(asked), judging.cluster
    meshes = {mesh: list(_splits(batch, mesh, asked.settings.micro_batch)) for mesh in _meshes(asked, cluster)}
    # The same one for all meshes, so that each mode is traced twice.
    largest = max((size for splits in meshes.values() for size, _ in splits), default=1)
    for mesh, splits in meshes.items():
        if mesh.cpu_offload is not with_offload:
            continue
        modes: Sequence[str] = _MODES
        before = 1
        for micro_batch, accumulation in splits:
            if before > 1 and accumulation == 1:
                modes = _MODES  # gradients of earlier micro-steps are no longer kept
            before = accumulation
            for mode in modes:  # the first that fits is the fastest
                settings = replace(asked.settings, micro_batch=micro_batch, activation_checkpointing=mode)
                layout = replace(mesh, settings=settings, accumulation=accumulation)
                if layout not in found:
                    found[layout] = judging.nearly(layout, largest)
                if found[layout].fits or found[layout].plan.refused:
                    break
                modes = modes[1:]  # with larger micro-batches it does not fit either
    while True:
        fitting = [one for one in found.values() if one.fits]
        if not fitting:
            return None
        fastest = min(one.plan.seconds for one in fitting)
        best = min(
            (one for one in fitting if one.plan.seconds <= _AS_FAST * fastest),
            key=lambda one: (_num_choices(one.plan.layout, asked), one.plan.seconds),
        )
        layout = best.plan.layout
        found[layout] = judging.exactly(layout)
        if found[layout].fits:
            return found[layout]
        for mode in _MODES[_MODES.index(layout.settings.activation_checkpointing) + 1 :]:
            other = replace(layout, settings=replace(layout.settings, activation_checkpointing=mode))
            found[other] = judging.exactly(other)
            if found[other].fits:
                break


def _num_choices(layout: ParallelLayout, asked: ParallelLayout) -> int:
    """Return in how many ways ``layout`` differs from the asked one; axes besides data parallelism count twice."""
    one, other = axis_sizes(layout), axis_sizes(asked)
    axes = sum(
        2 if axis in ("tp", "cp", "pp", "ep") else 1 for axis, size in one.items() if size not in (1, other[axis])
    )
    settings: int = sum(
        getattr(layout.settings, each.name) != getattr(asked.settings, each.name) for each in fields(layout.settings)
    )
    return axes + settings + (layout.engine != asked.engine) + (layout.stage != asked.stage)


def _meshes(asked: ParallelLayout, cluster: Cluster) -> Iterator[ParallelLayout]:
    """Yield the engines and meshes for a cluster: one axis besides data parallelism, inside a machine."""
    world, per_node = cluster.gpus_per_node * cluster.nodes, cluster.gpus_per_node
    plain = replace(asked, dp_replicate=1, dp_shard=1, tp=1, cp=1, pp=1, ep=1, stage=3, cpu_offload=False)
    yield asked
    if world == 1:
        yield replace(plain, engine="single")
        yield replace(plain, engine="fsdp2", cpu_offload=True)
        return
    yield replace(plain, engine="ddp", dp_replicate=world)
    yield replace(plain, engine="zero1", dp_replicate=world)
    for stage in (2, 3):
        yield replace(plain, engine="fsdp2", stage=stage, dp_shard=world)
        if cluster.nodes > 1:
            yield replace(plain, engine="fsdp2", stage=stage, dp_replicate=cluster.nodes, dp_shard=per_node)
    yield replace(plain, engine="fsdp2", dp_shard=world, cpu_offload=True)
    for size in (2, 4, 8):
        if per_node % size == 0:
            split = replace(plain, engine="fsdp2", dp_shard=world // size)
            yield from (replace(split, tp=size), replace(split, cp=size), replace(split, pp=size))
        if world % size == 0:
            yield replace(plain, engine="fsdp2", dp_shard=world, ep=size)


def _splits(batch: int, mesh: ParallelLayout, micro_batch: int) -> Iterator[tuple[int, int]]:
    """Yield the micro-batches, with their accumulation steps, that make up the global batch: powers of two and the asked one."""
    per_rank, rest = divmod(batch, mesh.dp_replicate * mesh.dp_shard)
    if rest or per_rank == 0:
        return
    for size in sorted({1, 2, 4, 8, 16, 32, 64, micro_batch}):
        if size <= 4 * micro_batch and per_rank % size == 0:
            yield size, per_rank // size


def _changes_of_layout(judging: _Judge, asked: ParallelLayout) -> list[Change]:
    """Return the settings of ``echelon launch`` that make the step fit one by one, the fastest first."""
    settings = asked.settings
    tried: list[tuple[str, str, ParallelLayout]] = []
    for mode in _MODES[1:]:
        if mode != settings.activation_checkpointing:
            text = _("recompute activations: {mode}", mode=mode)
            tried.append((text, "", replace(asked, settings=replace(settings, activation_checkpointing=mode))))
    if settings.loss_chunk is None and judging.traces.source.can_chunk_loss:
        text = _("compute the loss in chunks of {tokens} tokens", tokens=1024)
        tried.append(
            (text, "TrainingArguments(loss_chunk=1024)", replace(asked, settings=replace(settings, loss_chunk=1024)))
        )
    if settings.mixed_precision == "no":
        text = _("mixed precision")
        tried.append((text, "", replace(asked, settings=replace(settings, mixed_precision="bf16"))))
    for mesh in _meshes(asked, judging.cluster):
        if global_batch(mesh) == global_batch(asked) and mesh != asked:
            tried.append((_("engine and mesh: {name}", name=layout_name(mesh)), "", mesh))
    found: list[Change] = []
    for text, arguments, layout in (*tried, *_smaller_micro_batches(asked)):
        is_smaller_batch = layout.settings.micro_batch < settings.micro_batch
        if is_smaller_batch and any(one.candidate.plan.layout.accumulation > asked.accumulation for one in found):
            continue  # a larger one fits
        candidate = judging.at_peaks(layout)
        if candidate.fits:
            found.append(Change(text=text, flags=_new_flags(layout, asked), arguments=arguments, candidate=candidate))
    return sorted(found, key=lambda one: one.candidate.plan.seconds)


def _smaller_micro_batches(asked: ParallelLayout) -> Iterator[tuple[str, str, ParallelLayout]]:
    size = asked.settings.micro_batch
    while size % 2 == 0:
        size //= 2
        yield (
            _("micro-batch {size} instead of {asked}", size=size, asked=asked.settings.micro_batch),
            _("batch size of the DataLoader: {size}", size=size),
            replace(
                asked,
                settings=replace(asked.settings, micro_batch=size),
                accumulation=asked.accumulation * asked.settings.micro_batch // size,
            ),
        )


def _new_flags(layout: ParallelLayout, asked: ParallelLayout) -> tuple[str, ...]:
    return tuple(flag for flag in flags_of(layout) if flag not in flags_of(asked))


def _changes_of_model(judging: _Judge, asked: ParallelLayout, variants: Sequence[Variant]) -> list[Change]:
    found = []
    for variant in variants:
        other = _Judge(Traces(variant.build()), judging.cluster, judging.planner, judging.reserve)
        for layout in (asked, *_least_memory(asked, judging.cluster)):
            candidate = other.at_peaks(layout)
            if candidate.fits:
                found.append(
                    Change(
                        text=variant.text,
                        flags=_new_flags(layout, asked),
                        arguments=variant.arguments,
                        candidate=candidate,
                    )
                )
                break
    return found


def _changes_of_cluster(judging: _Judge, asked: ParallelLayout) -> list[Change]:
    """Return the smallest number of machines with which a layout fits that shards everything and recomputes activations."""
    cluster = judging.cluster
    while cluster.gpus_per_node * cluster.nodes < _MOST_DEVICES:
        if cluster.gpus_per_node < 8:
            cluster = replace(cluster, gpus_per_node=2 * cluster.gpus_per_node)
        else:
            cluster = replace(cluster, nodes=2 * cluster.nodes)
        other = _Judge(judging.traces, cluster, judging.planner, judging.reserve)
        for layout in _least_memory(asked, cluster):
            candidate = other.at_peaks(layout)
            if candidate.fits:
                total = cluster.gpus_per_node * cluster.nodes
                arguments = f"--gpus {cluster.gpus_per_node} --nodes {cluster.nodes}"
                text = _("{total} devices of the same kind", total=total)
                return [Change(text=text, flags=_new_flags(layout, asked), arguments=arguments, candidate=candidate)]
    return []


def _least_memory(asked: ParallelLayout, cluster: Cluster) -> Iterator[ParallelLayout]:
    """Yield layouts that need little memory: everything sharded, one sample at a time, without and with recomputation."""
    world = cluster.gpus_per_node * cluster.nodes
    for mode in _MODES[:3]:
        settings = replace(asked.settings, micro_batch=1, activation_checkpointing=mode)
        accumulation = max(1, -(-global_batch(asked) // world))
        plain = replace(
            asked, settings=settings, accumulation=accumulation, dp_replicate=1, tp=1, cp=1, pp=1, ep=1, stage=3
        )
        engine = "single" if world == 1 else "fsdp2"
        yield replace(plain, engine=engine, dp_shard=world, cpu_offload=False)


def layout_name(layout: ParallelLayout) -> str:
    """Return a short name: the engine, its stage and its mesh, such as ``fsdp2 dp_shard=4 tp=2``."""
    stage = " stage 2" if layout.engine == "fsdp2" and layout.stage == 2 else ""
    stage = f" stage {layout.stage}" if layout.engine == "deepspeed" else stage
    axes = "".join(f" {axis}={size}" for axis, size in axis_sizes(layout).items() if size > 1)
    return f"{layout.engine}{stage}{axes}{' + CPU offload' if layout.cpu_offload else ''}"


def format_bytes(size: float) -> str:
    """Return a size in the unit that the vendors of GPUs use, GB of 10^9 bytes, or a smaller one."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.{1 if abs(size) < 100 * scale else 0}f} {unit}"
    return f"{size:.0f} B"


_SIZES = tuple(one.name for one in fields(Moment) if one.name not in ("phase", "unit", "line"))


def _possible_peaks(trace: StepTrace) -> StepTrace:
    """Return ``trace`` without moments in which nothing is larger than in another of the same visit to a block.

    An engine changes what it holds when a block begins or ends, so that the first and the last moment of a visit stay.
    """
    kept: list[Moment] = []
    for _place, group in groupby(trace.moments, key=lambda one: (one.phase, one.unit)):
        visit = list(group)
        largest: list[tuple[Moment, tuple[int, ...]]] = []
        for moment in visit:
            sizes = tuple(getattr(moment, name) for name in _SIZES)
            if not any(all(map(ge, other, sizes)) for _, other in largest):
                largest = [pair for pair in largest if not all(map(ge, sizes, pair[1]))] + [(moment, sizes)]
        places = {id(moment) for moment in (visit[0], visit[-1], *(moment for moment, _ in largest))}
        kept += [moment for moment in visit if id(moment) in places]
    return replace(trace, moments=tuple(kept))


def _interpolate(low: StepTrace, high: StepTrace, settings: StepSettings) -> StepTrace:
    first, last = low.settings.micro_batch, high.settings.micro_batch
    share = (settings.micro_batch - first) / (last - first)
    moments = tuple(
        Moment(*(_between(getattr(a, one.name), getattr(b, one.name), share) for one in fields(Moment)))
        for a, b in zip(low.moments, high.moments)
    )
    rest = {
        one.name: _between(getattr(low, one.name), getattr(high, one.name), share)
        for one in fields(StepTrace)
        if one.name not in ("settings", "moments", "notes")
    }
    return replace(high, settings=settings, moments=moments, **rest)


def _between(low: Any, high: Any, share: float) -> Any:
    """Return the value at ``share`` of the way from ``low`` to ``high``, rounded up: of numbers, and of those in mappings and tuples."""
    if isinstance(high, int):
        return math.ceil(low + (high - low) * share)
    if isinstance(high, Mapping):
        return {name: _between(low.get(name, value), value, share) for name, value in high.items()}
    if isinstance(high, tuple):
        return tuple(_between(a, b, share) for a, b in zip(low, high))
    return high
