"""Learning rates of whole runs (accelerate's or the plain loop's), and schedulers that follow a metric."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.base.errors import DesyncError, UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import all_warnings, heard, marked_line
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain
from tests.side_by_side.lr_traces import SAMPLES, build, trace

# The learning rate before each of the 14 updates of one process, and the one at the end.
# fmt: off
PLAIN = {
    "onecycle": [0.02, 0.12666314, 0.35184402, 0.49538847, 0.49182375, 0.45952219, 0.40587283, 0.33634192, 0.25801386,
                 0.17886939, 0.10697241, 0.04964840, 0.01273801, 0.000002, 0.01273801],
    "cosine": [0.5] * 7 + [0.25] * 7 + [0.0],
    "linear": [0.5, 0.46785714, 0.43571429, 0.40357143, 0.37142857, 0.33928571, 0.30714286, 0.275, 0.24285714,
               0.21071429, 0.17857143, 0.14642857, 0.11428571, 0.08214286, 0.05],
}
# accelerate 1.15.0: after each update the schedule advances once for each process. The cosine, stepped once an epoch and
# built for the two epochs, is at its end after the first one on two processes, and back at its beginning on four.
ACCELERATE = {
    ("onecycle", 2): [0.02, 0.35184402, 0.49182375, 0.40587283, 0.25801386, 0.10697241, 0.01273801, 0.01273801, 0.01273801],
    ("cosine", 2): [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5],
    ("linear", 2): [0.5, 0.43571429, 0.37142857, 0.30714286, 0.24285714, 0.17857143, 0.11428571, 0.05, 0.05],
    ("onecycle", 4): [0.02, 0.49182375, 0.25801386, 0.01273801, 0.01273801],
    ("cosine", 4): [0.5, 0.5, 0.5, 0.5, 0.5],
    ("linear", 4): [0.5, 0.37142857, 0.24285714, 0.11428571, 0.05],
}
# fmt: on


def _plain(name: str, world_size: int) -> list[float]:
    """Return the first updates of the plain loop: one process has as many per epoch as each of several."""
    per_epoch = -(-SAMPLES // world_size)
    if name == "cosine":
        return [0.5] * per_epoch + [0.25] * per_epoch + [0.0]
    return PLAIN[name][: 2 * per_epoch + 1]


def _traces(follows: bool, parity: str = "off") -> dict[str, list[float]]:
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=follows, parity=parity)
    return {name: trace(accelerator, name) for name in PLAIN}


@pytest.mark.parametrize("name", PLAIN)
def test_the_reference_numbers_are_those_of_a_plain_loop(name: str) -> None:
    assert trace(None, name) == pytest.approx(PLAIN[name], abs=1e-8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_learning_rates_match_accelerate_or_the_plain_loop(world_size: int) -> None:
    for rates in run_on_ranks(_traces, True, world_size=world_size):
        for name in PLAIN:
            expected = ACCELERATE.get((name, world_size), PLAIN[name])
            assert rates[name] == pytest.approx(expected, abs=1e-8), name
    for rates in run_on_ranks(_traces, False, world_size=world_size):
        for name in PLAIN:
            assert rates[name] == pytest.approx(_plain(name, world_size), abs=1e-8), name
    for rates in run_on_ranks(_traces, True, "exact", world_size=world_size):  # the batch size is that of all ranks
        for name in PLAIN:
            assert rates[name] == pytest.approx(PLAIN[name], abs=1e-8), name


@pytest.mark.slow
def test_schedules_count_updates_of_any_number_of_micro_steps() -> None:
    programs = [Program(num_samples=22, batch_size=6, schedule=name) for name in ("step", "lambda", "cosine")]
    cuts = [{"world_size": 1}, {"world_size": 2, "max_micro": 2}, {"world_size": 3}]
    require_plain(
        [
            Case(program=replace(program, accumulation=accumulation), layout=Layout(parity="exact", **cut))
            for program in programs
            for accumulation in (1, 2)
            for cut in cuts
        ]
    )


def _notes(step_scheduler_with_optimizer: bool, split_batches: bool) -> list[str]:
    accelerator = Accelerator(
        cpu=True, split_batches=split_batches, step_scheduler_with_optimizer=step_scheduler_with_optimizer
    )
    with heard("echelon.accelerator.prepare.prepare_objects", level=logging.INFO) as told:
        for name in ("onecycle", "onecycle", "linear"):
            optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.5)
            accelerator.prepare(optimizer, build(name, optimizer, 7))
    return told


def test_rank_zero_reports_once_per_class_how_often_a_scheduler_steps() -> None:
    first, second = run_on_ranks(_notes, True, False, world_size=2)
    assert [line.partition(",")[0] for line in first] == [
        "OneCycleLR steps 2 times per update",
        "LinearLR steps 2 times per update",
    ]
    assert "Accelerator(step_scheduler_with_optimizer=False) to step it once" in first[0]
    assert second == []
    assert run_on_ranks(_notes, False, False, world_size=2) == [[], []]  # the user's choice
    assert run_on_ranks(_notes, True, True, world_size=2) == [[], []]  # the global batch is the loader's
    assert _notes(True, False) == []  # one process


def _rates() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model: Any = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    loader: Any = DataLoader(range(9))  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    rates = []
    for _ in loader:
        with accelerator.accumulate():
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            if accelerator.sync_gradients:
                rates.append(scheduler.get_last_lr()[0])
    return rates


def test_one_cycle_counts_updates_not_micro_steps() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    expected = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        expected.append(scheduler.get_last_lr()[0])
    assert run_on_ranks(_rates, world_size=1) == [expected]


SAME = [[1.0, 1.0], [0.9, 0.9], [0.95, 0.95], [0.96, 0.96], [0.97, 0.97]]
OWN = [[1.0, 2.0], [0.9, 3.0], [0.8, 1.0], [0.7, 2.5], [0.6, 2.6]]  # rank 0 alone would never reduce


def _plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=1, factor=0.5)


def _plain_plateau(metrics: Sequence[float]) -> list[float]:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    scheduler = _plateau(optimizer)
    rates = []
    for metric in metrics:
        optimizer.step()
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def _train(
    metrics: list[list[float]], options: dict[str, Any], form: str
) -> tuple[list[float], list[tuple[str, str]], str]:
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, _plateau(optimizer))
    rates, text = [], ""
    with all_warnings() as caught:
        try:
            for row in metrics:
                metric: Any = row[accelerator.process_index]
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
                if form == "tensor":
                    scheduler.step(torch.tensor(metric, dtype=torch.float64))
                elif form == "keyword":
                    scheduler.step(metrics=metric)
                elif form == "main process" and not accelerator.is_main_process:
                    accelerator.wait_for_everyone()
                else:
                    scheduler.step(metric)  # STEP
                rates.append(optimizer.param_groups[0]["lr"])
        except UsageError as error:
            text = str(error)
    said = [(str(w.message), f"{Path(w.filename).name}:{w.lineno}") for w in caught if w.category is EchelonWarning]
    return rates, said, text


@pytest.mark.parametrize("options", [{}, {"step_scheduler_with_optimizer": False}, {"parity": "exact", "seed": 0}])
@pytest.mark.parametrize("form", ["float", "tensor", "keyword"])
def test_equal_metrics_step_once_as_in_a_plain_loop(form: str, options: dict[str, Any]) -> None:
    expected = _plain_plateau([row[0] for row in SAME])
    assert len(set(expected)) > 1
    for rates, said, text in run_on_ranks(_train, SAME, options, form, world_size=2):
        assert (rates, said, text) == (expected, [], "")


@pytest.mark.parametrize("form", ["float", "keyword"])
def test_metrics_that_differ_are_averaged_with_one_warning(form: str) -> None:
    expected = _plain_plateau([(one + other) / 2 for one, other in OWN])
    assert expected != _plain_plateau([row[0] for row in OWN])
    first, second = run_on_ranks(_train, OWN, {}, form, world_size=2)
    assert first[0] == second[0] == expected
    ((text, line),) = first[1]
    assert second[1] == []
    assert "ReduceLROnPlateau" in text
    assert "rank 0: 1.0, rank 1: 2.0" in text
    assert "their mean, 1.5" in text
    assert "accelerator.reduce(metric, 'mean')" in text
    assert line == marked_line(__file__) or form == "keyword"


def test_metrics_that_differ_are_an_error_in_an_exact_mode() -> None:
    for _, said, text in run_on_ranks(_train, OWN, {"parity": "exact", "seed": 0}, "float", world_size=2):
        assert said == []
        assert "rank 0: 1.0, rank 1: 2.0" in text
        assert marked_line(__file__) in text


def test_a_step_on_one_rank_alone_is_named() -> None:
    with pytest.raises(RanksFailed, match=rf"(?s){DesyncError.__name__}: .*rank 0: scheduler.step\(metric\) at"):
        run_on_ranks(_train, SAME, {}, "main process", world_size=2)


def test_one_process_is_the_plain_loop() -> None:
    assert _train(OWN, {}, "float") == (_plain_plateau([row[0] for row in OWN]), [], "")
