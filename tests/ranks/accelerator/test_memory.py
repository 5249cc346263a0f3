"""``find_executable_batch_size`` and related functions: the attempts, in order, on one and two ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError
from echelon.base.warnings import EchelonWarning
from echelon.utils import find_executable_batch_size, release_memory
from echelon.utils.memory import should_reduce_batch_size
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
