"""Fixtures of the tests on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from echelon.base import environ


@pytest.fixture(autouse=True, scope="session")
def _initialized_device() -> None:
    """Open the files of the driver before the first test, so that they are no leak of that test."""
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator")
    x = torch.ones(64, 64, device=torch.accelerator.current_accelerator())
    (x @ x).sum().item()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What parity="bitwise" requires on a CUDA device."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    with environ.patch({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}):
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.allow_tf32 = False
        yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
