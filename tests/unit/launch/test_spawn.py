"""What a function is called with on a rank: as the user gave it, and its place where it asks for that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from echelon.base.errors import UsageError
from echelon.launch.spawn import _Call


def call(function: Callable[..., Any], *args: object, rank_first: bool = False) -> Any:
    given = _Call(function=function, args=args, caller="spawn", has_rank_first=rank_first)
    positional, by_name = given.arguments(rank=1, world_size=4)
    return function(*positional, **by_name)


def tutorial(rank: int, world_size: int) -> tuple[int, int]:
    return rank, world_size


def longer(rank: int, world_size: int, epochs: int, lr: float = 0.1) -> tuple[int, int, int, float]:
    return rank, world_size, epochs, lr


def own(epochs: int, rank: int = -1) -> tuple[int, int]:
    return epochs, rank


def keyword(epochs: int, *, world_size: int) -> tuple[int, int]:
    return epochs, world_size


def several(*args: int) -> tuple[int, ...]:
    return args


@pytest.mark.parametrize(
    ("function", "args", "expected", "rank_first"),
    [
        (tutorial, (), (1, 4), False),
        (tutorial, (0, 2), (0, 2), False),  # what is given in full stays
        (longer, (10,), (1, 4, 10, 0.1), False),
        (longer, (10, 0.5), (1, 4, 10, 0.5), False),
        (own, (3,), (3, -1), False),  # it fits: a default is the user's
        (keyword, (3,), (3, 4), False),
        (several, (5, 6), (5, 6), False),
        (functools.partial(longer, epochs=7), (), (1, 4, 7, 0.1), False),
        (tutorial, (), (1, 4), True),
        (tutorial, (2,), (1, 2), True),
        (longer, (9, 10), (1, 9, 10, 0.1), True),
        (longer, (10,), (1, 4, 10, 0.1), True),
        (several, (5,), (1, 5), True),
    ],
)
def test_a_function_gets_its_rank_and_world_size_if_it_accepts_them(
    function: Callable[..., Any], args: tuple[object, ...], expected: tuple[object, ...], rank_first: bool
) -> None:
    assert call(function, *args, rank_first=rank_first) == expected


@pytest.mark.parametrize(
    ("function", "args", "rank_first"), [(longer, (), False), (own, (), False), (tutorial, (1, 2, 3), True)]
)
def test_mismatched_arguments_are_rejected_before_a_process_starts(
    function: Callable[..., Any], args: tuple[object, ...], rank_first: bool
) -> None:
    with pytest.raises(UsageError, match="cannot be called by") as caught:
        call(function, *args, rank_first=rank_first)
    assert function.__name__ in str(caught.value)
    assert "parameters named rank and world_size, which are filled in" in str(caught.value)
