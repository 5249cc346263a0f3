"""Schedulers that follow a metric: one step per call, the same learning rate on every rank, never a silent difference."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from echelon import Accelerator
from echelon.base.errors import DesyncError, UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import marked_line

SAME = [[1.0, 1.0], [0.9, 0.9], [0.95, 0.95], [0.96, 0.96], [0.97, 0.97]]
OWN = [[1.0, 2.0], [0.9, 3.0], [0.8, 1.0], [0.7, 2.5], [0.6, 2.6]]  # rank 0 alone would never reduce


def _plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=1, factor=0.5)


def _plain(metrics: Sequence[float]) -> list[float]:
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
    expected = _plain([row[0] for row in SAME])
    assert len(set(expected)) > 1
    for rates, said, text in run_on_ranks(_train, SAME, options, form, world_size=2):
        assert (rates, said, text) == (expected, [], "")


@pytest.mark.parametrize("form", ["float", "keyword"])
def test_metrics_that_differ_are_averaged_with_one_warning(form: str) -> None:
    expected = _plain([(one + other) / 2 for one, other in OWN])
    assert expected != _plain([row[0] for row in OWN])
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
    assert _train(OWN, {}, "float") == (_plain([row[0] for row in OWN]), [], "")
