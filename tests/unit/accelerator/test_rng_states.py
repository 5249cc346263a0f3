"""The states of random number generators are saved and restored, also of one that numpy does not use by default."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from echelon.accelerator.rng_states import current_random_states, restore_random_states
from echelon.data.rng.host_rng import other_states, set_other_states
from echelon.data.rng.per_sample_rng import draws_of

RANDOM: Any = np.random


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    generator, states = RANDOM.get_bit_generator(), current_random_states()
    yield
    RANDOM.set_bit_generator(generator)
    restore_random_states(states)


def _draw() -> list[object]:
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), np.random.rand(), float(torch.rand(()))]


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("num_kept", [0, 1])  # of a pair of Gaussian numbers, the second one is kept
def test_restoring_a_state_repeats_the_draws(kind: Any, num_kept: int) -> None:
    RANDOM.set_bit_generator(kind(3))
    np.random.randn(num_kept)
    [random.gauss(0, 1) for _ in range(num_kept)]
    states = current_random_states()
    assert isinstance(states["numpy_random_seed"], tuple) is (kind is np.random.MT19937)
    first = _draw()
    restore_random_states(states)
    assert _draw() == first


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_reading_a_sample_does_not_change_the_state_of_any_generator(kind: Any) -> None:
    RANDOM.set_bit_generator(kind(3))
    before = other_states()
    with draws_of(1, 2):
        first = _draw()
        assert other_states() != before
    assert other_states() == before
    np.random.randn()  # keeps the second number of a pair
    with draws_of(1, 2):
        assert _draw() == first
    set_other_states(before)
    drawn = _draw()[:-1]  # without torch
    set_other_states(before)
    assert _draw()[:-1] == drawn
