"""Learning rates of whole runs, as numbers: accelerate 1.15's by default, the plain loop's with step_scheduler_with_optimizer=False.

``PEERS/bin/torchrun --nproc_per_node N tests/side_by_side/lr_traces.py accelerate [False]`` printed them.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator
from tests.harness import run_on_ranks
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


def _traces(follows: bool) -> dict[str, list[float]]:
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=follows)
    return {name: trace(accelerator, name) for name in PLAIN}


@pytest.mark.parametrize("name", PLAIN)
def test_the_reference_numbers_are_those_of_a_plain_loop(name: str) -> None:
    assert trace(None, name) == pytest.approx(PLAIN[name], abs=1e-8)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_learning_rates_match_accelerate_or_the_plain_loop(world_size: int) -> None:
    for rates in run_on_ranks(_traces, True, world_size=world_size):
        for name in PLAIN:
            expected = ACCELERATE.get((name, world_size), PLAIN[name])
            assert rates[name] == pytest.approx(expected, abs=1e-8), name
    for rates in run_on_ranks(_traces, False, world_size=world_size):
        for name in PLAIN:
            assert rates[name] == pytest.approx(_plain(name, world_size), abs=1e-8), name


def _notes(step_scheduler_with_optimizer: bool, split_batches: bool) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("echelon.accelerator.prepare.prepare_objects")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    accelerator = Accelerator(
        cpu=True, split_batches=split_batches, step_scheduler_with_optimizer=step_scheduler_with_optimizer
    )
    for name in ("onecycle", "onecycle", "linear"):
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.5)
        accelerator.prepare(optimizer, build(name, optimizer, 7))
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return told


def test_rank_zero_reports_once_per_class_how_often_a_scheduler_steps() -> None:
    first, second = run_on_ranks(_notes, True, False, world_size=2)
    assert [line.partition(",")[0] for line in first] == [
        "INFO OneCycleLR steps 2 times per update",
        "INFO LinearLR steps 2 times per update",
    ]
    assert "Accelerator(step_scheduler_with_optimizer=False) to step it once" in first[0]
    assert second == []
    assert run_on_ranks(_notes, False, False, world_size=2) == [[], []]  # the user's choice
    assert run_on_ranks(_notes, True, True, world_size=2) == [[], []]  # the global batch is the loader's
    assert _notes(True, False) == []  # one process


def _rates() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, DataLoader(range(9)))  # type: ignore[arg-type]
    rates = []
    for _ in loader:
        with accelerator.accumulate():
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
