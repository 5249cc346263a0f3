"""What is compared between a layout and its reference, stage by stage; each failed comparison is a ``RunDifference``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from echelon.distributed.checks.finding import Stage
from echelon.distributed.checks.sketch import NUM_BUCKETS, Sketch
from echelon.verify.comparison.alignment import (
    AlignedRun,
    RecordedTensor,
    SampleIds,
    calls_of,
    rows_by_sample,
)
from echelon.verify.comparison.tolerance import Measurement, RoundingModel, unit_roundoff
from echelon.verify.trace import Content, Forward

DifferenceKind: TypeAlias = Literal[
    "values",
    "missing",
    "nonfinite",
    "unequal ranks",
    "samples",
    "equal generators",
    "repeated generator",
    "generators",
    "norm",
    "max norm",
    "num clips",
    "rates",
    "settings",
    "num steps",
    "skipped",
    "parameters",
    "num updates",
    "saved",
    "loaded",
    "structure",
    "untrained forward",
]

_ROW_FREEDOM = 4
"""Length of the projection of one row of an output."""


@dataclass(frozen=True, slots=True)
class RunDifference:
    """One comparison that failed."""

    stage: Stage
    update: int
    kind: DifferenceKind
    _: KW_ONLY
    tensor: str = ""
    ranks: list[int] = field(default_factory=list)
    distance: float = math.inf
    norm: float = 0.0
    allowed: float = 0.0
    values: str = ""
    """The values that differ, in words, for kinds without a distance."""
    line: str = ""
    share: float = 1.0
    """Fraction of the rows of an output that differ."""

    @property
    def relative(self) -> float | None:
        """Return the distance divided by the norm of the reference, if both are known."""
        return self.distance / self.norm if math.isfinite(self.distance) and self.norm > 0 else None


@dataclass(slots=True, kw_only=True)
class Tally:
    """Result of one stage in one update."""

    num_compared: int = 0
    largest: float = 0.0
    equal_bits: bool = True
    differences: list[RunDifference] = field(default_factory=list)


class Tolerances:
    """Measured rounding errors of the reference, of each tensor at most so far."""

    def __init__(self, probability: float) -> None:
        self.probability = probability
        self._relative: dict[tuple[str, str], float] = {}
        self._norms: dict[tuple[str, str], float] = {}

    def largest_so_far(self, kind: str, name: str, *, norm: float, error: float) -> float:
        """Return the error of this update, or that of an earlier one if it was greater relative to the norm.

        In a chaotic run the error grows along one direction and changes its sign now and then, so that it may be small by chance.
        """
        key = (kind, name)
        relative = max(self._relative.get(key, 0.0), error / norm if norm > 0 else 0.0)
        self._relative[key] = relative
        return max(error, relative * norm)

    def largest_norm(self, kind: str, name: str, norm: float) -> float:
        """Return the greatest norm so far: that of the terms of a sum that passes through zero now and then."""
        key = (kind, name)
        self._norms[key] = max(self._norms.get(key, 0.0), norm)
        return self._norms[key]


class Comparison:
    """Compares one update after the other; ``tallies`` collects what was found."""

    def __init__(
        self,
        layout: AlignedRun,
        reference: AlignedRun,
        exact: AlignedRun | None,
        perturbed: Sequence[AlignedRun] = (),
        *,
        probability: float,
        is_bitwise: bool,
    ) -> None:
        """Compare ``layout`` with ``reference``, whose rounding errors are its distances to ``exact`` and ``perturbed``.

        Args:
            layout: the run of all ranks.
            reference: the run on one process.
            exact: the reference in float64.
            perturbed: the reference with weights perturbed by one rounding.
            probability: of a false alarm in one comparison.
            is_bitwise: whether tolerances are zero.
        """
        self.layout = layout
        self.reference = reference
        self.exact = exact
        self.perturbed = list(perturbed)
        self.twins = [run for run in (exact, *perturbed) if run is not None]
        """Other runs of the reference, which show its rounding errors."""
        self.is_bitwise = is_bitwise
        self.samples = SampleIds()
        self.tolerances = Tolerances(probability)
        self.tallies: dict[tuple[int, Stage], Tally] = {}
        self.skipped_outputs: set[str] = set()
        self.remarks: list[RunDifference] = []
        """What differs from one process without making it another run."""
        self.num_told_apart: Counter[Stage] = Counter()
        """Number of values of stages that show only in the reduced gradient, in updates in which that differs."""
        self.allowed: dict[tuple[int, str], dict[str, float]] = {}
        """Allowed distances of the tensors of (update, kind)."""

    def tally(self, update: int, stage: Stage) -> Tally:
        """Return the result of ``stage`` in ``update`` so far."""
        return self.tallies.setdefault((update, stage), Tally())

    def differ(self, stage: Stage, update: int, kind: DifferenceKind, **facts: Any) -> None:
        """Record a comparison that failed, by the fields of a ``RunDifference``."""
        self.add(RunDifference(stage, update, kind, **facts))

    def add(self, difference: RunDifference) -> None:
        """Record a comparison that failed."""
        tally = self.tally(difference.update, difference.stage)
        tally.differences.append(difference)
        tally.equal_bits = False
        ratio = difference.distance / difference.allowed if difference.allowed > 0 else math.inf
        tally.largest = max(tally.largest, ratio)

    def passed(
        self, update: int, stage: Stage, *, largest: float = 0.0, equal_bits: bool = True, count: int = 1
    ) -> None:
        """Record ``count`` comparisons that succeeded."""
        tally = self.tally(update, stage)
        tally.num_compared += count
        tally.largest = max(tally.largest, largest)
        tally.equal_bits = tally.equal_bits and equal_bits

    def num_samples(self, update: int) -> int:
        """Return the number of samples of the reference's update: the depth of the sum that a gradient is."""
        return max(1, sum(len(one.rows()) for one in self.reference.ranks_at(update)))

    def roundoff_of(self, name: str) -> float:
        """Return the unit roundoff of the parameter or buffer ``"0:weight"`` or the state ``"0:weight/exp_avg"``."""
        index, _, rest = name.partition(":")
        model = self.reference.models.get(int(index)) if index.isdigit() else None
        parameter = rest.partition("/")[0]
        if model is not None and parameter in model.parameters:
            return unit_roundoff(model.dtypes[model.parameters.index(parameter)]) or unit_roundoff("float32")
        return unit_roundoff("float32")

    # tensors -------------------------------------------------------------------------------------------------------------------

    def compare_tensors(self, update: int, kind: Content, stage: Stage) -> None:
        """Compare all tensors of ``kind`` after or in ``update``."""
        ours = self.layout.tensors(update, kind)
        theirs = self.reference.tensors(update, kind)
        if kind == "clipped" and bool(ours) != bool(theirs):
            # They are recorded only where clipping changed the gradients.
            ours = ours or self.layout.tensors(update, "reduced")
            theirs = theirs or self.reference.tensors(update, "reduced")
        if kind == "clipped":
            # What no optimizer steps with is not clipped in its sight; that it is missing there is found later.
            known = self.layout.optimized(update)
            ours = {name: one for name, one in ours.items() if name in known}
            theirs = {name: one for name, one in theirs.items() if name in known}
        if not ours or not theirs:
            return
        names = [name for name in theirs if kind in ("reduced", "clipped") or name in ours]
        names += [name for name in ours if name not in theirs and kind in ("reduced", "clipped")]
        explained = self.explained_by_rounding(update, kind, theirs)
        typical = _typical_element(theirs)
        allowed_of = self.allowed.setdefault((update, kind), {})
        for name in names:
            self._compare_copies(update, stage, name, ours.get(name))
            own = ours[name].whole if name in ours else None
            other = theirs[name].whole if name in theirs else None
            if own is not None and other is not None and own.has_bits_of(other):
                self.passed(update, stage)
                allowed_of[name] = explained[name]
                continue
            size = (other or own).num_elements  # type: ignore[union-attr]
            smallest = self.roundoff_of(name) * typical * math.sqrt(size)
            allowed = 0.0 if self.is_bitwise else max(explained.get(name, 0.0), smallest)
            allowed_of[name] = allowed
            self._compare_values(update, stage, name, own, other, allowed)
        if kind in ("weights", "buffers"):
            for name in theirs:
                if name not in ours:
                    self.differ(stage, update, "missing", tensor=name, norm=theirs[name].whole.norm)

    def explained_by_rounding(
        self, update: int, kind: Content, theirs: Mapping[str, RecordedTensor]
    ) -> dict[str, float]:
        """Return the greatest distance of each tensor of the reference that rounding explains."""
        measurements = self.measured(update, kind, theirs)
        model = RoundingModel(list(measurements.values()), probability=self.tolerances.probability)
        terms = self._norms_of_terms(update) if kind in ("reduced", "clipped") else {}
        depth = math.sqrt(self.num_samples(update))
        return {
            # A sum that cancels has the rounding error of its terms: a bias before BatchNorm has no gradient but this error.
            name: max(model.allowed(one), self.roundoff_of(name) * depth * terms.get(name, 0.0))
            for name, one in measurements.items()
        }

    def _norms_of_terms(self, update: int) -> dict[str, float]:
        """Return the sum of the norms of the local gradients whose mean over the ranks is the gradient; of the run where it is greater."""
        result: dict[str, float] = {}
        for run in (self.layout, self.reference):
            own: dict[str, float] = {}
            for local in run.local_gradients(update).values():
                for name, sketch in local.items():
                    own[name] = own.get(name, 0.0) + sketch.norm / run.world_size
            for name, norm in own.items():
                result[name] = max(result.get(name, 0.0), norm)
        return result

    def measured(self, update: int, kind: Content, theirs: Mapping[str, RecordedTensor]) -> dict[str, Measurement]:
        """Return the rounding error of each tensor of the reference."""
        twins = [run.tensors(update, kind) for run in self.twins]
        if kind == "clipped":
            twins = [twin or run.tensors(update, "reduced") for twin, run in zip(twins, self.twins, strict=True)]
        result = {}
        depth = math.sqrt(self.num_samples(update))
        for name, tensor in theirs.items():
            norm = tensor.whole.norm
            floor = self.roundoff_of(name) * depth
            distances = [tensor.whole.distance(twin[name].whole) for twin in twins if name in twin]
            error = max(distances, default=floor * norm * (update - self.reference.first_update + 2))
            freedom = min(tensor.whole.num_elements, NUM_BUCKETS)
            if freedom < NUM_BUCKETS:
                # A sum of few elements may be close to zero by chance; its rounding error is that of its terms.
                norm = self.tolerances.largest_norm(kind, name, norm)
            error = self.tolerances.largest_so_far(kind, name, norm=norm, error=error)
            result[name] = Measurement(norm=norm, error=error, freedom=freedom, floor=floor)
        return result

    def _compare_copies(self, update: int, stage: Stage, name: str, tensor: RecordedTensor | None) -> None:
        if tensor is None or len(tensor.by_rank) < 2:
            return
        unequal = tensor.unequal_ranks()
        if unequal:
            copies = tensor.replicas if tensor.is_sharded else tensor.by_rank
            distance = max(tensor.whole.distance(copies[rank]) for rank in unequal)
            norm = tensor.whole.norm
            self.differ(
                stage,
                update,
                "unequal ranks",
                tensor=name,
                ranks=[next(iter(tensor.by_rank)), *unequal],
                distance=distance,
                norm=norm,
            )

    def _compare_values(
        self, update: int, stage: Stage, name: str, own: Sketch | None, other: Sketch | None, allowed: float
    ) -> None:
        known = own or other
        assert known is not None
        zero = replace(known, projection=np.zeros_like(known.projection), square_sum=0.0, bits=-1, num_nonfinite=0)
        own, other = own or zero, other or zero
        if own.num_nonfinite != other.num_nonfinite:
            values = f"{own.num_nonfinite} elements are inf or nan, {other.num_nonfinite} in the reference run"
            self.differ(stage, update, "nonfinite", tensor=name, values=values, norm=other.norm, allowed=allowed)
            return
        distance = own.distance(other)
        if distance > allowed:
            self.differ(stage, update, "values", tensor=name, distance=distance, norm=other.norm, allowed=allowed)
        else:
            self.passed(update, stage, largest=distance / allowed if allowed else 0.0, equal_bits=distance == 0.0)

    # outputs -------------------------------------------------------------------------------------------------------------------

    def compare_outputs(self, update: int) -> None:
        """Compare the outputs of all modules, sample by sample."""
        known = self._reference_rows(update)
        if not known:
            return
        failed: set[tuple[int, str]] = set()
        for rank in range(self.layout.world_size):
            for forward, call, rows in rows_by_sample(self.layout, update, self.samples, rank=rank):
                output = known.get(_output_key(forward, call))
                if output is None:
                    self.skipped_outputs.add(
                        f"outputs of {forward.module or 'the model'}: a different shape than in the reference run"
                    )
                    continue
                difference = self._compare_rows(update, rank, forward, rows, output)
                # Only the first module that differs in one forward pass is of interest: what follows differs because of it.
                if difference is not None:
                    failed.add((forward.model, forward.module))
                    self.add(difference)

    def _compare_rows(
        self, update: int, rank: int, forward: Forward, rows: list[tuple[int, np.ndarray]], output: _Output
    ) -> RunDifference | None:
        pairs = [(values, output.nearest(sample, values)) for sample, values in rows]
        known = [(values, near) for values, near in pairs if near is not None]
        # A damaged sample gives infinities in both runs.
        known = [(values, near) for values, near in known if np.isfinite(values).all() or np.isfinite(near).all()]
        if not known:
            return None
        with np.errstate(invalid="ignore"):
            squares = np.array([float(np.sum((values - near) ** 2)) for values, near in known])
        norms = np.array([float(np.sum(near**2)) for _, near in known if np.isfinite(near).all()] or [0.0])
        name = f"{forward.model}:{forward.module}"
        count = len(known)
        mean_norm, error = math.sqrt(norms.mean()), output.error
        whole = Measurement(
            norm=mean_norm * math.sqrt(count),
            error=error * math.sqrt(count),
            freedom=min(_ROW_FREEDOM * count, NUM_BUCKETS),
            floor=output.floor,
        )
        row = Measurement(
            norm=max(mean_norm, math.sqrt(norms.max())),
            error=max(error, output.largest_error),
            freedom=_ROW_FREEDOM,
            floor=output.floor,
        )
        model = output.model or RoundingModel([whole], probability=self.tolerances.probability)
        allowed_whole, allowed_row = model.allowed(whole), model.allowed(row)
        if self.is_bitwise:
            allowed_whole = allowed_row = 0.0
        distance, largest = math.sqrt(float(squares.sum())), math.sqrt(float(squares.max()))
        finite = np.isfinite(squares).all()
        if finite and distance <= allowed_whole and largest <= allowed_row:
            ratio = max(
                distance / allowed_whole if allowed_whole else 0.0, largest / allowed_row if allowed_row else 0.0
            )
            self.passed(update, "forward", largest=ratio, equal_bits=distance == 0.0, count=count)
            return None
        return RunDifference(
            "forward",
            update,
            "values" if finite else "nonfinite",
            tensor=name,
            ranks=[rank],
            distance=distance if finite else math.inf,
            norm=whole.norm,
            allowed=allowed_whole,
            share=float(np.mean(~(squares <= allowed_row**2))),
        )

    def _reference_rows(self, update: int) -> dict[tuple[object, ...], _Output]:
        result: dict[tuple[object, ...], _Output] = {}
        twins = [_rows_by_position(run, update) for run in self.twins]
        for rank in range(self.reference.world_size):
            for forward, call, rows in rows_by_sample(self.reference, update, self.samples, rank=rank):
                roundoff = self._output_roundoff(forward)
                output = result.setdefault(_output_key(forward, call), _Output(floor=roundoff))
                place = (rank, forward.micro_step, forward.model, forward.module, call)
                others = [twin[place] for twin in twins if place in twin and len(twin[place]) == len(rows)]
                for index, (sample, values) in enumerate(rows):
                    finite = np.isfinite(values).all()
                    errors = [float(np.linalg.norm(values - other[index])) for other in others if finite]
                    output.add(sample, values, max(errors, default=None))
        for key, output in result.items():
            output.finish(self.tolerances, str(key), update - self.reference.first_update)
        for key, output in result.items():
            peers = [one.measurement() for other, one in result.items() if other[0] == key[0]]
            output.model = RoundingModel(peers, probability=self.tolerances.probability)
        return result

    def _output_roundoff(self, forward: Forward) -> float:
        model = self.reference.models.get(forward.model)
        dtypes = [unit_roundoff(one) for one in model.dtypes] if model else []
        return max(dtypes, default=0.0) or unit_roundoff("float32")


class _Output:
    """The rows of one output of the reference, by sample."""

    def __init__(self, *, floor: float) -> None:
        self.floor = floor
        self.model: RoundingModel | None = None
        self.error = 0.0
        self.largest_error = 0.0
        self._rows: dict[int, list[np.ndarray]] = {}
        self._errors: list[float | None] = []
        self._norm = 0.0

    def add(self, sample: int, values: np.ndarray, error: float | None) -> None:
        self._rows.setdefault(sample, []).append(values)
        if np.isfinite(values).all():
            self._errors.append(error if error is None or math.isfinite(error) else None)

    def finish(self, tolerances: Tolerances, name: str, num_updates: int) -> None:
        norms = [float(np.sum(row**2)) for rows in self._rows.values() for row in rows if np.isfinite(row).all()]
        self._norm = math.sqrt(sum(norms) / len(norms)) if norms else 0.0
        known = [one for one in self._errors if one is not None]
        error = (
            math.sqrt(sum(one * one for one in known) / len(known))
            if known
            else self.floor * self._norm * (num_updates + 2)
        )
        self.error = tolerances.largest_so_far("forward", name, norm=self._norm, error=error)
        self.largest_error = max(known, default=error)

    def measurement(self) -> Measurement:
        count = sum(len(rows) for rows in self._rows.values())
        return Measurement(
            norm=self._norm, error=self.error, freedom=min(_ROW_FREEDOM * count, NUM_BUCKETS), floor=self.floor
        )

    def nearest(self, sample: int, values: np.ndarray) -> np.ndarray | None:
        """Return the reference's row of ``sample``; the nearest if it occurs twice."""
        rows = self._rows.get(sample)
        if not rows or len(rows) == 1:
            return rows[0] if rows else None
        with np.errstate(invalid="ignore"):
            return min(rows, key=lambda row: float(np.sum((row - values) ** 2)))


def _rows_by_position(run: AlignedRun, update: int) -> dict[tuple[object, ...], np.ndarray]:
    return {
        (rank, forward.micro_step, forward.model, forward.module, call): forward.rows
        for rank, one in enumerate(run.ranks_at(update))
        for forward, call in calls_of(one)
    }


def _output_key(forward: Forward, call: int) -> tuple[object, ...]:
    rest = forward.shape[1:] if forward.shape[0] == len(forward.rows) else [forward.shape[0], *forward.shape[2:]]
    if forward.is_without_padding:
        rest = rest[1:]
    return (forward.model, forward.module, call, tuple(rest))


def _typical_element(tensors: Mapping[str, RecordedTensor]) -> float:
    """Return the median over tensors of the root mean square of an element."""
    values = sorted(
        one.whole.norm / math.sqrt(one.whole.num_elements)
        for one in tensors.values()
        if one.whole.num_elements and one.whole.norm
    )
    return values[len(values) // 2] if values else 0.0


def failed_values(differences: Sequence[RunDifference]) -> Iterator[RunDifference]:
    """Yield the differences that have a distance, the greatest relative one first."""
    known = [one for one in differences if one.kind in ("values", "nonfinite", "unequal ranks", "missing")]
    yield from sorted(known, key=lambda one: -(one.relative if one.relative is not None else math.inf))


def structure_differences(comparison: Comparison) -> Iterator[RunDifference]:
    """Yield parameters that only one of the runs has, or that are tied in only one of them."""
    for index, theirs in comparison.reference.models.items():
        ours = comparison.layout.models.get(index)
        if ours is None or not set(ours.parameters) & set(theirs.parameters):
            continue
        found = {
            name: f"{name} is a parameter of its own; in the reference run it is the same parameter as {theirs.tied[name]}"
            for name in ours.parameters
            if name in theirs.tied
        }
        for name in theirs.parameters:
            if name in ours.tied:
                found[name] = (
                    f"{name} is the same parameter as {ours.tied[name]}; in the reference run it is a parameter of its own"
                )
        for name in ours.parameters:
            if name not in theirs.parameters and name not in theirs.tied:
                found[name] = f"the reference run has no parameter {name}"
        for name in theirs.parameters:
            if name not in ours.parameters and name not in ours.tied:
                found[name] = f"the model has no parameter {name}, unlike that of the reference run"
        for name, values in found.items():
            yield RunDifference(
                "initial weights",
                comparison.layout.first_update - 1,
                "structure",
                tensor=f"{index}:{name}",
                values=values,
            )
