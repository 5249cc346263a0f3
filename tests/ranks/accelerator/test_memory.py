"""``find_executable_batch_size``: the attempts, in order; and models and groups that are freed when a program lets them go."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator
from echelon.base.errors import DesyncError
from echelon.base.warnings import EchelonWarning
from echelon.utils import find_executable_batch_size, release_memory
from echelon.utils.memory import should_reduce_batch_size
from echelon.world.group import close_group
from tests.harness import run_on_ranks

OUT = "CUDA out of memory. Tried to allocate 2 GiB."


def _attempts(fits: int, **options: Any) -> tuple[list[int], Any]:
    seen: list[int] = []

    @find_executable_batch_size(**options)
    def train(batch_size: int, answer: str) -> str:
        seen.append(batch_size)
        if batch_size > fits:
            raise torch.OutOfMemoryError(OUT)
        return f"{answer} {batch_size}"

    return seen, train


@pytest.mark.filterwarnings("ignore::echelon.base.warnings.EchelonWarning")
def test_the_batch_shrinks_by_a_tenth_and_the_working_size_is_kept() -> None:
    seen, train = _attempts(100)
    assert train("fits") == "fits 92"
    assert seen == [128, 115, 103, 92]
    assert train("again") == "again 92"


def test_each_smaller_attempt_is_logged() -> None:
    _, train = _attempts(10, starting_batch_size=11)
    with pytest.warns(EchelonWarning, match="out of memory with a batch size of 11; the next attempt uses 9"):
        train("")


@pytest.mark.filterwarnings("ignore::echelon.base.warnings.EchelonWarning")
def test_the_next_size_can_be_chosen() -> None:
    sizes = iter([64, 16, 4])
    seen, train = _attempts(5, starting_batch_size=256, reduce_batch_size_fn=lambda: next(sizes))
    assert train("fits") == "fits 4"
    assert seen == [256, 64, 16, 4]


@pytest.mark.filterwarnings("ignore::echelon.base.warnings.EchelonWarning")
def test_an_error_is_raised_if_no_size_fits() -> None:
    seen, train = _attempts(0, starting_batch_size=3)
    with pytest.raises(RuntimeError, match="no executable batch size found"):
        train("")
    assert seen == [3, 2, 1]


def test_other_errors_are_raised_unchanged() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match=r"^shapes do not fit$"):
        train()


def test_passing_a_batch_size_is_rejected_with_the_correct_call() -> None:
    _, train = _attempts(1)
    with pytest.raises(TypeError, match=r"\n  do:    call train\(answer='yes'\)"):
        train(128, "yes")


@pytest.mark.filterwarnings("ignore::echelon.base.warnings.EchelonWarning")
def test_a_failed_attempt_keeps_no_tensor_alive() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> list[bool]:
        alive = [ref() is not None for ref in kept]
        tensor = torch.zeros(batch_size)
        kept.append(weakref.ref(tensor))
        if batch_size > 1:
            raise torch.OutOfMemoryError(OUT)
        return alive

    assert train() == [False]


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError(OUT), True),
        (RuntimeError("MPS backend out of memory (MPS allocated ...)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception, ran_out: bool) -> None:
    assert should_reduce_batch_size(error) is ran_out


def test_released_objects_are_freed() -> None:
    tensor = torch.zeros(3)
    ref = weakref.ref(tensor)
    tensor, other = release_memory(tensor, [1])  # type: ignore[assignment]
    gc.collect()
    assert (tensor, other, ref()) == (None, None, None)


def _one_runs_out() -> tuple[list[int], float]:
    import warnings

    seen: list[int] = []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: seen[-1] // 2)
    def train(batch_size: int) -> float:
        seen.append(batch_size)
        if dist.get_rank() == 1 and batch_size > 2:
            raise torch.OutOfMemoryError(OUT)
        return float(batch_size)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        result = train()
    total = torch.tensor(result)
    dist.all_reduce(total)  # both are at the same place again
    return seen, total.item()


def test_all_ranks_use_the_size_that_fits_the_smallest_rank() -> None:
    assert run_on_ranks(_one_runs_out, world_size=2) == [([8, 4, 2], 4.0), ([8, 4, 2], 4.0)]


def _one_fails() -> str:
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError

    with pytest.raises((ZeroDivisionError, DesyncError)) as caught:
        train()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_another_error_on_one_rank_does_not_block_the_other_ranks() -> None:
    texts = run_on_ranks(_one_fails, world_size=2)
    assert texts[0].startswith("DesyncError: rank 1 failed in find_executable_batch_size")
    assert texts[1] == "ZeroDivisionError: "


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
@pytest.mark.sample(1)
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
