"""Schedules are the formulas of their definitions, and go on from a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from echelon.base.errors import ConfigError
from echelon.trainer import SchedulerType, Trainer, TrainerCallback, get_scheduler
from tests.trainer_models import DATA, Line, arguments

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
        ("cosin", 20, {}, "is not one of"),
        ("linear", None, {}, "'linear' scheduler needs num_training_steps"),
        ("linear", 20, {"cycles": 2}, "'linear' scheduler does not accept these arguments"),
        ("cosine_with_min_lr", 20, {}, "needs either min_lr"),
        ("polynomial", 20, {"lr_end": 0.5}, "not below the learning rate 0.5"),
        ("polynomial", 20, {"lr_init": 1.0}, "polynomial scheduler has no argument lr_init"),
        ("warmup_stable_decay", 20, {}, "does not accept these arguments"),
        ("warmup_stable_decay", 20, {"num_decay_steps": 5, "warmup_type": "sine"}, "not one of linear, cosine, 1-sqrt"),
    ],
)
def test_a_schedule_that_cannot_be_is_an_error(
    name: str, total: int | None, more: dict[str, Any], message: str
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    with pytest.raises(ConfigError, match=message):
        get_scheduler(name, optimizer, WARMUP, total, more)


def test_schedules_have_the_keyword_names_of_transformers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    common = {"num_warmup_steps": WARMUP, "num_training_steps": TOTAL}
    own: dict[str, dict[str, float]] = {"polynomial": {"lr_end": 0.05}}
    for name in ("linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial"):
        schedule: Any = get_scheduler(name, optimizer, WARMUP, TOTAL, own.get(name))
        more = {**own["polynomial"], "lr_init": PEAK} if name == "polynomial" else {}
        assert schedule.lr_lambdas[0].keywords == {**common, **more}


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


class Cautious:
    """A schedule of somebody's own that torch does not know: it halves the rate where the value is not better."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.best, self.seen = optimizer, float("inf"), [0.0]

    def step(self, metrics: float, epoch: int | None = None) -> None:
        self.seen.append(metrics)
        if metrics >= self.best:
            for group in self.optimizer.param_groups:
                group["lr"] /= 2
        self.best = min(self.best, metrics)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.seen = state["best"], list(state["seen"])


class Sinking(ReduceLROnPlateau):
    """A schedule of somebody's own, of a class of torch."""


def _greedy_of_transformers(optimizer: Any) -> Any:
    return pytest.importorskip("transformers.optimization").GreedyLR(
        optimizer, patience=0, factor=0.5, min_lr=1e-6, max_lr=10.0, smooth=True, window_size=2
    )


class Still(Line):
    """Its loss is one, and its gradients are nothing."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        return {**found, "loss": 0.0 * found["loss"] + 1.0} if "loss" in found else found


_MADE: dict[str, Any] = {
    "foreign": (Cautious, Cautious),
    "greedy": (_greedy_of_transformers, None),
    "sub": (lambda optimizer: Sinking(optimizer, patience=0, factor=0.5), Sinking),
    "torch": (lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5), ReduceLROnPlateau),
    "lambda": (lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step), LambdaLR),
}


def _plateau_args(folder: Path, **options: Any) -> Any:
    return arguments(
        folder, **{"learning_rate": 1.0, "optim": "sgd", "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1,
        "logging_strategy": "steps", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, **options},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", list(_MADE))
@pytest.mark.parametrize("checkpoint_format", ["echelon", "transformers"])
@pytest.mark.parametrize("is_given", [True, False])
def test_the_schedule_is_the_users_own_object_and_goes_on_from_a_checkpoint(
    tmp_path: Path, name: str, checkpoint_format: str, is_given: bool
) -> None:
    make, kind = _MADE[name]
    seen: list[Any] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["lr_scheduler"])

    class Making(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                self.lr_scheduler = make(optimizer)
            return self.lr_scheduler

    def trainer(**options: Any) -> Trainer:
        args = _plateau_args(tmp_path, checkpoint_format=checkpoint_format, **options)
        model = Still()
        rest: dict[str, Any] = {"train_dataset": DATA, "eval_dataset": DATA, "callbacks": [Looks()]}
        if not is_given:
            return Making(model, args, **rest)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return Trainer(model, args, optimizers=(optimizer, make(optimizer)), **rest)

    def rates(one: Trainer) -> list[float]:
        return [entry["learning_rate"] for entry in one.state.log_history if "loss" in entry]

    whole = trainer(output_dir=str(tmp_path / "whole"))
    given = whole.lr_scheduler
    whole.train()
    if kind is not None:
        assert type(whole.lr_scheduler) is kind
    assert given is None or whole.lr_scheduler is given
    assert all(one is whole.lr_scheduler for one in seen)
    # Every value is that of before: no better. (The first one is better than none, and transformers' takes the rate up.)
    expected = [1.0, 2.0, 1.0, 0.5] if name == "greedy" else [1.0, 0.5, 0.25, 0.125] if name == "lambda" else None
    assert rates(whole) == (expected or [1.0, 1.0, 0.5, 0.25])
    trainer(max_steps=2).train()
    again = trainer()
    again.train(resume_from_checkpoint=True)
    assert rates(again) == rates(whole)
    assert again.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict() or name == "lambda"


def test_a_schedule_by_name_is_of_torchs_class_and_a_second_training_steps_it_too(tmp_path: Path) -> None:
    args = _plateau_args(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0})
    trainer = Trainer(Still(), args, train_dataset=DATA, eval_dataset=DATA)
    for _ in range(2):
        trainer.train()
        assert type(trainer.lr_scheduler) is ReduceLROnPlateau
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
        trainer.optimizer.param_groups[0]["lr"] = 1.0
    greedy = Trainer(
        Still(), _plateau_args(tmp_path, lr_scheduler_type="greedy"), train_dataset=DATA, eval_dataset=DATA
    )
    greedy.train()
    assert isinstance(greedy.lr_scheduler, ReduceLROnPlateau)


def test_an_evaluation_before_the_first_step_is_not_told_to_the_schedule(tmp_path: Path) -> None:
    for max_steps, resume in ((2, None), (3, True)):
        model = Still()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule: Any = Cautious(optimizer)
        args = _plateau_args(tmp_path, eval_on_start=True, max_steps=max_steps)
        trainer = Trainer(model, args, optimizers=(optimizer, schedule), train_dataset=DATA, eval_dataset=DATA)
        trainer.train(resume_from_checkpoint=resume)
        assert schedule.seen == [0.0] + max_steps * [1.0]
