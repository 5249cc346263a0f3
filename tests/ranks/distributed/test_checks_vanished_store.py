"""Checks that write to the store of the process group after rank zero, which may hold the store, has finished its work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from echelon.base.errors import DesyncError
from echelon.base.warnings import UserLine
from echelon.distributed.checks.duplicate_samples import DuplicateSamplesCheck
from echelon.distributed.checks.replica_drift import ReplicaDriftCheck
from echelon.distributed.checks.unsharded_loader import UnshardedLoaderCheck
from tests.harness import RanksFailed, run_on_ranks

X = torch.arange(256.0).view(64, 4)
BATCHES = [X[start : start + 8] for start in range(0, 64, 8)]


class _VanishingStore(dist.HashStore):
    """Fails like the connection to a server that has ended, after ``num_left`` calls."""

    def __init__(self, num_left: int) -> None:
        super().__init__()
        self._num_left = num_left

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise dist.DistNetworkError("Broken pipe")

    def set(self, key: str, value: str) -> None:
        self._count()
        super().set(key, value)

    def add(self, key: str, value: int) -> int:
        self._count()
        return super().add(key, value)

    def get(self, key: str) -> bytes:
        self._count()
        return super().get(key)

    def check(self, keys: list[str]) -> bool:
        self._count()
        return super().check(keys)


def _check(rank: int, *, is_error: bool = False) -> DuplicateSamplesCheck:
    line = UserLine(("train.py", 3))
    return DuplicateSamplesCheck(1, rank=rank, world_size=2, line=line, reads_own=True, do="fix it", is_error=is_error)


def _read_pass() -> None:
    check = _check(1)
    for batch in BATCHES:
        check.add(batch)
    check.end()


def _compare_stream() -> None:
    _check(1).compare_stream({})


def _step_unsharded() -> None:
    check = UnshardedLoaderCheck()
    try:
        for _ in DataLoader(TensorDataset(X)):
            for _ in range(60):
                check.check_step()
            break
    finally:
        check.stop()


def _read_the_same() -> None:
    for rank in range(2):
        check = _check(rank, is_error=True)
        for batch in BATCHES:
            check.add(batch)


def _compare_weights() -> None:
    model = torch.nn.Linear(4, 1)
    check = ReplicaDriftCheck()
    check.compare_models([model], "now", "fix it")
    for _ in range(3):
        check.before_step(torch.optim.SGD(model.parameters(), lr=0.1), "fix it")
    check.compare_models([model], "at the end", "fix it", is_last=True)


def _run(action: Callable[[], None], num_left: int) -> None:
    store = _VanishingStore(num_left)
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.distributed.PrefixStore", lambda _prefix, store: store))
        for module in ("duplicate_samples", "replica_drift", "unsharded_loader"):
            stack.enter_context(mock.patch(f"echelon.distributed.checks.{module}.store_of", return_value=store))
        action()


@pytest.mark.parametrize("action", [_read_pass, _compare_stream, _step_unsharded, _compare_weights])
def test_a_vanished_store_ends_the_check_and_not_the_run(action: Callable[[], None]) -> None:
    for num_left in range(4):
        run_on_ranks(_run, action, num_left, world_size=2)


def test_a_finding_is_reported_even_if_the_store_vanishes_before_the_report() -> None:
    num_calls = 2 + 4  # rank 0: set, add; rank 1: set, add and two times get
    with pytest.raises(RanksFailed, match=f"{DesyncError.__name__}: ranks 0 and 1 read the same samples"):
        run_on_ranks(_run, _read_the_same, num_calls, world_size=2)
