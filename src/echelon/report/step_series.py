"""Turns the step records of all ranks into series of at most ``MAX_POINTS`` points, for plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.diagnose.straggler import Steps, steps_of
from echelon.report.run_folder import RecordedRun
from echelon.status.board import StepPart
from echelon.status.step_records import read_step_bytes, read_step_file

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_POINTS = 960
"""Largest number of points in a series: about one for each pixel of a plot."""
WHOLE_STEP = "step"
"""Name of the only part of a step whose parts were not recorded."""
_MAX_CELLS = 16_000
"""Largest number of points by rank and time."""
_MAX_PENDING = 128
_OWN = [StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER, StepPart.OTHER]
_NOT_TRAINING = [StepPart.EVALUATION, StepPart.CHECKPOINT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The smallest, mean and largest value in each bucket of steps; nan where there is none."""

    least: Floats
    mean: Floats
    most: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """The steps of a run, in buckets of consecutive steps. Steps that were repeated after a restart count once."""

    ranks: list[int]
    num_steps: int
    """Number of steps that were kept."""
    last_step: int
    num_repeated: int
    """Number of steps that were lost at a restart and done again."""
    steps: Floats
    """Last step of each bucket."""
    times: Floats
    """Unix time at the end of each bucket."""
    loss: Spread
    lr: Floats
    grad_norm: Spread
    samples_per_s: Floats
    items_per_s: Floats
    step_ms: Floats
    """Mean time of a step over all ranks."""
    part_ms: dict[str, Floats]
    """Mean time of a step by part: ``StepPart`` in lower case, with communication split into transfer and ``wait``; or only
    ``WHOLE_STEP``."""
    has_parts: bool
    """Whether the parts of a step were recorded, which the Accelerator and the Trainer do."""
    rank_columns: Floats
    """Last step of each bucket of the series by rank, which are coarser."""
    rank_times: Floats
    memory_mb: Floats
    """Memory in use by rank and bucket."""
    own_ms: Floats
    """Time of a step without communication, evaluation and checkpoints by rank and bucket."""
    rank_part_ms: dict[str, Floats]
    """Mean time of a step of each rank by part, over the whole run."""
    rank_memory_mb: Floats
    """Largest memory in use of each rank."""
    num_samples: int
    num_items: float
    attempt_began: list[float]
    """Unix time at the first step that is recorded of each start or restart."""
    last_loss: float
    not_finite_from: int | None
    """First step whose loss is nan or infinite."""
    verdict: str
    """A sentence that names the rank that the others wait for; empty if there is none."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """The records of one rank in one attempt, as arrays."""

    attempt: int
    rank: int
    time_s: Floats
    step: Ints
    weight: Floats
    loss: Floats
    lr: Floats
    grad_norm: Floats
    memory_mb: Floats
    samples: Floats
    items: Floats
    spent_ms: Floats

    def up_to(self, step: int) -> _Columns:
        """Return the records of the steps before ``step``."""
        end = int(np.searchsorted(self.step, step))
        fields = [getattr(self, name)[:end] for name in self.__slots__[2:]]
        return _Columns(self.attempt, self.rank, *fields)


def step_series(run: RecordedRun) -> StepSeries | None:
    """Return the series of a run, or None if it has no step records."""
    found = list(_read(run))
    if not found:
        return None
    kept = _without_repeated(found)
    steps = np.unique(np.concatenate([one.step for one in kept]))
    first, last = int(steps[0]), int(steps[-1])
    number = min(MAX_POINTS, len(steps))
    buckets = _Buckets(first=first, last=last, number=number)
    ranks = sorted({one.rank for one in kept})
    sums = _Sums(ranks, number)
    for one in kept:
        sums.add(one, buckets.of(one.step))
    loss = _over_ranks([(one.step, one.loss, one.weight) for one in kept])
    norm = _over_ranks([(one.step, one.grad_norm, np.ones_like(one.grad_norm)) for one in kept])
    zero = [one for one in kept if one.rank == ranks[0]]
    rate = _over_ranks([(one.step, one.lr, np.ones_like(one.lr)) for one in zero])
    known = np.flatnonzero(~np.isnan(loss[1]))
    group = max(1, -(-number // max(40, min(240, _MAX_CELLS // len(ranks)))))
    totals = {rank: sums.spent_ms[i].sum(axis=0).tolist() for i, rank in enumerate(ranks)}
    counted = int(sums.num_steps.sum(axis=1).max())
    verdict: Steps | None = steps_of(totals, num_steps=counted) if len(ranks) > 1 else None
    step_ms = _mean(_ratio(sums.elapsed_ms, sums.num_steps), axis=0)
    has_parts = bool(sums.spent_ms.any())
    return StepSeries(
        ranks=ranks,
        num_steps=last - _start(kept) + 1,
        last_step=last,
        num_repeated=_num_steps(found) - _num_steps(kept),
        steps=_last_in(buckets.of(steps), steps.astype(np.float64), number),
        times=sums.time_s,
        loss=_spread(buckets, *loss),
        lr=_spread(buckets, *rate).mean,
        grad_norm=_spread(buckets, *norm),
        samples_per_s=sums.rate(sums.samples),
        items_per_s=sums.rate(sums.items),
        step_ms=step_ms,
        part_ms=_by_part(_ratio(sums.spent_ms, sums.num_steps[:, :, None])) if has_parts else {WHOLE_STEP: step_ms},
        has_parts=has_parts,
        rank_columns=_last_of_groups(_last_in(buckets.of(steps), steps.astype(np.float64), number), group),
        rank_times=_last_of_groups(sums.time_s, group),
        memory_mb=_groups(sums.memory_mb, group, np.fmax),
        own_ms=_ratio(
            _groups(sums.spent_ms[:, :, _OWN].sum(axis=2), group, np.add), _groups(sums.num_steps, group, np.add)
        ),
        rank_part_ms=_of_ranks(_ratio(sums.spent_ms.sum(axis=1), sums.num_steps.sum(axis=1)[:, None]))
        if has_parts
        else {WHOLE_STEP: _ratio(sums.elapsed_ms.sum(axis=1), sums.num_steps.sum(axis=1))},
        rank_memory_mb=np.fmax.reduce(sums.memory_mb, axis=1),
        num_samples=_total(found, "samples"),
        num_items=float(_total(found, "items")),
        attempt_began=[
            min(float(one.time_s[0]) for one in found if one.attempt == attempt)
            for attempt in sorted({one.attempt for one in found})
        ],
        last_loss=float(loss[1][known[-1]]) if len(known) else float("nan"),
        not_finite_from=_first_not_finite(kept),
        verdict="" if verdict is None else verdict.verdict,
    )


def last_step(run: RecordedRun) -> tuple[int | None, float | None]:
    """Return the last step of a run, and the mean over the ranks of the last known loss; None where there is none."""
    paths = run.step_paths()
    step: int | None = None
    losses = []
    for attempt, _, path in paths:
        if attempt != paths[-1][0]:
            continue
        try:
            records = read_step_file(path, num_records=0, num_last=_MAX_PENDING).last
        except (OSError, ValueError):
            continue
        known = [one for one in records if one.num_losses]
        step = max(step or 0, records[-1].step) if records else step
        losses += [known[-1].loss] if known else []
    return step, sum(losses) / len(losses) if losses else None


class _Buckets:
    """Assigns steps to buckets of equal numbers of steps."""

    def __init__(self, *, first: int, last: int, number: int) -> None:
        self.first, self.length, self.number = first, last - first + 1, number

    def of(self, steps: Ints) -> Ints:
        """Return the bucket of each step."""
        return np.asarray((steps - self.first) * self.number // self.length, dtype=np.int64)


class _Sums:
    """Sums by rank and bucket: differences between consecutive records, which are totals."""

    def __init__(self, ranks: Sequence[int], number: int) -> None:
        self._index = {rank: i for i, rank in enumerate(ranks)}
        shape = (len(ranks), number)
        self.num_steps = np.zeros(shape)
        self.elapsed_ms = np.zeros(shape)
        self.spent_ms = np.zeros((*shape, len(StepPart)))
        self.samples = np.zeros(shape)
        self.items = np.zeros(shape)
        self.memory_mb = np.full(shape, np.nan)
        self.time_s = np.full(number, np.nan)

    def add(self, one: _Columns, bucket: Ints) -> None:
        """Add the records of a rank in an attempt."""
        i, number = self._index[one.rank], self.num_steps.shape[1]

        def sums(totals: Floats) -> Floats:
            # The first record of an attempt covers the start of its loop and is only the base of the differences.
            return _sums(bucket[1:], np.diff(totals), number)

        self.num_steps[i] += sums(one.step.astype(np.float64))
        self.elapsed_ms[i] += sums(one.time_s) * 1e3
        self.samples[i] += sums(one.samples)
        self.items[i] += sums(one.items)
        for part in StepPart:
            self.spent_ms[i, :, part] += sums(one.spent_ms[:, part])
        np.fmax.at(self.memory_mb[i], bucket, one.memory_mb)
        np.fmax.at(self.time_s, bucket, one.time_s)

    def rate(self, amounts: Floats) -> Floats:
        """Return the amount of all ranks per second of training, without evaluation and checkpoints."""
        seconds = (self.elapsed_ms - self.spent_ms[:, :, _NOT_TRAINING].sum(axis=2)) / 1e3
        rates = _ratio(amounts, seconds)
        is_known = amounts.any() & ~np.isnan(rates).all(axis=0)
        return np.where(is_known, np.nansum(rates, axis=0), np.nan)


def _read(run: RecordedRun) -> Iterator[_Columns]:
    """Yield the records of each rank in each attempt; files that cannot be read, or have no record yet, are left out."""
    for attempt, _, path in run.step_paths():
        try:
            rank, _, began_ns, data = read_step_bytes(path)
        except (OSError, ValueError):  # the rank was killed while it created the file
            continue
        if len(data):
            yield _columns(attempt, rank, began_ns, np.frombuffer(data, dtype=RECORD_TYPE))


# The fields of ``StepRecord`` in ``RECORD_FORMAT``.
RECORD_TYPE = np.dtype(
    [
        ("time_ns", "<u8"),
        ("step", "<u4"),
        ("num_losses", "<u4"),
        *((name, "<f8") for name in ("loss", "lr", "grad_norm", "memory_mb")),
        ("num_samples", "<u8"),
        ("num_items", "<f8"),
        ("spent_ns", "<u8", (len(StepPart),)),
    ]
)


def _columns(attempt: int, rank: int, began_ns: int, records: npt.NDArray[np.void]) -> _Columns:
    names = ("num_losses", "loss", "lr", "grad_norm", "memory_mb", "num_samples", "num_items")
    fields: list[npt.NDArray[Any]] = [
        began_ns / 1e9 + records["time_ns"] / 1e9,
        records["step"].astype(np.int64),
        *(records[name].astype(np.float64) for name in names),
        records["spent_ns"] / 1e6,
    ]
    return _Columns(attempt, rank, *fields)


def _without_repeated(found: Sequence[_Columns]) -> list[_Columns]:
    """Return the records without the steps that a later attempt did again."""
    firsts: dict[int, int] = {}
    for one in found:
        firsts[one.attempt] = min(firsts.get(one.attempt, int(one.step[0])), int(one.step[0]))
    limits = {
        attempt: min((step for other, step in firsts.items() if other > attempt), default=int(np.iinfo(np.int64).max))
        for attempt in firsts
    }
    kept = [one.up_to(limits[one.attempt]) for one in found]
    return [one for one in kept if len(one.step)]


def _start(kept: Sequence[_Columns]) -> int:
    """Return the first step of the run. A first record of several steps begins after the step before."""
    return min(int(one.step[0]) for one in kept)


def _num_steps(found: Sequence[_Columns]) -> int:
    ends: dict[int, int] = {}
    for one in found:
        ends[one.attempt] = max(ends.get(one.attempt, 0), int(one.step[-1] - one.step[0]) + 1)
    return sum(ends.values())


def _first_not_finite(kept: Sequence[_Columns]) -> int | None:
    firsts = []
    for one in kept:  # without losses: a loss that is still on a device
        is_bad = (one.weight > 0) & ~np.isfinite(one.loss)
        firsts += one.step[is_bad][:1].tolist()
    return min(firsts, default=None)


def _total(found: Sequence[_Columns], name: str) -> int:
    return int(sum(getattr(one, name)[-1] for one in found))


def _over_ranks(rows: Sequence[tuple[Ints, Floats, Floats]]) -> tuple[Ints, Floats]:
    """Return all steps and the weighted mean over the ranks at each; nan where no rank has a value."""
    steps, inverse = np.unique(np.concatenate([row[0] for row in rows]), return_inverse=True)
    values, weights = (np.concatenate([row[i] for row in rows]) for i in (1, 2))
    weights = np.where(np.isnan(values), 0.0, np.maximum(weights, 1.0))
    total = _sums(inverse, np.where(np.isnan(values), 0.0, values) * weights, len(steps))
    return steps, _ratio(total, _sums(inverse, weights, len(steps)))


def _spread(buckets: _Buckets, steps: Ints, values: Floats) -> Spread:
    bucket, number = buckets.of(steps), buckets.number
    least, most = np.full(number, np.nan), np.full(number, np.nan)
    np.fmin.at(least, bucket, values)
    np.fmax.at(most, bucket, values)
    is_known = ~np.isnan(values)
    total = _sums(bucket[is_known], values[is_known], number)
    return Spread(least=least, mean=_ratio(total, _sums(bucket, is_known.astype(np.float64), number)), most=most)


def _sums(place: Ints, values: Floats, number: int) -> Floats:
    """Return the sums of the values with the same place."""
    return np.asarray(np.bincount(place, weights=values, minlength=number), dtype=np.float64)


def _last_in(bucket: Ints, values: Floats, number: int) -> Floats:
    last = np.full(number, np.nan)
    last[bucket] = values  # the last one wins
    return last


def _by_part(ms: Floats) -> dict[str, Floats]:
    """Return the mean over ranks by part, from milliseconds by rank, bucket and part."""
    transfer = _fewest(ms[:, :, StepPart.COMMUNICATION])
    parts = {part.name.lower(): _mean(ms[:, :, part], axis=0) for part in StepPart}
    wait = parts["communication"] - transfer
    return {**parts, "communication": transfer, "wait": wait}


def _of_ranks(ms: Floats) -> dict[str, Floats]:
    """Return milliseconds by part, from milliseconds by rank and part."""
    transfer = _fewest(ms[:, StepPart.COMMUNICATION])
    parts = {part.name.lower(): ms[:, part] for part in StepPart}
    return {**parts, "communication": np.full(len(ms), transfer), "wait": parts["communication"] - transfer}


def _fewest(values: Floats) -> Floats:
    return np.asarray(np.fmin.reduce(values, axis=0))


def _mean(values: Floats, *, axis: int) -> Floats:
    is_known = ~np.isnan(values)
    return _ratio(np.where(is_known, values, 0.0).sum(axis=axis), is_known.sum(axis=axis))


def _ratio(one: Floats, other: Floats) -> Floats:
    """Return ``one / other``; nan where ``other`` is zero."""
    shape = np.broadcast_shapes(one.shape, other.shape)
    found: Floats = np.divide(one, other, out=np.full(shape, np.nan), where=np.broadcast_to(other, shape) > 0)
    return found


def _groups(values: Floats, size: int, function: np.ufunc) -> Floats:
    return np.asarray(function.reduceat(values, np.arange(0, values.shape[1], size), axis=1))


def _last_of_groups(values: Floats, size: int) -> Floats:
    ends = np.minimum(np.arange(size - 1, len(values) + size - 1, size), len(values) - 1)
    return np.asarray(values[ends])
