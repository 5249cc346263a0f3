"""Device memory at each moment of a traced step in one layout: what is held between steps, and what the engine adds to the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from echelon.plan.facts import ModelFacts, Moment, ParallelLayout, StepTrace
from echelon.plan.holdings import RankClass, device_bytes, holdings, owned_elements
from echelon.plan.sharding import ShardingUnit, gathered_bytes, sharding_units, stage_pieces
from echelon.plan.sizes import allocated, computed_dtype, has_masters, item_bytes, numel, reduced_dtype, stored_dtype


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Bytes by category while one operator runs."""

    moment: Moment
    changing: Mapping[str, int]
    """What changes during the step."""
    static: Mapping[str, int]
    """What is held all the time."""
    total: int

    @property
    def by_category(self) -> Mapping[str, int]:
        found = Counter(self.static)
        found.update(self.changing)
        return {name: size for name, size in found.items() if size}


def memory_over_step(
    model: ModelFacts, trace: StepTrace, layout: ParallelLayout, rank: RankClass, *, expert_load: float = 1.0
) -> tuple[MemoryMoment, ...]:
    """Return the memory of a rank at each moment of the last micro-step, and of the optimizer step, of any step but the first.

    Args:
        model: the model.
        trace: of one micro-step with the settings of ``layout``.
        layout: how it runs.
        rank: whose memory.
        expert_load: of units with experts, the rows that this rank's experts get as a multiple of their equal share.
    """
    static = dict(device_bytes(holdings(model, layout, rank)))
    gradients = static.pop("gradients", 0)
    own = _own_moments(model, trace, layout, rank, expert_load=expert_load)
    engine = _Fsdp2Step(model, layout, rank) if layout.engine == "fsdp2" else _CopiesStep(layout, gradients)
    owned, trained = owned_elements(model, layout, rank)
    static["batch"] = allocated(trace.batch_bytes // layout.cp)
    held = sum(static.values())
    # The optimizer's temporaries have the sizes of what it steps. Offloaded shards are stepped on the CPU.
    stepped = 0.0 if layout.cpu_offload else owned / max(1, trained)
    found = []
    before: Moment | None = None
    for moment, after in zip(own, [*own[1:], None]):
        changing = engine.memory(moment, before, after)
        temporaries = int(moment.temporaries * stepped) if moment.phase == "optimizer" else moment.temporaries
        changing["temporaries"] = changing.get("temporaries", 0) + temporaries
        changing["activations"] = moment.activations
        if layout.engine != "fsdp2":
            changing["low-precision copies of weights"] = moment.weight_copies
        found.append(MemoryMoment(moment, changing, static, held + sum(changing.values())))
        before = moment
    return tuple(found)


# ---- the part of a traced step that one rank computes --------------------------------------------------------------------


def _own_moments(
    model: ModelFacts, trace: StepTrace, layout: ParallelLayout, rank: RankClass, *, expert_load: float
) -> list[Moment]:
    """Return the moments of the units that this rank computes, with its part of their activations and temporaries."""
    moments: Sequence[Moment] = trace.moments
    kept = 0
    if layout.pp > 1:
        moments, kept = _of_stage(model, trace, layout, rank.stage)
    if layout.tp == layout.cp == 1 and not kept and expert_load == 1.0:
        return list(moments)
    divided = []
    with_experts = {p.unit for p in model.parameters if p.is_expert}
    for moment in moments:
        share = activation_share(layout, in_block=bool(moment.unit))
        temporaries = moment.temporaries * share
        if expert_load != 1.0 and moment.unit in with_experts:
            temporaries *= expert_load
        divided.append(
            replace(
                moment,
                activations=int((moment.activations + kept) * share),
                temporaries=int(temporaries),
                gradients=moment.gradients // layout.tp if layout.tp > 1 else moment.gradients,
                weight_copies=moment.weight_copies // layout.tp,
            )
        )
    return divided


def activation_share(layout: ParallelLayout, *, in_block: bool) -> float:
    """Return which part of a unit's activations a rank has.

    ``cp`` divides all of them. With ``tp`` = n, a block of a decoder keeps (4 + 12 / n) of 16 (docs/parallelism.md), and what is outside
    of blocks (logits are gathered) stays whole.
    """
    split = (4 + 12 / layout.tp) / 16 if in_block else 1.0
    return split / layout.cp


def _of_stage(model: ModelFacts, trace: StepTrace, layout: ParallelLayout, stage: int) -> tuple[list[Moment], int]:
    """Return the moments of a pipeline stage, and the activations of the other micro-batches that it keeps with 1F1B."""
    names = {name for piece in stage_pieces(model, layout, stage) for name in piece}
    first, last = stage == 0, stage == layout.pp - 1
    own: list[Moment] = []
    before = 0
    base: int | None = None
    seen = False
    for moment in trace.moments:
        inside = moment.unit in names
        if moment.unit == "":
            inside = (first and not seen) if moment.phase == "forward" else last and not seen
            inside = inside or (last and seen and moment.phase != "optimizer") or moment.phase == "optimizer"
        else:
            seen = True
        if inside:
            base = before if base is None else base
            own.append(replace(moment, activations=max(0, moment.activations - base)))
        before = moment.activations if moment.phase == "forward" else before
    in_flight = min(layout.pp - stage, layout.accumulation)
    of_one = max((m.activations for m in own if m.phase == "forward"), default=0)
    return own, (in_flight - 1) * of_one


# ---- what engines add ------------------------------------------------------------------------------------------------------


class _CopiesStep:
    """Gradients of single, ddp, zero1 and deepspeed."""

    def __init__(self, layout: ParallelLayout, gradients: int) -> None:
        self._layout = layout
        self._held = gradients

    def memory(self, moment: Moment, before: Moment | None, after: Moment | None) -> dict[str, int]:
        """Return the bytes that the engine adds at ``moment``, by category."""
        if self._layout.accumulation == 1:
            return {"gradients": self._held if moment.phase == "optimizer" else min(self._held, moment.gradients)}
        # Earlier micro-steps have left all gradients; a new one is added to them as soon as it is complete.
        new = max(0, moment.gradients - (before.gradients if before is not None else 0))
        return {"gradients": self._held, "temporaries": new if moment.phase == "backward" else 0}


@dataclass(frozen=True, slots=True)
class _UnitSizes:
    """Bytes of a unit on the device."""

    buffer: int
    """Of the output of its all_gather, one tensor."""
    gathered: int
    """Of its whole parameters, which are copied out of that buffer."""
    cast: int
    """Of its own shards in the dtype in which they are gathered, if that is another one or they are on the host."""
    gradients: int
    """Of its whole gradients, in the dtype in which they are computed."""
    accumulated: int
    """Of its whole gradients in the dtype in which they are reduced, in which micro-steps add them up."""
    reduction: int
    """Of the input of its reduce_scatter, one tensor."""
    shard: int
    """Of the output of its reduce_scatter."""
    held: int
    """Of its gradients between steps."""
    stored: int
    """Of its trained parameters whole in the dtype in which they are stored, as moments count their gradients."""


def _sizes(unit: ShardingUnit, layout: ParallelLayout, *, masters: bool) -> _UnitSizes:
    whole, cast, separate, gradients, accumulated, reduction, held, stored = 0, 0, 0, 0, 0, 0, 0, 0
    for p, shape in unit.sharded(layout):
        kept = stored_dtype(p, masters=masters)
        computed = computed_dtype(kept, layout)
        size = gathered_bytes(unit, p, shape, computed)
        whole += size
        separate += allocated(size)
        cast += size // unit.shards if computed != kept or layout.cpu_offload else 0
        if p.is_trainable:
            reduced = reduced_dtype(computed, layout)
            gradients += allocated(numel(shape) * item_bytes(computed))
            accumulated += allocated(numel(shape) * item_bytes(reduced))
            reduction += gathered_bytes(unit, p, shape, reduced)
            held += gathered_bytes(unit, p, shape, kept) // unit.shards
            stored += allocated(numel(shape) * item_bytes(kept))
    return _UnitSizes(
        buffer=allocated(whole) if unit.shards > 1 else 0,
        gathered=separate,
        cast=allocated(cast),
        gradients=gradients,
        accumulated=accumulated,
        reduction=allocated(reduction),
        shard=allocated(reduction // unit.shards),
        held=0 if layout.cpu_offload else allocated(held),
        stored=stored,
    )


class _Fsdp2Step:
    """Gathered parameters, gradients and buffers of fully_shard.

    In a forward pass, the buffer of a unit's all_gather is freed when the next unit has been gathered; in a backward pass, the next unit is
    gathered into its buffer ahead, and the input of a unit's reduce_scatter is kept until that of the next one.

    Source: torch.distributed.fsdp._fully_shard (torch 2.13).
    """

    def __init__(self, model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> None:
        masters = has_masters(model, layout)
        units = sharding_units(model, layout, rank.stage)
        self._layout = layout
        self._sizes = {unit.name: _sizes(unit, layout, masters=masters) for unit in units}
        self._order = [name for name in self._sizes if name]
        self._places = {name: place for place, name in enumerate(self._order)}
        self._root = self._sizes.get("", _NOTHING)
        # Of the first units together, for each number of them.
        self._gathered_before = [0, *accumulate(self._sizes[name].gathered for name in self._order)]
        self._stored = sum(sizes.stored for sizes in self._sizes.values())
        self._computed = sum(sizes.gradients for sizes in self._sizes.values())
        self._current = ""  # the last unit that was gathered
        self._done: set[str] = set()  # units whose gradients are reduced
        self._last_reduction = 0  # of the unit that was reduced last
        self._stored_done = self._held_done = 0
        self._held = sum(sizes.held for sizes in self._sizes.values())
        self._kept = self._gathered_before[-1]  # of units whose gradients are not reduced yet
        self._phase = "forward"
        self._keeps = layout.stage == 2 or layout.pp > 1
        # Micro-steps before the last one leave whole gradients (no_sync), and so do all micro-batches of a pipeline.
        self._left = sum(sizes.accumulated for sizes in self._sizes.values()) if layout.accumulation > 1 else 0

    def memory(self, moment: Moment, before: Moment | None, after: Moment | None) -> dict[str, int]:
        """Return the bytes that the engine adds at ``moment``, by category."""
        if moment.phase == "optimizer":
            return {"gradients": self._held}
        if moment.phase == "forward":
            return self._forward(moment)
        if self._phase == "forward":
            self._phase, self._current = "backward", ""
        return self._backward(moment, after)

    def _forward(self, moment: Moment) -> dict[str, int]:
        own = self._with_experts(moment.unit)
        previous = self._sizes.get(self._current, self._root)
        is_entered = bool(own) and moment.unit != self._current
        gathered = self._root.gathered
        if self._keeps:
            gathered += self._gathered_before[self._places[own[-1]] + 1 if own else self._num_entered()]
        else:
            gathered += sum(self._sizes[name].gathered for name in own)
        buffer = sum(self._sizes[name].buffer for name in own) if own else previous.buffer
        total = gathered + buffer
        if is_entered:  # the former unit's buffer is still there while this unit is gathered into its own
            before_copy = gathered - sum(self._sizes[name].gathered for name in own)
            total = max(total, before_copy + previous.buffer + buffer + sum(self._sizes[name].cast for name in own))
            self._current = moment.unit
        return {"gathered parameters": total, "unreduced gradients": self._left}

    def _num_entered(self) -> int:
        return self._places.get(self._current, -1) + 1

    def _with_experts(self, unit: str) -> list[str]:
        # The unit of experts comes before that of the rest of a block.
        return [name for name in (f"{unit}.experts", unit) if name in self._places] if unit else []

    def _backward(self, moment: Moment, after: Moment | None) -> dict[str, int]:
        own = self._with_experts(moment.unit)
        if own:
            self._current = moment.unit
        first = self._places[own[0]] if own else self._next_in_backward()
        ahead = self._sizes[self._order[first - 1]].buffer if 0 < first <= len(self._order) and not self._keeps else 0
        gathered = self._root.gathered + sum(self._sizes[name].gathered for name in own)
        if self._keeps:
            gathered = self._root.gathered + self._kept
        last_reduction = self._last_reduction
        found = {
            "gathered parameters": gathered + ahead,
            "unreduced gradients": self._new_gradients(moment) + self._left,
            "reduction buffers": last_reduction,
            "gradients": self._held_done,
        }
        leaves = after is None or after.phase != "backward" or (own and after.unit != moment.unit)
        if not leaves or self._layout.pp > 1:
            return found
        # The unit is freed, and its gradients are copied into the input of a reduce_scatter, while autograd waits.
        finished = own or [""]
        if not own:
            gathered = 0
        reduction = max(
            (self._sizes.get(name, _NOTHING).reduction + self._sizes.get(name, _NOTHING).shard) for name in finished
        )
        while_reducing = (0 if self._keeps or not own else self._root.gathered + ahead) + reduction
        if self._keeps:
            while_reducing += gathered - sum(self._sizes[name].gathered for name in own)
        for name in finished:
            self._finish(name)
        if while_reducing > found["gathered parameters"] + last_reduction + moment.temporaries:
            found["reduction buffers"] = reduction
            found["gathered parameters"] = while_reducing - reduction
        return found

    def _finish(self, name: str) -> None:
        """Note that the gradients of a unit are reduced."""
        if name not in self._sizes:
            return
        sizes = self._sizes[name]
        self._last_reduction = sizes.reduction
        if name not in self._done:  # a block can be left and entered again
            self._done.add(name)
            self._stored_done += sizes.stored
            self._held_done += sizes.held
            self._left -= sizes.accumulated if self._layout.accumulation > 1 else 0
            self._kept -= sizes.gathered if name else 0

    def _next_in_backward(self) -> int:
        """Return the place after the unit that the backward pass enters next."""
        return self._num_entered() - 1 if self._current else len(self._order)

    def _new_gradients(self, moment: Moment) -> int:
        """Return the bytes of whole gradients of this micro-step that are not reduced yet, in the dtype in which they are computed."""
        return int(max(0, moment.gradients - self._stored_done) * self._computed / max(1, self._stored))


_NOTHING = _UnitSizes(0, 0, 0, 0, 0, 0, 0, 0, 0)


def gathered_whole(model: ModelFacts, layout: ParallelLayout, rank: RankClass) -> Iterator[tuple[str, int]]:
    """Yield each unit of fully_shard with the bytes of its whole parameters on the device."""
    masters = has_masters(model, layout)
    for unit in sharding_units(model, layout, rank.stage):
        yield unit.name, _sizes(unit, layout, masters=masters).gathered
