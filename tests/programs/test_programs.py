"""Whole training programs, drawn: each is a plain PyTorch loop, or is refused by name; never another run in silence."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.programs.program import Case, draw_case
from tests.programs.runner import check_cases, shrink

SEEDS = 24  # half of them in test_programs_too.py, behind `make soak`
CHUNK = 12  # of the programs of one test
SOAK_CHUNK = 100
SOAK = int(os.environ.get("DRAWN_PROGRAMS", "10000"))


def require_drawn(first: int, count: int, draw: Callable[[int], Case] = draw_case) -> None:
    """Fail, with smaller programs that fail, too, unless every program of these seeds keeps its promise."""
    report = check_cases([draw(seed) for seed in range(first, first + count)])
    print(report.summary())
    if report.failures:
        small = [shrink(case, limit_s=30) for case, _ in report.failures[:2]]
        pytest.fail(f"{report}\nsmaller:\n" + "\n".join(case.script() for case in small), pytrace=False)


@pytest.mark.parametrize("first", range(0, SEEDS // 2, CHUNK))
def test_a_drawn_program_is_that_of_one_process_or_is_refused_by_name(first: int) -> None:
    require_drawn(first, CHUNK)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SEEDS, SOAK, SOAK_CHUNK))
def test_any_drawn_program_is_that_of_one_process_or_is_refused_by_name(first: int) -> None:
    require_drawn(first, SOAK_CHUNK)
