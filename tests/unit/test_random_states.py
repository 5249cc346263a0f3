"""The states of random number generators, taken again and again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from echelon.accelerator.rng_states import RandomStates, current_random_states, restore_random_states

RANDOM: Any = np.random


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    generator, states = RANDOM.get_bit_generator(), current_random_states()
    yield
    RANDOM.set_bit_generator(generator)
    restore_random_states(states)


def _draw() -> list[object]:
    return [random.random(), *np.random.randn(3), np.random.rand(), float(torch.rand(()))]


CHANGES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "one number": np.random.rand,
    "a Gaussian one: the second of the pair is kept": np.random.randn,
    "the one that was kept: the numbers stay": np.random.randn,
    "a third": np.random.randn,
    "nothing, while one is kept": lambda: None,
    "seed": lambda: np.random.seed(7),
    "the same seed": lambda: np.random.seed(7),
    "shuffle": lambda: np.random.shuffle(np.arange(9)),
    "another generator": lambda: RANDOM.set_bit_generator(np.random.MT19937(3)),
    "of another kind": lambda: RANDOM.set_bit_generator(np.random.PCG64(3)),
    "drawn from that": np.random.rand,
    "the first kind again": lambda: RANDOM.set_bit_generator(np.random.MT19937(3)),
}


def test_states_are_current_after_every_change() -> None:
    states = RandomStates()
    for change, make in CHANGES.items():
        make()
        found, expected = states.now()["numpy_random_seed"], np.random.get_state(legacy=False)
        assert isinstance(expected, dict)
        if expected["bit_generator"] != "MT19937":
            assert found == expected, change
            continue
        assert np.array_equal(found[1], expected["state"]["key"]), change
        others = expected["state"]["pos"], expected["has_gauss"], expected["gauss"]
        assert found[0] == "MT19937", change
        assert found[2:] == others, change


def test_states_of_python_are_current_after_every_change() -> None:
    states = RandomStates()
    changes: list[Callable[[], object]] = [
        lambda: None,
        random.random,
        lambda: random.gauss(0, 1),  # the second of the pair is kept
        lambda: random.gauss(0, 1),  # the one that was kept: the numbers stay
        lambda: None,
        lambda: random.seed(7),
        lambda: random.shuffle(list(range(9))),
        lambda: random.setstate(random.Random(3).getstate()),
    ]
    for number, make in enumerate(changes):
        make()
        assert states.now()["random_state"] == random.getstate(), number


def test_the_state_of_python_is_copied_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    states, copy, copies = RandomStates(), random.getstate, []
    monkeypatch.setattr(random, "getstate", lambda: copies.append(1) or copy())
    for _ in range(3):
        states.now()
    assert len(copies) == 1
    random.random()
    states.now()
    assert len(copies) == 2


@pytest.mark.parametrize("num_kept", [0, 1])
def test_restoring_a_state_repeats_the_draws(num_kept: int) -> None:
    states = RandomStates()
    np.random.seed(3)
    np.random.randn(num_kept)
    states.now()
    noted = states.now()
    first = _draw()
    restore_random_states(noted)
    assert _draw() == first
