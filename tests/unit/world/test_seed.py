"""set_seed seeds every generator, by rank only when asked."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from echelon import set_seed
from echelon.base import environ


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_equal_seeds_give_equal_draws_from_every_generator() -> None:
    set_seed(3)
    first = _draw()
    set_seed(4)
    assert not set(first) & set(_draw())
    set_seed(3)
    assert _draw() == first


@pytest.mark.parametrize("rank", [0, 2])
def test_device_specific_adds_the_rank(rank: int) -> None:
    with environ.patch({"RANK": str(rank), "WORLD_SIZE": "3"}):
        set_seed(10, device_specific=True)
        by_rank = _draw()
        set_seed(10)
        plain = _draw()
    set_seed(10 + rank)
    assert by_rank == _draw()
    set_seed(10)
    assert plain == _draw()


def test_deterministic_enables_deterministic_algorithms() -> None:
    with environ.patch({"TORCHINDUCTOR_CACHE_DIR": environ.get("TORCHINDUCTOR_CACHE_DIR")}):  # torch sets it here
        try:
            set_seed(0, deterministic=True)
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)
