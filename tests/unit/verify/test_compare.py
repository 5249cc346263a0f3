"""echelon verify's comparison: planted faults of simulated runs are found at the right stage, and clean runs raise no alarm."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.distributed.checks.finding import Finding, Stage
from echelon.distributed.checks.sketch import Sketch, sketch_of
from echelon.verify.compare import CompareOptions, compare, gradient_errors
from echelon.verify.comparison.gradient_causes import ratio_between, scale_between
from echelon.verify.comparison.tolerance import f_quantile
from echelon.verify.finding import Verdict
from echelon.verify.trace import (
    Batch,
    Clip,
    Forward,
    Loss,
    Model,
    OptimizerStep,
    Rng,
    SketchedTensors,
    Trace,
)
from tests.simulated_training import Setting, reference_of, simulate

GRADIENTS = ("local", "reduced", "clipped")


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault and what must be found."""

    name: str
    stage: Stage
    cause: str
    tensor: str = ""
    """One of the finding's tensors, the first one if the stage has an order."""
    update: int = 1
    setting: dict[str, Any] = field(default_factory=dict)
    is_resumed: bool = False


# What the planted faults of ``tests/mutants`` do not show, and one fault of each stage or two that is found quickly.
FAULTS = [
    Fault("different initial weights", "initial weights", "different initial weights", update=-1),
    Fault("same samples", "data", "same samples on every rank"),
    Fault("shifted by a micro-batch", "data", "shifted by samples"),
    Fault("sharded twice", "data", "sharded twice", setting={"num_samples": 256}),
    Fault("left out", "data", "samples left out"),
    Fault("augmented", "data", "different contents", update=0),
    Fault("ends early", "data", "different number of updates", update=3),
    Fault("equal generators", "rng", "same dropout masks on every rank"),
    Fault("one wrong row", "forward", "", tensor="0:first"),
    Fault("evaluation mode", "forward", "", tensor="0:"),
    Fault("averaged per rank", "loss weight", "loss averaged per rank", setting={"is_ragged": True}),
    Fault(
        "averaged per rank", "loss weight", "loss averaged per micro-step", setting={"is_ragged": True, "world_size": 1}
    ),
    Fault("not divided", "loss weight", "not divided by the micro-steps", setting={"num_micro_steps": 3}),
    Fault("backward scaled", "backward", "backward scaled"),
    Fault("wrong backward on a rank", "backward", "", tensor="0:first.weight"),
    Fault("not reduced", "reduce", "not reduced"),
    Fault("only the last reduced", "reduce", "only the last micro-step reduced"),
    Fault("unused on a rank", "forward", "", tensor="0:"),
    Fault("reduced in bfloat16", "reduce", "reduced in low precision"),
    Fault("missing gradient", "reduce", "gradient missing", tensor="0:first.bias"),
    Fault("norm of a shard", "clip", "norm of one shard", setting={"is_sharded": True}),
    Fault("scheduler steps W times", "scheduler", "scheduler stepped num_processes times"),
    Fault("silent decay", "optimizer", ""),
    Fault("steps counted W times", "optimizer", "", update=0),
    Fault("skipped on a rank", "optimizer", "step skipped"),
    Fault("swapped states", "optimizer", "optimizer state of another parameter", tensor="0:first.weight/exp_avg"),
    Fault("drift", "optimizer", "ranks step apart", tensor="0:first.weight"),
    Fault("old gradients", "optimizer", "step with old gradients", setting={"optimizer": "sgd"}),
    Fault("stale buffers", "buffers", "stale buffers", tensor="0:norm.running_mean"),
    Fault("saved too early", "save", "wrong state saved"),
    Fault("shard not saved", "save", "state missing from the checkpoint", setting={"is_sharded": True}),
    Fault("older state", "load", "state of a different update", is_resumed=True),
]


@cache
def _traces_of_reference(setting: Setting) -> tuple[Trace, Trace]:
    return simulate(setting), simulate(reference_of(setting, dtype=torch.float64))


def _verdict(setting: Setting, *, is_resumed: bool = False) -> Verdict:
    reference, exact = _traces_of_reference(reference_of(setting))
    if is_resumed:
        # Compared with the uninterrupted run on the same ranks, whose generators are known, too.
        clean = Setting(
            **{name: getattr(setting, name) for name in Setting.__dataclass_fields__}
            | {"fault": "", "first_update": 0, "num_updates": setting.num_updates + setting.first_update}
        )
        reference, exact = simulate(clean), simulate(reference_of(clean, dtype=torch.float64))
    return compare(simulate(setting), reference, exact, options=CompareOptions(is_resumed=is_resumed))


def _finding(fault: Fault) -> Finding:
    changes = dict(fault.setting)
    if fault.is_resumed:
        changes |= {"first_update": 2, "num_updates": 2}
    at = changes.pop("at", 0 if fault.update <= 0 else 1)
    verdict = _verdict(Setting(fault=fault.name, at=at, **changes), is_resumed=fault.is_resumed)
    assert verdict.result == "different"
    assert verdict.finding is not None
    return verdict.finding


# One fault of each stage or two in the ordinary run, all in the long one.
OFTEN = (
    "different initial weights", "same samples", "equal generators", "one wrong row", "averaged per rank", "not divided", "backward scaled",
    "not reduced", "reduced in bfloat16", "norm of a shard", "scheduler steps W times", "drift", "stale buffers", "older state",
)  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=() if one.name in OFTEN else pytest.mark.soak) for one in FAULTS],
    ids=lambda fault: f"{fault.name}-{fault.cause or fault.stage}",
)
def test_a_planted_fault_is_named(fault: Fault) -> None:
    finding = _finding(fault)
    expected_update = 1 if fault.is_resumed and fault.stage == "load" else fault.update
    assert (finding.stage, finding.cause, finding.update) == (fault.stage, fault.cause, expected_update), finding
    assert not fault.tensor or fault.tensor in finding.tensors, finding
    assert finding.do
    assert finding.line or finding.stage != "reduce", finding


@pytest.mark.parametrize("name", ["", "weights not restored", "buffers not restored"])
def test_both_processes_of_a_resumed_run_may_be_one_trace(name: str) -> None:
    before, after = Setting(num_updates=2), Setting(num_updates=2, first_update=2, fault=name)
    joined = Trace(
        ranks=[first + second for first, second in zip(simulate(before).ranks, simulate(after).ranks, strict=True)]
    )
    reference, exact = _traces_of_reference(reference_of(Setting()))
    verdict = compare(joined, reference, exact, options=CompareOptions(is_resumed=True))
    if not name:
        assert verdict.result == "same", verdict.finding
        return
    assert verdict.finding is not None
    assert (verdict.finding.stage, verdict.finding.update, verdict.finding.cause) == ("load", 1, name)


def _changed(trace: Trace, kind: type, **changes: Any) -> Trace:
    """Return the trace with attributes of all events of a kind replaced by functions of the event."""
    ranks = [
        [replace(e, **{n: f(e) for n, f in changes.items()}) if isinstance(e, kind) else e for e in rank]
        for rank in trace.ranks
    ]
    return Trace(ranks=ranks)


def _damaged(forward: Forward) -> np.ndarray:
    rows = forward.rows.copy()
    rows[rows[:, 0] > 0.0] = np.inf
    return rows


def test_a_damaged_sample_gives_infinities_in_both_runs() -> None:
    reference, exact = _traces_of_reference(reference_of(Setting()))
    runs = [_changed(one, Forward, rows=_damaged) for one in (simulate(Setting()), reference, exact)]
    assert any(not np.isfinite(e.rows).all() for rank in runs[0].ranks for e in rank if isinstance(e, Forward))
    assert compare(*runs).result == "same"
    verdict = compare(runs[0], reference, exact)
    assert verdict.finding is not None
    assert verdict.finding.stage == "forward"


@pytest.mark.parametrize(("shift", "result"), [(3e-8, "same"), (0.05, "different")])
def test_a_rate_that_follows_a_measured_loss_has_its_rounding_error(shift: float, result: str) -> None:
    """The rate of an update is that of the loss of an evaluation; both runs round it."""
    reference, exact = _traces_of_reference(reference_of(Setting()))

    def rates(error: float) -> Any:
        return lambda step: [rate * (1 + error * (1 + step.update)) for rate in step.lrs]

    verdict = compare(
        _changed(simulate(Setting()), OptimizerStep, lrs=rates(shift)),
        _changed(reference, OptimizerStep, lrs=rates(1e-8)),
        exact,
    )
    assert verdict.result == result, verdict.finding
    assert result == "same" or (verdict.finding is not None and verdict.finding.stage == "scheduler")


def _random_setting(seed: int) -> Setting:
    choice = random.Random(seed)
    return Setting(
        seed=seed,
        world_size=choice.choice([1, 2, 3, 4]),
        batch_size=choice.choice([1, 2, 4, 8]),
        num_micro_steps=choice.choice([1, 2, 3]),
        dtype=choice.choice([torch.float32, torch.bfloat16]),
        is_ragged=choice.random() < 0.5,
        is_sharded=choice.random() < 0.3,
        optimizer=choice.choice(["adamw", "sgd"]),
        lr=choice.choice([0.001, 0.01, 0.05]),
        width=choice.choice([4, 12, 32]),
        activation=choice.choice(["tanh", "relu"]),
        max_norm=choice.choice([None, 1.0, 100.0]),
    )


def _confirmed_verdict(setting: Setting) -> Verdict:
    """Return the verdict as ``echelon verify`` reaches it: a difference that may be rounding must be confirmed."""
    reference, exact = _traces_of_reference(reference_of(setting))
    layout = simulate(setting)
    verdict = compare(layout, reference, exact)
    if verdict.finding is not None and verdict.finding.may_be_rounding:
        errors = tuple(gradient_errors(reference, exact, world_size=setting.world_size).items())
        settings = [reference_of(setting, perturbation=one, gradient_errors=errors) for one in range(1, 5)]
        perturbed = [simulate(one) for one in settings]
        verdict = compare(layout, reference, exact, perturbed=perturbed)
    return verdict


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 60))])
def test_a_clean_run_raises_no_alarm(seed: int) -> None:
    setting = replace(_random_setting(seed), num_updates=4 if seed < 3 else 20)
    verdict = _confirmed_verdict(setting)
    assert verdict.result == "same", (setting, verdict.finding)
    assert verdict.num_updates == setting.num_updates


def test_the_allowed_distance_is_measured_and_not_set() -> None:
    """The same training in bfloat16 has a rounding error 2**16 times as great; a difference of 1e-4 is found only in float32."""
    for dtype, result in ((torch.float32, "different"), (torch.bfloat16, "same")):
        setting = Setting(dtype=dtype, fault="changed on all ranks")
        assert _verdict(setting).result == result


@pytest.mark.parametrize(
    ("left_out", "stage"),
    [
        ((Forward,), "forward"),
        ((Batch,), "data"),
        (("buffers",), "buffers"),
        (("optimizer_state", "weights"), "optimizer"),
        (GRADIENTS, "reduce"),
        (("optimizer_state", Rng), "rng"),
    ],
)
def test_what_is_not_recorded_is_not_compared(left_out: tuple[type | str, ...], stage: Stage) -> None:
    setting = Setting(num_updates=2)
    layout, (reference, exact) = simulate(setting), _traces_of_reference(reference_of(setting))
    verdict = compare(_without(layout, left_out), reference, exact)
    assert verdict.result == "same", verdict.finding
    coverage = {one.stage: one for one in verdict.coverage}
    if stage != "optimizer":  # its steps are still compared
        assert coverage[stage].num_compared == 0
        assert coverage[stage].missing
    full = compare(layout, reference, exact)
    assert all(one.num_compared for one in full.coverage if one.stage not in ("load", "save"))


@pytest.mark.parametrize(("max_norm", "is_clipped"), [(9.0, False), (0.25, True)])
def test_a_clipping_call_in_each_micro_step(max_norm: float, is_clipped: bool) -> None:
    """The first call sees each rank's own gradient; if that is below the limit, the call changes nothing."""
    setting = Setting()
    layout = simulate(setting)
    for rank, events in enumerate(layout.ranks):
        for own in [
            one for one in events if isinstance(one, SketchedTensors) and (one.content, one.micro_step) == ("local", 0)
        ]:
            clip = Clip(update=own.update, micro_step=1, norm=0.5 + rank, max_norm=max_norm, line="train.py:9")
            place = events.index(own) + 1
            events[place:place] = [replace(own, content="reduced"), clip]
            if is_clipped:  # so the reduced gradient is another
                for i, one in enumerate(events):
                    if (
                        isinstance(one, SketchedTensors)
                        and (one.content, one.update) == ("reduced", own.update)
                        and one.micro_step
                    ):
                        events[i] = replace(one, sketches=[sketch + sketch for sketch in one.sketches])
    verdict = compare(layout, simulate(reference_of(setting)))
    if not is_clipped:
        assert verdict.result == "same", verdict.finding
        return
    assert verdict.finding is not None
    assert (verdict.finding.cause, verdict.finding.line) == ("clipped before the reduction", "train.py:9")
    assert (
        "after 1 of the 2 backward passes of the update, before they are averaged over the ranks: each rank clips its own (norm on "
        "rank 0: 0.5, rank 1: 1.5; max_norm: 0.25)" in verdict.finding.why
    )


def test_losses_and_local_gradients_count_as_compared_where_the_reduced_gradient_differs() -> None:
    setting = Setting(num_updates=2, fault="averaged per rank", at=0, is_ragged=True)
    layout, (reference, exact) = simulate(setting), _traces_of_reference(reference_of(setting))
    coverage = {one.stage: one for one in compare(layout, reference, exact).coverage}
    for stage in ("loss weight", "backward"):
        assert coverage[stage].num_compared > 0
        assert not coverage[stage].missing
    reduced = _without(layout, GRADIENTS)
    coverage = {one.stage: one for one in compare(reduced, reference, exact).coverage}
    assert coverage["loss weight"].missing == ["no gradients at an optimizer step were recorded"]  # the losses were
    assert coverage["backward"].missing[0].startswith("the gradients of a rank before the average")


def test_a_scale_of_nearly_1_is_no_cause() -> None:
    generator = np.random.default_rng(0)
    theirs, noise = {"w": generator.normal(size=32)}, generator.normal(size=32)
    limits = {"w": 1e-3 * float(np.linalg.norm(theirs["w"]))}
    near = {"w": theirs["w"] + 1.5 * limits["w"] * noise / float(np.linalg.norm(noise))}
    assert ratio_between(near, theirs, limits, ["w"]) == pytest.approx(1.0, abs=2e-3)
    assert scale_between(near, theirs, limits, ["w"]) is None
    assert scale_between({"w": 1.005 * theirs["w"]}, theirs, limits, ["w"]) == pytest.approx(1.005)
    assert scale_between({"w": theirs["w"].copy()}, theirs, limits, ["w"]) is None


@pytest.mark.parametrize(("kind", "drawn"), [("Dropout", "dropout masks"), ("Linear", "random numbers")])
def test_what_equal_generators_draw_is_called_by_its_name(kind: str, drawn: str) -> None:
    setting = Setting(num_updates=2, fault="equal generators")
    layout = _changed(simulate(setting), Model, module_classes=lambda _: {"first": kind})
    reference, exact = _traces_of_reference(reference_of(setting))
    found = compare(layout, reference, exact).finding
    assert found is not None
    assert found.cause == f"same {drawn} on every rank"
    assert found.what == f"ranks 0, 1 draw the same {drawn}"


def test_equal_masks_under_a_trainer_are_a_remark_and_no_difference() -> None:
    """transformers' Trainer, too, gives all ranks one seed: with everything else equal, the run is the same."""
    setting = Setting(num_updates=2, fault="equal generators")
    layout = _changed(simulate(setting), Loss, trainer_code=lambda _: "compute_loss")
    reference, exact = _traces_of_reference(reference_of(setting))
    verdict = compare(layout, reference, exact)
    assert (verdict.result, verdict.finding, verdict.exit_code) == ("same", None, 0)
    (remark,) = verdict.remarks
    assert (remark.stage, remark.update, remark.ranks) == ("rng", 1, [0, 1])
    assert "set_seed(args.seed, device_specific=True); trainer.train()" in remark.do


@pytest.mark.parametrize(
    ("code", "source", "remedy"),
    [
        ("", "accelerator.backward(loss)", "accelerator.backward(loss, num_items=(labels != -100).sum())"),
        (
            "",
            "accelerator.backward(loss, num_items=labels.numel())",
            "num_items=(labels != -100).sum(), without padding",
        ),
        (
            "compute_loss",
            "loss = F.cross_entropy(x, y)",
            "return loss * self.accelerator.num_processes / num_items_in_batch",
        ),
        ("model", "loss = F.cross_entropy(x, y)", 'divide it by kwargs["num_items_in_batch"]'),
        ("library", "trainer.train()", "leave average_tokens_across_devices at True"),
    ],
)
def test_the_remedy_for_unequal_items_fits_the_script(code: str, source: str, remedy: str, tmp_path: Path) -> None:
    """What the line already does is not advised again, and a Trainer script has no backward()."""
    (tmp_path / "train.py").write_text(f"import torch\n{source}\n")
    setting = Setting(num_updates=2, fault="averaged per rank", at=0, is_ragged=True)
    line = f"{tmp_path / 'train.py'}:2"
    layout = _changed(simulate(setting), Loss, trainer_code=lambda _: code, line=lambda _: line)
    found = compare(layout, *_traces_of_reference(reference_of(setting))).finding
    assert found is not None
    assert (found.cause, found.line) == ("loss averaged per rank", line)
    assert remedy in found.do


def test_each_figure_names_its_ranks_and_its_bound() -> None:
    setting = Setting(num_updates=2, fault="averaged per rank", at=0, is_ragged=True)
    found = compare(simulate(setting), *_traces_of_reference(reference_of(setting))).finding
    assert found is not None
    assert found.measured == f"{found.tensors[0]} on 2 processes"
    assert 0 < (found.allowed or 0) < (found.difference or 0)
    assert re.search(r"tokens \(rank 0: \d+, rank 1: \d+\)", found.why), found.why


@pytest.mark.parametrize(("size", "is_rounding"), [(0.9, True), (100.0, False)])
def test_a_gradient_of_rounding_errors_alone_is_measured_by_its_terms(size: float, is_rounding: bool) -> None:
    """A bias before BatchNorm has local gradients that cancel: what is left of them is rounding, and no measure of it."""
    setting = Setting(num_updates=1, optimizer="sgd", max_norm=None)
    layout, (reference, exact) = simulate(setting), _traces_of_reference(reference_of(setting))
    local = [e for rank in layout.ranks for e in rank if isinstance(e, SketchedTensors) and e.content == "local"]
    terms = sum(10 * one.sketches[one.names.index("0:norm.weight")].norm for one in local) / setting.world_size
    rounding = size * 2.0**-24 * np.sqrt(16) * terms  # of a sum over 16 samples

    def cancelled(trace: Trace, value: float) -> Trace:
        def sketches(event: SketchedTensors) -> list[Sketch]:
            found = list(event.sketches)
            if event.content not in GRADIENTS:
                return found
            index, whole = event.names.index("0:norm.weight"), event.content == "reduced"
            found[index] = sketch_of(torch.full((12,), value / 12**0.5)) if whole else _times(found[index], 10.0)
            return found

        return _changed(trace, SketchedTensors, sketches=sketches)

    ours, theirs = cancelled(layout, -rounding / 2), cancelled(reference, rounding / 2)
    found = compare(ours, theirs, cancelled(exact, rounding / 2)).finding
    assert (found is None) == is_rounding, found


def _times(sketch: Sketch, factor: float) -> Sketch:
    return replace(sketch, projection=factor * sketch.projection, square_sum=factor**2 * sketch.square_sum, bits=1)


@pytest.mark.parametrize(
    ("parity", "num_extra", "is_same"),
    [("exact", 1, True), ("bitwise", 1, True), ("off", 1, False), ("exact", 9, False)],
)
def test_samples_that_fill_up_a_global_batch_have_no_weight_under_exact_parity(
    parity: str, num_extra: int, is_same: bool
) -> None:
    setting = Setting(num_updates=2)
    reference, exact = _traces_of_reference(reference_of(setting))
    layout = _changed(simulate(setting), Model, parity=lambda _: parity)
    last = [
        replace(e, rows=[*e.rows, *e.rows[:1] * num_extra]) if isinstance(e, Batch) and e.micro_step else e
        for e in layout.ranks[1]
    ]
    verdict = compare(_without(Trace(ranks=[layout.ranks[0], last]), (Forward,)), reference, exact)
    assert (verdict.result == "same") == is_same, verdict.finding
    assert is_same or (verdict.finding is not None and verdict.finding.stage == "data")


def test_nan_is_equal_to_nan() -> None:
    """Gradients that are clipped by value have no norm; a setting or a rate may be nan in both runs."""
    runs = [simulate(Setting()), *_traces_of_reference(reference_of(Setting()))]
    runs = [_changed(one, Clip, norm=lambda _: float("nan"), max_norm=lambda _: float("nan")) for one in runs]
    settings = lambda _: [{"eps": float("nan")}]  # noqa: E731
    runs = [_changed(one, OptimizerStep, lrs=lambda _: [float("nan")], settings=settings) for one in runs]
    verdict = compare(*runs)
    assert verdict.result == "same", verdict.finding


def test_a_run_that_recorded_nothing_is_not_comparable() -> None:
    setting = Setting(num_updates=2)
    layout, (reference, exact) = simulate(setting), _traces_of_reference(reference_of(setting))
    lost = Trace(ranks=[layout.ranks[0], []])
    verdict = compare(lost, reference, exact)
    assert (verdict.result, verdict.reason, verdict.exit_code) == (
        "not comparable",
        "no step was recorded on rank(s) 1",
        2,
    )


def test_without_the_float64_run_bounds_are_used() -> None:
    setting = Setting()
    reference, _ = _traces_of_reference(reference_of(setting))
    verdict = compare(simulate(setting), reference)
    assert verdict.result == "same", verdict.finding
    assert any("no reference run in float64" in note for note in verdict.notes)
    assert compare(simulate(replace(setting, fault="summed")), reference).exit_code == 1


def _rank_1_without_steps(trace: Trace, *, has_steps_until: int) -> Trace:
    """Rank 1 never ends the update in which it does not step, so that its micro-steps go on."""
    kept: list[Any] = []
    for event in trace.ranks[1]:
        later = getattr(event, "update", -1) - has_steps_until
        if later < 0:
            kept.append(event)
        elif isinstance(event, (Batch, Forward, Loss, Rng)):
            kept.append(replace(event, update=has_steps_until, micro_step=10 * later + event.micro_step))
    return Trace(ranks=[trace.ranks[0], kept])


@pytest.mark.parametrize("begin", [0, 2])
def test_a_run_that_hangs_because_a_rank_does_not_step(begin: int) -> None:
    setting = Setting(num_updates=5)
    reference, exact = _traces_of_reference(reference_of(setting))
    options = CompareOptions(has_failed=True)
    verdict = compare(
        _rank_1_without_steps(simulate(setting), has_steps_until=begin), reference, exact, options=options
    )
    assert verdict.finding is not None
    assert (verdict.finding.update, verdict.finding.stage, verdict.finding.ranks) == (begin, "optimizer", [1])
    assert "without an optimizer step" in verdict.finding.what


def test_a_run_that_hangs_because_a_rank_is_in_evaluation_mode() -> None:
    setting = Setting(num_updates=5)
    reference, exact = _traces_of_reference(reference_of(setting))
    ranks = [
        simulate(setting).ranks[0],
        [
            replace(event, is_in_evaluation_mode=True) if isinstance(event, Loss) else event
            for event in _without(simulate(setting), (Batch, Forward, Rng)).ranks[1]
        ],
    ]
    verdict = compare(Trace(ranks=ranks), reference, exact)
    assert verdict.finding is not None
    assert (verdict.finding.update, verdict.finding.stage, verdict.finding.ranks) == (0, "forward", [1])
    assert verdict.finding.cause == "not in training mode"


@pytest.mark.sample(4)
@pytest.mark.parametrize("count", range(0, 120, 7))
def test_a_failed_run_without_a_fault_raises_no_alarm(count: int) -> None:
    """A rank may end anywhere: ``count`` events before the other's end."""
    setting = Setting(num_updates=3)
    layout, (reference, exact) = simulate(setting), _traces_of_reference(reference_of(setting))
    cut = Trace(ranks=[layout.ranks[0], layout.ranks[1][: len(layout.ranks[1]) - count]])
    verdict = compare(cut, reference, exact, options=CompareOptions(has_failed=True))
    assert verdict.finding is None, verdict.finding


def test_rates_are_compared_by_parameter_where_groups_differ() -> None:
    setting = Setting(num_updates=2)
    layout, (reference, exact) = simulate(setting), _traces_of_reference(reference_of(setting))

    def in_two_groups(factor: float) -> Trace:
        def split(event: Any) -> Any:
            if not isinstance(event, OptimizerStep):
                return event
            names = list(event.group_of)
            groups = {name: event.group_of[name] + (index > 1) * len(event.lrs) for index, name in enumerate(names)}
            rates = [*event.lrs, *(rate * factor for rate in event.lrs)]
            return replace(event, lrs=rates, settings=[*event.settings, *event.settings], group_of=groups)

        return Trace(ranks=[[split(event) for event in events] for events in layout.ranks])

    assert compare(in_two_groups(1.0), reference, exact).result == "same"
    wrong = compare(in_two_groups(2.0), reference, exact).finding
    assert wrong is not None
    assert (wrong.update, wrong.stage) == (0, "scheduler")


def _without(trace: Trace, left_out: tuple[type | str, ...]) -> Trace:
    """Return the trace without events of these types, or tensors of these contents."""
    ranks = [
        [event for event in events if type(event) not in left_out and getattr(event, "content", "") not in left_out]
        for events in trace.ranks
    ]
    return Trace(ranks=ranks)


@pytest.mark.parametrize(
    ("probability", "numerator", "denominator", "expected"),
    # Source: R's qf(1 - probability, numerator, denominator)
    [(0.05, 3, 20, 3.098), (0.001, 32, 32, 3.09), (0.01, 1, 10, 10.04), (0.05, 10, 1, 241.9)],
)
def test_quantiles_of_the_f_distribution(probability: float, numerator: int, denominator: int, expected: float) -> None:
    # The logarithm of the probability is rounded to one decimal, so that quantiles can be kept.
    assert f_quantile(probability, numerator, denominator) == pytest.approx(expected, rel=0.12)
