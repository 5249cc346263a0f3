"""Small programs of trl, sentence-transformers, setfit, diffusers, peft and others give the same numbers on echelon as natively.

``make ecosystem`` installs the libraries and runs these tests, which take many minutes.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.ecosystem.run import PROGRAMS, PYTHON, TOLERANCE, WAYS, Way, compare, run

pytestmark = pytest.mark.soak

# On two processes, a shuffled loader that a program prepares with an Accelerator has another order than natively: that of the loader
# without the Accelerator, as on one process (docs/accelerate_compat.md). Read in order, the numbers are the same.
IN_ORDER = ("--in-order",)
ORDERED = {"glue", "pytorch-accelerated"}

# (program, number of processes) -> values that differ, and why.
DIFFERENT: dict[tuple[str, int], tuple[set[str], str]] = {
    ("diffusers", 1): (
        {"resumed", "resumed_average"},
        "a resumed run continues with the samples of the interrupted epoch; natively it draws a new order",
    ),
}


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    if not PYTHON.exists():
        text = f"NOT COMPARED with the libraries' own runs: there is no {PYTHON} (make ecosystem)"
        assert os.environ.get("REQUIRE_ECOSYSTEM") != "1", text
        pytest.skip(text)


_run = cache(run)


def _different(name: str, way: Way, num_processes: int, *args: str) -> dict[str, float]:
    native, swapped = (_run(name, each, num_processes, args=args) for each in ("native", way))
    assert "stands in for accelerate" in swapped.output
    known = DIFFERENT.get((name, num_processes), (set(), ""))[0]
    found = compare(native.values, swapped.values)
    assert found  # something was compared
    return {key: value for key, value in found.items() if value > TOLERANCE and key not in known}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_process_gives_the_native_numbers(name: str, way: Way) -> None:
    assert _different(name, way, 1) == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["dpo", "lora", "sft"])
def test_two_processes_of_the_trainer_give_the_native_numbers(name: str, way: Way) -> None:
    # Their numbers of evaluation samples are multiples of the global batch: natively, others are filled up with repeated samples.
    assert _different(name, way, 2) == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(ORDERED))
def test_two_processes_that_read_in_order_give_the_native_numbers(name: str, way: Way) -> None:
    assert _different(name, way, 2, *IN_ORDER) == {}
