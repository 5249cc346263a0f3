"""Schedules are the formulas of their definitions; optimizers decay the weights that should."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from echelon.base.errors import ConfigError
from echelon.trainer import SchedulerType, TrainingArguments, get_scheduler
from echelon.trainer.optimizers import decay_parameter_names, optimizer_class_and_arguments, parameter_groups

PEAK, WARMUP, TOTAL = 0.5, 4, 20


def _rates(name: str, **more: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = get_scheduler(name, optimizer, WARMUP, TOTAL, more)
    rates = []
    for _ in range(TOTAL + 3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def _up_then(after: Any) -> list[float]:
    return [PEAK * (s / WARMUP if s < WARMUP else after(s)) for s in range(TOTAL + 3)]


def _done(step: int) -> float:
    return (step - WARMUP) / (TOTAL - WARMUP)


def _wave(turns: float) -> float:
    return (1 + math.cos(math.pi * turns)) / 2


def _floored(step: int) -> float:
    return 0.1 + 0.9 * _wave(_done(step))


CASES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("constant", {}, [PEAK] * (TOTAL + 3)),
    ("constant_with_warmup", {}, _up_then(lambda s: 1.0)),
    ("linear", {}, _up_then(lambda s: max(0.0, (TOTAL - s) / (TOTAL - WARMUP)))),
    ("cosine", {}, _up_then(lambda s: _wave(_done(s)))),
    ("cosine", {"num_cycles": 1.5}, _up_then(lambda s: _wave(3 * _done(s)))),
    ("cosine_with_restarts", {"num_cycles": 2}, _up_then(lambda s: _wave(2 * _done(s) % 1) if s < TOTAL else 0.0)),
    (
        "polynomial",
        {"lr_end": 0.05, "power": 2.0},
        _up_then(lambda s: 0.1 + 0.9 * (1 - _done(s)) ** 2 if s <= TOTAL else 0.1),
    ),
    ("inverse_sqrt", {}, _up_then(lambda s: math.sqrt(WARMUP / s))),
    ("inverse_sqrt", {"timescale": 9}, _up_then(lambda s: math.sqrt(9 / (s + 9 - WARMUP)))),
    ("cosine_with_min_lr", {"min_lr": 0.05}, _up_then(_floored)),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, _up_then(_floored)),
    (
        "cosine_warmup_with_min_lr",
        {"min_lr_rate": 0.1},
        [PEAK * ((s + 1) / WARMUP if s < WARMUP else _floored(s + 1)) for s in range(TOTAL + 3)],
    ),
    (
        "cosine_warmup_with_min_lr",
        {"min_lr_rate": 0.1, "warmup_lr_rate": 0.25},
        [PEAK * (0.25 + 0.75 * s / 3 if s < WARMUP else _floored(s + 1)) for s in range(TOTAL + 3)],
    ),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 5, "min_lr_ratio": 0.1},
        [PEAK * (0.1 + 0.9 * s / WARMUP) for s in range(WARMUP)]
        + [PEAK] * (TOTAL - 5 - WARMUP)
        + [PEAK * (0.1 + 0.9 * _wave(s / 5)) for s in range(5)]
        + [PEAK * 0.1] * 3,
    ),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 5, "warmup_type": "cosine", "decay_type": "1-sqrt"},
        [PEAK * (1 - _wave(s / WARMUP)) for s in range(WARMUP)]
        + [PEAK] * (TOTAL - 5 - WARMUP)
        + [PEAK * (1 - math.sqrt(s / 5)) for s in range(5)]
        + [0.0] * 3,
    ),
]


@pytest.mark.parametrize(("name", "more", "expected"), CASES, ids=[f"{n}-{m}" for n, m, _ in CASES])
def test_the_rate_follows_its_formula(name: str, more: dict[str, Any], expected: list[float]) -> None:
    assert _rates(name, **more) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_every_schedule_has_a_formula_but_two() -> None:
    assert {kind.value for kind in SchedulerType} - {name for name, _, _ in CASES} == {"reduce_lr_on_plateau", "greedy"}


@pytest.mark.parametrize(
    ("name", "total", "more", "message"),
    [
        ("cosin", 20, {}, "none of the choices"),
        ("linear", None, {}, "'linear' needs to know where it ends"),
        ("linear", 20, {"cycles": 2}, "'linear' does not take these arguments"),
        ("cosine_with_min_lr", 20, {}, "needs one of min_lr"),
        ("polynomial", 20, {"lr_end": 0.5}, "not below the learning rate 0.5"),
        ("warmup_stable_decay", 20, {}, "does not take these arguments"),
        ("warmup_stable_decay", 20, {"num_decay_steps": 5, "warmup_type": "sine"}, "none of linear, cosine, 1-sqrt"),
    ],
)
def test_a_schedule_that_cannot_be_is_an_error(
    name: str, total: int | None, more: dict[str, Any], message: str
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    with pytest.raises(ConfigError, match=message):
        get_scheduler(name, optimizer, WARMUP, total, more)


def _greedy(values: list[float], **more: Any) -> tuple[list[float], Any]:
    """Return the rate after each of ``values``, and the schedule."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = get_scheduler("greedy", optimizer, scheduler_specific_kwargs={"min_lr": 1e-6, **more})
    rates = []
    for value in values:
        schedule.step(value)  # type: ignore[arg-type]
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, schedule


def test_the_greedy_schedule_rises_while_values_get_better_and_falls_while_they_do_not() -> None:
    falling, flat = [5.0, 4.0, 3.0, 2.0, 1.0], [1.0] * 4
    rates, _ = _greedy(falling + flat, factor=0.5, patience=1, max_lr=3 * PEAK)
    # More than one better value in a row: twice the rate, at most max_lr; more than one other: half of it.
    up = [PEAK, 2 * PEAK, 2 * PEAK, 3 * PEAK, 3 * PEAK]
    assert rates == pytest.approx([*up, 3 * PEAK, 1.5 * PEAK, 1.5 * PEAK, 0.75 * PEAK], rel=1e-12)
    waiting, _ = _greedy(
        [5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0], factor=0.5, patience=0, warmup=2, cooldown=1, max_lr=9.0
    )
    # A rise is followed by two values that count for nothing, a fall by one.
    assert waiting == pytest.approx([2 * PEAK] * 3 + [4 * PEAK] * 3 + [2 * PEAK, 2 * PEAK, PEAK], rel=1e-12)
    again, _ = _greedy([1.0] * 6, factor=0.5, patience=0, min_lr=0.5 * PEAK, max_lr=PEAK, reset_start=2)
    # The first value is better than none. At the least rate twice: all begins anew.
    assert again == pytest.approx([PEAK, 0.5 * PEAK, PEAK, PEAK, 0.5 * PEAK, PEAK], rel=1e-12)
    smooth, _ = _greedy([4.0, 0.0, 2.0, 1.0], factor=0.5, patience=0, smooth=True, window_size=2, max_lr=9.0)
    assert smooth == pytest.approx([2 * PEAK, 4 * PEAK, 8 * PEAK, 4 * PEAK], rel=1e-12)  # of 4, 2, 1, 1.5


@pytest.mark.parametrize("more", [{}, {"smooth": True, "window_size": 3}, {"mode": "max", "threshold_mode": "rel"}])
def test_the_greedy_schedule_is_transformers_and_takes_its_state(more: dict[str, Any]) -> None:
    theirs = pytest.importorskip("transformers.optimization")
    options: dict[str, Any] = {"patience": 1, "cooldown": 1, "warmup": 2, "min_lr": PEAK / 2, "reset_start": 2, **more}
    values = torch.randn(60, generator=torch.Generator().manual_seed(1)).cumsum(0).abs().tolist()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule, expected = theirs.GreedyLR(optimizer, **options), []
    for value in values[:40]:
        schedule.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    rates, ours = _greedy(values[:40], **options)
    assert rates == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 2
    _, taken = _greedy([], **options)
    taken.load_state_dict(schedule.state_dict())
    schedule.load_state_dict(ours.state_dict())
    for value in values[40:]:
        for one in (ours, taken, schedule):
            one.step(value)
        rate = ours.get_last_lr()
        assert taken.get_last_lr() == pytest.approx(rate, rel=1e-12)
        assert schedule.get_last_lr() == pytest.approx(rate, rel=1e-12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.plain = nn.LayerNorm(2)  # by its type, whatever its name
        self.input_norm = nn.BatchNorm1d(2)  # by its name
        self.norm = nn.Linear(2, 2)
        self.normal = nn.Linear(2, 2)  # no norm
        self.RMSNorm = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)


def test_weights_decay_and_biases_and_norms_do_not() -> None:
    model = Block()
    names = decay_parameter_names(model)
    assert names == ["frozen", "linear.weight", "normal.weight"]
    decaying, others = parameter_groups(model, decaying=names, weight_decay=0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decaying["params"]] == [id(model.linear.weight), id(model.normal.weight)]
    assert len(others["params"]) == 11 - 2


@pytest.mark.parametrize(
    ("name", "kind", "arguments"),
    [
        ("adamw_torch", torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
        ("adamw_torch_fused", torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True}),
        ("sgd", torch.optim.SGD, {"lr": 0.1}),
        ("adagrad", torch.optim.Adagrad, {"lr": 0.1}),
        ("rmsprop", torch.optim.RMSprop, {"lr": 0.1}),
        ("adafactor", torch.optim.Adafactor, {"lr": 0.1}),
    ],
)
def test_optimizers_by_name(name: str, kind: type, arguments: dict[str, Any]) -> None:
    args = TrainingArguments(optim=name, learning_rate=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)
    assert optimizer_class_and_arguments(args) == (kind, arguments)
    kind([nn.Parameter(torch.zeros(1))], **arguments)


def test_more_arguments_of_the_optimizer_are_read_from_text() -> None:
    args = TrainingArguments(optim="sgd", optim_args="momentum=0.9, nesterov=True, betas=(0.5, 0.6), mode=fast")
    assert optimizer_class_and_arguments(args)[1] == {
        "lr": 5e-5,
        "momentum": 0.9,
        "nesterov": True,
        "betas": (0.5, 0.6),
        "mode": "fast",
    }
