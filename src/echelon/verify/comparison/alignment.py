"""The events of a trace in the order in which they are compared: by update and rank, with whole tensors put together from shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from echelon.distributed.checks.sketch import Sketch
from echelon.verify.trace import (
    Batch,
    Clip,
    Content,
    Event,
    Forward,
    Loss,
    Model,
    Note,
    OptimizerStep,
    RecordingSettings,
    Rng,
    Row,
    SketchedTensors,
    Trace,
)


@dataclass(slots=True, kw_only=True)
class RankUpdate:
    """What one rank did in one update."""

    batches: list[Batch] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    tensors: list[SketchedTensors] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    steps: list[OptimizerStep] = field(default_factory=list)
    rngs: list[Rng] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Add ``event`` to the list of its kind."""
        lists: dict[type, list[Any]] = {
            Batch: self.batches,
            Forward: self.forwards,
            Loss: self.losses,
            SketchedTensors: self.tensors,
            Clip: self.clips,
            OptimizerStep: self.steps,
            Rng: self.rngs,
            Note: self.notes,
        }
        lists[type(event)].append(event)

    def rows_of(self, micro_step: int) -> list[Row]:
        """Return the samples of a micro-step: those of the loader, or of the model's inputs if no loader was seen."""
        own = [one for one in self.batches if one.micro_step == micro_step]
        loader = [one for one in own if one.source == "loader"]
        return [row for one in loader or own for row in one.rows]

    def rows(self) -> list[Row]:
        """Return the samples of the update."""
        return [row for micro_step in self.micro_steps() for row in self.rows_of(micro_step)]

    def micro_steps(self) -> list[int]:
        """Return the indices of the micro-steps that have samples."""
        return sorted({one.micro_step for one in self.batches})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTensor:
    """One tensor, of all ranks."""

    whole: Sketch
    """Of the sum of the shards, or of the first rank that has it."""
    by_rank: dict[int, Sketch]
    replica_of: Mapping[int, int] | None = None
    """If it is sharded: of which replica each rank's shard is."""
    replicas: dict[int, Sketch] = field(default_factory=dict)
    """Under hybrid sharding: by the first rank of each replica but the first, the sum of its shards."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of it."""
        return self.replica_of is not None

    def unequal_ranks(self) -> list[int]:
        """Return the ranks whose copy has other bits than the first rank's (if it is sharded: the first rank of such a replica)."""
        return [
            rank
            for rank, one in (self.replicas if self.is_sharded else self.by_rank).items()
            if not one.has_bits_of(self.whole)
        ]


class SampleIds:
    """Recognizes a sample by its contents, also if only its padding differs."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Learn which hashes mean the same sample."""
        for row in rows:
            whole, prefix = self._root(row.whole), self._root(row.prefix)
            if whole != prefix:
                self._parents[whole] = prefix

    def of(self, row: Row) -> int:
        """Return the id of the sample."""
        return self._root(row.whole)

    def _root(self, key: int) -> int:
        parents = self._parents
        while (parent := parents.setdefault(key, key)) != key:
            parents[key] = parents[parent]
            key = parent
        return key


class AlignedRun:
    """A trace by update and rank.

    Args:
        has_failed: whether the run failed or hung: its last updates are complete only if the weights after them were recorded.
    """

    def __init__(self, trace: Trace, *, has_failed: bool = False) -> None:
        self.world_size = len(trace.ranks)
        self.processes: list[RecordingSettings | None] = []
        self.models: dict[int, Model] = {}
        self._updates: list[dict[int, RankUpdate]] = []
        self._begins: list[RankUpdate] = []
        self.resumed_at: int | None = None
        """First update of a second process in the same trace, which has resumed the first one."""
        last_steps: list[int] = []
        for events in trace.ranks:
            process: RecordingSettings | None = None
            updates: dict[int, RankUpdate] = {}
            begin = RankUpdate()
            last = -2
            for event in events:
                if isinstance(event, RecordingSettings):
                    if process is not None:
                        self.resumed_at = event.first_update
                    process = process or event
                elif isinstance(event, Model):
                    self.models.setdefault(event.model, event)
                elif self.resumed_at is not None and event.update < self.resumed_at and last == self.resumed_at - 1:
                    begin.add(event)
                else:
                    updates.setdefault(event.update, RankUpdate()).add(event)
                    is_weights = isinstance(event, SketchedTensors) and event.content == "weights"
                    if is_weights if has_failed else isinstance(event, OptimizerStep):
                        last = max(last, event.update)
            self.processes.append(process)
            self._updates.append(updates)
            self._begins.append(begin)
            last_steps.append(last)
        self.first_update = max((one.first_update for one in self.processes if one), default=0)
        self.end_update = min(last_steps, default=-2) + 1
        """The first update that not all ranks have completed."""
        self._tensors: dict[tuple[int, str], dict[str, RecordedTensor]] = {}
        for update in self.updates:
            _drop_idle_clips(self.ranks_at(update))

    @property
    def updates(self) -> range:
        """Return the updates that all ranks have completed."""
        return range(self.first_update, max(self.first_update, self.end_update))

    def at(self, rank: int, update: int) -> RankUpdate:
        """Return what ``rank`` did in ``update``; it is empty if it did nothing."""
        return self._updates[rank].get(update) or RankUpdate()

    def ranks_at(self, update: int) -> list[RankUpdate]:
        """Return what each rank did in ``update``."""
        return [self.at(rank, update) for rank in range(self.world_size)]

    def notes(self) -> list[str]:
        """Return the notes of all ranks, each text once."""
        texts = {one.text: None for ranks in self._updates for update in ranks.values() for one in update.notes}
        return list(texts)

    def states(self, content: Literal["saved", "loaded"]) -> Iterator[tuple[int, SketchedTensors]]:
        """Yield the rank and the event of each state, by rank and then in the order of the updates."""
        for rank, updates in enumerate(self._updates):
            for one in (*(updates[update] for update in sorted(updates)), self._begins[rank]):
                yield from ((rank, event) for event in one.tensors if event.content == content)

    def tensors(self, update: int, kind: Content) -> dict[str, RecordedTensor]:
        """Return the tensors of ``kind`` in ``update`` by name (``"0:weight"``)."""
        key = (update, kind)
        if key not in self._tensors:
            self._tensors[key] = self._collect(update, kind)
        return self._tensors[key]

    def optimized(self, update: int) -> set[str]:
        """Return the parameters that are in an optimizer of some rank."""
        return {name for one in self.ranks_at(update) for step in one.steps for name in step.group_of}

    def local_gradients(self, update: int) -> dict[tuple[int, int], dict[str, Sketch]]:
        """Return what backward added on each rank in each micro-step: ``(rank, micro_step)`` to name to sketch."""
        result: dict[tuple[int, int], dict[str, Sketch]] = {}
        for rank, one in enumerate(self.ranks_at(update)):
            for event in one.tensors:
                if event.content == "local" and not event.is_sharded:
                    known = result.setdefault((rank, event.micro_step), {})
                    for name, sketch in zip(event.names, event.sketches, strict=True):
                        known[name] = known[name] + sketch if name in known else sketch
        return result

    def resumed_tensors(self, kind: Content) -> dict[str, RecordedTensor]:
        """Return the tensors of ``kind`` with which the second process began."""
        return whole_tensors(_events(self._begins, kind))

    def _collect(self, update: int, kind: Content) -> dict[str, RecordedTensor]:
        tensors = whole_tensors(_events(self.ranks_at(update), kind))
        if kind != "clipped" or not tensors:
            return tensors
        # Clipped gradients are recorded only where clipping changed them.
        reduced = self.tensors(update, "reduced")
        result = dict(tensors)
        for name, one in reduced.items():
            own = tensors[name].by_rank if name in tensors else {}
            ranks = {rank: own.get(rank, sketch) for rank, sketch in one.by_rank.items()}
            result[name] = _whole_tensor(ranks, one.replica_of)
        return result


def _drop_idle_clips(ranks: Sequence[RankUpdate]) -> None:
    """Remove clipping calls that changed nothing on any rank and were followed by another backward pass.

    A script may clip in each micro-step, where the gradients of this rank alone may still be below the limit.
    """
    last = max((clip.micro_step for one in ranks for clip in one.clips), default=0)
    by_micro_step: dict[int, list[Clip]] = {}
    for one in ranks:
        for clip in one.clips:
            by_micro_step.setdefault(clip.micro_step, []).append(clip)
    idle = {step for step, clips in by_micro_step.items() if step < last and all(c.norm <= c.max_norm for c in clips)}
    for one in ranks if idle else ():
        one.clips[:] = [clip for clip in one.clips if clip.micro_step not in idle]


def _events(ranks: Sequence[RankUpdate], content: Content) -> Iterator[tuple[int, SketchedTensors]]:
    for rank, one in enumerate(ranks):
        yield from ((rank, event) for event in one.tensors if event.content == content)


def whole_tensors(events: Iterable[tuple[int, SketchedTensors]]) -> dict[str, RecordedTensor]:
    """Return the tensors of which ranks have recorded copies or shards, by name."""
    by_rank: dict[str, dict[int, Sketch]] = {}
    replica_of: dict[str, dict[int, int]] = {}
    for rank, event in events:
        # The latest counts: with a clipping call in each micro-step, gradients are also recorded before the last backward pass.
        for name, sketch in zip(event.names, event.sketches, strict=True):
            by_rank.setdefault(name, {})[rank] = sketch
            if event.is_sharded:
                replica_of.setdefault(name, {})[rank] = event.replica
    return {name: _whole_tensor(sketches, replica_of.get(name)) for name, sketches in by_rank.items()}


def _whole_tensor(by_rank: dict[int, Sketch], replica_of: Mapping[int, int] | None) -> RecordedTensor:
    """Return the tensor of which ranks have copies or, if ``replica_of`` tells of which replica each rank's shard is, shards."""
    if replica_of is None:
        return RecordedTensor(whole=next(iter(by_rank.values())), by_rank=by_rank)
    sums: dict[int, tuple[int, Sketch]] = {}
    for rank, sketch in by_rank.items():
        replica = replica_of.get(rank, 0)
        first, total = sums.get(replica, (rank, None))
        sums[replica] = (first, sketch if total is None else total + sketch)
    (_, whole), *others = (sums[replica] for replica in sorted(sums))
    return RecordedTensor(whole=whole, by_rank=by_rank, replica_of=replica_of, replicas=dict(others))


def rows_by_sample(
    run: AlignedRun, update: int, samples: SampleIds, *, rank: int
) -> Iterator[tuple[Forward, int, list[tuple[int, np.ndarray]]]]:
    """Yield each output of a training forward pass with the number of the call and its rows by sample.

    Outputs whose first dim is not that of the batch are left out.
    """
    one = run.at(rank, update)
    for forward, call in calls_of(one):
        rows = one.rows_of(forward.micro_step)
        if len(forward.rows) and len(forward.rows) == len(rows):
            yield forward, call, [(samples.of(row), values) for row, values in zip(rows, forward.rows, strict=True)]


def calls_of(one: RankUpdate) -> Iterator[tuple[Forward, int]]:
    """Yield each output with the number of the call of its module in the micro-step."""
    calls: Counter[tuple[int, int, str]] = Counter()
    for forward in one.forwards:
        key = (forward.micro_step, forward.model, forward.module)
        yield forward, calls[key]
        calls[key] += 1
