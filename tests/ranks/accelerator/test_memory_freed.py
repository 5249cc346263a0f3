"""echelon keeps no references to models that a program has released, nor threads of a closed process group."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator
from echelon.world.group import close_group
from tests.harness import run_on_ranks

_TASKS = Path("/proc/self/task")


def _num_groups(*, patience_s: float = 0.0, enough: int = 0) -> int:
    """Count the process groups by their gloo threads; a thread that is ending takes a while."""
    deadline = time.monotonic() + patience_s
    while True:
        names = [read for path in _TASKS.glob("*/comm") if (read := _read(path))]
        found = names.count("gloo_tcp_loop\n")
        if found <= enough or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended since it was listed
        return ""


def _train_and_let_go(engine: str) -> bool:
    """Return whether the model of a short training run still exists after its last reference is gone."""
    accelerator = Accelerator(cpu=True, engine=engine)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    watched = weakref.ref(accelerator.unwrap_model(model))
    del accelerator, model, optimizer
    gc.collect()
    return watched() is not None


def _rounds(engine: str) -> tuple[list[bool], int]:
    """Train four times, each with a new group; return the result of each time and the number of remaining groups."""
    kept = []
    before = _num_groups()  # from earlier tests in this process
    for _ in range(4):
        kept.append(_train_and_let_go(engine))
        close_group()
        gc.collect()
    return kept, _num_groups(patience_s=10, enough=before + 2) - before


# DeepSpeed itself keeps models and groups in module variables.
@pytest.mark.skipif(not _TASKS.exists(), reason="threads are counted in /proc, which Linux has")
@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_a_model_and_its_group_are_freed(engine: str) -> None:
    for kept, num_groups in run_on_ranks(_rounds, engine, init_group=False):
        assert kept == [False] * 4
        assert num_groups <= 2  # torch keeps the last one, and the last two with DTensors


def _let_models_go_after_their_groups(rounds: int) -> list[int]:
    """Let each go right after a collective, while a thread of gloo may wait for the lock to free the tensor of that."""
    before, cores, references = sys.getswitchinterval(), os.sched_getaffinity(0), []
    os.sched_setaffinity(0, [min(cores)])
    sys.setswitchinterval(100)
    try:
        for _ in range(rounds):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
            model(torch.ones(2, 8)).sum().backward()
            dist.all_reduce(torch.ones(3))
            group = dist.group.WORLD
            close_group()
            references.append(sys.getrefcount(group))
            del group, model
    finally:
        sys.setswitchinterval(before)
        os.sched_setaffinity(0, cores)
    return references


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="one core makes the moment frequent")
@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_model_that_outlives_its_group_does_not_block_exit(rounds: int) -> None:
    (references,) = run_on_ranks(_let_models_go_after_their_groups, rounds, world_size=1, init_group=False)
    # The variable, the argument, the model, and who lets it go in peace; the hang itself takes hundreds of rounds.
    assert references == [4] * rounds
